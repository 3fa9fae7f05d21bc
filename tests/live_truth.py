"""What a fixture's live model was, and what came out of its checkpoint: compared bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ckptkit

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
Image = tuple[torch.dtype, tuple[int, ...], bytes]


def images(tensors: Mapping[str, torch.Tensor] | Path) -> dict[str, Image]:
    """Types, shapes and bytes of tensors, or of those in a file."""
    tensors = load_file(tensors) if isinstance(tensors, Path) else tensors
    return {
        name: (
            t.dtype,
            tuple(t.shape),
            t.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors.items()
    }


def truth_of(case: str, name: str = "truth") -> dict[str, Image]:
    return images(FIXTURES / case / f"{name}.safetensors")


def written(source: Path, out: Path, **options: Any) -> dict[str, Image]:
    ckptkit.consolidate(source, out, **{"names": "live", **options})
    return images(out / "model.safetensors")


def copied(case: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / case / "checkpoint", to))
