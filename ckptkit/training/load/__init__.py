"""Filling live tensors from stored ones: of any model, and of a step that is resumed."""
