"""What went wrong in the writer, as errors that name the file and say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.core.errors import CkptkitError, NoSpaceError, OutputError, SaveError
from ckptkit.storage.syscalls import is_out_of_space

_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the name of a file into errors of calls that only know its descriptor.

    Raises:
        OSError: As it came, with a name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def as_failure(error: BaseException, where: str) -> CkptkitError:
    """Turns any exception into an error of ours.

    Args:
        error: What was raised.
        where: The folder concerned, where the exception does not name a file.

    Returns:
        The error, with a hint.
    """
    if isinstance(error, CkptkitError):
        return error
    if isinstance(error, OSError):
        return _of_system(error, where)
    return SaveError(
        f"the writer failed with {type(error).__name__}: {error}",
        where=where,
        hint="this is a fault of ckptkit; please report it with this text",
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
            hint="see whether the file system was mounted read-only, and whose the directory is",
        )
    if isinstance(error, FileExistsError):
        return SaveError(
            "a file was found where none was expected",
            where=where,
            hint="another job may be saving into the same run; give every job its own directory",
        )
    return SaveError(
        f"the file system answered: {reason}",
        where=where,
        hint="see the system's log for what is wrong with the storage",
    )
