"""Bases that were packed in training: unpacking and packing them, bit for bit."""
