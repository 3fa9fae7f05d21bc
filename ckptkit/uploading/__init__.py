"""The process that brings steps to an object store; it needs neither torch nor numpy."""
