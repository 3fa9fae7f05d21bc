"""An execution's events as lines for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ckptkit.execution.events import (
    BytesWritten,
    Committed,
    Event,
    Kept,
    Left,
    Planned,
    Started,
    Waiting,
)

_PAUSE_SECONDS = 1.0


class Emit(Protocol):
    """Writes one line; see `Output.event`."""

    def __call__(self, name: str, /, **facts: Any) -> None:
        """Writes an event of that name."""
        ...


class EventLines:
    """Turns events into lines: progress at most once a second, and once more at the end.

    Whoever calls sees to it that no two events come at once.
    """

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepares for one execution.

        Args:
            emit: Writes a line.
            clock: Tells seconds.
        """
        self._emit = emit
        self._clock = clock
        self._done_bytes = 0
        self._told_bytes = 0
        self._total_bytes = 0
        self._told_at = 0.0

    def listen(self, event: Event) -> None:
        """Takes notice of an event."""
        match event:
            case Planned(notes):
                self._emit("planned", notes=list(notes))
            case Started(total_bytes):
                self._end_stage()
                self._total_bytes, self._done_bytes, self._told_bytes = total_bytes, 0, 0
                self._told_at = self._clock()
                self._emit("started", total_bytes=total_bytes)
            case BytesWritten(size_bytes):
                self._done_bytes += size_bytes
                if self._clock() - self._told_at >= _PAUSE_SECONDS:
                    self._tell_progress()
            case Waiting(what):
                self._end_stage()
                self._emit("waiting", message=what)
            case Committed(path) | Kept(path) | Left(path):
                self._end_stage()
                self._emit(type(event).__name__.lower(), path=path)

    def _end_stage(self) -> None:
        if self._done_bytes > self._told_bytes:
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._told_at = self._clock()
        self._told_bytes = self._done_bytes
        self._emit("progress", done_bytes=self._done_bytes, total_bytes=self._total_bytes)
