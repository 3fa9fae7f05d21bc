"""The process that asks the installed transformers."""
