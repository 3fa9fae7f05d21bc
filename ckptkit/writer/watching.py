"""Doing one request while telling the trainer that all is well, and leaving when it is gone."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from ckptkit.writer.messages import Answer, Channel, Progress

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
        """Whether it has ended."""
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
