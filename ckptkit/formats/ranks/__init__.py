"""Files that each rank saved for itself."""
