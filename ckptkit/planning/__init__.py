"""From an index and a request to a plan; pure."""
