"""What will hurt a run before it starts: facts are gathered, and rules judge them."""
