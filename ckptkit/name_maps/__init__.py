"""Maps between the names of tensors in one framework and in another, as data."""
