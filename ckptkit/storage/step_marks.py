"""Marks of steps in use: who reads a step holds a lock that whoever removes it has to take.

The lock is that of a file of the step, shared among readers; it ends with its process, so that a
kill leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ckptkit.core.closing import Closing
from ckptkit.core.errors import MissingFileError
from ckptkit.storage.syscalls import Capabilities, OpenFile, detect_capabilities, open_for_reading

logger = logging.getLogger(__name__)

_TRIES = 10
_TRY_SECONDS = 0.05


class StepMark(Closing):
    """Locks of files, held until it is closed or the process ends. Use it as a context manager."""

    def __init__(self, files: Iterable[OpenFile] = ()) -> None:
        self._files = tuple(files)

    def close(self) -> None:
        """Gives the locks back; a second call does nothing."""
        for file in self._files:
            file.close()


def hold(paths: Iterable[Path], capabilities: Capabilities | None = None) -> StepMark:
    """Marks files as being read; others may read them too, and nobody removes them.

    Where the file system has no locks, or allows none to this user, nothing is marked.

    Raises:
        MissingFileError: If one is gone, or is being removed.
    """
    able = capabilities or detect_capabilities()
    held: list[OpenFile] = []
    try:
        for path in paths if able.locks else ():
            file = _held(path, able)
            if file is not None:
                held.append(file)
    except BaseException:
        StepMark(held).close()
        raise
    return StepMark(held)


def claim(paths: Iterable[Path], capabilities: Capabilities | None = None) -> StepMark | None:
    """Takes files for removal, without waiting.

    Returns:
        The mark, which keeps readers out, or None where somebody reads one of the files. Where
        the file system has no locks, there is nothing to take, and it is not None.
    """
    able = capabilities or detect_capabilities()
    taken: list[OpenFile] = []
    for path in paths if able.locks else ():
        file = _opened_for_claim(path, able)
        if file is None:
            continue
        taken.append(file)
        if _locks(file, path, shared=False) is False:
            StepMark(taken).close()
            return None
    return StepMark(taken)


def _opened_for_claim(path: Path, capabilities: Capabilities) -> OpenFile | None:
    """Opens a file, for writing where that is allowed: NFS gives no other lock to such a one."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            return OpenFile(path.resolve(), flags, capabilities)
        except OSError as error:
            logger.debug("%s cannot be opened: %s", path, error)
    return None


def _held(path: Path, capabilities: Capabilities) -> OpenFile | None:
    """Tries more than once: who only asks whether a step is in use has the lock for a moment."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_SECONDS)
        try:
            file = open_for_reading(path.resolve(strict=True), capabilities)
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
