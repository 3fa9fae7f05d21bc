"""The program of the writer process: takes requests from a socket until the trainer is gone.

Every rank has one that persists its files; rank 0 has a second one that commits. Which is which
only shows in what they are asked.

How a trainer starts the writer process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.storage.local.disk import Disk
from ckptkit.writer.failures import Parent, Tally, as_failure, attend
from ckptkit.writer.messages import (
    Answer,
    Buffer,
    Channel,
    Commit,
    Discard,
    Drain,
    Failed,
    Message,
    Persist,
    Written,
)
from ckptkit.writer.persist import Persister

if TYPE_CHECKING:
    from ckptkit.writer.drain import Drainer


_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Worker(Protocol):
    """Does requests, and answers every failure."""

    def attach(self, message: Buffer, channel: Channel) -> None:
        """Takes the buffer that the trainer shares."""

    def do(self, message: Message, tally: Tally) -> Answer:
        """Does a request, and returns its answer."""


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the niceness."""
    run(Desk(Disk()))


def run(desk: Worker) -> None:
    """Is the program, with what does the requests."""
    # Slurm and people signal all processes of a job; the trainer decides what becomes of it.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(int(sys.argv[2]))
    _serve(socket.socket(fileno=int(sys.argv[1])), desk)


def _serve(connection: socket.socket, desk: Worker) -> None:
    """Does one request after the other until the other end, or the parent process, is gone."""
    channel = Channel(connection)
    parent = Parent()
    with connection, suppress(OSError):  # while answering: the other end is gone
        while parent.speaks(connection):
            try:
                message = channel.receive()
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                channel.send(_failed("", error, "message"))
                continue
            if message is None:
                return
            if isinstance(message, Buffer):
                desk.attach(message, channel)
            else:
                attempt = getattr(message, "attempt", "")
                work = partial(desk.do, message)
                channel.send(attend(connection, channel, parent, attempt, work))


class Desk:
    """Does requests, and answers every failure."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._persister = Persister(disk)
        self._drainer: Drainer | None = None

    def attach(self, message: Buffer, channel: Channel) -> None:
        """Maps the buffer that the trainer shares; a failure shows in the next `Persist`."""
        try:
            self._persister.attach(channel.take_descriptor(), message.size_bytes)
        except (OSError, ValueError, IndexError) as error:
            self._persister.detach(f"the shared buffer could not be mapped: {error}")

    def do(self, message: Message, tally: Tally) -> Answer:
        """Does a request.

        Returns:
            Its answer, `Failed` where it could not be done.
        """
        attempt, folder = getattr(message, "attempt", ""), str(getattr(message, "folder", ""))
        try:
            return self._done(message, tally)
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer has to know
            return _failed(attempt, error, folder)

    def _done(self, message: Message, tally: Tally) -> Answer:
        if isinstance(message, Persist):
            return self._persister.persist(message, tally)
        if isinstance(message, Commit):
            from ckptkit.writer.commit import commit  # only rank 0's second process needs it

            return commit(message, self._disk, tally)
        if isinstance(message, Drain):
            return self._drained(message, tally)
        if isinstance(message, Discard):
            from ckptkit.writer.sweep import discard

            notes = discard(message.folder)
            return Written(message.attempt, 0, 0.0, 0.0, None, notes)
        raise SaveError(
            f"a {type(message).__name__} was received where a request was expected",
            hint="trainer and writer are of different versions; start the job again",
        )

    def _drained(self, message: Drain, tally: Tally) -> Written:
        from ckptkit.writer.drain import Drainer  # only the processes that drain need it

        if self._drainer is None:
            self._drainer = Drainer(self._disk)
        return self._drainer.drain(message, tally)


def _failed(attempt: str, error: Exception, where: str) -> Failed:
    failure: CkptkitError = as_failure(error, where)
    return Failed(attempt, failure.to_json())


NICENESS = 10
# These may be site-packages, so they come last: nothing there may replace a standard module.
_PROGRAM = "import sys; sys.path.extend({!r}); from ckptkit.writer.process import main; main()"


def writer_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests.

    It starts without site-packages and environment variables, since it needs neither; only the
    library that sums up fast is let in, where there is one.

    Args:
        descriptor: Number of the socket that it inherits.
        niceness: By how much its priority is lowered.
    """
    return [
        *(sys.executable, "-I", "-S", "-c", _PROGRAM.format(_roots())),
        *(str(descriptor), str(niceness)),
    ]


def _roots() -> list[str]:
    """Returns the folders that hold ckptkit and the library of `ckptkit.core.crc`."""
    root = Path(__file__).resolve().parents[2]
    spec = find_spec("isal")
    found = spec.submodule_search_locations if spec else None
    return [str(root), *(str(Path(folder).parent) for folder in found or ())]
