"""What `ckptkit watch` shows: a line for each event, and what it does now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.core.text import counted, size_text
from ckptkit.engine.outcome import BytesWritten, Event, Started
from ckptkit.hub.watch.events import EventName, WatchEvent, WatchMetrics
from ckptkit_cli._output import Output, escaped, first_of, stamped
from ckptkit_cli.views.live_lines import LiveLines, Pace, duration_text

_LISTED_STEPS = 20
_BAD = {"failed": "red", "retrying": "yellow", "warning": "yellow", "passed": "yellow"}
_DOING = {
    "idle": "looking for new steps",
    "building": "building",
    "pushing": "pushing",
    "retrying": "waiting for the next try",
}


class WatchPage:
    """Writes the events of a watch, which come from several threads.

    Events go to stdout, as text or as JSON lines. What the watch does now, what is done and what
    waits is drawn on stderr, if that is a terminal.
    """

    def __init__(self, output: Output, metrics: WatchMetrics, *, as_json: bool) -> None:
        self._output = output
        self._metrics = metrics
        self._as_json = as_json
        self._lock = threading.RLock()
        self._where = "starting"
        self._pace = Pace()
        self._retry_at: float | None = None
        self._ended = False
        shows_status = output.shows_progress and not as_json
        self._lines = LiveLines(self._make_lines) if shows_status else None

    def listen(self, event: WatchEvent) -> None:
        """Counts and writes an event."""
        self._metrics.listen(event)
        with self._lock:
            if event.name == "started":
                self._where = f"{event.facts['run']} to {event.facts['repo_id']}"
            if event.name in {"building", "pushing"}:
                self._pace.begin(0)
            seconds = event.facts.get("seconds") if event.name == "retrying" else None
            self._retry_at = None if seconds is None else time.monotonic() + seconds
            if self._lines is not None:
                self._lines.wipe()
            self._write(event)
            if self._lines is not None:
                if event.name == "stopped":
                    self._lines.close()
                else:
                    self._lines.draw(now=True)

    def progress(self, event: Event) -> None:
        """Counts bytes that were written or uploaded."""
        with self._lock:
            if isinstance(event, Started):
                self._pace.begin(event.total_bytes)
            elif isinstance(event, BytesWritten):
                self._pace.add(event.size_bytes)
        if self._lines is not None:
            self._lines.draw()

    def _write(self, event: WatchEvent) -> None:
        if self._as_json:
            self._output.record(stamped(event.name, event.to_json()))
            return
        at = self._output.styled(time.strftime("%H:%M:%SZ", time.gmtime()), "dim")
        about = "" if event.step is None else f"step {event.step}: "
        text = escaped(f"{about}{_TEXTS[event.name](event.facts)}")
        style = _BAD.get(event.name)
        shown = self._output.styled(text, style) if style else text  # type: ignore[arg-type]
        if event.name == "waiting" and "message" in event.facts:
            self._output.warn(text)
            return
        self._output.lines([f"{at} {shown}"])

    def _make_lines(self, _width: int) -> list[str]:
        """Returns the lines; without the lock, which the thread that draws may have."""
        totals, pace = self._metrics.totals, self._pace
        doing = _DOING.get(totals.phase, totals.phase)
        if totals.step is not None:
            doing += f" step {totals.step}"
        if pace.total_bytes and totals.phase in {"building", "pushing"}:
            doing += f", {pace.share:.0%} of {size_text(pace.total_bytes)}"
            doing += f", {size_text(pace.bytes_per_second)}/s"
            left = pace.seconds_left
            doing += "" if left is None else f", {duration_text(left)} left"
        done = f"{totals.pushed:,} pushed"
        if totals.last_step is not None and totals.last_unix_seconds is not None:
            ago = duration_text(max(time.time() - totals.last_unix_seconds, 0))
            done += f", the last was step {totals.last_step}, {ago} ago"
        failed = sum(totals.failures.values())
        done += f"; {failed:,} failed" if failed else ""
        waiting = max(totals.waiting - (totals.step is not None), 0)
        waits = counted(waiting, "step") if waiting else "nothing"
        if waiting and totals.newest_step is not None:
            waits += f", the newest is {totals.newest_step}"
        retry_at = self._retry_at
        if retry_at is not None:
            waits += f"; next try in {duration_text(max(retry_at - time.monotonic(), 0))}"
        rows = (("now", doing), ("done", done), ("waiting", waits))
        return [escaped(self._where), *(f"  {label:<8}{escaped(text)}" for label, text in rows)]


def _pushed(facts: Mapping[str, Any]) -> str:
    if facts["resumed"]:
        return f"was pushed before, as {facts['tag']} of {facts['repo_id']}: {facts['url']}"
    size = size_text(facts["uploaded_bytes"])
    return f"pushed as {facts['tag']}, {size} in {facts['seconds']:.1f} s: {facts['url']}"


def _stopped(facts: Mapping[str, Any]) -> str:
    if "error" in facts:
        return "stopped by an error"  # the command reports it, as any other does
    if "signal" in facts:
        return f"stopped by {facts['signal']}"
    if "failed" in facts:
        steps = facts["failed"]
        listed = ", ".join(first_of([str(step) for step in steps], _LISTED_STEPS))
        return f"nothing else to push; {counted(len(steps), 'step')} could not be pushed: {listed}"
    return "nothing left to push"


def _error(facts: Mapping[str, Any]) -> str:
    error = facts["error"]
    where = f"{error['where']}: " if error["where"] else ""
    hint = f" ({error['hint']})" if error["hint"] else ""
    return f"{where}{error['message']}{hint}"


_TEXTS: dict[EventName, Callable[[Mapping[str, Any]], str]] = {
    "serving": lambda facts: f"serving metrics at {facts['url']}",
    "started": lambda facts: f"watching {facts['run']} for {facts['repo_id']}",
    "waiting": lambda facts: f"waiting: {_error(facts) if 'error' in facts else facts['message']}",
    "seen": lambda _: "waits to be pushed",
    "building": lambda _: "building",
    "pushing": lambda facts: f"pushing to {facts['repo_id']}",
    "pushed": _pushed,
    "passed": lambda facts: f"is not pushed: {facts['reason']}",
    "failed": lambda facts: f"cannot be pushed: {_error(facts)}",
    "retrying": lambda facts: f"{_error(facts)}; retrying in {facts['seconds']:g} s",
    "pruned": lambda facts: f"removed from the run: {', '.join(map(str, facts['steps']))}",
    "note": lambda facts: f"note: {facts['message']}",
    "warning": lambda facts: f"warning: {facts['message']}",
    "stopped": _stopped,
}
