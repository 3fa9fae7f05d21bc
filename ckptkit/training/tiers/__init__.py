"""Steps on the node's own disk first, then in the shared place."""
