"""What asks transformers how a model's tensors are called on disk: a program of its own.

Only training, where transformers is loaded anyway, asks in its own process.
"""
