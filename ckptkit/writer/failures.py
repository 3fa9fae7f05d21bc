"""What went wrong in the writer, as errors that name the file and say what to do.

Doing one request while telling the trainer that all is well, and leaving when it is gone.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptkit.core.errors import CkptkitError, NoSpaceError, OutputError, SaveError
from ckptkit.storage.local.disk import is_out_of_space
from ckptkit.writer.messages import Answer, Channel, Progress

_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the name of a file into errors of calls that only know its descriptor."""
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


_TICK_SECONDS = 0.5
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
LEFT_STATUS = 3
"""Exit status of a writer whose trainer is gone."""


class Parent:
    """The process that started this one.

    That the other end of the connection is closed does not always show: a process forked from the
    trainer, such as a worker of a DataLoader, may hold it open when the trainer was killed.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()

    @property
    def is_gone(self) -> bool:
        return os.getppid() != self._pid

    def speaks(self, connection: socket.socket) -> bool:
        """Waits until something can be read from a connection; False where nobody is left."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while not self.is_gone:
            if poll.poll(_TICK_SECONDS * 1000):
                return True
        return False


class Tally:
    """How far a request is; written by the thread that does it, read by the one that tells."""

    __slots__ = ("done_bytes",)

    def __init__(self) -> None:
        self.done_bytes = 0


def attend(
    connection: socket.socket,
    channel: Channel,
    parent: Parent,
    attempt: str,
    work: Callable[[Tally], Answer],
) -> Answer:
    """Runs `work` in a thread of its own and sends `Progress` until it is done.

    The process ends at once when the other end of the connection is closed or the parent is gone,
    be it in the middle of a write: nobody would learn of the outcome. What `work` raises is its
    own business.

    Args:
        connection: To the trainer.
        channel: The same, for messages.
        parent: The trainer.
        attempt: What to report progress of.
        work: Does the request; is given a tally to keep, and catches everything.

    Returns:
        What `work` returned.
    """
    tally, answers = Tally(), []
    wake_reader, wake_writer = os.pipe()

    def run() -> None:
        answers.append(work(tally))
        os.write(wake_writer, b"\0")

    thread = threading.Thread(target=run, name="ckptkit-request", daemon=True)
    thread.start()
    poll = select.poll()
    poll.register(connection, _GONE)
    poll.register(wake_reader, select.POLLIN)
    told = time.monotonic()
    while not answers:
        ready = poll.poll(_TICK_SECONDS * 1000)
        if parent.is_gone or any(descriptor != wake_reader for descriptor, _ in ready):
            os._exit(LEFT_STATUS)
        if not ready and time.monotonic() - told >= _TICK_SECONDS:
            _tell(channel, Progress(attempt, tally.done_bytes))
            told = time.monotonic()
    thread.join()
    os.close(wake_reader)
    os.close(wake_writer)
    return answers[0]


def _tell(channel: Channel, progress: Progress) -> None:
    try:
        channel.send(progress)
    except OSError:  # closed since it was last looked at
        os._exit(LEFT_STATUS)
