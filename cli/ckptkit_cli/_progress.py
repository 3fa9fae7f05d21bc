"""A bar in bytes, for whoever watches."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from ckptkit.execution.events import BytesWritten, Event, Kept, Left, Planned, Started, Waiting
from ckptkit_cli._event_lines import EventLines
from ckptkit_cli._output import Output


class Progress:
    """Listens to an execution and draws a bar on stderr; draws nothing where nobody watches.

    Events come from several threads at once.

    Attributes:
        notes: What the plan has to say to the user, once it is known.
        kept: Whether the output was there already.
    """

    def __init__(self, output: Output, label: str) -> None:
        """Prepares a bar.

        Args:
            output: Knows whether somebody watches.
            label: What stands before the bar.
        """
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
            self._shown = False  # a thread that is still at work must not draw the bar again
            if self._bar is not None:
                self._bar.close()

    def listen(self, event: Event) -> None:
        """Takes notice of an event."""
        with self._lock:
            self._lines.listen(event)
            if isinstance(event, Kept):
                self.kept = True
            if isinstance(event, Left):
                self._output.warn(f"what is finished stays in {event.path} for --resume")
            if isinstance(event, Planned):
                self.notes += tuple(event.notes)
            if not self._shown:
                return
            if isinstance(event, Started):
                self._start(event.total_bytes)
            elif isinstance(event, Waiting):
                self._draw(desc=f"waiting until {event.what}", bar_format="{desc}")
            elif isinstance(event, BytesWritten) and self._bar is not None:
                self._bar.update(event.size_bytes)

    def warn(self, notes: Iterable[str]) -> None:
        """Tells what the user should know, unless an event has told it: that of the plan."""
        told = self.notes if self._output.events else ()
        for note in notes:
            if note not in told:
                self._output.warn(note)

    def _start(self, total_bytes: int) -> None:
        self._draw(total=total_bytes, desc=self._label, unit="B", unit_scale=True)

    def _draw(self, **given: Any) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its watching thread would outlive the bar
        if self._bar is not None:  # of a stage before
            self._bar.close()
        self._bar = tqdm(**given, dynamic_ncols=True, leave=False)
