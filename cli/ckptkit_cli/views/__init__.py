"""What commands show beyond lines of text: progress on a terminal, and HTML pages."""
