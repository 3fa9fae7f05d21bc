"""Opening a checkpoint: its files, side files, steps and adapters."""
