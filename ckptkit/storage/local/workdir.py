"""The hidden folder in which one output is staged: its commit, and its removal after kills.

Next to OUT (or inside it, where OUT cannot be renamed over) is

    .OUT.ckptkit-0123456789abcdef/
        .lock     locked while the process that works there is alive
        files/    the output as it will be
        last      the file that is put in place after all others, while they go one by one
        old/      the previous output, where the two cannot be exchanged in one step
        parts/    notes of finished parts, of an output that can be continued after a kill

Other users cannot look into the folder, and folders of theirs are left alone.
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

from ckptkit.storage.local.disk import Disk, OpenFile, is_refused
from ckptkit.storage.local.durable import OCCUPIED, replace_folder
from ckptkit.storage.local.ownership import copy_owner, inherit_group, is_own, make_private
from ckptkit.storage.locations import current_directory, hidden_name, is_work_folder

NONCE_BYTES = 8
_ATTEMPTS = 16
_SWEEP_SECONDS = 0.01  # in which another process has swept an empty folder


class WorkFolder:
    """A folder that belongs to this process, or to a process that has ended."""

    __slots__ = ("_lock", "files", "last", "old", "parts", "path")

    def __init__(self, path: Path, lock: OpenFile | None) -> None:
        self.path = path
        self.files = path / "files"
        self.last = path / "last"
        self.old = path / "old"
        self.parts = path / "parts"
        self._lock = lock

    @property
    def is_held(self) -> bool:
        """Whether its lock is still there, which a program that cleans up may have removed."""
        return (self.path / ".lock").exists()

    def make_files(self, out: Path) -> None:
        """Makes `files`; with the set-group-ID bit and the group of `out` if that has the bit."""
        self.files.mkdir(exist_ok=True)
        if out.is_dir():
            inherit_group(out, self.files)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()


def claim_work_folder(parent: Path, name: str, disk: Disk) -> WorkFolder:
    """Makes a new work folder for the output `name`, locked, with an empty `files` in it."""
    for _ in range(_ATTEMPTS):
        path = parent / hidden_name(name, os.urandom(NONCE_BYTES).hex())
        make_private(path)
        try:
            work = _lock_work_folder(path, disk)
        except FileNotFoundError:  # swept away between its making and its locking
            continue
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        if work is not None:
            try:
                work.make_files(parent / name)
            except OSError:
                work.remove()
                raise
            return work
    raise FileNotFoundError(f"{_ATTEMPTS} new folders disappeared from {str(parent)!r}")


def join_work_folder(parent: Path, name: str, nonce: str, disk: Disk) -> WorkFolder:
    """Makes the work folder of a nonce, or enters it where another process has made it.

    It is not swept away while one of the processes is alive, which all pass the same nonce.
    """
    path = parent / hidden_name(name, nonce)
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):  # swept away meanwhile
            make_private(path, exist_ok=True)
            work = _lock_work_folder(path, disk, shared=True)
            if work is not None:
                work.make_files(parent / name)
                return work
        time.sleep(_SWEEP_SECONDS)
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))


def reclaim_work_folder(parent: Path, out: Path, disk: Disk) -> WorkFolder | None:
    """Locks the newest work folder for `out` that has parts and whose process is gone.

    Half a commit is undone. Without locks, no process can know which others are alive.
    """
    if not disk.locks:
        return None
    begun: list[tuple[float, Path]] = []
    with suppress(OSError):  # a folder that may be written to but not listed
        for path in _work_folders(parent, out):
            with suppress(OSError):
                begun.append((WorkFolder(path, None).parts.stat().st_mtime, path))
    for _, path in sorted(begun, reverse=True):
        with suppress(OSError):  # another process was faster, or it belongs to another user
            _, lock = disk.try_lock(path / ".lock")
            if lock is None:
                continue
            work = WorkFolder(path, lock)
            recover(work, out)
            shutil.rmtree(work.old, ignore_errors=True)
            work.make_files(out)
            return work
    return None


def _lock_work_folder(path: Path, disk: Disk, *, shared: bool = False) -> WorkFolder | None:
    is_ours, lock = disk.try_lock(path / ".lock", shared=shared)
    return WorkFolder(path, lock) if is_ours else None


def sweep_work_folders(
    parent: Path, out: Path, disk: Disk, *, committed_only: bool = False
) -> None:
    """Removes the work folders for `out` whose process is gone, after undoing half a commit.

    Without locks, no process can know which others are alive, and nothing is removed. With
    `committed_only`, those stay that still have files of an output.
    """
    if not disk.locks:
        return
    with suppress(OSError):  # a folder that may be written to but not listed
        for path in _work_folders(parent, out):
            with suppress(OSError):  # another process was faster, or it belongs to another user
                _, lock = disk.try_lock(path / ".lock")
                if lock is None:
                    continue
                work = WorkFolder(path, lock)
                try:
                    recover(work, out)
                finally:
                    if committed_only and (work.files.exists() or work.old.exists()):
                        work.release()
                    else:
                        work.remove()
        publish_lock = _publish_lock(out)
        # In a full directory, it refuses all processes that wait for it.
        if parent == out and not is_empty(out) and publish_lock.exists():
            _, lock = disk.try_lock(publish_lock)
            if lock is not None:
                publish_lock.unlink()
                lock.close()


def _work_folders(parent: Path, out: Path) -> list[Path]:
    pattern = re.compile(re.escape(hidden_name(out.name, "")) + f"[0-9a-f]{{{2 * NONCE_BYTES}}}")
    return [path for path in parent.iterdir() if pattern.fullmatch(path.name) and is_own(path)]


def _publish_lock(out: Path) -> Path:
    return out / hidden_name(out.name, "publish")


def recover(work: WorkFolder, out: Path) -> None:
    """Undoes the unfinished commit of a process that has ended."""
    if work.last.exists():
        _take_back(work, out)
        work.last.unlink()
    elif work.old.is_dir() and not out.exists():
        work.old.rename(out)


def _take_back(work: WorkFolder, out: Path) -> None:
    """Removes from `out` what was put there by link from the work folder, and nothing else."""
    folders: list[Path] = []
    for path in work.files.rglob("*"):
        placed = out / path.relative_to(work.files)
        if path.is_dir():
            folders.append(placed)
        elif placed.exists() and placed.samefile(path):
            placed.unlink()
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):  # holds other files, or was never made
            folder.rmdir()


def list_entries(out: Path) -> Iterator[Path]:
    """Yields what a directory holds besides work folders and what `mkfs` leaves there."""
    for path in out.iterdir():
        if not is_work_folder(path.name) and path.name != "lost+found":
            yield path


def is_empty(out: Path) -> bool:
    return next(list_entries(out), None) is None


def is_free(out: Path, disk: Disk) -> bool:
    """Returns whether an output can be written without replacing one.

    What a killed process left of a commit is undone or removed before; its finished files stay.
    """
    for parent in (out.parent, out) if out.is_dir() and not is_empty(out) else ():
        sweep_work_folders(parent, out, disk, committed_only=True)
    return not out.is_dir() or is_empty(out)


_PUBLISH_ATTEMPTS = 8


def can_be_replaced(out: Path, work: WorkFolder) -> bool:
    """Says whether a directory may be renamed, which a mount point may not.

    Tries to rename it to the work folder. That folder is not empty, so the system refuses this for
    an ordinary directory too, but with another error, and nothing has changed.
    """
    try:
        out.rename(work.path)
    except OSError as error:
        return error.errno in OCCUPIED
    return False


def publish(
    work: WorkFolder, out: Path, disk: Disk, *, last: str = "", overwrite: bool = False
) -> bool:
    """Renames the staged files to `out` in one step.

    An empty directory that has to stay gets them one by one, and the file `last` at the end. That
    is a mount point, the directory that this process runs in, one with hidden entries, and one
    whose owner or group this user may not give to a new directory. Returns False, and changes
    nothing, if `out` holds something that is not to be overwritten.
    """
    stays = work.path.parent == out
    if not stays and out.is_dir():
        has_owner = copy_owner(out, work.files)
        has_to_stay = not has_owner or out == current_directory() or any(out.iterdir())
        stays = is_empty(out) and has_to_stay
        if not stays:
            shutil.copymode(out, work.files)  # the user may have made it private
    if stays:
        return _publish_inside(work, out, last, disk)
    for _ in range(_PUBLISH_ATTEMPTS):
        if _take_empty_place(work.files, out):
            return True
        if not overwrite or not out.is_dir():
            return False
        with suppress(FileNotFoundError):  # removed meanwhile, so the place is free now
            try:
                # After a kill between two renames, `recover` restores it.
                replace_folder(work.files, out, work.old, disk)
            except OSError as error:
                if error.errno in OCCUPIED:
                    return False
                raise
            return True
    return False


def _take_empty_place(files: Path, out: Path) -> bool:
    try:
        files.rename(out)
    except OSError as error:
        if error.errno not in OCCUPIED:
            raise
    else:
        return True
    try:  # Windows does not rename over an empty directory
        out.rmdir()
        files.rename(out)
    except OSError:
        return False
    return True


def _publish_inside(work: WorkFolder, out: Path, last: str, disk: Disk) -> bool:
    path = _publish_lock(out)
    is_alone, lock = disk.try_lock(path)
    try:
        if not is_alone or not is_empty(out):
            return False
        (work.files / last).rename(work.last)
        try:
            _place_all(work.files, out, disk)
            work.last.rename(out / last)
        except OSError as error:
            _take_back(work, out)
            if error.errno in OCCUPIED:
                return False
            raise
        disk.sync_directory((out / last).parent)
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)
            lock.close()
    return True


def _place_all(files: Path, out: Path, disk: Disk) -> None:
    for path in sorted(files.rglob("*")):
        placed = out / path.relative_to(files)
        if path.is_dir():
            placed.mkdir()
            continue
        try:  # with both names in place, half a commit can be undone
            placed.hardlink_to(path)
        except OSError as error:
            if not is_refused(error) and error.errno != errno.EPERM:  # what FAT answers
                raise
            path.rename(placed)
    for folder in sorted((p for p in files.rglob("*") if p.is_dir()), reverse=True):
        disk.sync_directory(out / folder.relative_to(files))
    disk.sync_directory(out)
