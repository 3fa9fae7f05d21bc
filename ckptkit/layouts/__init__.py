"""What each kind of output looks like, as segments of files."""
