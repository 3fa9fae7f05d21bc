"""What the live objects of a training hold."""
