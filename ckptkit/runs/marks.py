"""Small files and locks through which the processes that use a run coordinate.

RUN/.ckptkit/lock       locked while a job writes to RUN; holds its host and process
RUN/.ckptkit/save-now   requests a save from the job
RUN/.ckptkit/identity   identifies the run, also against an earlier one at its path

A reader of a step holds a shared lock on a file of the step, which a process has to take before it
removes the step. Locks end with their process, so that a kill leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import MsgspecError, Struct
from msgspec.json import decode

from ckptkit.core.errors import MissingFileError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.text import Closing
from ckptkit.core.threads import weak_callback
from ckptkit.storage.local.disk import LOCAL_DISK, Disk, OpenFile
from ckptkit.storage.local.durable import replace_file
from ckptkit.storage.locations import MARKS_FOLDER

logger = logging.getLogger(__name__)

_LOCK = "lock"
_REQUEST = "save-now"
_IDENTITY = "identity"
_IDENTITY_BYTES = 8
STEP_PREFIXES = ("checkpoint-", "checkpoint_")
"""The prefixes of step folders: those of the Trainer, and of accelerate's automatic naming."""

STEP_FOLDER = re.compile(r"(checkpoint[-_])(0|[1-9]\d{0,17})")
_MOST_BYTES = 4096
_TRIES = 5
_TRY_SECONDS = 0.1


class Owner(Struct, frozen=True):
    """The process that left a mark; `host` is empty if the mark does not name one."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host:.100}" if self.host else "an unknown process"


def take_run_lock(run: Path, disk: Disk = LOCAL_DISK) -> FileLocks | None:
    """Takes the lock of a run for this process; None if the file system has no locks."""
    path = run / MARKS_FOLDER / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _locked(path, disk)
    if file is None:
        return None
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    try:
        file.truncate(0)
        file.write_at(0, memoryview(text))
    except BaseException:
        file.close()
        raise
    lock = FileLocks([file])
    if hasattr(os, "register_at_fork"):
        # A forked child, such as a worker of a DataLoader, shares the lock while it has the
        # descriptor, and may outlive this process.
        os.register_at_fork(after_in_child=weak_callback(lock.close))
    return lock


def _locked(path: Path, disk: Disk) -> OpenFile | None:
    """Tries more than once: a process that only checks the lock has it for a moment."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_SECONDS)
        is_alone, file = disk.try_lock(path)
        if is_alone:
            return file
    owner, hint = (
        _owner(path),
        "use a directory of its own for each job, or wait until the other has ended",
    )
    if owner == Owner(socket.gethostname(), os.getpid()):
        hint = "this process has opened the run already; save through that Checkpointer"
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
    is_alone, file = disk.try_lock(path)
    if file is None:
        return None if is_alone else True
    file.close()
    return False


def ask_for_save(run: Path) -> None:
    """Requests a save, which the job begins within about a second."""
    folder = run / MARKS_FOLDER
    folder.mkdir(exist_ok=True)
    host, pid = socket.gethostname(), os.getpid()
    draft = folder / f".{_REQUEST}-{host}-{pid}"
    draft.write_text(json.dumps({"host": host, "pid": pid}), encoding="utf-8")
    draft.replace(folder / _REQUEST)


def take_request(run: Path) -> Owner | None:
    """Removes a request to save, and returns its owner; None if there is none."""
    path = run / MARKS_FOLDER / _REQUEST
    if not path.exists():
        return None
    owner = _owner(path)
    path.unlink(missing_ok=True)
    return owner


def run_identity(run: Path) -> str:
    """Returns the identity of a run; writes one, durably, if it has none.

    Only the process with the lock of the run may call this.
    """
    return identity_in(run / MARKS_FOLDER)


def identity_in(folder: Path) -> str:
    """Returns the identity in a folder; writes one, durably, if it has none."""
    path = folder / _IDENTITY
    identity = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    if not identity:
        identity = secrets.token_hex(_IDENTITY_BYTES)
        replace_file(path, identity.encode(), LOCAL_DISK, draft=path.with_name(f".{_IDENTITY}"))
    return identity


def step_folders(run: Path, prefixes: Sequence[str] = STEP_PREFIXES) -> dict[int, Path]:
    """Returns the folders of a run's steps, complete or not, by number."""
    folders = {
        int(match[2]): path
        for path in run.iterdir()
        if (match := STEP_FOLDER.fullmatch(path.name)) and match[1] in prefixes and path.is_dir()
    }
    return dict(sorted(folders.items()))


def is_step_folder(name: str) -> bool:
    """Returns whether a name is that of a step's folder; the number has no leading zero."""
    return STEP_FOLDER.fullmatch(name) is not None


def committed_steps(run: Path) -> dict[int, tuple[Path, int]]:
    """Returns the steps with a manifest, each with a number that changes with each commit."""
    steps = {}
    for step, path in step_folders(run).items():
        try:
            steps[step] = path, (path / MANIFEST_NAME).stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return steps


def _owner(path: Path) -> Owner:
    try:
        file = LOCAL_DISK.open_for_reading(path)  # whatever is there, the job must not wait for it
        try:
            return decode(file.read_bytes(0, _MOST_BYTES), type=Owner)
        finally:
            file.close()
    except (OSError, MsgspecError, RecursionError):
        return Owner(host="", pid=0)


_MARK_TRIES = 10
_MARK_TRY_SECONDS = 0.05


class FileLocks(Closing):
    """Locks of files, held until it is closed or the process ends; a context manager."""

    def __init__(self, files: Iterable[OpenFile] = ()) -> None:
        self._files = tuple(files)

    def close(self) -> None:
        """Releases the locks; a second call does nothing."""
        for file in self._files:
            file.close()


def hold(paths: Iterable[Path], disk: Disk = LOCAL_DISK) -> FileLocks:
    """Marks files as being read: others may read them too, and no process removes them.

    Nothing is marked if the file system has no locks, or allows none to this user.
    """
    held: list[OpenFile] = []
    try:
        for path in paths if disk.locks else ():
            file = _held(path, disk)
            if file is not None:
                held.append(file)
    except BaseException:
        FileLocks(held).close()
        raise
    return FileLocks(held)


def claim(paths: Iterable[Path], disk: Disk = LOCAL_DISK) -> FileLocks | None:
    """Locks files for removal, without waiting; None if one of them is being read."""
    taken: list[OpenFile] = []
    try:
        for path in paths if disk.locks else ():
            file = _opened_for_claim(path, disk)
            if file is None:
                continue
            taken.append(file)
            if _locks(file, path, shared=False) is False:
                FileLocks(taken).close()
                return None
    except BaseException:
        FileLocks(taken).close()
        raise
    return FileLocks(taken)


def _opened_for_claim(path: Path, disk: Disk) -> OpenFile | None:
    """Opens a file, for writing if allowed: NFS gives an exclusive lock to no other one."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            return disk.open(path.resolve(), flags)
        except OSError as error:
            logger.debug("%s cannot be opened: %s", path, error)
    return None


def _held(path: Path, disk: Disk) -> OpenFile | None:
    """Tries more than once: a process that checks whether a step is in use has the lock briefly."""
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
    """Takes a lock; None if there are no locks, False if another process has it.

    A lock is useless once its file has lost its name.
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
