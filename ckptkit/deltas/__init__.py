"""What changed between two models: made, applied to the first, described and verified."""
