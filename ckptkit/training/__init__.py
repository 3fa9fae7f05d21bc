"""Saving sharded training state without stopping, and resuming from it."""

from __future__ import annotations

from importlib.util import find_spec

from ckptkit.core.errors import MissingLibraryError

if find_spec("torch") is None:
    raise MissingLibraryError(
        "saving and resuming inside a training job needs torch, which is not installed",
        where="ckptkit.training",
        hint="run `pip install torch`; reading and converting checkpoints need none",
    )

from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.handle import SaveHandle, SaveReport, SkippedError
from ckptkit.training.load.load_into import LoadResult, load_into
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
