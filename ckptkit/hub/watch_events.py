"""What a watch tells whoever listens, and what that adds up to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EventName = Literal[
    "serving",  # metrics can be had
    "started",  # it has the lock, and will look at the run
    "waiting",  # another watch has the lock
    "seen",  # a step was committed that is to be pushed
    "building",  # its model or adapter is being made
    "pushing",  # it is made and verified, and goes to the Hub
    "pushed",  # commit and tag are there
    "passed",  # a step will not be pushed, and need not be
    "failed",  # a step cannot be pushed as it is; the watch goes on
    "retrying",  # the network, the Hub or a disk failed; it is tried again
    "pruned",  # steps were removed from the run
    "warning",
    "stopped",  # the last event
]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that happened.

    Attributes:
        name: What.
        step: The step concerned, if one is.
        facts: What else is known, as JSON values.
    """

    name: EventName
    step: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the event as plain values."""
        step = {} if self.step is None else {"step": self.step}
        return {"event": self.name} | step | dict(self.facts)


WatchListener = Callable[[WatchEvent], None]


@dataclass(slots=True)
class Tally:
    """What the events of a watch add up to.

    Attributes:
        pushed: Steps that were pushed since it started.
        failures: Steps that could not be, by the code of the error.
        retries: Tries that failed and were repeated, by the code of the error.
        pruned: Steps that were removed from the run.
        uploaded_bytes: Bytes that were uploaded.
        push_seconds: Time that pushed steps took, from the first look at them.
        newest_step: The newest complete step of the run; None where none was seen.
        last_step: The step that was pushed last.
        last_unix_seconds: When that was.
        waiting: Steps that wait for their push, the one at work included.
        phase: What it does at this moment.
        step: The step that it does it to.
    """

    pushed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    pruned: int = 0
    uploaded_bytes: int = 0
    push_seconds: float = 0.0
    newest_step: int | None = None
    last_step: int | None = None
    last_unix_seconds: float | None = None
    waiting: int = 0
    phase: str = "idle"
    step: int | None = None

    def take(self, event: WatchEvent, now: float) -> None:
        """Adds an event.

        Args:
            event: What happened.
            now: The time, in seconds since the epoch.
        """
        facts = event.facts
        self.waiting = facts.get("waiting", self.waiting)
        self.newest_step = facts.get("newest", self.newest_step)
        match event.name:
            case "building" | "pushing":
                self.phase, self.step = event.name, event.step
            case "pushed":
                self._take_push(event, now)
            case "failed":
                _count(self.failures, facts)
            case "retrying":
                _count(self.retries, facts)
                self.phase = event.name
            case "pruned":
                self.pruned += len(facts["steps"])
            case _:
                pass
        if event.name in {"pushed", "failed", "passed"}:
            self.waiting = max(self.waiting - 1, 0)
        if event.name in {"pushed", "failed", "passed", "stopped"}:
            self.phase, self.step = "idle", None

    def _take_push(self, event: WatchEvent, now: float) -> None:
        self.pushed += 1
        self.uploaded_bytes += event.facts.get("uploaded_bytes", 0)
        self.push_seconds += event.facts.get("seconds", 0.0)
        self.last_step, self.last_unix_seconds = event.step, now


def _count(table: dict[str, int], facts: Mapping[str, Any]) -> None:
    code = str(facts["error"]["code"])
    table[code] = table.get(code, 0) + 1
