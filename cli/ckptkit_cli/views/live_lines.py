"""Lines at the bottom of a terminal that are drawn again and again, and the pace of work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ckptkit_cli._output import cells, shortened

_DRAW_SECONDS = 0.1
_PACE_SECONDS = 15.0
_LEAST_WIDTH, _USUAL_SIZE = 20, (80, 24)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class LiveLines:
    """Draws lines on stderr below what was printed, at most ten times a second.

    A thread draws them too, so that times go on while nothing happens. Its methods can be called
    from any thread.
    """

    def __init__(self, make_lines: Callable[[int], Sequence[str]]) -> None:
        """Starts to draw.

        Args:
            make_lines: Returns the lines, printable, for a width; called from several threads, one
                after another. Lines that are too wide are shortened.
        """
        self._make_lines = make_lines
        self._lock = threading.RLock()
        self._drawn = 0  # lines that are on the terminal
        self._drawn_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ckptkit-screen", daemon=True)
        self._thread.start()

    def draw(self, *, now: bool = False) -> None:
        """Draws the lines, unless that was done a moment ago."""
        with self._lock:
            at = time.monotonic()
            if self._ended.is_set() or (not now and at - self._drawn_at < _DRAW_SECONDS):
                return
            self._drawn_at = at
            columns, rows = terminal_size()
            lines = [
                text if cells(text) < columns else shortened(text, columns - 1)
                for text in self._make_lines(columns)[: max(rows - 1, 1)]
            ]
            # Each line is cleared after its text, and not before, which would flicker.
            text = "\n".join(f"{line}\x1b[K" for line in lines)
            self._write(f"{self._home()}{text}\x1b[J")
            self._drawn = len(lines)

    def wipe(self) -> None:
        """Removes the lines, so that something can be printed in their place."""
        with self._lock:
            if self._drawn:
                self._write(f"{self._home()}\x1b[J")
                self._drawn = 0

    def close(self) -> None:
        """Removes the lines for good."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1)
        self.wipe()

    def _home(self) -> str:
        return f"\r\x1b[{self._drawn - 1}A" if self._drawn > 1 else "\r"

    def _tick(self) -> None:
        while not self._ended.wait(_DRAW_SECONDS * 2):
            self.draw()

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone; the work goes on
            return


def terminal_size() -> tuple[int, int]:
    """Returns the columns and the rows of the terminal at stderr."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        columns, rows = _USUAL_SIZE
    return max(columns or _USUAL_SIZE[0], _LEAST_WIDTH), rows or _USUAL_SIZE[1]


class Pace:
    """How fast bytes are done, over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin(0)

    def begin(self, total_bytes: int) -> None:
        self.total_bytes, self.done_bytes = total_bytes, 0
        self._began = self._clock()
        self._marks: deque[tuple[float, int]] = deque([(self._began, 0)])

    def add(self, size_bytes: int) -> None:
        now = self._clock()
        self.done_bytes += size_bytes
        if now - self._marks[-1][0] >= _DRAW_SECONDS:
            self._marks.append((now, self.done_bytes))
            while len(self._marks) > 2 and now - self._marks[1][0] > _PACE_SECONDS:  # noqa: PLR2004
                self._marks.popleft()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._began

    @property
    def share(self) -> float:
        """What is done, from 0 to 1."""
        return min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0

    @property
    def bytes_per_second(self) -> float:
        """Over the last seconds; 0 while nothing is known."""
        at, done = self._marks[0]
        seconds = self._clock() - at
        return (self.done_bytes - done) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until all is done, at this rate; None while nothing is known."""
        rate = self.bytes_per_second
        return max(self.total_bytes - self.done_bytes, 0) / rate if rate else None


def duration_text(seconds: float) -> str:
    """Returns a duration as people say it, in one or two units.

    >>> duration_text(4.2), duration_text(75), duration_text(3 * 3600 + 300), duration_text(2e5)
    ('4 s', '1 min 15 s', '3 h 5 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def bar_text(share: float, width: int) -> str:
    """Returns a bar of ASCII, which every terminal and font has.

    >>> bar_text(0.5, 8)
    '[###...]'
    """
    room = max(width - 2, 1)
    full = round(max(0.0, min(share, 1.0)) * room)
    return f"[{'#' * full}{'.' * (room - full)}]"
