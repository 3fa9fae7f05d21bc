"""Writing a model folder from all ranks at once."""
