"""Conversions of transformers, run backwards on tensors without elements.

A traced tensor records where its elements would have come from. Conversions are run on such tensors
as they are, and arrive here as operations of ATen. Those that move elements are followed element
by element. Any other is refused, so that a conversion that computes is never taken for one that
only moves: it is run once more on tensors that have a dtype and a shape alone, which shows its
sources and its results as a whole.

Source: the schemas in PyTorch's `aten/src/ATen/native/native_functions.yaml`; transformers 5.23,
`revert_weight_conversion` and `WeightConverter` in `core_model_loading.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from msgspec import Struct
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.core.index import Fqn, Shape


class ComputesError(Exception):
    """A conversion does more with elements than to move them; `reverting` deals with it."""


class TracedTensor(torch.Tensor):
    """A tensor whose elements are known by their positions in live tensors."""

    arrangement: Arrangement

    @classmethod
    def holding(cls, arrangement: Arrangement, dtype: torch.dtype) -> TracedTensor:
        """Returns a tensor of such elements."""
        traced: TracedTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  how it is done
            cls, arrangement.shape, dtype=dtype, device=torch.device("meta")
        )
        traced.arrangement = arrangement
        return traced

    @classmethod
    def of_live(cls, name: Fqn, shape: Shape, dtype: torch.dtype) -> TracedTensor:
        return cls.holding(Arrangement.of(name, shape), dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it as its guide says
        cls,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Follows one operation."""
        follow = _MOVES.get(str(operation.overloadpacket))
        if follow is None or not all(issubclass(kind, (cls, torch.nn.Parameter)) for kind in types):
            raise _refused(operation)
        return follow(*args, **(kwargs or {}))


def _refused(operation: Any) -> ComputesError:
    return ComputesError(
        f"a conversion computes with elements ({operation}), where moving them can be followed"
    )


def _like(tensor: TracedTensor, arrangement: Arrangement) -> TracedTensor:
    return TracedTensor.holding(arrangement, tensor.dtype)


def _axis(dim: int, dimensions: int) -> int:
    return dim + dimensions if dim < 0 else dim


def _same(tensor: TracedTensor, **_options: Any) -> TracedTensor:
    return _like(tensor, tensor.arrangement)


def _to_copy(tensor: TracedTensor, dtype: torch.dtype | None = None, **_kw: Any) -> TracedTensor:
    if dtype not in {None, tensor.dtype}:
        raise _refused(f"a cast from {tensor.dtype} to {dtype}")
    return _same(tensor)


def _view(tensor: TracedTensor, size: Sequence[int], *_layout: Any) -> TracedTensor:
    known = math.prod(n for n in size if n != -1)
    shape = tuple(tensor.numel() // max(known, 1) if n == -1 else n for n in size)
    return _like(tensor, tensor.arrangement.viewed(shape))


def _transpose(tensor: TracedTensor, first: int, second: int) -> TracedTensor:
    order = list(range(tensor.dim()))
    a, b = _axis(first, tensor.dim()), _axis(second, tensor.dim())
    order[a], order[b] = order[b], order[a]
    return _like(tensor, tensor.arrangement.permuted(order))


def _t(tensor: TracedTensor) -> TracedTensor:
    return _transpose(tensor, 0, 1) if tensor.dim() > 1 else _same(tensor)


def _permute(tensor: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    order = [_axis(dim, tensor.dim()) for dim in dims]
    return _like(tensor, tensor.arrangement.permuted(order))


def _slice(
    tensor: TracedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TracedTensor:
    axis = _axis(dim, tensor.dim())
    if step != 1:
        raise _refused(f"a slice of every {step}th index")
    low, high, _ = slice(start, end).indices(tensor.shape[axis])
    return _like(tensor, tensor.arrangement.sliced(axis, low, max(low, high)))


def _select(tensor: TracedTensor, dim: int, index: int) -> TracedTensor:
    axis = _axis(dim, tensor.dim())
    return _like(tensor, tensor.arrangement.selected(axis, _axis(index, tensor.shape[axis])))


def _split(tensor: TracedTensor, size: int | Sequence[int], dim: int = 0) -> list[TracedTensor]:
    total = tensor.shape[_axis(dim, tensor.dim())]
    if isinstance(size, int):
        starts = range(0, total, size) if size else [0]
        return [_slice(tensor, dim, low, low + size) for low in starts]
    bounds = pairwise(accumulate(size, initial=0))
    return [_slice(tensor, dim, low, high) for low, high in bounds]


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(tensor, dim, i) for i in range(tensor.shape[_axis(dim, tensor.dim())])]


def _squeeze(tensor: TracedTensor, dim: int | Sequence[int] | None = None) -> TracedTensor:
    given = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    found = tensor.arrangement
    for axis in sorted((_axis(d, tensor.dim()) for d in given), reverse=True):
        found = found.squeezed(axis) if found.shape[axis] == 1 else found
    return _like(tensor, found)


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    return _like(tensor, tensor.arrangement.unsqueezed(_axis(dim, tensor.dim() + 1)))


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if len(kinds) > 1:
        raise CannotPlanError(
            f"a tensor on disk is joined from tensors of {' and '.join(kinds)}",
            hint="give them one element type with --dtype, or pass --names live",
        )
    axis = _axis(dim, tensors[0].dim())
    return _like(tensors[0], join([tensor.arrangement for tensor in tensors], axis))


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


_MOVES: dict[str, Callable[..., Any]] = {
    "aten._reshape_alias": _view,
    "aten._to_copy": _to_copy,
    "aten._unsafe_view": _view,
    "aten.alias": _same,
    "aten.cat": _cat,
    "aten.clone": _same,
    "aten.detach": _same,
    "aten.permute": _permute,
    "aten.select": _select,
    "aten.slice": _slice,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.squeeze": _squeeze,
    "aten.stack": _stack,
    "aten.t": _t,
    "aten.transpose": _transpose,
    "aten.unbind": _unbind,
    "aten.unsqueeze": _unsqueeze,
    "aten.view": _view,
}

_ATTRIBUTE = "_weight_conversions"  # where loading leaves at a model what it used


class ComputedTensor(Struct, frozen=True):
    """A tensor that a conversion computes."""

    shape: Shape
    dtype: torch.dtype
    sources: tuple[Fqn, ...]  # all live tensors that the conversion is given


def revert_conversions(
    model: Any, tensors: Mapping[Fqn, TracedTensor]
) -> dict[str, TracedTensor | ComputedTensor]:
    """Returns what `save_pretrained` would write, by disk name.

    `tensors`: its tensors, by live name.
    """
    revert = core_model_loading.revert_weight_conversion
    try:
        return dict(revert(model, dict(tensors)))
    except ComputesError:
        pass
    left = vars(model).get(_ATTRIBUTE)
    conversions = left
    if conversions is None:  # loading left none: those of its class
        # The prefix in the files of a model that was never loaded is unknown.
        prefixes = getattr(core_model_loading, "PrefixChange", ())
        of_class = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in of_class if not isinstance(entry, prefixes)]
    watched = []
    for entry in conversions:
        is_converter = isinstance(entry, WeightConverter)
        watched.append(copy.copy(entry) if is_converter else entry)
        if is_converter:
            watched[-1].operations = [_Watched(entry.operations)]
    setattr(model, _ATTRIBUTE, watched)
    try:
        return dict(revert(model, dict(tensors)))
    finally:
        setattr(model, _ATTRIBUTE, left)


class _Watched(ConversionOps):  # type: ignore[misc]  # transformers is not followed
    """All operations of a conversion as one, which does not fail where they compute."""

    def __init__(self, operations: Sequence[Any]) -> None:
        self._operations = operations

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    @property
    def supports_many_to_many(self) -> bool:
        return any(getattr(one, "supports_many_to_many", False) for one in self._operations)

    @property
    def reverse_op(self) -> _Watched:
        return _Watched([one.reverse_op for one in reversed(self._operations)])

    def convert(self, input_dict: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Converts what traced tensors stand for."""
        try:
            return self._run(_each(input_dict, lambda tensor: tensor), options)
        except ComputesError:
            pass
        try:
            bare = _each(input_dict, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
            made = self._run(bare, options)
        except RuntimeError as error:
            raise CannotPlanError(
                f"a conversion reads elements, so that its result cannot be traced: {error}"
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


def _sources(tensors: Mapping[str, Any]) -> list[Fqn]:
    listed = [value if isinstance(value, list) else [value] for value in tensors.values()]
    return [part.source for each in listed for one in each for part in one.arrangement.parts]
