"""Pushing the steps of a run as they are committed."""
