"""Progress of work: a bar of tqdm in a terminal or a notebook, and lines now and then in a log.

Work only counts; a thread of its own draws. tqdm is imported once there is something to show.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckptkit.core.text import Closing, counted, make_printable, without_url_secrets
from ckptkit.engine.outcome import BytesWritten, Event, Listener, Started, Waiting, ignore
from ckptkit.options import ProgressOptions

_DRAW_SECONDS = 0.2
_QUIET_SECONDS, _LOG_SECONDS = 2.0, 10.0  # before the first line in a log, and between lines
_LEAVE_SECONDS = 1.0
_LEAST_WIDTH = 76  # of a bar that says how many files are complete
_LINE = "{desc}: {n_fmt}B of {total_fmt}B ({percentage:.0f}%), {rate_fmt}, {remaining} left"
_TIME = "{desc}, {elapsed}"


def is_terminal() -> bool:
    """Whether stderr is a terminal that can draw a line again."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Stage:
    """A part of a job: how many of its bytes are done. Its methods can be called by any thread.

    `total_bytes`: None if the work is not counted. `files`: paths and sizes, where they are known.
    """

    def __init__(
        self, text: str, total_bytes: int | None, files: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.text, self.total_bytes, self.done_bytes = make_printable(text), total_bytes, 0
        self._left = dict(files)  # bytes, by the path of a file that is not complete
        self._files, self._lock = len(files), threading.Lock()
        self.began = time.time()  # as tqdm counts

    def add(self, size_bytes: int, path: str = "") -> None:
        """Counts bytes, of a file where that is known."""
        with self._lock:
            self.done_bytes += size_bytes
            left = self._left.pop(path, 0) - size_bytes
            if left > 0:
                self._left[path] = left

    @property
    def remark(self) -> str:
        """How many files are complete; empty if that says nothing."""
        done = self._files - len(self._left)
        return f"{done:,} of {counted(self._files, 'file')}" if self._files > 1 else ""


class ProgressLog:
    """Decides when a log gets a line about a job, and makes it."""

    def __init__(self) -> None:
        self._due = time.time() + _QUIET_SECONDS
        self._stage: Stage | None = None
        self._told, self._told_bytes = 0.0, 0

    def line(self, stage: Stage) -> str | None:
        """Returns the line if one is due: what, how much of how much, rate and time left."""
        if stage is not self._stage:
            self._stage, self._told, self._told_bytes = stage, stage.began, 0
        now, done = time.time(), stage.done_bytes
        if now < self._due:
            return None
        from tqdm.std import tqdm

        rate = (done - self._told_bytes) / max(now - self._told, 1e-9)
        self._due, self._told, self._told_bytes = now + _LOG_SECONDS, now, done
        line: str = tqdm.format_meter(
            done,
            stage.total_bytes,
            now - stage.began,
            prefix=stage.text,
            unit="B",
            unit_scale=True,
            rate=rate or None,  # of all of the stage, where nothing was done since the last line
            bar_format=_LINE if stage.total_bytes else _TIME,
        )
        return line


class ProgressBar(Closing):
    """Shows the events of a job, until it is closed; they may come from several threads.

    `label`: what the job does. `tell`: takes the lines of a log, which are then written wherever
    stderr leads to.
    """

    def __init__(self, label: str, tell: Callable[[str], object] | None = None) -> None:
        self._label = label
        self._tell = tell
        self._lock = threading.Lock()
        self._stage = self._drawn = Stage(label, None)
        self._counted: Stage | None = None  # the last one whose bytes are counted
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        # A notebook shows a widget in the cell whose thread makes it.
        self._is_notebook = tell is None and "ipykernel.zmqshell" in sys.modules
        self._bar: Any = self._make_bar() if self._is_notebook else None

    def listen(self, event: Event) -> None:
        """Counts and shows an event."""
        if isinstance(event, BytesWritten):
            self._stage.add(event.size_bytes, event.path)
        elif isinstance(event, Started):
            self.begin(Stage(self._label, event.total_bytes, event.files))
        elif isinstance(event, Waiting):
            self.begin(Stage(f"{self._label}: waiting until {event.what}", None))

    def begin(self, stage: Stage) -> None:
        """Shows a stage instead of the one before."""
        with self._lock:
            self._stage = stage
            if stage.total_bytes is not None:
                self._counted = stage
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="ckptkit-progress", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Removes the bar; a notebook keeps it as it is at the end."""
        with self._lock:
            self._ended.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)
            if self._thread.is_alive():  # the terminal takes nothing
                return
        if self._bar is not None:
            with suppress(OSError, ValueError):
                if self._is_notebook:
                    self._stage = self._counted or self._stage
                    self._draw(self._bar)
                    self._bar.leave = self._counted is not None
                self._bar.close()

    def _run(self) -> None:
        draws = self._is_notebook or (self._tell is None and is_terminal())
        log, tell = ProgressLog(), self._tell or _write_line
        with suppress(OSError, ValueError):  # stderr is gone; the work goes on
            while not self._ended.wait(_DRAW_SECONDS):
                if draws:
                    if self._bar is None:  # tqdm's truth is that of its total
                        self._bar = self._make_bar()
                    self._draw(self._bar)
                elif line := log.line(self._stage):
                    tell(line)

    def _make_bar(self) -> Any:
        if self._is_notebook:
            from tqdm.auto import tqdm
        else:
            from tqdm.std import tqdm
        return tqdm(
            desc=self._label,
            unit="B",
            unit_scale=True,
            leave=self._is_notebook,
            mininterval=0,
            miniters=0,
        )

    def _draw(self, bar: Any) -> None:
        stage, remark = self._stage, self._stage.remark
        if not self._is_notebook:
            bar.ncols, bar.nrows = _screen_size()
            remark = remark if bar.ncols >= _LEAST_WIDTH else ""
        if stage is not self._drawn:
            self._drawn = stage
            bar.set_description_str(without_url_secrets(stage.text), refresh=False)
            bar.bar_format = _TIME if stage.total_bytes is None else None
            bar.total = stage.total_bytes
            bar.reset(stage.total_bytes)
            bar.start_t = bar.last_print_t = stage.began
        bar.set_postfix_str(remark, refresh=False)
        step = stage.done_bytes - bar.n
        if step > 0:  # the rate is since the last step
            bar.update(step)
        else:
            bar.refresh()


def _write_line(line: str) -> None:
    sys.stderr.write(without_url_secrets(f"{line}\n"))
    sys.stderr.flush()


def _screen_size() -> tuple[int, int]:
    """Returns columns, without the last, and rows; some terminals say 0, where tqdm is silent."""
    columns, rows = os.get_terminal_size(sys.stderr.fileno())
    return max((columns or 80) - 1, 1), rows or 24


@contextmanager
def report_to(label: str, options: ProgressOptions) -> Iterator[Listener]:
    """Returns where a public function reports its events, for as long as it works.

    `label`: what the function does.
    """
    own = options.get("listener") or ignore
    if not options.get("progress"):
        yield own
        return
    with ProgressBar(label) as bar:

        def listen(event: Event) -> None:
            bar.listen(event)
            own(event)

        yield listen
