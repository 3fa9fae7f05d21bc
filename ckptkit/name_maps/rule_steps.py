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

Steps have sizes of the model, which are computed from its configuration by short expressions:
`heads = "num_attention_heads"`, `head_dim = ["head_dim", "hidden_size / heads"]`. An expression
has names, integers, `+`, `-`, `*`, `/` and parentheses; a name is another size or a key of the
configuration, and `vision_config.depth` a key of a configuration inside it. Of a list, the first
whose names all exist is taken. A division leaves no remainder.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import FormatError, RefusedError, UsageError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.core.index import Shape

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

    @property
    def shape(self) -> Shape:
        return self.arrangement.shape

    def viewed(self, shape: Shape) -> Made:
        return replace(self, arrangement=self.arrangement.viewed(shape))


class Step:
    """One step of a rule; most change each tensor by itself."""

    __slots__ = ()

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        """Returns the tensors after the step."""
        return [self.change(made, sizes) for made in tensors]

    def change(self, made: Made, sizes: Sizes) -> Made:
        raise NotImplementedError

    def inverse(self) -> Step:
        """Returns the step that undoes it."""
        raise NotImplementedError


def _misfit(where: str, shape: Shape, expected: str, subject: str = "") -> FormatError:
    return FormatError(
        f"{subject}has shape {list(shape)}; {expected}", where=where, hint=_OF_ANOTHER
    )


class Split(Step, Struct, frozen=True):
    """One tensor becomes several."""

    where: str
    parts: tuple[str, ...]  # the size of each result along the axis, per group
    axis: int
    groups: str  # the number of groups

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        (made,) = _expect(tensors, 1, self.where)
        counts, groups = [sizes.count(part) for part in self.parts], sizes.count(self.groups)
        shape, axis = made.shape, self.axis
        total = groups * sum(counts)
        if len(shape) <= axis or shape[axis] != total:
            each = " + ".join(f"{count:,}" for count in counts)
            raise _misfit(
                self.where,
                shape,
                f"expected {total:,} along axis {axis}: {groups:,} x ({each})",
            )
        before, behind = shape[:axis], shape[axis + 1 :]
        grouped = made.arrangement
        if groups != 1:
            grouped, axis = grouped.viewed((*before, groups, sum(counts), *behind)), axis + 1
        bounds = pairwise(accumulate(counts, initial=0))
        parts = (grouped.sliced(axis, low, high) for low, high in bounds)
        return [
            replace(made, arrangement=part).viewed((*before, groups * count, *behind))
            for part, count in zip(parts, counts, strict=True)
        ]

    def inverse(self) -> Step:
        return Concat(self.where, self.parts, self.axis, self.groups)


class Concat(Step, Struct, frozen=True):
    """Several tensors become one; the fields are those of `Split`."""

    where: str
    parts: tuple[str, ...]
    axis: int
    groups: str

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        _expect(tensors, len(self.parts), self.where)
        counts, groups = [sizes.count(part) for part in self.parts], sizes.count(self.groups)
        axis, first = self.axis, tensors[0].shape
        before, behind = first[:axis], first[axis + 1 :]
        pieces = []
        for made, count in zip(tensors, counts, strict=True):
            expected = (*before, groups * count, *behind)
            if len(first) <= axis or made.shape != expected:
                raise _misfit(
                    self.where,
                    made.shape,
                    f"expected {list(expected)}: {groups * count:,} along axis {axis}",
                    "a part ",
                )
            split = (*before, groups, count, *behind)
            pieces.append(made.arrangement.viewed(split) if groups != 1 else made.arrangement)
        joined = replace(tensors[0], arrangement=join(pieces, axis + (groups != 1)))
        return [joined.viewed((*before, groups * sum(counts), *behind))]

    def inverse(self) -> Step:
        return Split(self.where, self.parts, self.axis, self.groups)


class Reorder(Step, Struct, frozen=True):
    """The indices of an axis in another order."""

    where: str
    before: tuple[str, ...]  # the factors of the axis, the outermost first
    after: tuple[str, ...]  # the same factors in the new order
    factors: Mapping[str, str]  # expressions by factor; one may be missing
    axis: int

    def change(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.shape, self.axis
        known = {name: sizes.count(expression) for name, expression in self.factors.items()}
        rows, product = (shape[axis] if axis < len(shape) else 0), math.prod(known.values())
        is_open = len(known) < len(self.before)
        if not product or rows % product or (not is_open and rows != product):
            factors = " x ".join(f"{name} {size:,}" for name, size in known.items())
            raise _misfit(self.where, shape, f"axis {axis} does not consist of {factors}")
        split = tuple(known.get(name, rows // product) for name in self.before)
        fine = made.arrangement.viewed((*shape[:axis], *split, *shape[axis + 1 :]))
        order = [axis + self.before.index(name) for name in self.after]
        behind = range(axis + len(split), len(shape) + len(split) - 1)
        permuted = fine.permuted([*range(axis), *order, *behind])
        return replace(made, arrangement=permuted).viewed(shape)

    def inverse(self) -> Step:
        return replace(self, before=self.after, after=self.before)


class Transpose(Step, Struct, frozen=True):
    """The axes in another order."""

    where: str
    order: tuple[int, ...]

    def change(self, made: Made, _sizes: Sizes) -> Made:
        if len(made.shape) != len(self.order):
            raise _misfit(self.where, made.shape, f"expected {len(self.order)} axes")
        return replace(made, arrangement=made.arrangement.permuted(self.order))

    def inverse(self) -> Step:
        order = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return replace(self, order=order)


class Unflatten(Step, Struct, frozen=True):
    """One axis becomes several, the outermost first."""

    where: str
    parts: tuple[str, ...]
    axis: int

    def change(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.shape, self.axis
        counts = [sizes.of(part) for part in self.parts]
        if len(shape) <= axis or shape[axis] != math.prod(counts):
            factors = " x ".join(f"{count:,}" for count in counts)
            raise _misfit(self.where, shape, f"axis {axis} does not consist of {factors}")
        return made.viewed((*shape[:axis], *counts, *shape[axis + 1 :]))

    def inverse(self) -> Step:
        return Flatten(self.where, self.parts, self.axis)


class Flatten(Step, Struct, frozen=True):
    """Several axes become one; the fields are those of `Unflatten`."""

    where: str
    parts: tuple[str, ...]
    axis: int

    def change(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.shape, self.axis
        counts = tuple(sizes.of(part) for part in self.parts)
        end = axis + len(counts)
        if shape[axis:end] != counts:
            raise _misfit(self.where, shape, f"expected {list(counts)} from axis {axis} on")
        return made.viewed((*shape[:axis], math.prod(counts), *shape[end:]))

    def inverse(self) -> Step:
        return Unflatten(self.where, self.parts, self.axis)


class Rows(Step, Struct, frozen=True):
    """The first indices of an axis, without the padding after them."""

    where: str
    count: str
    axis: int
    multiple: str = ""

    def change(self, made: Made, sizes: Sizes) -> Made:
        count, axis, shape = sizes.count(self.count), self.axis, made.shape
        if len(shape) <= axis or shape[axis] < count:
            raise _misfit(self.where, shape, f"expected at least {count:,} along axis {axis}")
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
        return replace(kept, padding=(count, whole)) if extra else kept

    def inverse(self) -> Step:
        return Pad(self.where, self.count, self.axis, self.multiple) if self.multiple else self


class Pad(Step, Struct, frozen=True):
    """Zeros after the last index of an axis, up to a multiple."""

    where: str
    count: str
    axis: int
    multiple: str

    def change(self, made: Made, sizes: Sizes) -> Made:
        count, multiple, axis = sizes.count(self.count), sizes.count(self.multiple), self.axis
        if len(made.shape) <= axis or made.shape[axis] != count:
            raise _misfit(self.where, made.shape, f"expected {count:,} along axis {axis}")
        whole = -(-count // multiple) * multiple
        return replace(made, arrangement=made.arrangement.padded(axis, whole))

    def inverse(self) -> Step:
        return Rows(self.where, self.count, self.axis, self.multiple)


class Add(Step, Struct, frozen=True):
    """A constant is added."""

    where: str
    value: float

    def change(self, made: Made, _sizes: Sizes) -> Made:
        return replace(made, added=made.added + self.value)

    def inverse(self) -> Step:
        return replace(self, value=-self.value)


class Only(Step, Struct, frozen=True):
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
            self.step.change(made, sizes) if position in self.positions else made
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


# Sizes, and expressions of them

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MOST_CHARACTERS = 200
_MOST = 1 << 40


class _AbsentError(Exception):
    """A name that neither the sizes nor the configuration have."""


class Sizes(Struct, frozen=True):
    """Computes the sizes of one model."""

    # By the name of a size, its expressions; the first that can be computed counts.
    expressions: Mapping[str, Sequence[str]]
    config: Mapping[str, Any]  # the configuration; that of the text model in it where there is one
    where: str
    _under_way: list[str] = field(default_factory=list)
    # Each size once: of sizes that are sums of one another, the terms double with each.
    _known: dict[str, int | _AbsentError] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Returns whether a size is declared."""
        return name in self.expressions

    def of(self, expression: str | int) -> int:
        """Returns the value of an expression."""
        if isinstance(expression, int):
            return expression
        try:
            return self._value(_parse(expression, self.where).body, expression)
        except _AbsentError as error:
            raise RefusedError(
                f"{expression!r} needs {error}, which the configuration does not have",
                where=self.where,
                hint="pass the folder of a model of that family with --base, or the map of the"
                " model's own family with --map",
            ) from error
        except RecursionError as error:
            raise UsageError(
                f"{expression!r} is computed from too many other sizes",
                where=self.where,
                hint="write the expressions out",
            ) from error

    def count(self, expression: str | int) -> int:
        """Returns the value of an expression that counts something, and so is at least 1."""
        value = self.of(expression)
        if value < 1:
            raise RefusedError(
                f"{expression!r} is {value:,}; expected at least 1",
                where=self.where,
                hint="the configuration is of another model, or the map is wrong",
            )
        return value

    def _named(self, name: str) -> int:
        if name not in self._known:
            try:
                self._known[name] = self._compute(name)
            except _AbsentError as error:
                self._known[name] = error
        known = self._known[name]
        if isinstance(known, _AbsentError):
            raise known
        return known

    def _compute(self, name: str) -> int:
        if name in self._under_way:
            raise UsageError(
                f"the size {name!r} is computed from itself: {' -> '.join(self._under_way)}"
                f" -> {name}",
                where=self.where,
                hint="take one of these names out of [sizes]",
            )
        missing: list[str] = []
        for expression in self.expressions.get(name, ()):
            self._under_way.append(name)
            try:
                return self._value(_parse(expression, self.where).body, expression)
            except _AbsentError as error:
                missing.append(str(error))
            finally:
                self._under_way.pop()
        if name in self.expressions:
            raise _AbsentError(" or ".join(dict.fromkeys(missing)))
        return self._configured(name)

    def _configured(self, name: str) -> int:
        value: Any = self.config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _AbsentError(repr(name))
        return value

    def _value(self, node: ast.expr, expression: str) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            # A size that is declared by a key of the same name means the key.
            if self._under_way[-1:] == [node.id]:
                return self._configured(node.id)
            return self._named(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self._configured(f"{node.value.id}.{node.attr}")
        if not isinstance(node, ast.BinOp):
            raise UsageError(
                f"{expression!r} is not an expression of sizes",
                where=self.where,
                hint="use names, whole numbers, + - * / and parentheses",
            )
        left, right = self._value(node.left, expression), self._value(node.right, expression)
        kind = type(node.op)
        if kind in _OPERATORS:
            result = _OPERATORS[kind](left, right)
        elif kind is ast.Div and right and left % right == 0:
            result = left // right
        else:
            raise RefusedError(
                f"{expression!r}: {left:,} and {right:,} do not divide"
                if kind is ast.Div
                else f"{expression!r} has an operator other than + - * /",
                where=self.where,
                hint="the configuration is of another model, or the map is wrong",
            )
        if abs(result) > _MOST:
            raise RefusedError(f"{expression!r} is {result:,}: too large", where=self.where)
        return result


def _parse(expression: str, where: str) -> ast.Expression:
    shown = expression[:_MOST_CHARACTERS]  # a longer one is cut, so that it is no expression
    try:
        return ast.parse(shown if shown == expression else "(", mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{shown!r} is not an expression of sizes",
            where=where,
            hint="use names, whole numbers, + - * / and parentheses",
        ) from error
