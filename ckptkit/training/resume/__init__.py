"""From a stored step back into live objects."""
