"""The progress of an execution: for people as of the library, or as lines for programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from ckptkit.core.text import Closing
from ckptkit.engine.outcome import (
    BlocksShared,
    BytesWritten,
    Event,
    OutputCommitted,
    OutputKept,
    Planned,
    Started,
    Waiting,
    WorkKept,
)
from ckptkit.engine.progress import ProgressBar
from ckptkit_cli._output import Output

_PAUSE_SECONDS = 1.0
_NAMES: Mapping[type[Event], str] = {
    OutputCommitted: "committed",
    OutputKept: "kept",
    WorkKept: "left",
}


class Progress(Closing):
    """Shows the progress of a command on stderr; its events come from several threads.

    Lines for programs give the bytes at most once a second, and once more at the end.

    Attributes:
        notes: The notes of the plan, once there is one.
        kept: Whether an existing output was kept.
        shared_bytes: How many bytes of the output are blocks of the sources.
        seconds: How long it took, once it is closed.
    """

    def __init__(
        self, output: Output, label: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.notes: tuple[str, ...] = ()
        self.kept = False
        self.shared_bytes = 0
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._output = output
        self._clock = clock
        self._done_bytes = self._reported_bytes = self._total_bytes = 0
        self._reported_at = 0.0
        self._lock = threading.Lock()
        self._bar = ProgressBar(label) if output.reports_progress else None

    def close(self) -> None:
        """Removes what a terminal shows."""
        self.seconds = time.perf_counter() - self._began
        if self._bar is not None:
            self._bar.close()

    def listen(self, event: Event) -> None:
        """Counts and shows an event."""
        with self._lock:
            self._count(event)
        if isinstance(event, WorkKept):
            self._output.warn(f"finished files stay in {event.path} for --resume")
        if self._bar is not None:
            self._bar.listen(event)

    def _count(self, event: Event) -> None:
        """Counts an event, and writes its line, if it has one."""
        match event:
            case Planned(notes):
                self.notes += tuple(notes)
                self._output.event("planned", notes=list(notes))
            case Started(total_bytes):
                self._end_stage()
                self._total_bytes, self._done_bytes, self._reported_bytes = total_bytes, 0, 0
                self._reported_at = self._clock()
                self._output.event("started", total_bytes=total_bytes)
            case BlocksShared(size_bytes):
                self.shared_bytes += size_bytes
                self._output.event("shared", bytes=size_bytes)
            case BytesWritten(size_bytes):
                self._done_bytes += size_bytes
                if self._clock() - self._reported_at >= _PAUSE_SECONDS:
                    self._report_progress()
            case Waiting(what):
                self._end_stage()
                self._output.event("waiting", message=what)
            case OutputCommitted(path) | OutputKept(path) | WorkKept(path):
                self._end_stage()
                self.kept |= isinstance(event, OutputKept)
                self._output.event(_NAMES[type(event)], path=path)

    def _end_stage(self) -> None:
        if self._done_bytes > self._reported_bytes:
            self._report_progress()

    def _report_progress(self) -> None:
        self._reported_at = self._clock()
        self._reported_bytes = self._done_bytes
        done, total = self._done_bytes, self._total_bytes
        self._output.event("progress", done_bytes=done, total_bytes=total)

    def warn(self, notes: Iterable[str]) -> None:
        """Warns of each note, unless the event of the plan has it already."""
        reported = self.notes if self._output.events else ()
        for note in notes:
            if note not in reported:
                self._output.remark(note)
