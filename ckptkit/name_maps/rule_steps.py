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
from msgspec.structs import astuple, replace

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


class Step(Struct, frozen=True):
    """One step of a rule; most change each tensor by itself."""

    where: str
    axis: int
    only: tuple[int, ...]  # the positions of the tensors that it applies to; empty for all

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        """Returns the tensors after the step."""
        if self.only and max(self.only) >= len(tensors):
            raise UsageError(
                f"'only' has {max(self.only)}, and {len(tensors)} tensors come from the step"
                " before it, counted from 0",
                where=self.where,
                hint="take the number out of 'only'",
            )
        return [
            self.change(made, sizes) if not self.only or position in self.only else made
            for position, made in enumerate(tensors)
        ]

    def change(self, made: Made, sizes: Sizes) -> Made:
        raise NotImplementedError

    def inverse(self) -> Step:
        """Returns the step that undoes it."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns the step in words."""
        only = f", of tensors {', '.join(map(str, self.only))} only" if self.only else ""
        return f"{self._words()}{only}"

    def _words(self) -> str:
        return type(self).__name__.lower()

    @property
    def moves_rows(self) -> bool:
        """Whether whole rows are moved, so that the factor B of a weight is changed alike."""
        return self.axis == 0 and isinstance(self, (Split, Reorder, Rows))

    def refuse_count(self, tensors: Sequence[Made], count: int) -> None:
        if len(tensors) != count:
            raise UsageError(
                f"the step takes {count} tensors, and {len(tensors)} come from the step before it",
                where=self.where,
                hint="list as many names, or parts",
            )

    def misfit(self, shape: Shape, expected: str, subject: str = "") -> FormatError:
        return FormatError(
            f"{subject}has shape {list(shape)}; {expected}", where=self.where, hint=_OF_ANOTHER
        )


class Split(Step, frozen=True):
    """One tensor becomes several."""

    parts: tuple[str, ...]  # the size of each result along the axis, per group
    groups: str  # the number of groups

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        self.refuse_count(tensors, 1)
        made, counts, each = (
            tensors[0],
            list(map(sizes.count, self.parts)),
            sizes.count(self.groups),
        )
        shape, axis = made.shape, self.axis
        total = each * sum(counts)
        if len(shape) <= axis or shape[axis] != total:
            listed = " + ".join(f"{count:,}" for count in counts)
            expected = f"expected {total:,} along axis {axis}: {each:,} x ({listed})"
            raise self.misfit(shape, expected)
        before, behind = shape[:axis], shape[axis + 1 :]
        grouped = made.arrangement
        if each != 1:
            grouped, axis = grouped.viewed((*before, each, sum(counts), *behind)), axis + 1
        bounds = pairwise(accumulate(counts, initial=0))
        parts = (grouped.sliced(axis, low, high) for low, high in bounds)
        return [
            replace(made, arrangement=part).viewed((*before, each * count, *behind))
            for part, count in zip(parts, counts, strict=True)
        ]

    def inverse(self) -> Step:
        return Concat(*astuple(self))

    def _words(self) -> str:
        each = "" if self.groups == "1" else f", repeated {self.groups} times"
        return f"split axis {self.axis} into {' | '.join(self.parts)}{each}"


class Concat(Split, frozen=True):
    """Several tensors become one."""

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        self.refuse_count(tensors, len(self.parts))
        counts, groups = list(map(sizes.count, self.parts)), sizes.count(self.groups)
        axis, first = self.axis, tensors[0].shape
        before, behind = first[:axis], first[axis + 1 :]
        pieces = []
        for made, count in zip(tensors, counts, strict=True):
            shape = (*before, groups * count, *behind)
            if len(first) <= axis or made.shape != shape:
                expected = f"expected {list(shape)}: {groups * count:,} along axis {axis}"
                raise self.misfit(made.shape, expected, "a part ")
            split = (*before, groups, count, *behind)
            pieces.append(made.arrangement.viewed(split) if groups != 1 else made.arrangement)
        joined = replace(tensors[0], arrangement=join(pieces, axis + (groups != 1)))
        return [joined.viewed((*before, groups * sum(counts), *behind))]

    def inverse(self) -> Step:
        return Split(*astuple(self))

    def _words(self) -> str:
        each = "" if self.groups == "1" else f", repeated {self.groups} times"
        return f"join along axis {self.axis}{each}"


class Reorder(Step, frozen=True):
    """The indices of an axis in another order."""

    before: tuple[str, ...]  # the factors of the axis, the outermost first
    after: tuple[str, ...]  # the same factors in the new order
    factors: Mapping[str, str]  # expressions by factor; one may be missing

    def change(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.shape, self.axis
        known = {name: sizes.count(expression) for name, expression in self.factors.items()}
        rows, product = (shape[axis] if axis < len(shape) else 0), math.prod(known.values())
        is_open = len(known) < len(self.before)
        if not product or rows % product or (not is_open and rows != product):
            factors = " x ".join(f"{name} {size:,}" for name, size in known.items())
            raise self.misfit(shape, f"axis {axis} does not consist of {factors}")
        split = tuple(known.get(name, rows // product) for name in self.before)
        fine = made.arrangement.viewed((*shape[:axis], *split, *shape[axis + 1 :]))
        order = [axis + self.before.index(name) for name in self.after]
        behind = range(axis + len(split), len(shape) + len(split) - 1)
        permuted = fine.permuted([*range(axis), *order, *behind])
        return replace(made, arrangement=permuted).viewed(shape)

    def inverse(self) -> Step:
        return replace(self, before=self.after, after=self.before)

    def _words(self) -> str:
        before, after = " ".join(self.before), " ".join(self.after)
        return f"reorder axis {self.axis} from ({before}) to ({after})"


class Transpose(Step, frozen=True):
    """The axes in another order."""

    order: tuple[int, ...]

    def change(self, made: Made, _sizes: Sizes) -> Made:
        if len(made.shape) != len(self.order):
            raise self.misfit(made.shape, f"expected {len(self.order)} axes")
        return replace(made, arrangement=made.arrangement.permuted(self.order))

    def inverse(self) -> Step:
        order = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return replace(self, order=order)

    def _words(self) -> str:
        return f"transpose to {list(self.order)}"


class Unflatten(Step, frozen=True):
    """One axis becomes several, the outermost first."""

    parts: tuple[str, ...]

    def change(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.shape, self.axis
        counts = [sizes.of(part) for part in self.parts]
        if len(shape) <= axis or shape[axis] != math.prod(counts):
            factors = " x ".join(f"{count:,}" for count in counts)
            raise self.misfit(shape, f"axis {axis} does not consist of {factors}")
        return made.viewed((*shape[:axis], *counts, *shape[axis + 1 :]))

    def inverse(self) -> Step:
        return Flatten(*astuple(self))

    def _words(self) -> str:
        return f"split axis {self.axis} into the axes {' x '.join(self.parts)}"


class Flatten(Unflatten, frozen=True):
    """Several axes become one."""

    def change(self, made: Made, sizes: Sizes) -> Made:
        shape, axis = made.shape, self.axis
        counts = tuple(sizes.of(part) for part in self.parts)
        end = axis + len(counts)
        if shape[axis:end] != counts:
            raise self.misfit(shape, f"expected {list(counts)} from axis {axis} on")
        return made.viewed((*shape[:axis], math.prod(counts), *shape[end:]))

    def inverse(self) -> Step:
        return Unflatten(*astuple(self))

    def _words(self) -> str:
        return f"join {len(self.parts)} axes from {self.axis} on"


class Rows(Step, frozen=True):
    """The first indices of an axis, without the padding after them."""

    count: str
    multiple: str

    def change(self, made: Made, sizes: Sizes) -> Made:
        count, axis, shape = sizes.count(self.count), self.axis, made.shape
        if len(shape) <= axis or shape[axis] < count:
            raise self.misfit(shape, f"expected at least {count:,} along axis {axis}")
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
        return Pad(*astuple(self)) if self.multiple else self

    def _words(self) -> str:
        return f"keep the first {self.count} indices of axis {self.axis}"


class Pad(Rows, frozen=True):
    """Zeros after the last index of an axis, up to a multiple."""

    def change(self, made: Made, sizes: Sizes) -> Made:
        count, multiple, axis = sizes.count(self.count), sizes.count(self.multiple), self.axis
        if len(made.shape) <= axis or made.shape[axis] != count:
            raise self.misfit(made.shape, f"expected {count:,} along axis {axis}")
        whole = -(-count // multiple) * multiple
        return replace(made, arrangement=made.arrangement.padded(axis, whole))

    def inverse(self) -> Step:
        return Rows(*astuple(self))

    def _words(self) -> str:
        return f"pad axis {self.axis} with zeros to a multiple of {self.multiple}"

    @property
    def moves_rows(self) -> bool:
        return False


class Add(Step, frozen=True):
    """A constant is added."""

    value: float

    def change(self, made: Made, _sizes: Sizes) -> Made:
        return replace(made, added=made.added + self.value)

    def inverse(self) -> Step:
        return replace(self, value=-self.value)

    def _words(self) -> str:
        return f"add {self.value:g}"


_KINDS = ("split", "concat", "reorder", "unflatten", "flatten", "transpose", "pad", "rows", "add")


def parse_step(step: Any, where: str) -> Step:
    """Parses a step of a rule."""
    table = dict(step) if isinstance(step, dict) else {}
    kind = next((kind for kind in _KINDS if kind in table), None)
    if kind is None:
        raise UsageError(f"{step!r} is no step; a step has one of {', '.join(_KINDS)}", where=where)
    value, axis, only = table.pop(kind), table.pop("axis", 0), table.pop("only", None)
    if type(axis) is not int or axis < 0:
        raise UsageError(f"{axis!r} is not an axis", where=where, hint="axes are counted from 0")
    is_only = only is None or (
        isinstance(only, list)
        and bool(only)
        and all(type(at) is int and at >= 0 for at in only)
        and kind not in {"split", "concat"}
    )
    made = _parse_kind(kind, value, table, (where, axis, tuple(only or ()))) if is_only else None
    if made is None or table:
        raise UsageError(
            f"{step!r} is not a step {kind!r}",
            where=where,
            hint="see the steps in docs/reference/name-maps.md",
        )
    return made


def _parse_kind(
    kind: str, value: Any, more: dict[str, Any], common: tuple[str, int, tuple[int, ...]]
) -> Step | None:
    """Returns a step, taking what it has besides `value` out of `more`; None if it is none."""
    match kind:
        case "split" | "concat":
            groups = more.pop("groups", "1")
            if _are_sizes(value) and _is_size(groups):
                made = Split if kind == "split" else Concat
                return made(*common, tuple(map(str, value)), str(groups))
        case "unflatten" | "flatten":
            if _are_sizes(value):
                shaped = Unflatten if kind == "unflatten" else Flatten
                return shaped(*common, tuple(map(str, value)))
        case "reorder":
            found = _REORDER.fullmatch(value.strip()) if isinstance(value, str) else None
            before, after = (tuple(found[i].split()) for i in (1, 2)) if found else ((), ())
            factors = {name: str(more.pop(name)) for name in before if _is_size(more.get(name))}
            is_order = sorted(before) == sorted(after) and len(set(before)) == len(before)
            if found and is_order and len(factors) >= len(before) - 1:
                return Reorder(*common, before, after, factors)
        case "transpose":
            # Text, so that neither `True` nor `1.0` is taken for a number.
            if isinstance(value, list) and sorted(map(repr, value)) == [
                repr(i) for i in range(len(value))
            ]:
                return Transpose(*common, tuple(value))
        case "rows":
            multiple = more.pop("multiple", "")
            if _is_size(value) and (multiple == "" or _is_size(multiple)):
                return Rows(*common, str(value), str(multiple))
        case "pad":
            count = more.pop("rows", None)
            if _is_size(value) and _is_size(count):
                return Pad(*common, str(count), str(value))
        case "add":
            if type(value) in {int, float} and abs(value) <= _MOST_ADDED:  # which no NaN is
                return Add(*common, float(value))
    return None


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or (type(value) is int and value > 0)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_size, value))


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
        """Returns a size: that of the first of its expressions whose names all exist."""
        if name in self._under_way:
            raise UsageError(
                f"the size {name!r} is computed from itself: {' -> '.join(self._under_way)}"
                f" -> {name}",
                where=self.where,
                hint="take one of these names out of [sizes]",
            )
        if name not in self.expressions:
            return self._configured(name)
        missing: list[str] = []
        for expression in () if name in self._known else self.expressions[name]:
            self._under_way.append(name)
            try:
                self._known[name] = self._value(_parse(expression, self.where).body, expression)
                break
            except _AbsentError as error:
                missing.append(str(error))
            finally:
                self._under_way.pop()
        known = self._known.setdefault(name, _AbsentError(" or ".join(dict.fromkeys(missing))))
        if isinstance(known, _AbsentError):
            raise known
        return known

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
