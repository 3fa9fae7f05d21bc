"""ckptkit: sharded checkpoints in, models that load out, with proof of every byte."""

from __future__ import annotations

from ckptkit.adapter_api import adapter_from_diff, extract_adapter
from ckptkit.api import (
    consolidate,
    convert,
    diff,
    inspect,
    open,  # noqa: A004
    verify,
)
from ckptkit.merge_api import merge_adapter
from ckptkit.run_api import list_run, prune
from ckptkit.version import __version__

__all__ = [
    "__version__",
    "adapter_from_diff",
    "consolidate",
    "convert",
    "diff",
    "extract_adapter",
    "inspect",
    "list_run",
    "merge_adapter",
    "open",
    "prune",
    "verify",
]
