"""Applies a name map to the tensors of a checkpoint; reads nothing.

Every tensor of the source is taken by exactly one rule, every tensor of the target is made once,
and no number of a capture is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from math import prod
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CannotPlanError, FormatError, IncompleteCheckpointError, UsageError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.text import quote
from ckptkit.hub_names.disk_tensors import HubTensor
from ckptkit.name_maps.language import NameMap, Rule
from ckptkit.name_maps.rule_steps import UNCHANGED, Made, Sizes
from ckptkit.plan.plan import StackedPart

Numbers = tuple[tuple[str, int], ...]
"""The numbers of captures, by name."""
Specs = Mapping[Fqn, tuple[DType, Shape]]
Extent = Literal["model", "part", "modules", "layers"]
"""Whether tensors are those of a whole model, of a part that another model completes, of some
modules in all layers, or of some layers."""
_SHOWN = 3
_MOST_SHOWN = 200  # characters


class MappedNames(Struct, frozen=True):
    """What a map makes of a checkpoint."""

    # The tensors of the target, by name, in the order of the source.
    tensors: Mapping[Fqn, HubTensor]
    # By the name of a tensor, what is added to its elements, and their factor and divisor before.
    changed: Mapping[Fqn, tuple[float, float, float]]
    dropped: Mapping[Fqn, str]  # the tensors of the source that are left out, with the reason
    # By the name of a tensor of the source, the rows after its last that are left out as padding:
    # the first of them, and the number of rows with them.
    padding: Mapping[Fqn, tuple[int, int]]
    made_by: Mapping[Fqn, Rule]  # the rule that makes each tensor of the target
    # Where tensors are in stacked ones, if these were not to be made whole.
    parts: Mapping[Fqn, StackedPart]
    # Further names of tensors of the source, with the name that is taken; their bytes have to be
    # the same.
    same: Mapping[Fqn, Fqn]
    zeros: Mapping[Fqn, Shape]  # the shapes of tensors of float32 zeros that are written besides


class _Taken(Struct):
    """The tensors that one rule takes: by the numbers of captures, one for each of its names."""

    rule: Rule
    sets: dict[Numbers, dict[int, Made]] = field(default_factory=lambda: defaultdict(dict))
    names: dict[Numbers, dict[int, Fqn]] = field(default_factory=lambda: defaultdict(dict))


def apply_map(
    name_map: NameMap,
    config: Mapping[str, Any],
    tensors: Specs,
    *,
    where: str,
    in_parts: bool = False,
    extent: Extent = "model",
) -> MappedNames:
    """Applies a map.

    `config`: the configuration of the model, for sizes. `tensors`: element types and shapes by the
    names of the source. `in_parts`: whether stacked tensors are made in parts, and optional
    captures stacked too. `extent`: what the tensors are those of.
    """
    sizes = sizes_of(name_map, config)
    layers = _number_halves(name_map, tensors, where, extent)
    firsts = {capture: sizes.of(further.after) for capture, further in name_map.further.items()}
    taken, dropped, same = _take_tensors(name_map, sizes, tensors, where, layers, firsts)
    _check_counts(taken, name_map, sizes, where, extent)
    absent = _find_stacked(name_map, taken, sizes) if in_parts else frozenset[str]()
    made: dict[Fqn, tuple[StackedPart, Made, HubTensor]] = {}
    made_by: dict[Fqn, Rule] = {}
    for one in taken:
        shifts = {} if name_map.is_inverse else firsts
        for name, members in _run_rule(one, sizes, where, absent, shifts):
            if name in made_by:
                raise CannotPlanError(
                    f"{quote(name)} is made by {made_by[name].where} and by {one.rule.where}",
                    where=where,
                    hint="take it out of one of the rules",
                )
            made_by[name] = one.rule
            for part, member in _split_or_stack(name, members, in_parts=in_parts):
                tensor = HubTensor.of(part.part_name, member.arrangement)
                _check_dtypes(tensor, tensors, one.rule, changes=member.change != UNCHANGED)
                made[part.part_name] = part, member, tensor
    zeros: dict[Fqn, Shape] = {}
    for rule in name_map.rules:
        if rule.sources or rule.beside is None:
            continue
        for numbers in filter(None, map(rule.beside.match, made_by)):
            shown = {capture: n for capture, n in numbers.items() if n is not None}
            zeros[Fqn(rule.targets[0].render(shown))] = tuple(map(sizes.of, rule.zeros))
    return MappedNames(
        tensors={name: tensor for name, (_, _, tensor) in made.items()},
        changed={n: m.change for n, (_, m, _) in made.items() if m.change != UNCHANGED},
        dropped=dropped,
        padding={t.sources[0]: m.padding for _, m, t in made.values() if m.padding is not None},
        made_by=made_by,
        parts={name: part for name, (part, _, _) in made.items() if part.index},
        same=same,
        zeros=zeros,
    )


def sizes_of(name_map: NameMap, config: Mapping[str, Any]) -> Sizes:
    """Returns the sizes of the model of a configuration."""
    inner = config.get("text_config")
    settings = {**config, **(inner if isinstance(inner, dict) else {})}
    return Sizes(name_map.sizes, settings, f"map {name_map.name}")


def _find_stacked(name_map: NameMap, taken: Sequence[_Taken], sizes: Sizes) -> frozenset[str]:
    """Returns the optional captures of names of the target that have all numbers everywhere."""
    used = [one for one in taken if one.sets]
    optional = {c for one in used for template in one.rule.targets for c in template.optional}
    counts = {
        c: max(dict(key)[c] for one in used for key in one.sets if c in dict(key)) + 1
        for c in optional
    }
    return frozenset(
        capture
        for capture in optional - {*name_map.unstacked}
        if all(
            len(numbers) == (sizes.count(capture) if sizes.has(capture) else counts[capture])
            for one in used
            if any(capture in template.optional for template in one.rule.targets)
            for numbers in _group_numbers(one, capture).values()
        )
    )


def _split_or_stack(
    name: Fqn, members: Mapping[Shape, Made], *, in_parts: bool
) -> Iterator[tuple[StackedPart, Made]]:
    """Yields a tensor of the target, stacked or in parts of one index along each stacked axis."""
    if not in_parts:
        yield StackedPart(name, (), ()), _stack(members)
        return
    counts = tuple(max(column) + 1 for column in zip(*members, strict=True))
    for index, made in members.items():
        arrangement = made.arrangement
        for _ in index:
            arrangement = arrangement.unsqueezed(0)
        yield StackedPart(name, index, counts), replace(made, arrangement=arrangement)


def _stack(members: Mapping[Shape, Made]) -> Made:
    """Stacks tensors along one axis for each number of their indices."""
    first = next(iter(members.values()))
    if () in members:
        return first
    inner: dict[int, dict[Shape, Made]] = defaultdict(dict)
    for (number, *rest), made in members.items():
        inner[number][tuple(rest)] = made
    slabs = [_stack(inner[number]).arrangement.unsqueezed(0) for number in sorted(inner)]
    return replace(first, arrangement=join(slabs, 0))


def _number_halves(
    name_map: NameMap, tensors: Specs, where: str, extent: Extent
) -> dict[str, dict[int, int]]:
    """Returns the number of the layer by that of its half, by capture; none where layers are whole.

    Refuses halves that do not follow one another in turn.
    """
    found: dict[str, dict[int, int]] = {}
    for capture, halves in name_map.halves.items():
        kinds: dict[int, set[str]] = defaultdict(set)
        for name in tensors:
            for symbol, template in halves.items():
                if (number := template.match(name)) is not None:
                    kinds[number[capture] or 0].add(symbol)
        is_whole = any(len(symbols) > 1 for symbols in kinds.values())
        # Of one half in some layers, or in one, nothing shows whose numbers these are.
        is_lone = len(set().union(*kinds.values())) < len(halves)
        if not kinds or is_whole or (is_lone and (extent != "model" or len(kinds) == 1)):
            continue
        first, second = halves
        pattern = "".join(next(iter(kinds.get(n, "?"))) for n in range(max(kinds) + 1))
        wrong = [n for n, s in enumerate(pattern) if s != (second if n % 2 else first)]
        if extent != "model":
            wrong = [n for n in wrong if pattern[n] != "?"]
        elif len(pattern) % 2:
            wrong.append(len(pattern))
        for at in wrong[:1]:
            there = pattern[at : at + 1].replace("?", "")
            raise CannotPlanError(
                f"numbers the halves of layers in the pattern {pattern[:_MOST_SHOWN]!r}: {at} is"
                f" {repr(there) if there else 'missing or of another kind'}, expected"
                f" {second if at % 2 else first!r}",
                where=f"{where}, map {name_map.name}",
                hint="a part is missing, or the model is of another family: keep its names with"
                " --map none",
            )
        found[capture] = {number: number // 2 for number in kinds}
    return found


def _take_tensors(
    name_map: NameMap,
    sizes: Sizes,
    tensors: Specs,
    where: str,
    layers: Mapping[str, Mapping[int, int]],
    firsts: Mapping[str, int],
) -> tuple[list[_Taken], dict[Fqn, str], dict[Fqn, Fqn]]:
    """Finds the rule of every tensor.

    Returns what each rule takes, the reason for each tensor that is left out, and further names of
    tensors with the one that is taken.
    """
    taken = [_Taken(rule) for rule in name_map.rules]
    dropped: dict[Fqn, str] = {}
    same: dict[Fqn, Fqn] = {}
    for name, (_, shape) in tensors.items():
        if name_map.keeps_others and not name_map.takes_any([name]):
            kept = _Taken(name_map.keep(name))
            kept.sets[()][0], kept.names[()][0] = Made(Arrangement.of(name, shape)), name
            taken.append(kept)
            continue
        number, numbers, position = _find_rule(name_map, name, where, firsts)
        numbers = {
            capture: n if n is None else layers.get(capture, {}).get(n, n)
            for capture, n in numbers.items()
        }
        rule = name_map.rules[number]
        if rule.drop:
            dropped[name] = rule.drop
            continue
        for key, made in _unstack(rule, numbers, name, shape, sizes):
            if rule.in_all_forms and position in taken[number].sets[key]:
                same[name] = taken[number].names[key][position]
                continue
            if position in taken[number].sets[key]:
                raise FormatError(
                    f"{_named(key)} comes from {quote(taken[number].names[key][position])} and"
                    f" from {quote(name)}",
                    where=f"{where}, {rule.where}",
                    hint="the checkpoint has one of them twice",
                )
            taken[number].sets[key][position] = made
            taken[number].names[key][position] = name
    return taken, dropped, same


def _find_rule(
    name_map: NameMap, name: Fqn, where: str, firsts: Mapping[str, int]
) -> tuple[int, Mapping[str, int | None], int]:
    """Returns the number of the one rule that takes a tensor, its numbers, and its position.

    `firsts`: by capture of further layers, the number from which on a layer of the target is one.
    """
    found: list[tuple[int, Mapping[str, int | None], int]] = [
        (number, numbers, position)
        for number, rule in enumerate(name_map.rules)
        for position, template in enumerate(rule.sources)
        if (numbers := template.match(name)) is not None
    ]
    if name_map.is_inverse:
        shifted = [
            (rule, {c: None if n is None else n - firsts.get(c, 0) for c, n in numbers.items()}, at)
            for rule, numbers, at in found
        ]
        found = [one for one in shifted if all((n or 0) >= 0 for n in one[1].values())]
        found = [one for one in found if any(firsts.get(c) for c in one[1])] or found
    if len(found) == 1:
        return found[0]
    if found:
        both = " and ".join(
            f"{name_map.rules[number].where} ({name_map.rules[number].sources[position].text!r})"
            for number, _, position in found[:2]
        )
        raise CannotPlanError(
            f"tensor {quote(name)} is taken by {both}", where=where, hint="make one more narrow"
        )
    texts = {t.text: rule.where for rule in name_map.rules for t in rule.sources}
    nearest = get_close_matches(name, texts, n=1, cutoff=0.0)[0]
    raise CannotPlanError(
        f"no rule of map {name_map.name!r} takes tensor {quote(name)}; the nearest is"
        f" {texts[nearest]}: {nearest!r}",
        where=where,
        hint="name the map of the model's family with --map, add a rule to the map, or leave the"
        " tensor out with --exclude",
    )


def _unstack(
    rule: Rule, numbers: Mapping[str, int | None], name: Fqn, shape: Shape, sizes: Sizes
) -> Iterator[tuple[Numbers, Made]]:
    """Yields a tensor of the source, or what is stacked in it, with the numbers of each."""
    wanted = rule.targets[0].captures if rule.targets else ()
    # The axes of absent captures come in the order in which the template has them.
    stacked = [capture for capture, number in numbers.items() if number is None]
    stacked += [capture for capture in wanted if capture not in numbers]
    found = [(dict(numbers), Arrangement.of(name, shape))]
    for capture in stacked:
        is_counted = sizes.has(capture) and capture not in rule.numbers
        count = sizes.count(capture) if is_counted else None
        longer = []
        for before, whole in found:
            arrangement, here, axis = whole, whole.shape, rule.axis
            if capture in rule.joined and count and here and here[0] % count == 0:
                arrangement = whole.viewed((count, here[0] // count, *here[1:]))
                here = arrangement.shape
            if axis >= len(here) or (count is not None and here[axis] != count):
                raise FormatError(
                    f"tensor {quote(name)} has shape {list(shape)}; expected"
                    f" {'' if count is None else f'{count:,}'} along the axis of {capture!r}",
                    where=rule.where,
                    hint="the configuration is of another model, or the checkpoint lacks some",
                )
            longer += [
                ({**before, capture: i}, arrangement.selected(axis, i)) for i in range(here[axis])
            ]
        found = longer
    for each, arrangement in found:
        for capture, (first, step) in rule.numbers.items():
            start = each.pop(first) if first in numbers else sizes.of(first)
            each[capture] = (start or 0) + step * (each[capture] or 0)
        key = tuple(sorted((c, n) for c, n in each.items() if n is not None))
        yield key, Made(arrangement)


def _run_rule(
    taken: _Taken,
    sizes: Sizes,
    where: str,
    left_out: Collection[str],
    shifts: Mapping[str, int],
) -> Iterator[tuple[Fqn, Mapping[Shape, Made]]]:
    """Yields what a rule makes, by name; stacked tensors by the indices of their first axes."""
    rule = taken.rule
    if not taken.sets:
        return
    named = [c for c in rule.targets[0].captures if c not in left_out]
    axes = [c for c in rule.list_captures() if c not in named]
    stacks: dict[str, dict[Shape, Made]] = defaultdict(dict)
    for key, parts in taken.sets.items():
        absent = [t.text for i, t in enumerate(rule.sources) if i not in parts]
        if absent:
            raise IncompleteCheckpointError(
                f"{_named(key)} has no {absent[0]!r}, which belongs to"
                f" {quote(next(iter(taken.names[key].values())))}",
                where=f"{where}, {rule.where}",
                hint="a part of the checkpoint is missing, or the map is of another family",
            )
        made = [parts[i] for i in range(len(rule.sources))]
        try:
            for step in rule.steps:
                made = step.apply(made, sizes)
        except FormatError as error:
            raise error.located(f"tensor {quote(taken.names[key][0])}") from None
        if len(made) != len(rule.targets):
            raise UsageError(
                f"makes {len(made)} tensors for {len(rule.targets)} names",
                where=rule.where,
                hint="list one name in 'to' for each tensor",
            )
        numbers = dict(key)
        shown = {c: numbers[c] + shifts.get(c, 0) for c in named}
        index = tuple(numbers[c] for c in axes)
        for template, one in zip(rule.targets, made, strict=True):
            for form in template.forms() if rule.in_all_forms else (template,):
                stacks[form.render(shown)][index] = one
    for name, members in stacks.items():
        shapes = sorted({one.arrangement.shape for one in members.values()})
        counts = tuple(len(set(column)) for column in zip(*members, strict=True))
        if len(shapes) > 1 or len(members) != prod(counts):
            listed = " and ".join(str(list(shape)) for shape in shapes)
            raise FormatError(
                f"{quote(name)} would be stacked from {len(members):,} tensors of shape {listed};"
                f" expected {' x '.join(map(str, counts))} of one shape",
                where=f"{where}, {rule.where}",
                hint="the configuration is of another model, or a part of the model is missing",
            )
        yield Fqn(name), members


def _group_numbers(taken: _Taken, capture: str) -> Mapping[Numbers, set[int]]:
    """Returns the numbers of a capture, by the numbers of the others."""
    groups: dict[Numbers, set[int]] = defaultdict(set)
    for key in taken.sets:
        groups[tuple(pair for pair in key if pair[0] != capture)].add(dict(key)[capture])
    return groups


def _check_counts(
    taken: list[_Taken], name_map: NameMap, sizes: Sizes, where: str, extent: Extent
) -> None:
    """Refuses rules that took nothing, and numbers that are missing or too large."""
    is_whole, may_lack = extent == "model", extent == "layers"
    captured = {c for one in taken if one.sets for t in one.rule.sources for c in t.captures}
    captured |= {one.rule.with_further for one in taken if one.sets}
    absent = name_map.further.keys() - captured  # no tensor is of these layers
    for one in taken if is_whole else ():
        rule = one.rule
        of_rule = {rule.with_further, *(c for t in rule.sources for c in t.captures)}
        is_absent = not absent.isdisjoint(of_rule)
        is_needed = not rule.is_optional or bool(rule.with_further)
        if not (one.sets or rule.drop or is_absent) and is_needed:
            raise CannotPlanError(
                f"has no tensor for {one.rule.where}: {one.rule.sources[0].text!r}",
                where=where,
                hint="name the map of the model's family with --map; a rule that may match nothing"
                " says optional = true",
            )
    if extent in {"model", "part"} and not any(one.sets for one in taken):
        raise CannotPlanError(
            "no rule of the map makes a tensor: all are left out",
            where=where,
            hint="name the map of the model's family with --map",
        )
    seen: dict[str, set[int]] = defaultdict(set)
    for one in (one for one in taken if one.sets):
        rule = one.rule
        # The innermost first: an expert that is missing in one layer is not a missing layer.
        for capture in reversed(rule.list_captures()):
            for others, numbers in _group_numbers(one, capture).items():
                seen[capture] |= numbers
                if capture not in rule.partial:
                    place = f"{where}, {rule.where}"
                    # What is made of several tensors is never made of some of them.
                    is_apart = extent == "part" and all(capture in t.captures for t in rule.targets)
                    lacks = may_lack or is_apart
                    _check_numbers(capture, numbers, sizes, place, others, may_lack=lacks)
    for capture, numbers in seen.items():
        # Others may have the numbers that are missing where rules may lack some.
        having = (
            one.rule
            for one in taken
            if any(capture in t.captures for t in (*one.rule.sources, *one.rule.targets))
        )
        is_partial = all(capture in rule.partial for rule in having)
        if not (name_map.keeps_others and is_partial) and extent != "part":
            _check_numbers(capture, numbers, sizes, where, (), may_lack=may_lack)
    for capture, further in name_map.further.items() if is_whole else ():
        stated, count = sizes.configured(further.count), len(seen.get(capture, ()))
        if count and further.count and stated != count:
            says = "is not in" if stated is None else f"is {stated} in"
            raise CannotPlanError(
                f"has {count} {capture} layers, and {further.count} {says} the configuration",
                where=f"{where}, map {name_map.name}",
                hint=f"leave them out with --exclude '{capture}.*', or name the model that was"
                " trained with --base",
            )


def _check_numbers(
    capture: str,
    numbers: set[int],
    sizes: Sizes,
    place: str,
    others: Numbers,
    *,
    may_lack: bool,
) -> None:
    count = sizes.count(capture) if sizes.has(capture) else max(numbers) + 1
    missing = list(islice((n for n in range(count) if n not in numbers), _SHOWN + 1))
    further = sorted(n for n in numbers if n >= count)
    at = f" of {_named(others)}" if others else ""
    if missing and not may_lack:
        listed = ", ".join(map(str, missing[:_SHOWN])) + (" ..." if missing[_SHOWN:] else "")
        raise IncompleteCheckpointError(
            f"{capture} {listed}{at} is missing; expected 0 to {count - 1}",
            where=place,
            hint="a part of the checkpoint is missing, or the configuration is of another model",
        )
    if further:
        raise FormatError(
            f"{capture} {further[0]}{at} is one too many; expected 0 to {count - 1}",
            where=place,
            hint="the configuration is of another model; name the right one with --base",
        )


def _check_dtypes(tensor: HubTensor, tensors: Specs, rule: Rule, *, changes: bool) -> None:
    first, *others = tensor.sources or (None,)
    if changes and first is not None and tensors[first][0].kind != "float":
        raise FormatError(
            f"{quote(first)} is {tensors[first][0].name}; a constant is added to floats only",
            where=rule.where,
            hint="take the step out of the rule",
        )
    for other in others:
        if first is not None and tensors[other][0] != tensors[first][0]:
            raise FormatError(
                f"{quote(first)} is {tensors[first][0].name} and {quote(other)} is"
                f" {tensors[other][0].name}; both belong to {quote(tensor.name)}",
                where=rule.where,
                hint="save both in one element type, or name them apart in a map of your own",
            )


def _named(key: Numbers) -> str:
    return " ".join(f"{capture} {number}" for capture, number in key) or "the tensor"
