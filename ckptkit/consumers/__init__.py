"""What loads an output, and what it expects of a folder."""
