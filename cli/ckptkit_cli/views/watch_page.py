"""What `ckptkit watch` shows: a line for each event, and what it does now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptkit.core.text import counted, size_text
from ckptkit.engine.outcome import Event
from ckptkit.engine.progress import ProgressBar, Stage, is_terminal
from ckptkit.hub.watch.watch import EventName, WatchEvent
from ckptkit_cli._output import Output, escaped, first_of, stamped

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

    Events go to stdout, as text or as JSON lines. What the watch does now is shown on stderr, or is
    an event too.
    """

    def __init__(self, output: Output, *, as_json: bool) -> None:
        self._output = output
        self._as_json = as_json
        self._shows = output.reports_progress or as_json
        self._lock = threading.RLock()
        self._bar: ProgressBar | None = None
        self._phase = "idle"
        self._step: int | None = None  # the one in progress
        self._waiting = 0  # steps that wait for their push, with the one in progress
        self._pushed = self._failed = 0
        self._last_step: int | None = None  # that was pushed

    def listen(self, event: WatchEvent) -> None:
        """Counts and writes an event, and shows what follows it."""
        with self._lock:
            self._count(event)
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.close()
            self._write(event)
            if self._shows and event.name != "stopped":
                self._bar = self._open_bar()

    def progress(self, event: Event) -> None:
        """Shows bytes that were written or uploaded."""
        bar = self._bar
        if bar is not None:
            bar.listen(event)

    def _count(self, event: WatchEvent) -> None:
        self._waiting = event.facts.get("waiting", self._waiting)
        if event.name in {"building", "pushing"}:
            self._phase, self._step = event.name, event.step
        elif event.name == "retrying":
            self._phase = event.name
        elif event.name in {"pushed", "failed", "passed", "stopped"}:
            self._phase, self._step = "idle", None
            self._waiting = max(self._waiting - (event.name != "stopped"), 0)
        if event.name == "pushed":
            self._pushed, self._last_step = self._pushed + 1, event.step
        self._failed += event.name == "failed"

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

    def _record_progress(self, step: int | None, line: str) -> None:
        self._write(WatchEvent("progress", step, {"message": line}))

    def _open_bar(self) -> ProgressBar | None:
        text = _DOING[self._phase]
        waiting = max(self._waiting - (self._step is not None), 0)
        waits = f"{counted(waiting, 'step')} waiting" if waiting else ""
        if self._step is not None:
            text += f" step {self._step}" + (f", {waits}" if waits else "")
        elif self._as_json or not is_terminal():  # a log says nothing about a watch that only looks
            return None
        else:
            last = "" if self._last_step is None else f", the last was step {self._last_step}"
            failed = f"{self._failed:,} failed" if self._failed else ""
            parts = [text, f"{self._pushed:,} pushed{last}", failed, waits]
            text = "; ".join(filter(None, parts))
        tell = partial(self._record_progress, self._step) if self._as_json else None
        bar = ProgressBar(text, tell)
        bar.begin(Stage(text, None))
        return bar


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
    "started": lambda facts: f"watching {facts['run']} for {facts['repo_id']}",
    "waiting": lambda facts: f"waiting: {_error(facts) if 'error' in facts else facts['message']}",
    "seen": lambda _: "waits to be pushed",
    "building": lambda _: "building",
    "pushing": lambda facts: f"pushing to {facts['repo_id']}",
    "progress": lambda facts: str(facts["message"]),
    "pushed": _pushed,
    "passed": lambda facts: f"is not pushed: {facts['reason']}",
    "failed": lambda facts: f"cannot be pushed: {_error(facts)}",
    "retrying": lambda facts: f"{_error(facts)}; retrying in {facts['seconds']:g} s",
    "pruned": lambda facts: f"removed from the run: {', '.join(map(str, facts['steps']))}",
    "note": lambda facts: f"note: {facts['message']}",
    "warning": lambda facts: f"warning: {facts['message']}",
    "stopped": _stopped,
}
