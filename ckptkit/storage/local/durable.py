"""Durable changes of a local file system: files, folders, renames and removals.

A rename is the commit of everything that ckptkit writes to a disk: what is renamed is durable
before, and the folder that has the new entry is synced after. This module needs the standard
library only, since the writer process imports it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.storage.local.disk import Disk
from ckptkit.storage.locations import hidden_name

OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""What a rename of a directory reports where the new name is taken."""

OLD, TRASH = "old", "trash"
"""Kinds of hidden directories: the previous content of a name, and one that is to be removed."""

_NONCE_BYTES = 8
_TRIES = 3
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name of a file to errors of calls that know only its descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def put_file(path: Path, data: bytes) -> None:
    """Creates a durable file; its entry in the folder is not durable yet."""
    with naming(path):
        descriptor = os.open(path, _NEW_FILE, 0o666)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, data: bytes, disk: Disk, *, draft: Path) -> None:
    """Creates or replaces a small file durably: readers see the old content or the new one.

    The content is first in `draft`, in the same folder; one that a killed process left is removed.
    """
    draft.unlink(missing_ok=True)  # never written through, since it may be a link
    put_file(draft, data)
    draft.replace(path)
    disk.sync_directory(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path, disk: Disk) -> None:
    """Makes the entries of a folder and of all folders in it durable, the innermost first."""
    for path, _, _ in os.walk(folder, topdown=False):
        disk.sync_directory(Path(path))


def make_folders(folder: Path, inside: Iterable[str], disk: Disk) -> list[Path]:
    """Creates a folder, its parents and folders inside it, as far as they do not exist.

    Its entry is durable afterwards. Returns the folders inside, with those in between, the
    innermost first; the caller makes their entries durable after it has filled them.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        disk.sync_directory(path.parent)
    needed = {folder}
    for name in inside:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        while path != folder:
            needed.add(path)
            path = path.parent
    return sorted(needed, reverse=True)


def new_hidden_path(path: Path, kind: str) -> Path:
    """Returns a new hidden name in the folder of a directory; no tool reads it as a checkpoint."""
    return path.with_name(hidden_name(path.name, f"{kind}-{os.urandom(_NONCE_BYTES).hex()}"))


def replace_folder(new: Path, final: Path, old: Path, disk: Disk) -> Path:
    """Gives a directory the name of another one: in one step where the platform can exchange them.

    Otherwise the previous directory is renamed first, to `old`. After a kill in between, a sweep
    has to rename it back. Returns where the previous directory is now: `new` or `old`.
    """
    if disk.exchange_folders(new, final):
        return new
    final.rename(old)
    try:
        new.rename(final)
    except OSError:
        with suppress(OSError):
            old.rename(final)
        raise
    return old


def remove_folder(path: Path) -> None:
    """Renames a directory and removes it, so that no half of it looks like a checkpoint.

    Of a symbolic link only the link is removed: its target may be in use elsewhere.
    """
    if path.is_symlink():
        path.unlink()
        return
    trash = new_hidden_path(path, TRASH)
    path.rename(trash)
    shutil.rmtree(trash)


def remove_tree(path: Path) -> None:
    """Removes a directory that another process may be filling or removing at the same time."""
    for left in reversed(range(_TRIES)):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return
        except OSError:
            if not left:
                raise
        else:
            return
