"""Filling a live model from any checkpoint."""
