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
        metrics: The numbers that were given when it was saved; None for one that was not finite.
        protected: Whether something needs it, whatever the rules say.
        save_number: Counts the saves of a run, across its jobs: of two steps the one with the
            larger number was saved later; 0 where it is not known. Clocks are not asked, since
            the next job may run on another host.
    """

    step: int
    complete: bool = True
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    protected: bool = False
    save_number: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps stay; a step stays if any rule keeps it, and all stay if there is no rule.

    Attributes:
        keep_last: How many of the newest, without those that were abandoned.
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
        metric: object = self.keep_best
        if metric is not None and not (isinstance(metric, str) and metric):
            raise UsageError(
                f"is {metric!r}, where the name of a metric was expected",
                where="keep_best",
                hint='pass the name that `save` is given, such as "loss"',
            )
        if self.best_mode not in get_args(BestMode):
            raise UsageError(f"{self.best_mode!r} is not among min, max", where="best_mode")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


def abandoned(steps: Sequence[StepFacts]) -> frozenset[int]:
    """Returns the steps that training went back from: a lower step was saved after them.

    >>> saved = {200: 1, 300: 2, 210: 3}  # resumed from step 200
    >>> sorted(abandoned([StepFacts(step, save_number=n) for step, n in saved.items()]))
    [300]
    """
    gone = set()
    latest = 0
    for facts in sorted((f for f in steps if f.complete), key=lambda f: f.step):
        if facts.save_number < latest:
            gone.add(facts.step)
        latest = max(latest, facts.save_number)
    return frozenset(gone)


def steps_to_remove(steps: Sequence[StepFacts], retention: Retention) -> tuple[int, ...]:
    """Chooses the steps that no rule keeps.

    An incomplete step is never counted, and never removed: it may be under way, or all that is
    left to repair. The newest complete step, which is the one saved last, is never removed, nor
    is a protected one. An abandoned step, see `abandoned`, is never counted among the newest,
    and stays only if another rule keeps it. Steps that lack the metric of `keep_best`, or whose
    value is no finite number, are not among the best; of equal values the higher step is better.
    After training went back, the best of all steps stay, and the best without the abandoned ones.

    Args:
        steps: All steps of the run, in any order.
        retention: The rules.

    Returns:
        The numbers of the steps to remove, lowest first.

    >>> kept = Retention(keep_last=2, keep_every=1000)
    >>> steps_to_remove([StepFacts(step) for step in (1000, 1500, 2000, 2500, 3000)], kept)
    (1500,)
    """
    if retention.keeps_all:
        return ()
    complete = sorted((facts for facts in steps if facts.complete), key=lambda facts: facts.step)
    left = abandoned(complete)
    line = [facts.step for facts in complete if facts.step not in left]
    kept = set(line[-(retention.keep_last or 1) :])
    if retention.keep_every is not None:
        kept |= {facts.step for facts in complete if facts.step % retention.keep_every == 0}
    kept |= {facts.step for facts in _best(complete, retention)}
    kept |= {facts.step for facts in _best([f for f in complete if f.step not in left], retention)}
    return tuple(facts.step for facts in complete if facts.step not in kept and not facts.protected)


def missing_metric(steps: Sequence[StepFacts], retention: Retention) -> str:
    """Tells what is wrong where no complete step has the metric of `keep_best`; else empty."""
    name = retention.keep_best
    complete = [facts for facts in steps if facts.complete]
    if name is None or not complete or any(_is_rated(facts, name) for facts in complete):
        return ""
    known = sorted({metric for facts in complete for metric in facts.metrics})
    found = f"found are {', '.join(known)}" if known else "no step has any"
    return (
        f"keep_best={name!r} keeps nothing: no step was saved with a number as that metric;"
        f" {found}; pass metrics={{{name!r}: ...}} to save"
    )


def _best(complete: Sequence[StepFacts], retention: Retention) -> list[StepFacts]:
    name = retention.keep_best
    if name is None:
        return []
    sign = 1 if retention.best_mode == "min" else -1
    rated = [facts for facts in complete if _is_rated(facts, name)]
    rated.sort(key=lambda facts: (sign * (facts.metrics[name] or 0.0), -facts.step))
    return rated[: retention.best_count]


def _is_rated(facts: StepFacts, name: str) -> bool:
    value = facts.metrics.get(name)
    return value is not None and math.isfinite(value)
