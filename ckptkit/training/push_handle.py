"""How the push of a step ends, to be asked from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptkit.training.outcome import Outcome


@dataclass(frozen=True, slots=True)
class PushReport:
    """A step that is at the Hub.

    Attributes:
        step: The training step.
        path: Where it lies in the run, a `Path`; where that is at a URL, a `Place`.
        repo_id: The repository.
        commit: The hash of its commit.
        tag: The tag that points to it.
        url: Where people see it.
    """

    step: int
    path: Any
    repo_id: str
    commit: str
    tag: str
    url: str


class Push(Outcome[PushReport]):
    """The push of a step, under way or done."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the push of step {step}")
        self.step = step
