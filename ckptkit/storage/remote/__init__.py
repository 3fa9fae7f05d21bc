"""Objects of a remote store."""
