"""The version of ckptkit."""

__version__ = "0.2.0"
