"""What adapters look like: names, layers, settings and arithmetic of LoRA, without I/O."""
