"""`ckptkit serve`."""
