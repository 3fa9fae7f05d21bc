"""The commands for the steps of a run."""
