"""Readers: one module per on-disk format, headers to a TensorIndex."""
