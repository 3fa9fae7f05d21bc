"""A module for each layout: which files an output has, and the bytes around their tensors."""
