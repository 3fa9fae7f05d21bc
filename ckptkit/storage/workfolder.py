"""The hidden folder in which one output is staged, and the removal of those left by a kill.

Beside OUT (or, where OUT cannot be renamed over, inside it) lies

    .OUT.ckptkit-0123456789abcdef/
        .lock     locked while the process that works there is alive
        files/    the output as it will be
        last      the file that is put in place after all others, where they go one by one
        old/      the previous output, where the two cannot be exchanged in one step
        journal   which files are finished, of an output that can be continued after a kill
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ckptkit.storage.names import WORK_INFIX, is_work_folder
from ckptkit.storage.syscalls import Capabilities, OpenFile, is_refused, open_locked

NONCE_BYTES = 8
_ATTEMPTS = 16
_SWEEP_SECONDS = 0.01  # in which somebody who sweeps is done with an empty folder


class WorkFolder:
    """A folder that belongs to this process, or to nobody alive.

    Attributes:
        path: The folder itself.
        files: Where the output grows.
        last: Where the last file waits.
        old: Where the previous output waits.
        journal: Where it is written down what is finished.
    """

    __slots__ = ("_lock", "files", "journal", "last", "old", "path")

    def __init__(self, path: Path, lock: OpenFile | None) -> None:
        self.path = path
        self.files = path / "files"
        self.last = path / "last"
        self.old = path / "old"
        self.journal = path / "journal"
        self._lock = lock

    def remove(self) -> None:
        """Deletes the folder as far as it can be, and gives the lock back."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Gives the lock back, so that whoever comes next may delete the folder."""
        if self._lock is not None:
            self._lock.close()


def claim_work_folder(parent: Path, name: str, capabilities: Capabilities) -> WorkFolder:
    """Makes a new work folder for the output `name`.

    Returns:
        The folder, locked, with an empty `files` in it.

    Raises:
        OSError: If nothing can be made in `parent`.
        FileNotFoundError: If somebody keeps removing what is made there.
    """
    for _ in range(_ATTEMPTS):
        path = parent / f".{name}{WORK_INFIX}{os.urandom(NONCE_BYTES).hex()}"
        path.mkdir()
        try:
            work = _lock_work_folder(path, capabilities)
        except FileNotFoundError:  # swept away between its making and its locking
            continue
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        if work is not None:
            work.files.mkdir()
            return work
    raise FileNotFoundError(f"{_ATTEMPTS} new folders disappeared from {str(parent)!r}")


def join_work_folder(parent: Path, name: str, nonce: str, capabilities: Capabilities) -> WorkFolder:
    """Makes the work folder of a nonce, or enters it where another process has made it.

    Args:
        parent: Where it lies.
        name: Of the output.
        nonce: 16 hexadecimal digits, the same in all processes that work there.
        capabilities: What the platform offers.

    Returns:
        The folder, which is not swept away while one of the processes is alive.

    Raises:
        OSError: If it can neither be made nor entered.
        FileNotFoundError: If somebody keeps removing it.
    """
    path = parent / f".{name}{WORK_INFIX}{nonce}"
    for _ in range(_ATTEMPTS):
        path.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # swept away meanwhile
            work = _lock_work_folder(path, capabilities, shared=True)
            if work is not None:
                work.files.mkdir(exist_ok=True)
                return work
        time.sleep(_SWEEP_SECONDS)
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))


def reclaim_work_folder(parent: Path, out: Path, capabilities: Capabilities) -> WorkFolder | None:
    """Enters the newest work folder for `out` that has a journal and whose process is gone.

    Half a commit is undone. Where there are no locks, nobody knows who is alive.

    Returns:
        The folder, locked, or None where there is none.
    """
    if not capabilities.locks:
        return None
    journals: list[tuple[float, Path]] = []
    with suppress(OSError):  # a folder that may be written to but not listed
        for path in _work_folders(parent, out):
            with suppress(OSError):
                journals.append((WorkFolder(path, None).journal.stat().st_mtime, path))
    for _, path in sorted(journals, reverse=True):
        with suppress(OSError):  # somebody else was faster, or it belongs to another user
            lock = open_locked(path / ".lock", capabilities)
            if lock is None:
                continue
            work = WorkFolder(path, lock)
            _recover(work, out)
            shutil.rmtree(work.old, ignore_errors=True)
            work.last.unlink(missing_ok=True)
            work.files.mkdir(exist_ok=True)
            return work
    return None


def _lock_work_folder(
    path: Path, capabilities: Capabilities, *, shared: bool = False
) -> WorkFolder | None:
    if not capabilities.locks:
        return WorkFolder(path, None)
    try:
        lock = open_locked(path / ".lock", capabilities, shared=shared)
    except OSError as error:
        if is_refused(error):  # then nobody else can lock it either, so nobody sweeps it away
            return WorkFolder(path, None)
        raise
    return None if lock is None else WorkFolder(path, lock)


def sweep_work_folders(parent: Path, out: Path, capabilities: Capabilities) -> None:
    """Removes the work folders for `out` whose process is gone, after undoing half a commit.

    Where there are no locks, nobody knows who is alive, and nothing is removed.
    """
    if not capabilities.locks:
        return
    with suppress(OSError):  # a folder that may be written to but not listed
        for path in _work_folders(parent, out):
            _sweep(path, out, capabilities)
        if parent == out and not is_empty(out):
            _sweep_publish_lock(out, capabilities)


def _work_folders(parent: Path, out: Path) -> list[Path]:
    pattern = re.compile(re.escape(f".{out.name}{WORK_INFIX}") + f"[0-9a-f]{{{2 * NONCE_BYTES}}}")
    return [
        path
        for path in parent.iterdir()
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def publish_lock(out: Path) -> Path:
    """Returns the file that is locked while `out` is filled one file at a time."""
    return out / f".{out.name}{WORK_INFIX}publish"


def _sweep_publish_lock(out: Path, capabilities: Capabilities) -> None:
    """Removes it from a full directory, where whoever waits for it would be refused anyway."""
    path = publish_lock(out)
    if path.exists():
        lock = open_locked(path, capabilities)
        if lock is not None:
            path.unlink()
            lock.close()


def _sweep(path: Path, out: Path, capabilities: Capabilities) -> None:
    with suppress(OSError):  # somebody else was faster, or it belongs to another user
        lock = open_locked(path / ".lock", capabilities)
        if lock is None:
            return
        work = WorkFolder(path, lock)
        try:
            _recover(work, out)
        finally:
            work.remove()


def _recover(work: WorkFolder, out: Path) -> None:
    if work.path.parent == out:
        if work.last.exists():
            take_back(work, out)
    elif work.old.is_dir() and not out.exists():
        work.old.rename(out)


def take_back(work: WorkFolder, out: Path) -> None:
    """Removes from `out` what was put there by link from the work folder, and nothing else."""
    folders: list[Path] = []
    for path in work.files.rglob("*"):
        placed = out / path.relative_to(work.files)
        if path.is_dir():
            folders.append(placed)
        elif placed.exists() and placed.samefile(path):
            placed.unlink()
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):  # somebody else's, or never made
            folder.rmdir()


def entries(out: Path) -> Iterator[Path]:
    """Yields what a directory holds besides work folders and what `mkfs` leaves there."""
    for path in out.iterdir():
        if not is_work_folder(path.name) and path.name != "lost+found":
            yield path


def is_empty(out: Path) -> bool:
    """Says whether a directory holds nothing of anybody's."""
    return next(entries(out), None) is None
