"""In which order the steps of a run were saved, whoever saved them.

ckptkit counts the saves of a run. Of steps that stock frameworks saved, times tell the order, and a
copy of a run may have changed them. So a lower step that is newer than a higher one proves that
training went back only where the Trainer's log in it is not the beginning of the other one's.

Which steps of a run stay, and which may go.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.storage.base import Source, is_there

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


TRAINER_STATE = "trainer_state.json"
_MOST_BYTES = 64 << 20
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """A complete step of a run.

    Attributes:
        folder: Relative to the source.
        step: Its number.
        save_number: What its manifest says; None of a step that others saved.
        modified: When its newest file was written, in seconds since 1970; 0 where unknown.
    """

    folder: str
    step: int
    save_number: int | None
    modified: float


def series_of(name: str) -> str:
    """Returns what the name of a step's folder has beside numbers.

    >>> series_of("checkpoint-500"), series_of("epoch=3-step=500")
    ('checkpoint-', 'epoch=-step=')
    """
    return _NUMBER.sub("", name)


def save_orders(source: Source, steps: Sequence[SavedFolder]) -> dict[str, int]:
    """Returns a number for each folder, the larger the later it was saved; 0 where unknown.

    Args:
        source: What the steps lie in.
        steps: Complete steps of one series of names.
    """
    if any(step.save_number is not None for step in steps):
        return {step.folder: step.save_number or 0 for step in steps}
    ordered = sorted(steps, key=lambda step: step.step)
    pairs = [
        (lower, higher)
        for position, higher in enumerate(ordered)
        for lower in ordered[:position]
        if lower.modified > higher.modified
    ]
    is_known = all(step.modified > 0 for step in steps) and _are_apart(source, pairs)
    return {step.folder: int(step.modified * 1000) if is_known else 0 for step in steps}


def _are_apart(source: Source, pairs: Sequence[tuple[SavedFolder, SavedFolder]]) -> bool:
    """Tells whether the Trainer's log in no step is the beginning of that in the other one."""
    folders = {step.folder for pair in pairs for step in pair}
    logs = {folder: _log(source, folder) for folder in folders}
    return all(
        logs[higher.folder][: len(logs[lower.folder])] != logs[lower.folder]
        for lower, higher in pairs
    )


def left_behind(source: Source, steps: Sequence[SavedFolder]) -> frozenset[str]:
    """Returns the folders of the steps that training went back from, see `abandoned`."""
    orders = save_orders(source, steps)
    facts = [StepFacts(step.step, save_number=orders[step.folder]) for step in steps]
    gone = abandoned(facts)
    return frozenset(step.folder for step in steps if step.step in gone)


def trainer_state(source: Source, folder: str) -> Mapping[str, Any]:
    """Returns the Trainer's state in a step; empty where there is none that can be read."""
    path = f"{folder}/{TRAINER_STATE}"
    if not is_there(source, path):
        return {}
    try:
        size_bytes = source.stat(path).size_bytes
        document = json.loads(source.read(path, 0, size_bytes)) if size_bytes <= _MOST_BYTES else {}
    except (CkptkitError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _log(source: Source, folder: str) -> list[Any]:
    found = trainer_state(source, folder).get("log_history")
    return found if isinstance(found, list) else []
