"""`ckptkit delta`, and what other commands show of deltas."""
