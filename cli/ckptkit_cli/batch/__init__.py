"""`ckptkit batch`: many jobs, each in a process of its own."""
