"""The steps of a run: listing, marking and pruning them."""
