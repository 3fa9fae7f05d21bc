"""The steps of a rule, which move elements; each has an inverse, or says that it has none.

- `{ split = ["q", "k"], axis = 0, groups = "g" }`: one tensor becomes several. With `groups`, the
  axis consists of that many groups, and each group of one part for every result.
- `{ concat = ["q", "k"], axis = 0, groups = "g" }`: the inverse of a split.
- `{ reorder = "(head half pair) -> (head pair half)", head = "heads", half = "2" }`: the indices of
  an axis in another order, in the notation of einops; one factor may be left open.
- `{ transpose = [1, 0] }`: the axes in another order.
- `{ unflatten = ["channels", "time"], axis = 1 }`: an axis becomes several, the outermost first.
- `{ flatten = ["channels", "time"], axis = 1 }`: the inverse of that.
- `{ rows = "vocab", axis = 0 }`: the first indices of an axis; the rest is padding up to a
  multiple of some number. The inverse adds none, or with `multiple = 128` zeros up to that.
- `{ pad = 128, rows = "vocab", axis = 0 }`: zeros up to a multiple; the inverse of the former.
- `{ add = 1 }`: a constant is added, in float32; the result has the element type of the source.

With `only = [0, 1]`, a step that makes one tensor of one applies to those tensors alone, counted
from 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import FormatError, UsageError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.name_maps.sizes import Sizes

_REORDER = re.compile(r"\(([a-z_ 0-9]+)\)\s*->\s*\(([a-z_ 0-9]+)\)")
# Vocabularies are padded to a multiple of 128 rows for each tensor-parallel rank, unless a user
# says otherwise; more would be rows of another model's tokens.
_MOST_PADDING = 128 * 128
_MOST_ADDED = 3e38  # of float32
_OF_ANOTHER = (
    "the map or the configuration is of another model; name the right ones with --map, --base"
)


class Made(Struct, frozen=True):
    """A tensor on its way from the source to the target."""

    arrangement: Arrangement  # the elements of the source that it consists of
    added: float = 0.0
    # The first row that was left out as padding, and the number of rows with the padding; None
    # where there is none.
    padding: tuple[int, int] | None = None


class Step(Protocol):
    """One step of a rule."""

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        """Returns the tensors after the step."""
        ...

    def inverse(self) -> Step:
        """Returns the step that undoes it."""
        ...


class Split(Struct, frozen=True):
    """One tensor becomes several."""

    where: str
    parts: tuple[str, ...]  # the size of each result along the axis, per group
    axis: int
    groups: str  # the number of groups

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        (made,) = _expect(tensors, 1, self.where)
        counts, groups = [sizes.count(part) for part in self.parts], sizes.count(self.groups)
        shape, axis = made.arrangement.shape, self.axis
        total = groups * sum(counts)
        if len(shape) <= axis or shape[axis] != total:
            each = " + ".join(f"{count:,}" for count in counts)
            raise FormatError(
                f"has shape {list(shape)}; expected {total:,} along axis {axis}: {groups:,} x"
                f" ({each})",
                where=self.where,
                hint=_OF_ANOTHER,
            )
        grouped = made.arrangement
        if groups != 1:
            grouped = grouped.viewed((*shape[:axis], groups, sum(counts), *shape[axis + 1 :]))
        at, results = 0, []
        for count in counts:
            part = grouped.sliced(axis + (groups != 1), at, at + count)
            part = part.viewed((*shape[:axis], groups * count, *shape[axis + 1 :]))
            results.append(replace(made, arrangement=part))
            at += count
        return results

    def inverse(self) -> Step:
        return Concat(self.where, self.parts, self.axis, self.groups)


class Concat(Struct, frozen=True):
    """Several tensors become one; the attributes are those of `Split`."""

    where: str
    parts: tuple[str, ...]
    axis: int
    groups: str

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        _expect(tensors, len(self.parts), self.where)
        counts, groups = [sizes.count(part) for part in self.parts], sizes.count(self.groups)
        axis, pieces = self.axis, []
        first = tensors[0].arrangement.shape
        for made, count in zip(tensors, counts, strict=True):
            shape = made.arrangement.shape
            expected = (*first[:axis], groups * count, *first[axis + 1 :])
            if len(first) <= axis or shape != expected:
                raise FormatError(
                    f"a part has shape {list(shape)}; expected {list(expected)}: {groups * count:,}"
                    f" along axis {axis}",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
            split = (*shape[:axis], groups, count, *shape[axis + 1 :])
            pieces.append(made.arrangement.viewed(split) if groups != 1 else made.arrangement)
        shape = tensors[0].arrangement.shape
        joined = join(pieces, axis + (groups != 1))
        whole = joined.viewed((*shape[:axis], groups * sum(counts), *shape[axis + 1 :]))
        return [replace(tensors[0], arrangement=whole)]

    def inverse(self) -> Step:
        return Split(self.where, self.parts, self.axis, self.groups)


class Reorder(Struct, frozen=True):
    """The indices of an axis in another order."""

    where: str
    before: tuple[str, ...]  # the factors of the axis, the outermost first
    after: tuple[str, ...]  # the same factors in the new order
    factors: Mapping[str, str]  # expressions by factor; one may be missing
    axis: int

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        return [self._reorder(made, sizes) for made in tensors]

    def _reorder(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.arrangement.shape, self.axis
        known = {name: sizes.count(expression) for name, expression in self.factors.items()}
        rows, product = (shape[axis] if axis < len(shape) else 0), math.prod(known.values())
        is_open = len(known) < len(self.before)
        if not product or rows % product or (not is_open and rows != product):
            raise FormatError(
                f"has shape {list(shape)}; axis {axis} does not consist of"
                f" {' x '.join(f'{n} {size:,}' for n, size in known.items())}",
                where=self.where,
                hint=_OF_ANOTHER,
            )
        split = tuple(known.get(name, rows // product) for name in self.before)
        fine = made.arrangement.viewed((*shape[:axis], *split, *shape[axis + 1 :]))
        order = [axis + self.before.index(name) for name in self.after]
        behind = range(axis + len(split), len(shape) + len(split) - 1)
        return replace(
            made, arrangement=fine.permuted([*range(axis), *order, *behind]).viewed(shape)
        )

    def inverse(self) -> Step:
        return replace(self, before=self.after, after=self.before)


class Transpose(Struct, frozen=True):
    """The axes in another order."""

    where: str
    order: tuple[int, ...]

    def apply(self, tensors: Sequence[Made], _sizes: Sizes) -> list[Made]:
        for made in tensors:
            if len(made.arrangement.shape) != len(self.order):
                raise FormatError(
                    f"has shape {list(made.arrangement.shape)}; expected {len(self.order)} axes",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
        return [replace(m, arrangement=m.arrangement.permuted(self.order)) for m in tensors]

    def inverse(self) -> Step:
        order = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return replace(self, order=order)


class Unflatten(Struct, frozen=True):
    """One axis becomes several, the outermost first."""

    where: str
    parts: tuple[str, ...]
    axis: int

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        counts, axis = [sizes.of(part) for part in self.parts], self.axis
        results = []
        for made in tensors:
            shape = made.arrangement.shape
            if len(shape) <= axis or shape[axis] != math.prod(counts):
                raise FormatError(
                    f"has shape {list(shape)}; axis {axis} does not consist of"
                    f" {' x '.join(f'{count:,}' for count in counts)}",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
            whole = made.arrangement.viewed((*shape[:axis], *counts, *shape[axis + 1 :]))
            results.append(replace(made, arrangement=whole))
        return results

    def inverse(self) -> Step:
        return Flatten(self.where, self.parts, self.axis)


class Flatten(Struct, frozen=True):
    """Several axes become one; the attributes are those of `Unflatten`."""

    where: str
    parts: tuple[str, ...]
    axis: int

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        counts, axis = tuple(sizes.of(part) for part in self.parts), self.axis
        end = axis + len(counts)
        results = []
        for made in tensors:
            shape = made.arrangement.shape
            if shape[axis:end] != counts:
                raise FormatError(
                    f"has shape {list(shape)}; expected {list(counts)} from axis {axis} on",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
            whole = made.arrangement.viewed((*shape[:axis], math.prod(counts), *shape[end:]))
            results.append(replace(made, arrangement=whole))
        return results

    def inverse(self) -> Step:
        return Unflatten(self.where, self.parts, self.axis)


class Rows(Struct, frozen=True):
    """The first indices of an axis, without the padding after them."""

    where: str
    count: str
    axis: int
    multiple: str = ""

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        count, axis = sizes.count(self.count), self.axis
        results = []
        for made in tensors:
            shape = made.arrangement.shape
            if len(shape) <= axis or shape[axis] < count:
                raise FormatError(
                    f"has shape {list(shape)}; expected at least {count:,} along axis {axis}",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
            whole, extra = shape[axis], shape[axis] - count
            if extra >= _MOST_PADDING or not any(
                whole % unit == 0 for unit in range(extra + 1, _MOST_PADDING + 1)
            ):
                raise FormatError(
                    f"has {whole:,} rows against {count:,} in the configuration: {extra:,} more is"
                    " no padding, which fills up to a multiple of a number up to"
                    f" {_MOST_PADDING:,}",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
            kept = replace(made, arrangement=made.arrangement.sliced(axis, 0, count))
            results.append(replace(kept, padding=(count, whole)) if extra else kept)
        return results

    def inverse(self) -> Step:
        return Pad(self.where, self.count, self.axis, self.multiple) if self.multiple else self


class Pad(Struct, frozen=True):
    """Zeros after the last index of an axis, up to a multiple."""

    where: str
    count: str
    axis: int
    multiple: str

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        count, multiple, axis = sizes.count(self.count), sizes.count(self.multiple), self.axis
        for made in tensors:
            shape = made.arrangement.shape
            if len(shape) <= axis or shape[axis] != count:
                raise FormatError(
                    f"has shape {list(shape)}; expected {count:,} along axis {axis}",
                    where=self.where,
                    hint=_OF_ANOTHER,
                )
        whole = -(-count // multiple) * multiple
        return [replace(m, arrangement=m.arrangement.padded(axis, whole)) for m in tensors]

    def inverse(self) -> Step:
        return Rows(self.where, self.count, self.axis, self.multiple)


class Add(Struct, frozen=True):
    """A constant is added."""

    where: str
    value: float

    def apply(self, tensors: Sequence[Made], _sizes: Sizes) -> list[Made]:
        return [replace(made, added=made.added + self.value) for made in tensors]

    def inverse(self) -> Step:
        return replace(self, value=-self.value)


class Only(Struct, frozen=True):
    """A step that applies to some tensors, by their positions."""

    where: str
    step: Step
    positions: tuple[int, ...]

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        if max(self.positions) >= len(tensors):
            raise UsageError(
                f"'only' has {max(self.positions)}, and {len(tensors)} tensors come from the step"
                " before it, counted from 0",
                where=self.where,
                hint="take the number out of 'only'",
            )
        return [
            self.step.apply([made], sizes)[0] if position in self.positions else made
            for position, made in enumerate(tensors)
        ]

    def inverse(self) -> Step:
        return replace(self, step=self.step.inverse())


def parse_step(step: Any, where: str) -> Step:
    """Parses a step of a rule."""
    table = dict(step) if isinstance(step, dict) else {}
    kind = next((kind for kind in _PARSERS if kind in table), None)
    if kind is None:
        raise UsageError(
            f"{step!r} is no step; a step has one of {', '.join(_PARSERS)}", where=where
        )
    value = table.pop(kind)
    axis = table.pop("axis", 0)
    if type(axis) is not int or axis < 0:
        raise UsageError(f"{axis!r} is not an axis", where=where, hint="axes are counted from 0")
    only = table.pop("only", None)
    made: Step | None = _PARSERS[kind](value, axis, table, where)
    if made is None or table or not (only is None or _is_positions(only, kind)):
        raise UsageError(f"{step!r} is not a step {kind!r}", where=where, hint=_FORMS)
    return made if only is None else Only(where, made, tuple(only))


_FORMS = "see the steps in docs/reference/name-maps.md"


def _parse_parts(kind: type[Split | Concat], value: Any, axis: int, more: Any, where: str) -> Any:
    groups = more.pop("groups", "1")
    if not isinstance(value, list) or not value or not all(map(_is_size, [*value, groups])):
        return None
    return kind(where, tuple(map(str, value)), axis, str(groups))


def _parse_axes(kind: type[Unflatten | Flatten], value: Any, axis: int, where: str) -> Any:
    if not isinstance(value, list) or not value or not all(map(_is_size, value)):
        return None
    return kind(where, tuple(map(str, value)), axis)


def _parse_reorder(value: Any, axis: int, more: dict[str, Any], where: str) -> Reorder | None:
    found = _REORDER.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    before, after = tuple(found[1].split()), tuple(found[2].split())
    factors = {name: str(more.pop(name)) for name in before if _is_size(more.get(name))}
    is_order = sorted(before) == sorted(after) and len(set(before)) == len(before)
    if not is_order or len(factors) < len(before) - 1:
        return None
    return Reorder(where, before, after, factors, axis)


def _parse_transpose(value: Any, _axis: int, _more: Any, where: str) -> Transpose | None:
    is_order = isinstance(value, list) and sorted(map(repr, value)) == [
        repr(i) for i in range(len(value))
    ]
    return Transpose(where, tuple(value)) if is_order else None


def _parse_rows(value: Any, axis: int, more: dict[str, Any], where: str) -> Rows | None:
    multiple = more.pop("multiple", "")
    is_step = _is_size(value) and (multiple == "" or _is_size(multiple))
    return Rows(where, str(value), axis, str(multiple)) if is_step else None


def _parse_pad(value: Any, axis: int, more: dict[str, Any], where: str) -> Pad | None:
    count = more.pop("rows", None)
    is_step = _is_size(value) and _is_size(count)
    return Pad(where, str(count), axis, str(value)) if is_step else None


def _parse_add(value: Any, _axis: int, _more: Any, where: str) -> Add | None:
    is_number = type(value) in {int, float} and abs(value) <= _MOST_ADDED  # which no NaN is
    return Add(where, float(value)) if is_number else None


_PARSERS: Mapping[str, Any] = {
    "split": lambda *given: _parse_parts(Split, *given),
    "concat": lambda *given: _parse_parts(Concat, *given),
    "reorder": _parse_reorder,
    "unflatten": lambda value, axis, _more, where: _parse_axes(Unflatten, value, axis, where),
    "flatten": lambda value, axis, _more, where: _parse_axes(Flatten, value, axis, where),
    "transpose": _parse_transpose,
    "pad": _parse_pad,
    "rows": _parse_rows,
    "add": _parse_add,
}


def _is_positions(value: Any, kind: str) -> bool:
    are_positions = isinstance(value, list) and all(type(at) is int and at >= 0 for at in value)
    return are_positions and bool(value) and kind not in {"split", "concat"}


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or (type(value) is int and value > 0)


def _expect(tensors: Sequence[Made], count: int, where: str) -> Sequence[Made]:
    if len(tensors) != count:
        raise UsageError(
            f"the step takes {count} tensors, and {len(tensors)} come from the step before it",
            where=where,
            hint="list as many names, or parts",
        )
    return tensors
