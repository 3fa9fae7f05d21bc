"""What a fixture's live model was, and what came out of its checkpoint: compared bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.tensor_images import Image, images, same

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def truth_of(case: str, name: str = "truth") -> dict[str, Image]:
    return images(FIXTURES / case / f"{name}.safetensors")


def written(source: Path, out: Path, **options: Any) -> dict[str, Image]:
    ckptkit.consolidate(source, out, **{"names": "live", **options})
    return images(out / "model.safetensors")


def is_truth(out: Path, case: Path) -> bool:
    return same(out / "model.safetensors", case / "truth.safetensors")


def copied(case: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / case / "checkpoint", to))


def base_with(folder: Path, case: Path, **changed: Any) -> Path:
    """Writes the configuration of a case with other values; returns its folder."""
    folder.mkdir()
    config = json.loads((case / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def refuse(
    message: str | None, source: Any, out: Any, kind: type[Exception] = CkptkitError, **options: Any
) -> pytest.ExceptionInfo[Any]:
    """Consolidates a source, which has to fail and to leave nothing."""
    with pytest.raises(kind, match=message) as caught:
        ckptkit.consolidate(source, out, **options)
    assert not Path(str(out)).exists()
    return caught
