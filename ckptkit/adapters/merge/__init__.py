"""Merging adapters into a base model, tensor by tensor."""
