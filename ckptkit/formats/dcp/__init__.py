"""The format of PyTorch's distributed checkpoints."""
