"""Turns what went wrong in the writer into errors that name the file and say what to do."""

from __future__ import annotations

import errno
import os

from ckptkit.core.errors import CkptkitError, NoSpaceError, OutputError, SaveError
from ckptkit.storage.local.disk import is_out_of_space

_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def as_failure(error: BaseException, where: str) -> CkptkitError:
    """Turns any exception into an error of ours.

    Args:
        error: What was raised.
        where: The folder concerned, for exceptions that do not name a file.
    """
    if isinstance(error, CkptkitError):
        return error
    if isinstance(error, OSError):
        return _of_system(error, where)
    return SaveError(
        f"the writer failed with {type(error).__name__}: {error}",
        where=where,
        hint="this is a bug of ckptkit; please report it with this text",
    )


def _of_system(error: OSError, where: str) -> CkptkitError:
    where = os.fsdecode(error.filename) if error.filename else where
    reason = error.strerror or str(error)
    if is_out_of_space(error):
        return NoSpaceError(
            f"the disk or the quota is full: {reason}",
            where=where,
            hint="make room, or keep fewer steps with keep_last; the next save tries again",
        )
    if error.errno in _NOT_WRITABLE:
        return OutputError(
            f"it cannot be written: {reason}",
            where=where,
            hint="check that the file system is mounted writable, and who owns the directory",
        )
    if isinstance(error, FileExistsError):
        return SaveError(
            "the file exists already",
            where=where,
            hint="another job may be saving into the same run; give every job its own directory",
        )
    return SaveError(
        f"the file system reported: {reason}",
        where=where,
        hint="see the system's log for what is wrong with the storage",
    )
