"""The program of the writer process.

It takes requests from a socket until the trainer is gone. Each rank has a process that writes its
files; rank 0 has a second one that commits. They differ only in the requests they get.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ckptkit.core.errors import CkptkitError, NoSpaceError, OutputError, SaveError
from ckptkit.storage.local.disk import Disk, is_out_of_space
from ckptkit.storage.locations import unstaged_path
from ckptkit.writer.messages import (
    Answer,
    Buffer,
    ByteCounter,
    Channel,
    Commit,
    Discard,
    Drain,
    Failed,
    Message,
    Persist,
    WriteProgress,
    Written,
)
from ckptkit.writer.persist import Persister

if TYPE_CHECKING:
    from ckptkit.writer.drain import Drainer


_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Handler(Protocol):
    """Serves the requests of a trainer."""

    def attach(self, message: Buffer, channel: Channel) -> None:
        """Takes the buffer that the trainer shares."""

    def do(self, message: Message, counter: ByteCounter) -> Answer:
        """Serves a request and returns its answer, `Failed` if it failed."""


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the niceness."""
    run(RequestHandler(Disk()))


def run(handler: Handler) -> None:
    """Serves requests until the trainer has closed the connection or is gone."""
    # Slurm and users signal all processes of a job; only the trainer reacts to that.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connection)
    # A closed connection is not enough to notice the trainer's end: a process forked from it, such
    # as a worker of a DataLoader, may hold the other end open after the trainer was killed.
    trainer = os.getppid()
    with connection, suppress(OSError):  # from an answer to a trainer that is gone
        while _wait_for_message(connection, trainer):
            try:
                message = channel.receive()
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                channel.send(Failed("", as_failure(error, "message").to_json()))
                continue
            if message is None:
                return
            if isinstance(message, Buffer):
                handler.attach(message, channel)
            else:
                channel.send(_answer(message, handler, connection, channel, trainer))


_TICK_SECONDS = 0.5
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
LEFT_STATUS = 3
"""Exit status of a writer whose trainer is gone."""


def _wait_for_message(connection: socket.socket, trainer: int) -> bool:
    """Waits until the connection is readable; False if the trainer is gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while os.getppid() == trainer:
        if poll.poll(_TICK_SECONDS * 1000):
            return True
    return False


def _answer(
    message: Message, handler: Handler, connection: socket.socket, channel: Channel, trainer: int
) -> Answer:
    """Has a request served in a thread of its own, and sends `WriteProgress` until it is done.

    The process exits at once, even in the middle of a write, if the connection is closed or the
    trainer is gone.
    """
    counter, answers = ByteCounter(), []
    wake_reader, wake_writer = os.pipe()

    def serve() -> None:
        answers.append(handler.do(message, counter))
        os.write(wake_writer, b"\0")

    thread = threading.Thread(target=serve, name="ckptkit-request", daemon=True)
    thread.start()
    poll = select.poll()
    poll.register(connection, _GONE)
    poll.register(wake_reader, select.POLLIN)
    reported = time.monotonic()
    while not answers:
        ready = poll.poll(_TICK_SECONDS * 1000)
        if os.getppid() != trainer or any(number != wake_reader for number, _ in ready):
            os._exit(LEFT_STATUS)
        if not ready and time.monotonic() - reported >= _TICK_SECONDS:
            try:
                channel.send(WriteProgress(getattr(message, "attempt", ""), counter.done_bytes))
            except OSError:  # closed since the poll
                os._exit(LEFT_STATUS)
            reported = time.monotonic()
    thread.join()
    os.close(wake_reader)
    os.close(wake_writer)
    return answers[0]


class RequestHandler:
    """Serves requests to write, drain, commit and discard."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._persister = Persister(disk)
        self._drainer: Drainer | None = None

    def attach(self, message: Buffer, channel: Channel) -> None:
        """Maps the buffer that the trainer shares; the next `Persist` reports a failure."""
        try:
            self._persister.attach(channel.take_descriptor(), message.size_bytes)
        except (OSError, ValueError, IndexError) as error:
            self._persister.detach(f"the shared buffer could not be mapped: {error}")

    def do(self, message: Message, counter: ByteCounter) -> Answer:
        """Serves a request and returns its answer, `Failed` if it failed."""
        attempt, folder = getattr(message, "attempt", ""), str(getattr(message, "folder", ""))
        try:
            match message:
                case Persist():
                    return self._persister.persist(message, counter)
                case Commit():
                    from ckptkit.writer.commit import commit  # only processes that commit need it

                    return commit(message, self._disk, counter)
                case Drain():
                    from ckptkit.writer.drain import Drainer  # only processes that drain need it

                    self._drainer = self._drainer or Drainer(self._disk)
                    return self._drainer.drain(message, counter)
                case Discard():
                    from ckptkit.writer.sweep import discard

                    return Written(attempt, 0, 0.0, 0.0, None, discard(message.folder))
                case _:
                    raise SaveError(  # noqa: TRY301  it is the answer
                        f"expected a request, received a {type(message).__name__}",
                        hint="trainer and writer have different versions; restart the job",
                    )
        except Exception as error:  # noqa: BLE001  the trainer reports any error
            return Failed(attempt, as_failure(error, folder).to_json())


_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def as_failure(error: BaseException, where: str) -> CkptkitError:
    """Turns any exception of a writer into an error of ours, which says what to do."""
    if isinstance(error, CkptkitError):
        return error
    if not isinstance(error, OSError):
        return SaveError(
            f"the writer failed with {type(error).__name__}: {error}",
            where=where,
            hint="this is a bug of ckptkit; please report it with this text",
        )
    where = unstaged_path(os.fsdecode(error.filename) if error.filename else where)
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
