"""What `ckptkit watch` shows: a line for each event, and one that says how things stand."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.core.texts import size_text
from ckptkit.execution.events import BytesWritten, Event, Started
from ckptkit.hub.watch_events import EventName, WatchEvent
from ckptkit.hub.watch_metrics import WatchMetrics
from ckptkit_cli._output import Output, stamped
from ckptkit_cli._text import counted, escaped, first_of, shortened

_CLEAR = "\r\x1b[K"
_REDRAW_SECONDS = 0.1
_LISTED = 20
_BAD = {"failed": "red", "retrying": "yellow", "warning": "yellow", "passed": "yellow"}


class WatchPage:
    """Listens to a watch, from several threads, and writes what it hears.

    Events go to stdout, as text or as JSON lines. The line that says how things stand is drawn on
    stderr, where that is a terminal.
    """

    def __init__(self, output: Output, metrics: WatchMetrics, *, as_json: bool) -> None:
        """Chooses what is shown.

        Args:
            output: Knows whether somebody watches, and colours.
            metrics: What the events add up to.
            as_json: Whether events are written as JSON.
        """
        self._output = output
        self._metrics = metrics
        self._as_json = as_json
        self._lock = threading.RLock()
        self._shows_status = output.shows_progress and not as_json
        self._where = ""
        self._done = self._total = 0
        self._drawn = 0.0

    def listen(self, event: WatchEvent) -> None:
        """Takes notice of an event."""
        self._metrics.listen(event)
        with self._lock:
            if event.name == "started":
                self._where = f"{event.facts['run']} to {event.facts['repo_id']}"
            if event.name in {"building", "pushing"}:
                self._done = self._total = 0
            self._wipe()
            self._write(event)
            if event.name == "stopped":
                self._shows_status = False
            self._draw()

    def progress(self, event: Event) -> None:
        """Takes notice of bytes that were written or uploaded."""
        with self._lock:
            if isinstance(event, Started):
                self._done, self._total = 0, event.total_bytes
            elif isinstance(event, BytesWritten):
                self._done += event.size_bytes
            if time.monotonic() - self._drawn >= _REDRAW_SECONDS:
                self._draw()

    def close(self) -> None:
        """Takes the line away that says how things stand."""
        with self._lock:
            self._wipe()
            self._shows_status = False

    def _write(self, event: WatchEvent) -> None:
        if self._as_json:
            self._output.record(stamped(event.name, event.to_json()))
            return
        at = self._output.styled(time.strftime("%H:%M:%SZ", time.gmtime()), "dim")
        about = "" if event.step is None else f"step {event.step}: "
        text = escaped(f"{about}{_told(event.name, event.facts)}")
        style = _BAD.get(event.name)
        shown = self._output.styled(text, style) if style else text  # type: ignore[arg-type]
        if event.name == "waiting" and "message" in event.facts:
            self._output.warn(text)
            return
        self._output.lines([f"{at} {shown}"])

    def _draw(self) -> None:
        if not self._shows_status:
            return
        self._drawn = time.monotonic()
        width = (self._output.width or 80) - 1
        sys.stderr.write(f"{_CLEAR}{shortened(escaped(self._status()), width)}")
        sys.stderr.flush()

    def _wipe(self) -> None:
        if self._shows_status:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()

    def _status(self) -> str:
        tally = self._metrics.tally
        doing = tally.phase if tally.step is None else f"{tally.phase} step {tally.step}"
        if self._total and tally.phase in {"building", "pushing"}:
            doing += f" {min(self._done / self._total, 1):.0%} of {size_text(self._total)}"
        waiting = f", {counted(tally.waiting, 'step')} waiting" if tally.waiting else ""
        failed = sum(tally.failures.values())
        bad = f", {failed} failed" if failed else ""
        return f"{self._where}: {tally.pushed} pushed{bad}{waiting}, {doing}"


def _told(name: EventName, facts: Mapping[str, Any]) -> str:
    """Returns an event in words."""
    return _TEXTS[name](facts)


def _pushed(facts: Mapping[str, Any]) -> str:
    if facts["resumed"]:
        return f"was pushed before, as {facts['tag']} of {facts['repo_id']}: {facts['url']}"
    size = size_text(facts["uploaded_bytes"])
    return f"pushed as {facts['tag']}, {size} in {facts['seconds']:.1f} s: {facts['url']}"


def _stopped(facts: Mapping[str, Any]) -> str:
    if "error" in facts:
        return "stopped by an error"  # which the command tells, as any other does
    if "signal" in facts:
        return f"stopped by {facts['signal']}"
    if "failed" in facts:
        return f"nothing else is left to be done; {_failed(facts['failed'])}"
    return "nothing is left to be done"


def _failed(steps: Sequence[int]) -> str:
    listed = ", ".join(first_of([str(step) for step in steps], _LISTED))
    return f"{counted(len(steps), 'step')} could not be pushed: {listed}"


def _error(facts: Mapping[str, Any]) -> str:
    error = facts["error"]
    where = f"{error['where']}: " if error["where"] else ""
    hint = f" ({error['hint']})" if error["hint"] else ""
    return f"{where}{error['message']}{hint}"


_TEXTS: dict[EventName, Callable[[Mapping[str, Any]], str]] = {
    "serving": lambda facts: f"metrics are at {facts['url']}",
    "started": lambda facts: f"watching {facts['run']} for {facts['repo_id']}",
    "waiting": lambda facts: f"waiting: {_error(facts) if 'error' in facts else facts['message']}",
    "seen": lambda _: "is to be pushed",
    "building": lambda _: "building what is pushed",
    "pushing": lambda facts: f"pushing to {facts['repo_id']}",
    "pushed": _pushed,
    "passed": lambda facts: f"is not pushed: {facts['reason']}",
    "failed": lambda facts: f"cannot be pushed: {_error(facts)}",
    "retrying": lambda facts: f"{_error(facts)}; trying again in {facts['seconds']:g} s",
    "pruned": lambda facts: f"removed from the run: {', '.join(map(str, facts['steps']))}",
    "warning": lambda facts: f"warning: {facts['message']}",
    "stopped": _stopped,
}
