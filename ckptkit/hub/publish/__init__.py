"""Publishing a folder on the Hub in one commit."""
