"""Fixtures for checkpoints that are damaged or hostile: copies, places for outputs, refusals."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import CkptkitError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def _archives(data: bytes) -> list[tuple[int, int]]:
    """Where the archives of a `.distcp` file that hold elements begin and end."""
    ends = [at + 22 for at in range(len(data)) if data.startswith(b"PK\5\6", at)]
    found = zip([0, *ends], ends, strict=False)
    return [(start, stop) for start, stop in found if _has_elements(data[start:stop])]


def _has_elements(archive: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.getinfo("archive/data/0").file_size > 0


def _change_metadata(checkpoint: Path, change: Callable[[Metadata], None]) -> None:
    """Rewrites `.metadata` with torch's own classes; the file is one of our fixtures."""
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301, TID251
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture
def blobs() -> Callable[[bytes], list[tuple[int, int]]]:
    """Finds the archives of a `.distcp` file."""
    return _archives


@pytest.fixture
def change_metadata() -> Callable[[Path, Callable[[Metadata], None]], None]:
    """Changes the objects of a `.metadata` file."""
    return _change_metadata


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
