"""What a fixture's live model was, and what came out of its checkpoint: compared bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ckptkit
from tests.tensor_images import Image, images

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def truth_of(case: str, name: str = "truth") -> dict[str, Image]:
    return images(FIXTURES / case / f"{name}.safetensors")


def written(source: Path, out: Path, **options: Any) -> dict[str, Image]:
    ckptkit.consolidate(source, out, **{"names": "live", **options})
    return images(out / "model.safetensors")


def copied(case: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / case / "checkpoint", to))
