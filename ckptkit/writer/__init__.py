"""The processes that write, commit and upload saves; only `upload` needs more than Python."""
