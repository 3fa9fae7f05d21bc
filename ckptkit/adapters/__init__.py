"""Adapters of PEFT: extracting, merging and making them."""
