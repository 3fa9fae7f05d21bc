"""Conversions of transformers, run backwards on tensors that have no elements.

A conversion that moves elements is followed element by element. One that computes is run once
more on tensors of which only type and shape are known: what it makes, and what from, is then
known as a whole, and its elements are left to whoever has those of its sources.

Source: transformers 5.23, `revert_weight_conversion` and `WeightConverter` in
`core_model_loading.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, Shape
from ckptkit.naming.tracing import ComputesError, TracedTensor

_ATTRIBUTE = "_weight_conversions"  # where loading leaves at a model what it used


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that a conversion computes.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
        sources: All live tensors that the conversion is given.
    """

    shape: Shape
    dtype: torch.dtype
    sources: tuple[Fqn, ...]


def reverted(
    model: Any, tensors: Mapping[Fqn, TracedTensor]
) -> dict[str, TracedTensor | ComputedTensor]:
    """Returns what `save_pretrained` would write, by disk name.

    Args:
        model: The model.
        tensors: Its tensors, by live name.

    Raises:
        CannotPlanError: If that depends on the elements.
    """
    revert = core_model_loading.revert_weight_conversion
    try:
        return dict(revert(model, dict(tensors)))
    except ComputesError:
        pass
    left = vars(model).get(_ATTRIBUTE)
    setattr(model, _ATTRIBUTE, [_watched(entry) for entry in _conversions_of(model, left)])
    try:
        return dict(revert(model, dict(tensors)))
    finally:
        setattr(model, _ATTRIBUTE, left)


def _conversions_of(model: Any, left: Sequence[Any] | None) -> Sequence[Any]:
    """Returns the conversions that are reverted: those of its class, where loading left none."""
    if left is not None:
        return left
    # Of a model that was never loaded nobody knows which prefix its files would have.
    prefixes = getattr(core_model_loading, "PrefixChange", ())
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in found if not isinstance(entry, prefixes)]


def _watched(entry: Any) -> Any:
    if not isinstance(entry, WeightConverter):
        return entry
    found = copy.copy(entry)
    found.operations = [_Watched(entry.operations)]
    return found


class _Watched(ConversionOps):  # type: ignore[misc]  # transformers is not followed
    """All operations of a conversion as one, which does not fail where they compute."""

    def __init__(self, operations: Sequence[Any]) -> None:
        self._operations = operations

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    @property
    def supports_many_to_many(self) -> bool:
        """Whether any of them is made for several inputs and outputs."""
        return any(getattr(one, "supports_many_to_many", False) for one in self._operations)

    @property
    def reverse_op(self) -> _Watched:
        """All of them backwards."""
        return _Watched([one.reverse_op for one in reversed(self._operations)])

    def convert(self, input_dict: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Converts what traced tensors stand for.

        Raises:
            CannotPlanError: If what is made depends on the elements.
        """
        try:
            return self._run(_each(input_dict, lambda tensor: tensor), options)
        except ComputesError:
            pass
        try:
            made = self._run(_each(input_dict, _bare), options)
        except RuntimeError as error:
            raise CannotPlanError(
                f"a conversion looks at elements before it tells what it makes of them: {error}"
            ) from error
        sources = tuple(dict.fromkeys(_sources(input_dict)))
        return _each(made, lambda t: ComputedTensor(tuple(t.shape), t.dtype, sources))

    def _run(self, tensors: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        for operation in self._operations:
            tensors = operation.convert(tensors, **options)
        return tensors


def _each(tensors: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Changes every tensor; under each name there is one, or a list."""
    return {
        name: [change(one) for one in value] if isinstance(value, list) else change(value)
        for name, value in tensors.items()
    }


def _bare(tensor: TracedTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _sources(tensors: Mapping[str, Any]) -> list[Fqn]:
    listed = [value if isinstance(value, list) else [value] for value in tensors.values()]
    return [part.source for each in listed for one in each for part in one.arrangement.parts]
