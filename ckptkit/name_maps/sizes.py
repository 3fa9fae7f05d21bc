"""Sizes of a model, computed from its configuration by short expressions.

`heads = "num_attention_heads"`, `head_dim = ["head_dim", "hidden_size / heads"]`: an expression
has names, integers, `+`, `-`, `*`, `/` and parentheses; a name is another size or a key of the
configuration, and `vision_config.depth` a key of a configuration inside it. Of a list, the first
whose names all exist is taken. A division leaves no remainder.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ckptkit.core.errors import RefusedError, UsageError

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
