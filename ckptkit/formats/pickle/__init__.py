"""Pickles and the archives of `torch.save`, parsed and never executed."""
