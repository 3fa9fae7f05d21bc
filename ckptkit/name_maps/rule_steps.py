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
- `{ root = "head_dim" }`: multiplied by the square root of a size, in float32.
- `{ over_root = "hidden_size" }`: divided by it; with `rounded = "bfloat16"`, by the root in this
  element type. One is the inverse of the other.
- `{ add = 1 }`: a constant is added, in float32; the result has the element type of the source.

With `only = [0, 1]`, a step that makes one tensor of one applies to those tensors alone, counted
from 0.

Steps have sizes of the model, which are computed from its configuration by short expressions:
`heads = "num_attention_heads"`, `head_dim = ["head_dim", "hidden_size / heads"]`. An expression has
names, integers, `+`, `-`, `*`, `/`, `//` and parentheses; a name is another size or a key of the
configuration, and `vision_config.depth` a key of a configuration inside it. Of a list, the first
whose names all exist is taken. `/` leaves no remainder, `//` drops it.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import struct
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


UNCHANGED = (0.0, 1.0, 1.0)


class Made(Struct, frozen=True):
    """A tensor on its way from the source to the target."""

    arrangement: Arrangement  # the elements of the source that it consists of
    added: float = 0.0
    factor: float = 1.0  # that it is multiplied by, before the constant is added
    divisor: float = 1.0  # that it is divided by, also before that
    # The first row that was left out as padding, and the number of rows with the padding; None
    # where there is none.
    padding: tuple[int, int] | None = None

    @property
    def shape(self) -> Shape:
        return self.arrangement.shape

    @property
    def change(self) -> tuple[float, float, float]:
        """What is added to its elements, and their factor and divisor before that."""
        return self.added, self.factor, self.divisor

    def viewed(self, shape: Shape) -> Made:
        return replace(self, arrangement=self.arrangement.viewed(shape))


class Step(Struct, frozen=True):
    """One step of a rule; each kind has some of these fields, as it is described above."""

    kind: str  # a key of the step, or `repeat`, which makes several of one tensor
    where: str
    axis: int = 0
    only: tuple[int, ...] = ()  # the positions of the tensors that it applies to; empty for all
    parts: tuple[str, ...] = ()  # sizes; of `rows` and `pad` the one that is kept
    groups: str = "1"  # how many there are of these parts
    multiple: str = ""
    before: tuple[str, ...] = ()  # the factors of the axis that is reordered, the outermost first
    after: tuple[str, ...] = ()  # the same factors in the new order
    factors: Mapping[str, str] = field(default_factory=dict)  # expressions; one may be missing
    order: tuple[int, ...] = ()  # of the axes
    value: float = 0.0  # that is added
    is_rounded: bool = False  # whether a root is rounded to bfloat16

    def apply(self, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
        """Returns the tensors after the step; most change each tensor by itself."""
        if self.kind == "repeat":
            return [made for made in tensors for _ in range(int(self.groups))]
        if self.kind in _COUNTS:
            count = 1 if self.kind == "split" else len(self.parts)
            if len(tensors) != count:
                raise UsageError(
                    f"the step takes {count} tensors, and {len(tensors)} come from the step before"
                    " it",
                    where=self.where,
                    hint="list as many names, or parts",
                )
            return _COUNTS[self.kind](self, tensors, sizes)
        if self.only and max(self.only) >= len(tensors):
            raise UsageError(
                f"'only' has {max(self.only)}, and {len(tensors)} tensors come from the step"
                " before it, counted from 0",
                where=self.where,
                hint="take the number out of 'only'",
            )
        change = _CHANGES[self.kind]
        return [
            change(self, made, sizes) if not self.only or position in self.only else made
            for position, made in enumerate(tensors)
        ]

    def inverse(self) -> Step:
        """Returns the step that undoes it."""
        if self.kind == "reorder":
            return replace(self, before=self.after, after=self.before)
        if self.kind == "transpose":
            return replace(self, order=tuple(map(self.order.index, range(len(self.order)))))
        if self.kind == "add":
            return replace(self, value=-self.value)
        if self.kind == "rows" and not self.multiple:
            return self
        return replace(self, kind=_INVERSES[self.kind])

    def describe(self) -> str:
        """Returns the step in words."""
        axis, each = self.axis, "" if self.groups == "1" else f", repeated {self.groups} times"
        before, after = " ".join(self.before), " ".join(self.after)
        words = {
            "split": f"split axis {axis} into {' | '.join(self.parts)}{each}",
            "concat": f"join along axis {axis}{each}",
            "reorder": f"reorder axis {axis} from ({before}) to ({after})",
            "transpose": f"transpose to {list(self.order)}",
            "rows": f"keep the first {''.join(self.parts)} indices of axis {axis}",
            "pad": f"pad axis {axis} with zeros to a multiple of {self.multiple}",
            "unflatten": f"split axis {axis} into the axes {' x '.join(self.parts)}",
            "flatten": f"join {len(self.parts)} axes from {axis} on",
            "add": f"add {self.value:g}",
            "root": f"multiply by the square root of {''.join(self.parts)}",
            "over_root": f"divide by the square root of {''.join(self.parts)}",
        }
        only = f", of tensors {', '.join(map(str, self.only))} only" if self.only else ""
        return f"{words.get(self.kind, self.kind)}{only}"

    @property
    def moves_rows(self) -> bool:
        """Whether whole rows are moved, so that the factor B of a weight is changed alike."""
        return self.axis == 0 and self.kind in {"split", "concat", "reorder", "rows"}

    def misfit(self, shape: Shape, expected: str, subject: str = "") -> FormatError:
        return FormatError(
            f"{subject}has shape {list(shape)}; {expected}", where=self.where, hint=_OF_ANOTHER
        )


def _split(step: Step, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
    made, counts, groups = tensors[0], list(map(sizes.count, step.parts)), sizes.count(step.groups)
    shape, axis, total = made.shape, step.axis, groups * sum(counts)
    if len(shape) <= axis or shape[axis] != total:
        each = " + ".join(f"{count:,}" for count in counts)
        expected = f"expected {total:,} along axis {axis}: {groups:,} x ({each})"
        raise step.misfit(shape, expected)
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


def _concat(step: Step, tensors: Sequence[Made], sizes: Sizes) -> list[Made]:
    counts, groups = list(map(sizes.count, step.parts)), sizes.count(step.groups)
    axis, first = step.axis, tensors[0].shape
    before, behind = first[:axis], first[axis + 1 :]
    pieces = []
    for made, count in zip(tensors, counts, strict=True):
        shape = (*before, groups * count, *behind)
        if len(first) <= axis or made.shape != shape:
            expected = f"expected {list(shape)}: {groups * count:,} along axis {axis}"
            raise step.misfit(made.shape, expected, "a part ")
        split = (*before, groups, count, *behind)
        pieces.append(made.arrangement.viewed(split) if groups != 1 else made.arrangement)
    if len({made.change for made in tensors}) > 1:
        raise UsageError(
            "joins tensors to which different constants were added, or that were multiplied by"
            " different numbers, which is not supported",
            where=step.where,
            hint="write these tensors one by one, or change all of them alike",
        )
    joined = replace(tensors[0], arrangement=join(pieces, axis + (groups != 1)))
    return [joined.viewed((*before, groups * sum(counts), *behind))]


def _reorder(step: Step, made: Made, sizes: Sizes) -> Made:
    shape, axis = made.shape, step.axis
    known = {name: sizes.count(expression) for name, expression in step.factors.items()}
    rows, product = (shape[axis] if axis < len(shape) else 0), math.prod(known.values())
    is_open = len(known) < len(step.before)
    if not product or rows % product or (not is_open and rows != product):
        factors = " x ".join(f"{name} {size:,}" for name, size in known.items())
        raise step.misfit(shape, f"axis {axis} does not consist of {factors}")
    split = tuple(known.get(name, rows // product) for name in step.before)
    fine = made.arrangement.viewed((*shape[:axis], *split, *shape[axis + 1 :]))
    order = [axis + step.before.index(name) for name in step.after]
    behind = range(axis + len(split), len(shape) + len(split) - 1)
    permuted = fine.permuted([*range(axis), *order, *behind])
    return replace(made, arrangement=permuted).viewed(shape)


def _transpose(step: Step, made: Made, _sizes: Sizes) -> Made:
    if len(made.shape) != len(step.order):
        raise step.misfit(made.shape, f"expected {len(step.order)} axes")
    return replace(made, arrangement=made.arrangement.permuted(step.order))


def _unflatten(step: Step, made: Made, sizes: Sizes) -> Made:
    shape, axis, counts = made.shape, step.axis, list(map(sizes.of, step.parts))
    if len(shape) <= axis or shape[axis] != math.prod(counts):
        factors = " x ".join(f"{count:,}" for count in counts)
        raise step.misfit(shape, f"axis {axis} does not consist of {factors}")
    return made.viewed((*shape[:axis], *counts, *shape[axis + 1 :]))


def _flatten(step: Step, made: Made, sizes: Sizes) -> Made:
    shape, axis, counts = made.shape, step.axis, tuple(map(sizes.of, step.parts))
    end = axis + len(counts)
    if shape[axis:end] != counts:
        raise step.misfit(shape, f"expected {list(counts)} from axis {axis} on")
    return made.viewed((*shape[:axis], math.prod(counts), *shape[end:]))


def _keep_rows(step: Step, made: Made, sizes: Sizes) -> Made:
    count, axis, shape = sizes.count(step.parts[0]), step.axis, made.shape
    if len(shape) <= axis or shape[axis] < count:
        raise step.misfit(shape, f"expected at least {count:,} along axis {axis}")
    whole, extra = shape[axis], shape[axis] - count
    if extra >= _MOST_PADDING or not any(
        whole % unit == 0 for unit in range(extra + 1, _MOST_PADDING + 1)
    ):
        raise FormatError(
            f"has {whole:,} rows against {count:,} in the configuration: {extra:,} more is no"
            f" padding, which fills up to a multiple of a number up to {_MOST_PADDING:,}",
            where=step.where,
            hint=_OF_ANOTHER,
        )
    kept = replace(made, arrangement=made.arrangement.sliced(axis, 0, count))
    return replace(kept, padding=(count, whole)) if extra else kept


def _pad(step: Step, made: Made, sizes: Sizes) -> Made:
    count, multiple, axis = sizes.count(step.parts[0]), sizes.count(step.multiple), step.axis
    if len(made.shape) <= axis or made.shape[axis] != count:
        raise step.misfit(made.shape, f"expected {count:,} along axis {axis}")
    whole = -(-count // multiple) * multiple
    if made.added and whole != count:
        raise UsageError(
            "fills with zeros a tensor to which a constant was added, which is not supported",
            where=step.where,
            hint="leave the padding out; or put it before that step, which fills it with the"
            " constant",
        )
    return replace(made, arrangement=made.arrangement.padded(axis, whole))


def _add(step: Step, made: Made, _sizes: Sizes) -> Made:
    return replace(made, added=made.added + step.value)


def _scale_by_root(step: Step, made: Made, sizes: Sizes) -> Made:
    if made.change != UNCHANGED:
        raise UsageError(
            "multiplies what was changed before, which is not supported",
            where=step.where,
            hint="multiply once, and add after it",
        )
    root = math.sqrt(sizes.count(step.parts[0]))
    if step.is_rounded:
        bits = struct.unpack("<I", struct.pack("<f", root))[0]
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000  # to the nearest, ties to even
        root = struct.unpack("<f", struct.pack("<I", bits))[0]
    return replace(made, factor=root) if step.kind == "root" else replace(made, divisor=root)


_COUNTS = {"split": _split, "concat": _concat}  # which change the number of tensors
_CHANGES = {
    "reorder": _reorder,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "transpose": _transpose,
    "pad": _pad,
    "rows": _keep_rows,
    "add": _add,
    "root": _scale_by_root,
    "over_root": _scale_by_root,
}
_INVERSES = {"split": "concat", "unflatten": "flatten", "rows": "pad", "root": "over_root"}
_INVERSES |= {undoing: kind for kind, undoing in _INVERSES.items()}
_KINDS = (
    "split",
    "concat",
    "reorder",
    "unflatten",
    "flatten",
    "transpose",
    "pad",
    "rows",
    "add",
    "root",
    "over_root",
)


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
        and kind not in _COUNTS
    )
    fields = _parse_fields(kind, value, table) if is_only else None
    if fields is None or table:
        raise UsageError(
            f"{step!r} is not a step {kind!r}",
            where=where,
            hint="see the steps in docs/reference/name-maps.md",
        )
    return Step(kind, where, axis, tuple(only or ()), **fields)


def _parse_fields(kind: str, value: Any, more: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of a step, taking what it has besides `value` out of `more`."""
    sizes = value if isinstance(value, list) else [None]
    match kind:
        case "split" | "concat" | "unflatten" | "flatten":
            groups = more.pop("groups", "1") if kind in _COUNTS else "1"
            if sizes and all(map(_is_size, [*sizes, groups])):
                return {"parts": tuple(map(str, sizes)), "groups": str(groups)}
        case "reorder":
            found = _REORDER.fullmatch(value.strip()) if isinstance(value, str) else None
            before, after = (tuple(found[i].split()) for i in (1, 2)) if found else ((), ())
            factors = {name: str(more.pop(name)) for name in before if _is_size(more.get(name))}
            is_order = sorted(before) == sorted(after) and len(set(before)) == len(before)
            if found and is_order and len(factors) >= len(before) - 1:
                return {"before": before, "after": after, "factors": factors}
        case "transpose":
            # Texts, so that neither `True` nor `1.0` is taken for a number.
            if isinstance(value, list) and sorted(map(repr, value)) == [
                repr(i) for i in range(len(value))
            ]:
                return {"order": tuple(value)}
        case "rows" | "pad":
            is_rows = kind == "rows"
            other = more.pop("multiple", "") if is_rows else more.pop("rows", None)
            count, multiple = (value, other) if is_rows else (other, value)
            if _is_size(count) and ((is_rows and multiple == "") or _is_size(multiple)):
                return {"parts": (str(count),), "multiple": str(multiple)}
        case "root" | "over_root":
            rounded = more.pop("rounded", None)
            if _is_size(value) and rounded in (None, "bfloat16"):
                return {"parts": (str(value),), "is_rounded": rounded is not None}
        case "add":
            if type(value) in {int, float} and abs(value) <= _MOST_ADDED:  # which no NaN is
                return {"value": float(value)}
    return None


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or (type(value) is int and value > 0)


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

    def configured(self, key: str) -> int | None:
        """Returns the number that a key of the configuration has; None where it has none."""
        try:
            return self._configured(key)
        except _AbsentError:
            return None

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
        elif right and (kind is ast.FloorDiv or (kind is ast.Div and left % right == 0)):
            result = left // right
        else:
            raise RefusedError(
                f"{expression!r}: {left:,} and {right:,} do not divide"
                if kind in {ast.Div, ast.FloorDiv}
                else f"{expression!r} has an operator other than + - * / //",
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
