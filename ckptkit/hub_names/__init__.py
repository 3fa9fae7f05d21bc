"""The names that `save_pretrained` gives to the tensors of a model."""
