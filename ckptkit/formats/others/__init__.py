"""Formats of torchsnapshot and torch_checkpointing."""
