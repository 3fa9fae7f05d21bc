"""How ranks agree without a collective."""
