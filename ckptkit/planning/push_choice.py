"""Which steps of a run are to be pushed, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckptkit.core.errors import UsageError
from ckptkit.planning.retention import BestMode, StepFacts, abandoned

PushKind = Literal["auto", "model", "adapter"]
"""What is made of a step: `auto` takes the adapter where PEFT trained one, else the model."""


@dataclass(frozen=True, slots=True)
class PushChoice:
    """Which steps are pushed; without a rule, all of them.

    Attributes:
        every: Only steps that are divisible by this.
        best: Only a step that is better by this metric than all that are known.
        best_mode: Whether the smallest or the largest value is best.
        last_only: Of several that wait, only the one that was saved last.
    """

    every: int | None = None
    best: str | None = None
    best_mode: BestMode = "min"
    last_only: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise UsageError(
                f"is {self.every}, where a whole number of at least 1 was expected",
                where="--every",
                hint="leave it out to push every step",
            )
        if self.best_mode not in get_args(BestMode):
            raise UsageError(f"{self.best_mode!r} is not among min, max", where="--best-mode")


@dataclass(frozen=True, slots=True)
class Earlier:
    """A step that was pushed before, and may be gone since.

    Attributes:
        digest: Of its manifest.
        save_number: Of its save; 0 where it is not known.
        metrics: That it was saved with.
    """

    digest: str
    save_number: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def waiting_steps(
    steps: Sequence[StepFacts],
    digests: Mapping[int, str],
    earlier: Mapping[int, Earlier],
    choice: PushChoice,
) -> tuple[int, ...]:
    """Chooses the steps that are to be pushed, in the order in which they were saved.

    A step that was saved before one that is pushed already is passed over: the branch's head
    would go back to it. So is one that training went back from, see `abandoned`.

    Args:
        steps: What lies in the run; only complete steps are chosen.
        digests: Of the complete steps' manifests.
        earlier: What was pushed before, by step.
        choice: The rules.

    Returns:
        The numbers of the steps.

    >>> steps = [StepFacts(step) for step in (100, 200, 300)]
    >>> digests = {100: "a", 200: "b", 300: "c"}
    >>> waiting_steps(steps, digests, {100: Earlier("a")}, PushChoice())
    (200, 300)
    """
    complete = [facts for facts in steps if facts.complete and facts.step in digests]
    left = abandoned(complete)
    latest = max(((e.save_number, step) for step, e in earlier.items()), default=(-1, -1))
    highest = max(earlier, default=-1)  # for a step of which only its number tells the order
    waiting = [
        facts
        for facts in complete
        if facts.step not in left
        and not _is_pushed(facts.step, digests, earlier)
        and (_saved(facts) >= latest if facts.save_number else facts.step >= highest)
        and (choice.every is None or facts.step % choice.every == 0)
    ]
    if choice.best is not None:
        live = [facts for facts in complete if facts.step not in left]
        waiting = _best_of(waiting, live, earlier, choice)
    waiting.sort(key=_saved)
    return tuple(facts.step for facts in (waiting[-1:] if choice.last_only else waiting))


def _saved(facts: StepFacts) -> tuple[int, int]:
    return facts.save_number, facts.step


def _is_pushed(step: int, digests: Mapping[int, str], earlier: Mapping[int, Earlier]) -> bool:
    return step in earlier and earlier[step].digest == digests[step]


def _best_of(
    waiting: Sequence[StepFacts],
    complete: Sequence[StepFacts],
    earlier: Mapping[int, Earlier],
    choice: PushChoice,
) -> list[StepFacts]:
    """Returns the one step that waits and is the best known, if it is."""
    sign = 1 if choice.best_mode == "min" else -1

    def value(metrics: Mapping[str, float | None]) -> float:
        found = metrics.get(choice.best or "")
        return sign * found if found is not None and math.isfinite(found) else math.inf

    pushed = [value(one.metrics) for one in earlier.values()]
    best = min([*map(value, (facts.metrics for facts in complete)), *pushed], default=math.inf)
    equal = [facts for facts in waiting if value(facts.metrics) == best]
    if best == math.inf or best in pushed or not equal:
        return []
    return [max(equal, key=_saved)]
