"""The progress of an execution: a bar for people, or lines for programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from ckptkit.engine.outcome import (
    BytesWritten,
    Event,
    OutputCommitted,
    OutputKept,
    Planned,
    Started,
    Waiting,
    WorkKept,
)
from ckptkit_cli._output import Output

_PAUSE_SECONDS = 1.0
_NAMES: Mapping[type[Event], str] = {
    OutputCommitted: "committed",
    OutputKept: "kept",
    WorkKept: "left",
}


class Emit(Protocol):
    """Writes one line; see `Output.event`."""

    def __call__(self, name: str, /, **facts: Any) -> None: ...


class EventLines:
    """Turns events into lines: progress at most once a second, and once more at the end.

    Not thread-safe.
    """

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit = emit
        self._clock = clock
        self._done_bytes = 0
        self._reported_bytes = 0
        self._total_bytes = 0
        self._reported_at = 0.0

    def listen(self, event: Event) -> None:
        """Writes the line of an event, if it has one."""
        match event:
            case Planned(notes):
                self._emit("planned", notes=list(notes))
            case Started(total_bytes):
                self._end_stage()
                self._total_bytes, self._done_bytes, self._reported_bytes = total_bytes, 0, 0
                self._reported_at = self._clock()
                self._emit("started", total_bytes=total_bytes)
            case BytesWritten(size_bytes):
                self._done_bytes += size_bytes
                if self._clock() - self._reported_at >= _PAUSE_SECONDS:
                    self._report_progress()
            case Waiting(what):
                self._end_stage()
                self._emit("waiting", message=what)
            case OutputCommitted(path) | OutputKept(path) | WorkKept(path):
                self._end_stage()
                self._emit(_NAMES[type(event)], path=path)

    def _end_stage(self) -> None:
        if self._done_bytes > self._reported_bytes:
            self._report_progress()

    def _report_progress(self) -> None:
        self._reported_at = self._clock()
        self._reported_bytes = self._done_bytes
        self._emit("progress", done_bytes=self._done_bytes, total_bytes=self._total_bytes)


class Progress:
    """Draws a bar on stderr, if that is a terminal; its events come from several threads.

    Attributes:
        notes: The notes of the plan, once there is one.
        kept: Whether an existing output was kept.
    """

    def __init__(self, output: Output, label: str) -> None:
        self.notes: tuple[str, ...] = ()
        self.kept = False
        self._output = output
        self._lines = EventLines(output.event)
        self._shown = output.shows_progress
        self._label = label
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._shown = False  # a thread that still runs must not draw the bar again
            if self._bar is not None:
                self._bar.close()

    def listen(self, event: Event) -> None:
        """Counts and shows an event."""
        with self._lock:
            self._lines.listen(event)
            if isinstance(event, OutputKept):
                self.kept = True
            if isinstance(event, WorkKept):
                self._output.warn(f"finished files stay in {event.path} for --resume")
            if isinstance(event, Planned):
                self.notes += tuple(event.notes)
            if not self._shown:
                return
            if isinstance(event, Started):
                total = event.total_bytes
                self._draw(total=total, desc=self._label, unit="B", unit_scale=True)
            elif isinstance(event, Waiting):
                self._draw(desc=f"waiting until {event.what}", bar_format="{desc}")
            elif isinstance(event, BytesWritten) and self._bar is not None:
                self._bar.update(event.size_bytes)

    def warn(self, notes: Iterable[str]) -> None:
        """Warns of each note, unless the event of the plan has it already."""
        reported = self.notes if self._output.events else ()
        for note in notes:
            if note not in reported:
                self._output.warn(note)

    def _draw(self, **settings: Any) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its thread would outlive the bar
        if self._bar is not None:  # of an earlier stage
            self._bar.close()
        self._bar = tqdm(**settings, dynamic_ncols=True, leave=False)
