"""The bytes of an output's files around its tensors."""
