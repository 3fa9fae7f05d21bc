"""ckptkit: sharded checkpoints in, models that load out, with proof of every byte."""

from __future__ import annotations

from ckptkit.api import (
    adapter_from_diff,
    consolidate,
    convert,
    diff,
    extract_adapter,
    inspect,
    open,  # noqa: A004
    verify,
)
from ckptkit.merge_api import merge_adapter
from ckptkit.version import __version__

__all__ = [
    "__version__",
    "adapter_from_diff",
    "consolidate",
    "convert",
    "diff",
    "extract_adapter",
    "inspect",
    "merge_adapter",
    "open",
    "verify",
]
