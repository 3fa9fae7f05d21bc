"""Which steps of a run stay, and which may go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckptkit.core.errors import UsageError

BestMode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a saved step.

    Attributes:
        step: Its number.
        complete: Whether it could be resumed from.
        metrics: The numbers that were given when it was saved.
        protected: Whether something needs it, whatever the rules say.
    """

    step: int
    complete: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    protected: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps stay; a step stays if any rule keeps it, and all stay if there is no rule.

    Attributes:
        keep_last: How many of the newest.
        keep_every: Those divisible by this.
        keep_best: The metric by which the best ones stay.
        best_mode: Whether the smallest or the largest value is best.
        best_count: How many of the best stay.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: str | None = None
    best_mode: BestMode = "min"
    best_count: int = 1

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "best_count"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(
                    f"is {value!r}, where a whole number of at least 1 was expected",
                    where=name,
                    hint="leave it out to keep all" if name == "keep_last" else "",
                )
        if self.best_mode not in get_args(BestMode):
            raise UsageError(f"{self.best_mode!r} is not among min, max", where="best_mode")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


def steps_to_remove(steps: Sequence[StepFacts], retention: Retention) -> tuple[int, ...]:
    """Chooses the steps that no rule keeps.

    An incomplete step is never counted, and never removed: it may be under way, or all that is
    left to repair. The newest complete step is never removed, nor is a protected one. Steps that
    lack the metric of `keep_best`, or whose value is no number, are not among the best; of equal
    values the newer step is better.

    Args:
        steps: All steps of the run, in any order.
        retention: The rules.

    Returns:
        The numbers of the steps to remove, oldest first.

    >>> kept = Retention(keep_last=2, keep_every=1000)
    >>> steps_to_remove([StepFacts(step) for step in (1000, 1500, 2000, 2500, 3000)], kept)
    (1500,)
    """
    if retention.keeps_all:
        return ()
    complete = sorted((facts for facts in steps if facts.complete), key=lambda facts: facts.step)
    kept = {facts.step for facts in complete[-(retention.keep_last or 1) :]}
    if retention.keep_every is not None:
        kept |= {facts.step for facts in complete if facts.step % retention.keep_every == 0}
    kept |= {facts.step for facts in _best(complete, retention)}
    return tuple(facts.step for facts in complete if facts.step not in kept and not facts.protected)


def _best(complete: Sequence[StepFacts], retention: Retention) -> list[StepFacts]:
    name = retention.keep_best
    if name is None:
        return []
    sign = 1 if retention.best_mode == "min" else -1
    rated = [f for f in complete if name in f.metrics and not math.isnan(f.metrics[name])]
    rated.sort(key=lambda facts: (sign * facts.metrics[name], -facts.step))
    return rated[: retention.best_count]
