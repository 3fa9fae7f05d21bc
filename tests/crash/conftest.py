"""Places to put outputs, a tiny disk, real checkpoints, and what every refusal looks like."""

from __future__ import annotations

import importlib.util
import io
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import CkptkitError


def _load(name: str) -> None:
    """Makes a module beside this file importable by the tests, whose folder is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_load("writing")
_load("troubles")
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


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


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Waits until something holds, and fails when it takes too long."""

    def wait(holds: Callable[[], bool], *, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # noqa: S607
