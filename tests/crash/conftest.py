"""Waiting, a tiny disk, and the fixtures of damaged checkpoints."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.damaged_checkpoints import blobs, change_metadata, copied, out, refusal


def _load(name: str) -> None:
    """Makes a module beside this file importable by the tests, whose folder is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


__all__ = ["blobs", "change_metadata", "copied", "out", "refusal"]
_load("writing")
_load("troubles")


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
