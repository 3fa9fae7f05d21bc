"""The small files by which a running job and other processes find each other.

RUN/.ckptkit/lock       locked while a job writes to RUN; says which host and process
RUN/.ckptkit/save-now   asks the job for a save
RUN/.ckptkit/identity   tells the run from all others, also from an earlier one of its path

Marks of steps in use: who reads a step holds a lock that whoever removes it has to take.

The lock is that of a file of the step, shared among readers; it ends with its process, so that a
kill leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.core.errors import MissingFileError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.text import Closing
from ckptkit.storage.local.disk import LOCAL_DISK, Disk, OpenFile, is_refused
from ckptkit.storage.local.durable import replace_file

MARKS_FOLDER = ".ckptkit"
_LOCK = "lock"
_REQUEST = "save-now"
_IDENTITY = "identity"
_IDENTITY_BYTES = 8
STEP_PREFIXES = ("checkpoint-", "checkpoint_")
"""What comes before a step's number: the Trainer's way, and that of accelerate's own naming."""

_STEP_FOLDER = re.compile(r"(checkpoint[-_])(0|[1-9]\d{0,17})")
_MOST_BYTES = 4096
_TRIES = 5
_TRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that left a mark; `host` is empty where the mark does not say."""

    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.host else "an unknown process"


class RunLock:
    """The lock of a run, held until it is closed or the process ends."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        if hasattr(os, "register_at_fork"):
            # A forked child, such as a worker of a DataLoader, shares the lock for as long as it
            # has the descriptor, and may live on when this process was killed.
            os.register_at_fork(after_in_child=partial(_close, weakref.ref(self)))

    def close(self) -> None:
        """Gives the lock back; a second call does nothing."""
        self._file.close()


def _close(lock: weakref.ref[RunLock]) -> None:
    alive = lock()
    if alive is not None:
        alive.close()


def take_run_lock(run: Path, disk: Disk = LOCAL_DISK) -> RunLock | None:
    """Takes the lock of a run for this process.

    Returns:
        The lock, or None where the file system knows no locks.
    """
    path = run / MARKS_FOLDER / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _locked(path, disk) if disk.locks else None
    if file is None:
        return None
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    file.truncate(0)
    file.write_at(0, memoryview(text))
    return RunLock(file)


def _locked(path: Path, disk: Disk) -> OpenFile | None:
    """Tries more than once: who only looks whether the lock is taken has it for a moment."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_SECONDS)
        try:
            file = disk.open_locked(path)
        except OSError as error:
            if is_refused(error):
                return None
            raise
        if file is not None:
            return file
    owner, hint = _owner(path), "give every job a directory of its own, or wait until it has ended"
    if owner == Owner(socket.gethostname(), os.getpid()):
        hint = "it is this very process: save through what has opened the run already"
    raise RefusedError(
        f"another job is writing to the run: {owner}",
        where=str(path.parent.parent),
        hint=hint,
    )


def run_is_live(run: Path, disk: Disk = LOCAL_DISK) -> bool | None:
    """Returns whether a job holds the lock of a run; None where the file system has no locks."""
    path = run / MARKS_FOLDER / _LOCK
    if not disk.locks:
        return None
    if not path.exists():
        return False
    try:
        file = disk.open_locked(path)
    except OSError as error:
        if is_refused(error):
            return None
        raise
    if file is None:
        return True
    file.close()
    return False


def ask_for_save(run: Path) -> None:
    """Leaves a request that the job takes up within about a second."""
    folder = run / MARKS_FOLDER
    folder.mkdir(exist_ok=True)
    host, pid = socket.gethostname(), os.getpid()
    draft = folder / f".{_REQUEST}-{host}-{pid}"
    draft.write_text(json.dumps({"host": host, "pid": pid}), encoding="utf-8")
    draft.replace(folder / _REQUEST)


def take_request(run: Path) -> Owner | None:
    """Removes a request to save, and returns whose it was; None if there is none."""
    path = run / MARKS_FOLDER / _REQUEST
    if not path.exists():
        return None
    owner = _owner(path)
    path.unlink(missing_ok=True)
    return owner


def run_identity(run: Path, disk: Disk = LOCAL_DISK) -> str:
    """Returns what tells a run from all others; a run that has none is given one, durably.

    Only who has the lock of the run may call this.
    """
    path = run / MARKS_FOLDER / _IDENTITY
    found = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    if found:
        return found
    identity = secrets.token_hex(_IDENTITY_BYTES)
    replace_file(path, identity.encode(), disk, draft=path.with_name(f".{_IDENTITY}"))
    return identity


def step_folders(run: Path, prefixes: Sequence[str] = STEP_PREFIXES) -> dict[int, Path]:
    """Returns the folders of a run's steps, whole or not, by number, oldest first.

    Args:
        run: The run's directory.
        prefixes: What may come before the number.
    """
    found = {
        int(match[2]): path
        for path in run.iterdir()
        if (match := _STEP_FOLDER.fullmatch(path.name)) and match[1] in prefixes and path.is_dir()
    }
    return dict(sorted(found.items()))


def is_step_folder(name: str) -> bool:
    """Returns whether a folder's name is that of a step of a run; no such number begins with 0."""
    return _STEP_FOLDER.fullmatch(name) is not None


def committed_steps(run: Path) -> dict[int, tuple[Path, int]]:
    """Returns the steps that have a manifest, with a number that changes with each commit."""
    found = {}
    for step, path in step_folders(run).items():
        try:
            found[step] = path, (path / MANIFEST_NAME).stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


def _owner(path: Path) -> Owner:
    try:
        with path.open("rb") as file:
            document: Mapping[str, Any] = json.loads(file.read(_MOST_BYTES))
        return Owner(str(document["host"])[:100], int(document["pid"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return Owner()


logger = logging.getLogger(__name__)

_MARK_TRIES = 10
_MARK_TRY_SECONDS = 0.05


class StepMark(Closing):
    """Locks of files, held until it is closed or the process ends. Use it as a context manager."""

    def __init__(self, files: Iterable[OpenFile] = ()) -> None:
        self._files = tuple(files)

    def close(self) -> None:
        """Gives the locks back; a second call does nothing."""
        for file in self._files:
            file.close()


def hold(paths: Iterable[Path], disk: Disk = LOCAL_DISK) -> StepMark:
    """Marks files as being read; others may read them too, and nobody removes them.

    Where the file system has no locks, or allows none to this user, nothing is marked.
    """
    held: list[OpenFile] = []
    try:
        for path in paths if disk.locks else ():
            file = _held(path, disk)
            if file is not None:
                held.append(file)
    except BaseException:
        StepMark(held).close()
        raise
    return StepMark(held)


def claim(paths: Iterable[Path], disk: Disk = LOCAL_DISK) -> StepMark | None:
    """Takes files for removal, without waiting.

    Returns:
        The mark, which keeps readers out, or None where somebody reads one of the files. Where
        the file system has no locks, there is nothing to take, and it is not None.
    """
    taken: list[OpenFile] = []
    for path in paths if disk.locks else ():
        file = _opened_for_claim(path, disk)
        if file is None:
            continue
        taken.append(file)
        if _locks(file, path, shared=False) is False:
            StepMark(taken).close()
            return None
    return StepMark(taken)


def _opened_for_claim(path: Path, disk: Disk) -> OpenFile | None:
    """Opens a file, for writing where that is allowed: NFS gives no other lock to such a one."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            return disk.open(path.resolve(), flags)
        except OSError as error:
            logger.debug("%s cannot be opened: %s", path, error)
    return None


def _held(path: Path, disk: Disk) -> OpenFile | None:
    """Tries more than once: who only asks whether a step is in use has the lock for a moment."""
    for attempt in range(_MARK_TRIES):
        if attempt:
            time.sleep(_MARK_TRY_SECONDS)
        try:
            file = disk.open_for_reading(path.resolve(strict=True))
        except FileNotFoundError as error:
            raise _gone(path) from error
        except OSError as error:
            logger.debug("%s cannot be marked as being read: %s", path, error)
            return None
        taken = _locks(file, path, shared=True)
        if taken:
            return file
        file.close()
        if taken is None:
            return None
    raise _gone(path)


def _locks(file: OpenFile, path: Path, *, shared: bool) -> bool | None:
    """Takes a lock; None where there is no such thing, False where somebody else has it.

    A lock is worth nothing once its file has lost its name.
    """
    try:
        if not file.lock(shared=shared):
            return False
        return not shared or os.path.samestat(file.status(), path.stat())
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.debug("%s cannot be locked: %s", path, error)
        return None


def _gone(path: Path) -> MissingFileError:
    return MissingFileError(
        "was removed while it was being opened",
        where=str(path),
        hint="run again; a newer step will be taken",
    )
