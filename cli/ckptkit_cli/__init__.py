"""The command `ckptkit`."""
