"""Commands whose values are text and flags alone, so that nothing needs converting.

typer converts values with pydantic since its version 0.28, even text to text, and importing
pydantic takes longer than inspecting a small checkpoint. With older versions this changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command that hands values to its function as they were typed."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters, `--help` among them."""
        return _left_as_typed(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for the options that stand before a command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters, `--help` among them."""
        return _left_as_typed(super().get_params(ctx))


class _AsTyped:
    """Stands in for typer's conversion of one parameter."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ARG002  typer's signature
        several = param.multiple or param.nargs == -1
        return list(value or ()) if several else value


def _left_as_typed(parameters: Iterable[Any]) -> list[Any]:
    kept = list(parameters)
    for parameter in kept:
        if hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = _AsTyped()  # noqa: SLF001  there is no public way
    return kept
