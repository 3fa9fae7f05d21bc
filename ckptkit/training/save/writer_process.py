"""The trainer's end of the writer process, which is started on demand, watched and restarted."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from ckptkit.core.errors import WriterError, error_from_json
from ckptkit.core.threads import weak_callback
from ckptkit.engine.progress import ProgressLog, Stage
from ckptkit.training.save.staging import SharedBuffer
from ckptkit.writer.messages import (
    Answer,
    Buffer,
    Channel,
    Failed,
    Request,
    StepCommitted,
    WriteProgress,
    Written,
)

logger = logging.getLogger(__name__)
_LEAVE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_NOTHING = (-1, 0)
Command = Callable[[int], Sequence[str]]
"""From the number of an inherited socket to the command that serves it."""


NICENESS = 10
# These may be site-packages, so they come last: nothing in them may replace a standard module.
_PROGRAM = "import sys; sys.path.extend({!r}); from ckptkit.writer.process import main; main()"


def writer_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests.

    It starts without site-packages and environment variables; only the folders of msgspec, and of
    the library that computes CRC-32 fast if it is installed, are added.
    """
    specs = filter(None, map(find_spec, ("msgspec", "isal")))
    folders = (folder for spec in specs for folder in spec.submodule_search_locations or ())
    roots = dict.fromkeys([Path(__file__).resolve().parents[3], *(Path(f).parent for f in folders)])
    return [
        *(sys.executable, "-I", "-S", "-c", _PROGRAM.format([str(root) for root in roots])),
        *(str(descriptor), str(niceness)),
    ]


class WriterTimeouts(Struct, frozen=True):
    """How long to wait for a writer, and what to start."""

    stall_seconds: float = 120.0  # a writer without any message for so long is killed
    idle_seconds: float = 600.0  # a writer that reports no further bytes for so long is killed
    command: Command = writer_command  # the command to start; tests pass another one


class WriterProcess:
    """A writer process, started again after it died or was killed.

    One thread at a time sends a request. Any thread may call `kill`.
    """

    def __init__(
        self, timeouts: WriterTimeouts, buffer: SharedBuffer | None = None, *, name: str = "writer"
    ) -> None:
        """Starts nothing yet."""
        self._name = name
        self._timeouts = timeouts
        self._buffer = buffer
        self._announced = _NOTHING  # descriptor and size that the running process knows
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=weak_callback(self.close_in_child))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        with self._lock:
            self._start()

    def request(self, request: Request, stage: Stage | None = None) -> Written | StepCommitted:
        """Sends a request and returns the answer; starts a process if none runs.

        If that takes a while, the progress of the stage is logged.
        """
        with self._lock:
            channel = self._start()
            self._send(channel, request)
            answer = self._answer(channel, stage)
        if isinstance(answer, Failed):
            raise error_from_json(answer.error)
        return answer

    def kill(self) -> None:
        """Kills the process; a request under way fails."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def close(self) -> None:
        with self._lock:
            self._forget(_LEAVE_SECONDS)

    def _start(self) -> Channel:
        if self._process is not None and self._process.poll() is not None:
            self._forget(0)
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                command = list(self._timeouts.command(theirs.fileno()))
                try:
                    self._process = subprocess.Popen(  # noqa: S603  our own program
                        command,
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        start_new_session=True,  # so that signals to the job do not reach it
                    )
                except OSError as error:
                    ours.close()
                    raise WriterError(f"could not be started: {error}", where=self._name) from error
            ours.settimeout(self._timeouts.stall_seconds)  # for each message
            self._socket, self._channel, self._announced = ours, Channel(ours), _NOTHING
        channel, buffer = self._channel, self._buffer
        if buffer is None or not buffer.size_bytes:
            return channel
        known = buffer.descriptor, buffer.size_bytes  # numbers of descriptors are reused
        if known != self._announced:
            self._announced = known
            self._send(channel, Buffer(buffer.size_bytes), (buffer.descriptor,))
        return channel

    def _send(self, channel: Channel, message: Request, descriptors: Sequence[int] = ()) -> None:
        """Sends a message; a stopped process may not receive it."""
        try:
            channel.send(message, descriptors)
        except TimeoutError as error:
            raise self._silent() from error
        except OSError as error:
            raise self._died() from error

    def _answer(self, channel: Channel, stage: Stage | None) -> Written | StepCommitted | Failed:
        log = ProgressLog()
        heard = grew = time.monotonic()
        done_bytes = -1
        while True:
            message = self._next(channel)
            now = time.monotonic()
            if isinstance(message, Written | StepCommitted | Failed):
                return message
            if isinstance(message, WriteProgress):
                heard = now
                if message.written_bytes != done_bytes:
                    grew, done_bytes = now, message.written_bytes
            if stage is not None:
                stage.done_bytes = max(done_bytes, 0)
                if line := log.line(stage):
                    logger.info("%s", line)
            if now - heard > self._timeouts.stall_seconds:
                raise self._silent()
            if now - grew > self._timeouts.idle_seconds:
                raise self._given_up(f"no further byte in {self._timeouts.idle_seconds:g} s")

    def _silent(self) -> WriterError:
        return self._given_up(f"no sign of life for {self._timeouts.stall_seconds:g} s")

    def _given_up(self, what: str) -> WriterError:
        self.kill()
        self._forget(_LEAVE_SECONDS)
        return WriterError(
            f"gave {what} and was killed",
            where=self._name,
            hint="the storage hangs or is very slow; the next save starts the writer again",
        )

    def _next(self, channel: Channel) -> Answer | None:
        """Returns the next message, None if none came for a while."""
        assert self._socket is not None  # noqa: S101  there is a channel
        poller = select.poll()  # unlike `select`, it takes descriptors above 1,024
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(_POLL_SECONDS * 1e3):
            return None
        try:
            message = channel.receive()
        except TimeoutError as error:  # in the middle of a message
            raise self._silent() from error
        if message is None:
            raise self._died()
        if not isinstance(message, WriteProgress | Written | StepCommitted | Failed):
            raise WriterError(f"answered with a {type(message).__name__}", where=self._name)
        return message

    def _died(self) -> WriterError:
        status = self._forget(_LEAVE_SECONDS)
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return WriterError(f"{how} in the middle of a save", where=self._name)

    def _forget(self, leave_seconds: float) -> int | None:
        """Closes the connection and collects the process; returns its exit status."""
        if self._socket is not None:
            with suppress(OSError):  # the other end may be gone
                # Otherwise a forked process, which has a copy, would keep the connection open.
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._channel is not None:
            self._channel.close()
        process, self._process, self._channel, self._socket = self._process, None, None, None
        self._announced = _NOTHING
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return process.wait(leave_seconds)
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # hanging storage blocks even killed processes
            return process.wait(_LEAVE_SECONDS)
        return None

    def close_in_child(self) -> None:
        """In a forked child: closes its copies of descriptors, without effect on the parent."""
        if self._socket is not None:
            self._socket.close()
        if self._buffer is not None:
            self._buffer.close_descriptor()
        if self._process is not None:
            self._process.returncode = 0  # only the parent can wait for it
        self._process = self._channel = self._socket = None
        self._lock = threading.Lock()  # a thread that the child lacks may have held it
