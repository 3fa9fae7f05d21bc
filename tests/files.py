"""What tests do to files: read all, flip a bit, wait for something that others do to them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Returns all files below a folder by their paths in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip_bit(path: Path, at: int, mask: int = 1) -> None:
    """Changes bits of a byte in place; one before the start counts from the end."""
    with path.open("r+b") as file:
        at = file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)
