"""The progress of an execution: on a terminal, in a log, or as lines for programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ckptkit.core.text import Closing, size_text
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
from ckptkit_cli._output import Output, cells, counted, escaped, shortened
from ckptkit_cli.views.live_lines import LiveLines, Pace, bar_text, duration_text

_PAUSE_SECONDS = 1.0
_QUIET_SECONDS, _LOG_SECONDS = 10.0, 30.0  # before the first line in a log, and between lines
_LEAST_FILES, _MOST_FILES = 2, 8
_LEAST_NAME, _FIGURES = 18, 24
_NARROWEST_BAR, _WIDEST_BAR = 8, 32
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


class Progress(Closing):
    """Shows the progress of a command on stderr; its events come from several threads.

    A terminal gets lines that are drawn again: the whole, and each file that is being written. A
    log file gets a plain line now and then, and none if the command is quick.

    Attributes:
        notes: The notes of the plan, once there is one.
        kept: Whether an existing output was kept.
    """

    def __init__(self, output: Output, label: str) -> None:
        self.notes: tuple[str, ...] = ()
        self.kept = False
        self._output = output
        self._events = EventLines(output.event)
        self._label = label
        self._lock = threading.Lock()
        self._pace = Pace()
        self._files: dict[str, int] = {}
        self._written: dict[str, int] = {}  # of files that are begun and not complete
        self._complete = 0
        self._waiting = ""
        self._lines: LiveLines | None = None
        self._logs = output.reports_progress
        self._logged_at = time.monotonic() - _LOG_SECONDS + _QUIET_SECONDS

    def close(self) -> None:
        """Removes what a terminal shows."""
        with self._lock:
            lines, self._lines = self._lines, None
            self._logs = False  # a thread that still runs must not draw again
        if lines is not None:
            lines.close()

    def listen(self, event: Event) -> None:
        """Counts and shows an event."""
        with self._lock:
            self._events.listen(event)
            if isinstance(event, OutputKept):
                self.kept = True
            if isinstance(event, WorkKept):
                self._warn(f"finished files stay in {event.path} for --resume")
            if isinstance(event, Planned):
                self.notes += tuple(event.notes)
            if isinstance(event, Started):
                self._begin(event)
            elif isinstance(event, Waiting):
                self._waiting = event.what
                self._pace.begin(0)
            elif isinstance(event, BytesWritten):
                self._add(event)
            if self._logs:
                self._show()

    def warn(self, notes: Iterable[str]) -> None:
        """Warns of each note, unless the event of the plan has it already."""
        reported = self.notes if self._output.events else ()
        for note in notes:
            if note not in reported:
                self._output.remark(note)

    def _warn(self, text: str) -> None:
        if self._lines is not None:
            self._lines.wipe()
        self._output.warn(text)

    def _begin(self, event: Started) -> None:
        self._waiting = ""
        self._files, self._written, self._complete = dict(event.files), {}, 0
        self._pace.begin(event.total_bytes)
        if self._logs and self._output.shows_progress and self._lines is None:
            self._lines = LiveLines(self._make_lines)

    def _add(self, event: BytesWritten) -> None:
        self._pace.add(event.size_bytes)
        size = self._files.get(event.path)
        if size is None:
            return
        written = self._written.get(event.path, 0) + event.size_bytes
        self._written[event.path] = written
        if written >= size:
            self._complete += 1
            self._written.pop(event.path)

    def _show(self) -> None:
        if self._lines is not None:
            self._lines.draw()
        elif not self._output.shows_progress and (self._pace.total_bytes or self._waiting):
            now = time.monotonic()
            if now - self._logged_at >= _LOG_SECONDS:
                self._logged_at = now
                self._output.note(self._summary())

    def _summary(self) -> str:
        pace = self._pace
        if self._waiting:
            return f"{self._label}: waiting until {self._waiting}, {duration_text(pace.seconds)}"
        text = f"{self._label}: {pace.share:.0%} of {size_text(pace.total_bytes)}"
        text += f", {size_text(pace.bytes_per_second)}/s"
        left = pace.seconds_left
        return text if left is None else f"{text}, {duration_text(left)} left"

    def _make_lines(self, width: int) -> list[str]:
        """Returns the lines; without the lock, which the thread that draws may have."""
        lines = [escaped(self._summary())]
        begun = [(path, size) for path, size in self._written.copy().items() if path in self._files]
        if len(self._files) < _LEAST_FILES or self._waiting:
            return lines
        room = max(width - _FIGURES - _NARROWEST_BAR, _LEAST_NAME)
        named = [(_name_file(path, room), path, done) for path, done in begun[:_MOST_FILES]]
        longest = max((cells(text) for text, _, _ in named), default=0)
        bar = min(width - longest - _FIGURES, _WIDEST_BAR)
        for text, path, done in named:
            size = self._files[path]
            drawn = f"  {bar_text(done / size, bar)}" if bar >= _NARROWEST_BAR else ""
            share = f"{min(done / size, 1):>4.0%} of {size_text(size)}"
            lines.append(f"  {text}{' ' * (longest - cells(text))}{drawn}  {share}")
        more = len(begun) - len(named)
        others = f", {more:,} more are being written" if more else ""
        lines.append(f"  {self._complete:,} of {counted(len(self._files), 'file')} done{others}")
        return lines


def _name_file(path: str, room: int) -> str:
    """Returns the name of a file, without its suffix where that makes it fit."""
    text = escaped(path)
    return text if cells(text) <= room else shortened(text.removesuffix(".safetensors"), room)
