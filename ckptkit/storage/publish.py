"""Making a staged output visible: by one rename where that is possible, else file by file."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.storage.syscalls import (
    Capabilities,
    exchange,
    is_refused,
    open_locked,
    sync_directory,
)
from ckptkit.storage.workfolder import WorkFolder, is_empty, publish_lock, take_back

_ATTEMPTS = 8
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def can_be_replaced(out: Path, work: WorkFolder) -> bool:
    """Says whether a directory may be renamed, which a mount point may not.

    It is told to take the place of the work folder. That folder is not empty, so the answer of
    an ordinary directory is that this cannot be, and nothing has changed.

    Returns:
        True if a rename over it, or an exchange with it, can be expected to succeed.
    """
    try:
        out.rename(work.path)
    except OSError as error:
        return error.errno in _OCCUPIED
    return False


def publish(work: WorkFolder, out: Path, *, overwrite: bool, capabilities: Capabilities) -> bool:
    """Renames the staged files to `out` in one step.

    Returns:
        False if `out` holds something that is not to be overwritten; then nothing has changed.

    Raises:
        OSError: If a rename fails.
    """
    if out.is_dir():
        shutil.copymode(out, work.files)  # somebody may have made it private
    for _ in range(_ATTEMPTS):
        if _take_empty_place(work.files, out):
            return True
        if not overwrite or not out.is_dir():
            return False
        with suppress(FileNotFoundError):  # removed meanwhile, so the place is free now
            return exchange(work.files, out, capabilities) or _swap(work, out)
    return False


def _take_empty_place(files: Path, out: Path) -> bool:
    try:
        files.rename(out)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
    else:
        return True
    try:  # Windows does not rename over an empty directory
        out.rmdir()
        files.rename(out)
    except OSError:
        return False
    return True


def _swap(work: WorkFolder, out: Path) -> bool:
    """Replaces `out` in two steps; after a kill in between, the next run restores it."""
    out.rename(work.old)
    try:
        work.files.rename(out)
    except OSError as error:
        with suppress(OSError):
            work.old.rename(out)
        if error.errno in _OCCUPIED:
            return False
        raise
    return True


def publish_inside(work: WorkFolder, out: Path, last: str, capabilities: Capabilities) -> bool:
    """Puts the staged files into the empty directory `out`, one by one, and `last` at the end.

    Returns:
        False if `out` was filled meanwhile, or is being filled; then nothing has changed.

    Raises:
        OSError: If a file cannot be put there; those that were are taken back.
    """
    with _only_one(out, capabilities) as alone:
        if not alone or not is_empty(out):
            return False
        (work.files / last).rename(work.last)
        try:
            _place_all(work.files, out, capabilities)
            work.last.rename(out / last)
        except OSError as error:
            take_back(work, out)
            if error.errno in _OCCUPIED:
                return False
            raise
        sync_directory((out / last).parent, capabilities)
    return True


@contextmanager
def _only_one(out: Path, capabilities: Capabilities) -> Iterator[bool]:
    if not capabilities.locks:
        yield True
        return
    path = publish_lock(out)
    lock = open_locked(path, capabilities)
    if lock is None:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        lock.close()


def _place_all(files: Path, out: Path, capabilities: Capabilities) -> None:
    for path in sorted(files.rglob("*")):
        placed = out / path.relative_to(files)
        if path.is_dir():
            placed.mkdir()
        else:
            _place(path, placed)
    for folder in sorted((p for p in files.rglob("*") if p.is_dir()), reverse=True):
        sync_directory(out / folder.relative_to(files), capabilities)
    sync_directory(out, capabilities)


def _place(path: Path, placed: Path) -> None:
    """Gives a file its second name; with both in place, half a commit can be undone."""
    try:
        placed.hardlink_to(path)
    except OSError as error:
        if not is_refused(error) and error.errno != errno.EPERM:  # what FAT answers
            raise
        path.rename(placed)
