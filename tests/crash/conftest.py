"""Places to put outputs, copies of real checkpoints, and what every refusal has to look like."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import CkptkitError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Copies the checkpoint of a fixture to where it may be damaged."""

    def copy(name: str, to: str = "checkpoint") -> Path:
        place = tmp_path / "run" / to
        shutil.copytree(FIXTURES / name / "checkpoint", place)
        return place

    return copy


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A place for an output, alone in its folder, so that what is left behind can be seen."""
    folder = tmp_path / "outbox"
    folder.mkdir()
    return folder / "out"


@pytest.fixture
def refusal(out: Path) -> Callable[..., CkptkitError]:
    """Consolidates, and checks what holds for every refusal.

    The error is of exactly the kind and exit status that are expected, says where, what and
    what to do, and nothing lies at or beside the output afterwards.
    """

    def refuse(
        src: Path, kind: type[CkptkitError], *, status: int = 3, **options: Any
    ) -> CkptkitError:
        with pytest.raises(CkptkitError) as caught:
            ckptkit.consolidate(src, out, **options)
        error = caught.value
        assert (type(error), error.exit_status) == (kind, status), str(error)
        assert error.where
        assert error.message
        assert not error.message.endswith(".")
        assert error.hint, str(error)
        assert list(out.parent.iterdir()) == []
        return error

    return refuse
