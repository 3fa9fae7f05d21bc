"""What PEFT adapters look like: names of their tensors."""
