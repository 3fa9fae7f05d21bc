"""Files and folders that are there, or said not to be, after the power failed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ckptkit.storage.names import WORK_INFIX
from ckptkit.storage.syscalls import Capabilities, sync_directory
from ckptkit.writer.failures import naming

TRASH, OLD = "trash", "old"
"""Kinds of hidden directories: one to be removed, and one that makes room for its successor."""

_NONCE_BYTES = 8
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


def put_file(path: Path, data: bytes) -> None:
    """Makes a durable file; its entry in the folder is not, yet.

    Raises:
        FileExistsError: If there is one of that name.
        OSError: If it cannot be written.
    """
    with naming(path):
        descriptor = os.open(path, _NEW_FILE, 0o666)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(folder: Path, inside: Iterable[str], capabilities: Capabilities) -> list[Path]:
    """Makes a folder, those above it, and some inside it, where they are not there.

    Args:
        folder: The outermost one that the caller fills.
        inside: Paths relative to it; may hold the empty one.
        capabilities: What the platform offers.

    Returns:
        The folders inside, those between included, whose entries are to be made durable after
        they were filled; the innermost first.

    Raises:
        OSError: If one cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent, capabilities)
    needed = {folder}
    for name in inside:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        while path != folder:
            needed.add(path)
            path = path.parent
    return sorted(needed, reverse=True)


def hidden_beside(path: Path, kind: str) -> Path:
    """Returns a new hidden name beside a directory, which no tool takes for a checkpoint."""
    nonce = os.urandom(_NONCE_BYTES).hex()
    return path.parent / f".{path.name}{WORK_INFIX}{kind}-{nonce}"


def remove_whole(path: Path) -> None:
    """Removes a directory, which first loses its name: no half of it looks like a checkpoint.

    Of a link only the link goes: what it leads to lies elsewhere, and may serve something else.

    Raises:
        OSError: If not all of it can be removed.
    """
    if path.is_symlink():
        path.unlink()
        return
    trash = hidden_beside(path, TRASH)
    path.rename(trash)
    shutil.rmtree(trash)


def sync_tree(folder: Path, capabilities: Capabilities) -> None:
    """Makes the entries of a folder and of all below it durable.

    Raises:
        OSError: If one cannot be.
    """
    for path, _, _ in os.walk(folder, topdown=False):
        sync_directory(Path(path), capabilities)
