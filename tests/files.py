"""What tests do to files: read all, count open ones, flip a bit, wait, mount a small disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def contents(folder: Path) -> dict[str, bytes]:
    """Returns all files below a folder by their paths in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def age(folder: Path, seconds: float = 3600.0) -> None:
    """Sets the times of a folder and of all below it back, as if nothing had been written since."""
    then = time.time() - seconds
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then))


def open_below(folder: Path) -> int:
    """Counts the open files in a folder; all others may be closed at any time.

    Sockets of idle connections are closed by threads, those of gloo by the garbage collector.
    """
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that listed them
            count += entry.readlink().is_relative_to(folder)
    return count


def flip_bit(path: Path, at: int, mask: int = 1) -> None:
    """Changes bits of a byte in place; one before the start counts from the end."""
    with path.open("r+b") as file:
        at = file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def copy_flipped(checkpoint: Path, to: Path) -> Path:
    """Copies a step of accelerate's FSDP2, with one wrong bit in the data of a model tensor."""
    shutil.copytree(checkpoint, to)
    shard = to / "pytorch_model_fsdp_0" / "__0_0.distcp"
    flip_bit(shard, shard.read_bytes().index(b"PK\x05\x06") // 2)
    return to


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def tmpfs(size: str) -> tuple[str, ...]:
    return ("-t", "tmpfs", "-o", f"size={size}", "tmpfs")


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """Mounts what the arguments say; skips the test where that is not permitted."""
    place.mkdir(parents=True, exist_ok=True)
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("there is no mount command")
    done = subprocess.run([mount, *arguments, str(place)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run([umount, "-l", str(place)], check=True)


def remount(place: Path, *arguments: str) -> None:
    subprocess.run([shutil.which("mount") or "mount", *arguments, str(place)], check=True)
