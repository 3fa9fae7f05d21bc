"""The process that uploads committed steps."""
