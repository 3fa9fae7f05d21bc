"""What a name map makes of a checkpoint, rule by rule; no weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from ckptkit.conversion.mapped_names import MappedModel, map_names
from ckptkit.conversion.names_on_disk import Specs
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.index import Fqn, Shape
from ckptkit.name_maps.rearrangement import (
    Add,
    Concat,
    Flatten,
    Only,
    Pad,
    Reorder,
    Rows,
    Split,
    Step,
    Transpose,
    Unflatten,
)

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
_Parts = tuple[str | frozenset[int], ...]


class AppliedRule(Struct, frozen=True):
    """What one rule makes.

    Attributes:
        rule: The map and the position of the rule in it; empty for tensors that are left out.
        sources: Shapes of the tensors that it takes, by name; with padding.
        targets: Shapes of those that it makes, by name; none where the sources are left out.
        steps: What is done in between, in words.
        padding: Rows that are left out as padding, by the name of the source: the first of them,
            and the number of rows with them.
        left_out: Why the sources are left out; empty if they are not.
    """

    rule: str
    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]
    steps: tuple[str, ...] = ()
    padding: Mapping[str, tuple[int, int]] | None = None
    left_out: str = ""


class MapReport(Struct, frozen=True):
    """What a map makes of a checkpoint.

    Attributes:
        name: The map.
        digest: The start of the SHA-256 of its text, in hexadecimal.
        source: The framework whose names are converted.
        target: The framework whose names they get.
        rules: What each rule makes; rules that take nothing are left out.
    """

    name: str
    digest: str
    source: str
    target: str
    rules: tuple[AppliedRule, ...]


def report_map(
    choice: str,
    framework: str,
    config: Mapping[str, Any] | None,
    checkpoint: OpenedCheckpoint,
    tensors: Specs,
) -> MapReport:
    """Applies a map to the tensors of a checkpoint; see `map_names`."""
    mapped = map_names(choice, framework, config, checkpoint, tensors)
    name_map = mapped.name_map
    rules = (*_list_rules(mapped), *_list_left_out(mapped))
    return MapReport(name_map.name, name_map.digest, name_map.source, name_map.target, rules)


def _list_rules(mapped: MappedModel) -> Iterator[AppliedRule]:
    names = mapped.names
    targets: dict[str, dict[Fqn, Shape]] = {}
    for name, rule in names.made_by.items():
        targets.setdefault(rule.where, {})[name] = names.tensors[name].shape
    rules = {rule.where: rule for rule in names.made_by.values()}
    for where, made in targets.items():
        sources = {source: None for name in made for source in names.tensors[name].sources}
        yield AppliedRule(
            rule=where,
            sources={str(name): mapped.live[name][1] for name in sources},
            targets={str(name): shape for name, shape in made.items()},
            steps=tuple(map(describe_step, rules[where].steps)),
            padding={str(n): rows for n, rows in names.padding.items() if n in sources},
        )


def _list_left_out(mapped: MappedModel) -> Iterator[AppliedRule]:
    reasons: dict[str, dict[str, Shape]] = {}
    for name, reason in mapped.names.dropped.items():
        reasons.setdefault(reason, {})[str(name)] = mapped.live[name][1]
    for reason, sources in reasons.items():
        yield AppliedRule("", sources, {}, left_out=reason)


def describe_step(step: Step) -> str:
    """Returns a step in words."""
    if isinstance(step, Only):
        return f"{describe_step(step.step)}, of tensors {', '.join(map(str, step.positions))} only"
    match step:
        case Split() | Concat():
            text = _describe_parts(step)
        case Reorder(before=before, after=after, axis=axis):
            text = f"reorder axis {axis} from ({' '.join(before)}) to ({' '.join(after)})"
        case Transpose(order=order):
            text = f"transpose to {list(order)}"
        case Rows(count=count, axis=axis):
            text = f"keep the first {count} indices of axis {axis}"
        case Pad(axis=axis, multiple=multiple):
            text = f"pad axis {axis} with zeros to a multiple of {multiple}"
        case Unflatten(parts=parts, axis=axis):
            text = f"split axis {axis} into the axes {' x '.join(parts)}"
        case Flatten(parts=parts, axis=axis):
            text = f"join {len(parts)} axes from {axis} on"
        case Add(value=value):
            text = f"add {value:g}"
        case _:
            text = type(step).__name__.lower()
    return text


def _describe_parts(step: Split | Concat) -> str:
    each = "" if step.groups == "1" else f", repeated {step.groups} times"
    if isinstance(step, Concat):
        return f"join along axis {step.axis}{each}"
    return f"split axis {step.axis} into {' | '.join(step.parts)}{each}"


def fold_names(names: Iterable[str]) -> list[str]:
    """Returns names that differ in numbers as one.

    >>> fold_names(["layers.0.w1", "layers.1.w1", "layers.2.w1", "norm"])
    ['layers.{0..2}.w1', 'norm']
    """
    rows: list[_Parts] = [
        tuple(frozenset({int(p)}) if i % 2 else p for i, p in enumerate(_NUMBER.split(name)))
        for name in names
    ]
    # From the last number to the first: what is not the same for all stays apart.
    for at in reversed(range(1, max(map(len, rows), default=0), 2)):
        found: dict[_Parts, set[int]] = {}
        for row in rows:
            part = row[at] if at < len(row) else frozenset()
            numbers = part if isinstance(part, frozenset) else frozenset()
            found.setdefault((*row[:at], "", *row[at + 1 :]) if numbers else row, set()).update(
                numbers
            )
        rows = [
            (*row[:at], frozenset(numbers), *row[at + 1 :]) if numbers else row
            for row, numbers in found.items()
        ]
    return ["".join(p if isinstance(p, str) else _range_text(sorted(p)) for p in r) for r in rows]


def _range_text(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as text: one as it is, several as `{0..3}` or `{0,2..5}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    stops = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    runs = [f"{a}" if a == b else f"{a}..{b}" for a, b in zip(starts, stops, strict=True)]
    return "{" + ",".join(runs) + "}"
