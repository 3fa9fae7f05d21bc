"""The version of ckptkit."""

VERSION = "0.1.0"
