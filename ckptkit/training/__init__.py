"""Saving sharded training state without stopping, and resuming from it."""

from __future__ import annotations

from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.handle import SaveHandle, SaveReport, SkippedError
from ckptkit.training.load.filling import LoadResult
from ckptkit.training.load.load_into import load_into
from ckptkit.training.settings import Options
from ckptkit.training.state.fsdp import write_flat_layout

__all__ = [
    "Checkpointer",
    "LoadResult",
    "Options",
    "SaveHandle",
    "SaveReport",
    "SkippedError",
    "load_into",
    "write_flat_layout",
]
