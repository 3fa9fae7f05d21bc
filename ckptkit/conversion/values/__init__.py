"""What the numbers in tensors are: of one checkpoint, and the average of several."""
