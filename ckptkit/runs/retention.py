"""The order in which the steps of a run were saved, and which of them a retention removes.

ckptkit counts the saves of a run. For steps that other frameworks saved, the order follows from
times, which a copy of the run may have changed. So a lower step that is newer than a higher one
shows that training went back only if the Trainer's log in it is not a prefix of the other one's.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import asdict, replace

from ckptkit.core.errors import CkptkitError, RefusedError, UsageError
from ckptkit.options import BestMode as BestMode  # noqa: PLC0414  part of a retention
from ckptkit.options import parse_duration
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.storage.base import Source, is_there

NEWEST, BEST, RATING = "newest", "keep_best", "rating"
"""Why a step stays, beside the rules that are numbers.

`RATING` is for a step by which an abandoned one is known to be abandoned.
"""
SPARED = frozenset({NEWEST, BEST})
"""The rules whose steps stay though all together are over `--max-total-size`.

The texts of that option name them: `ckptkit.prune`, `ckptkit prune` and docs/reference/runs.md.
"""
_Kept = Callable[[Any, Sequence[RunStep], Sequence[RunStep]], Iterable[RunStep]]


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(
            f"is {value!r}, where a whole number of at least 1 was expected",
            where=name,
            hint=_LEFT_OUT,
        )


def _check_time(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(
            f"is {value!r}, where a time such as '7d' was expected", where=name, hint=_LEFT_OUT
        )
    parse_duration(value, option=name)


def _saved_within(time_text: str, complete: Sequence[RunStep]) -> Iterator[RunStep]:
    """Yields the steps that were saved in a time until now, or whose time is unknown."""
    since = time.time() - parse_duration(time_text, option="keep_for")
    return (step for step in complete if not step.modified or step.modified >= since)


_LEFT_OUT = "leave it out to keep no step by it; without any rule, all stay"
_RULES: Mapping[str, tuple[str, Callable[[str, object], None], _Kept]] = {
    "keep_last": (
        "among the last {:,}",
        _check_count,
        lambda count, _, current: current[-count:],
    ),
    "keep_every": (
        "every {:,} steps",
        _check_count,
        lambda count, complete, _: (step for step in complete if step.step % count == 0),
    ),
    "keep_for": (
        "saved in the last {}",
        _check_time,
        lambda time_text, complete, _: _saved_within(time_text, complete),
    ),
}
"""By each rule that has one value: why a step stays, which values it can have, which steps stay.

These are found among the complete ones, and those of them that are not abandoned.
"""


class Retention(Struct, frozen=True, kw_only=True):
    """Which steps stay, see `RetentionOptions`; each is an option wherever a run is pruned."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_for: str | None = None
    keep_best: str | None = None
    best_mode: BestMode = "min"

    def __post_init__(self) -> None:
        for name, (_, check, _) in _RULES.items():
            value = getattr(self, name)
            if value is not None:
                check(name, value)
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
        rules = (name for name in RETENTION_OPTIONS if name.startswith("keep_"))
        return all(getattr(self, name) is None for name in rules)

    def as_arguments(self) -> list[str]:
        """Returns the arguments of a command that prunes by these rules.

        >>> Retention(keep_last=3, keep_best="loss").as_arguments()
        ['--keep-last', '3', '--keep-best', 'loss']
        """
        usual = asdict(Retention())
        given = {name: value for name, value in asdict(self).items() if value != usual[name]}
        pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given.items())
        return [word for pair in pairs for word in pair]

    def explain(self, rule: str) -> str:
        """Says why a step stays that a rule keeps."""
        if rule in _RULES:
            return _RULES[rule][0].format(getattr(self, rule))
        best = f"the best {self.keep_best}"
        return {NEWEST: "the newest complete step", BEST: best, RATING: "nothing removes it"}[rule]


RETENTION_OPTIONS = Retention.__struct_fields__


def rules_that_keep(steps: Iterable[RunStep], retention: Retention) -> dict[int, list[str]]:
    """Returns for each complete step which rules keep it: the one place that knows the rules.

    An incomplete step is never counted. The newest complete step, which is the one saved last,
    always stays. An abandoned step, see `abandoned`, is never counted among the newest, and stays
    only if another rule keeps it. Steps that lack the metric of `keep_best`, or whose value is no
    finite number, are not among the best; of equal values the higher step is better. After training
    went back, the best of all steps stay, and the best without the abandoned ones. With
    `keep_best`, one step stays by which each of the others that is abandoned is known to be.
    """
    complete = sorted((step for step in steps if step.complete), key=lambda step: step.step)
    left = abandoned(complete)
    current = [step for step in complete if step.step not in left]
    kept: dict[int, list[str]] = {step.step: [] for step in complete}

    def keep(rule: str, chosen: Iterable[RunStep]) -> None:
        for step in chosen:
            kept[step.step].append(rule)

    keep(NEWEST, current[-1:])
    for name, (_, _, choose) in _RULES.items():
        value = getattr(retention, name)
        if value is not None:
            keep(name, choose(value, complete, current))
    keep(BEST, (*_best(complete, retention), *_best(current, retention)))
    if retention.keep_best is not None:
        # Without it, an abandoned step would be rated among the others the next time, and the best
        # of those would be removed.
        for step in [step for step in complete if step.step in left]:
            if kept[step.step] or step.protected:
                rule = BEST if BEST in kept[step.step] else RATING
                keep(rule, [one for one in current if one.step < step.step][-1:])
    return kept


def steps_to_remove(steps: Sequence[RunStep], retention: Retention) -> tuple[int, ...]:
    """Returns the complete steps that no rule keeps and that are not protected, lowest first.

    An incomplete step is never removed: it may be under way, or all that is left to repair.

    >>> kept = Retention(keep_last=2, keep_every=1000)
    >>> steps_to_remove([RunStep(step) for step in (1000, 1500, 2000, 2500, 3000)], kept)
    (1500,)
    """
    if retention.keeps_all:
        return ()
    protected = {step.step for step in steps if step.protected}
    kept = rules_that_keep(steps, retention)
    return tuple(step for step, rules in kept.items() if not rules and step not in protected)


def missing_metric(steps: Sequence[RunStep], retention: Retention) -> str:
    """Returns a message where no complete step has the metric of `keep_best`; else empty."""
    name = retention.keep_best
    complete = [step for step in steps if step.complete]
    if name is None or not complete or any(_is_rated(step, name) for step in complete):
        return ""
    metrics = sorted({metric for step in complete for metric in step.metrics})
    available = f"found are {', '.join(metrics)}" if metrics else "no step has any"
    return (
        f"keep_best={name!r} keeps nothing: no step was saved with a number as that metric;"
        f" {available}; pass metrics={{{name!r}: ...}} to save"
    )


def unknown_metric(tables: Iterable[Mapping[str, float | None]], *, where: str) -> RefusedError:
    """Returns the error for a metric of a rule that no complete step has."""
    names = sorted({name for metrics in tables for name in metrics})
    return RefusedError(
        "no complete step was saved with a number as that metric;"
        f" {'found are ' + ', '.join(names) if names else 'no step has any'}",
        where=where,
        hint="pass one that `ckptkit ls` shows",
    )


def _best(complete: Sequence[RunStep], retention: Retention) -> list[RunStep]:
    name = retention.keep_best
    if name is None:
        return []
    sign = 1 if retention.best_mode == "min" else -1
    rated = (step for step in complete if _is_rated(step, name))
    ranked = sorted(rated, key=lambda step: (sign * (step.metrics[name] or 0.0), -step.step))
    return ranked[:1]


def _is_rated(step: RunStep, name: str) -> bool:
    value = step.metrics.get(name)
    return value is not None and math.isfinite(value)


TRAINER_STATE = "trainer_state.json"
_MOST_BYTES = 64 << 20


def save_orders(source: Source, steps: Sequence[RunStep]) -> dict[str, int]:
    """Returns a number for each folder that grows with the time of the save; 0 where unknown."""
    if any(step.save_number for step in steps):
        orders, latest = {}, 0
        for step in sorted(steps, key=lambda step: step.step):
            latest = max(latest, step.save_number)
            orders[step.name] = step.save_number or latest  # of others only the numbers are known
        return orders
    ordered = sorted(steps, key=lambda step: step.step)
    pairs = [
        (lower, higher)
        for position, higher in enumerate(ordered)
        for lower in ordered[:position]
        if lower.modified > higher.modified
    ]
    is_known = all(step.modified > 0 for step in steps) and _are_apart(source, pairs)
    return {step.name: int(step.modified * 1000) if is_known else 0 for step in steps}


def _are_apart(source: Source, pairs: Sequence[tuple[RunStep, RunStep]]) -> bool:
    """Returns whether in no pair the Trainer's log of one step is a prefix of the other's."""
    logs: dict[str, list[Any]] = {}
    for folder in {step.name for pair in pairs for step in pair}:
        history = trainer_state(source, folder).get("log_history")
        logs[folder] = history if isinstance(history, list) else []
    return all(
        logs[higher.name][: len(logs[lower.name])] != logs[lower.name] for lower, higher in pairs
    )


def abandoned_folders(source: Source, steps: Sequence[RunStep]) -> frozenset[str]:
    """Returns the folders of steps that training went back from, see `abandoned`."""
    orders = save_orders(source, steps)
    left = abandoned(replace(step, save_number=orders[step.name]) for step in steps)
    return frozenset(step.name for step in steps if step.step in left)


def trainer_state(source: Source, folder: str) -> Mapping[str, Any]:
    """Returns the Trainer's state in a step; empty if it has none that can be read."""
    path = f"{folder}/{TRAINER_STATE}"
    if not is_there(source, path):
        return {}
    try:
        size_bytes = source.stat(path).size_bytes
        document = json.loads(source.read(path, 0, size_bytes)) if size_bytes <= _MOST_BYTES else {}
    except (CkptkitError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
