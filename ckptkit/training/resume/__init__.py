"""Choosing a step, and putting the whole state of a training back; tensors by `load`."""
