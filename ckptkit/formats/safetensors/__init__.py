"""Safetensors files, whole and in shards."""
