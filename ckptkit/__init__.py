"""ckptkit: sharded checkpoints in, models that load out, with proof of every byte."""

from __future__ import annotations

from ckptkit.api import consolidate, convert, diff, inspect, open, verify  # noqa: A004
from ckptkit.version import __version__

__all__ = ["__version__", "consolidate", "convert", "diff", "inspect", "open", "verify"]
