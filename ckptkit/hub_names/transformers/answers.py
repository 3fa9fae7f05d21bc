"""What `save_pretrained` of the installed transformers writes: names, shapes, converted tensors.

A converting program receives a model first, and then groups of tensors, one a line; their elements
are exchanged in files. It ends at the end of its input.

Source: transformers 5.23, `PreTrainedModel.save_pretrained`, and
`convert_and_load_state_dict_in_model` in `core_model_loading.py`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, Self

import torch
import transformers
from msgspec import Struct
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import CannotPlanError, CkptkitError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.core.index import Fqn, Shape
from ckptkit.hub_names.disk_tensors import Computation, HubNames, HubTensor, NamingRequest
from ckptkit.hub_names.transformers.model_classes import build_model, list_kept, unsaved_names

Specs = Mapping[Fqn, tuple[DType, Shape]]


def answer_names(request: NamingRequest, conversions: Sequence[Any] | None = None) -> HubNames:
    """Finds out what the tensors of a model become on disk.

    `request`: the model and its tensors. `conversions`: those that loading left at the model, where
    it is known; None leaves them to the names of the base.
    """
    model = build_asked_model(request, conversions)
    own = _own_tensors(model)
    live = own
    if request.tensors is not None:
        live = {
            name: TracedTensor.of_live(name, shape, torch_dtype(dtype))
            for name, (dtype, shape) in request.tensors.items()
        }
    unknown = live.keys() - model.state_dict().keys()
    ignored = unsaved_names(model)
    saved = {name: tensor for name, tensor in live.items() if name not in ignored}
    is_done = False
    if unknown:  # whether they are the names on disk
        of_disk = revert_conversions(model, own).keys()
        is_done = bool(live.keys() & (of_disk - own.keys()))
        is_done = is_done and not live.keys() & (own.keys() - of_disk)
    disk = saved if is_done else revert_conversions(model, saved)
    return HubNames(
        library=transformers.__version__,
        live={name: tuple(tensor.shape) for name, tensor in live.items()},
        tensors={Fqn(n): _describe(Fqn(n), tensor) for n, tensor in disk.items()},
        unsaved=tuple(name for name in live if name in ignored),
        unknown=() if is_done else tuple(sorted(unknown)),
        kept=list_kept(model),
        tied=tuple(map(Fqn, model.all_tied_weights_keys)),
    )


def build_asked_model(request: NamingRequest, conversions: Sequence[Any] | None = None) -> Any:
    """Returns a model without weights that reverts the conversions as the one in question does.

    `request`: the model and its tensors. `conversions`: those that loading left at it, where they
    are known.
    """
    model = build_model(request.config, list(request.tensors or ()))
    if conversions is None and request.base:
        conversions = _used_by(model, request.base)
    if conversions is not None:
        model._weight_conversions = list(conversions)  # noqa: SLF001  as loading does
    return model


def torch_dtype(dtype: DType) -> torch.dtype:
    """Returns an element type as torch has it."""
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise CannotPlanError(f"torch {torch.__version__} has no element type {dtype.name}")
    return found


def _describe(name: Fqn, tensor: TracedTensor | ComputedTensor) -> HubTensor:
    if isinstance(tensor, TracedTensor):
        return HubTensor.of(name, tensor.arrangement)
    dtype = dtype_named(str(tensor.dtype).removeprefix("torch."))
    return HubTensor(name, tensor.shape, (), Computation(dtype, tensor.sources))


def _own_tensors(model: Any) -> dict[Fqn, TracedTensor]:
    """Returns what a model holds, without the names that it ties to others."""
    tied = model.all_tied_weights_keys
    return {
        Fqn(name): TracedTensor.of_live(Fqn(name), tuple(tensor.shape), tensor.dtype)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def _used_by(model: Any, base: Sequence[Fqn]) -> list[Any] | None:
    """Returns the conversions that loading the base's tensors would have used.

    `from_pretrained` leaves them at the model, and `save_pretrained` reverts those alone. The
    first releases of transformers 5 do not record which were used: None, as for a new model.
    """
    if not hasattr(WeightRenaming, "was_used"):
        return None
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    for name in sorted(base, key=dot_natural_key):
        rename_source_key(name, renamings, converters, model.base_model_prefix, own)
    return [entry for entry in conversions if entry.was_used()]


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Converts groups until there is no further one.

    `requests`: a naming request, and then groups, one JSON value a line. `replies`: takes an answer
    for each group, one JSON value a line.
    """
    model = build_asked_model(NamingRequest.from_json(requests.readline()))
    for line in requests:
        try:
            answer = convert_group(model, json.loads(line))
        except CkptkitError as error:
            answer = {"error": error.to_json()}
        replies.write(json.dumps(answer).encode() + b"\n")
        replies.flush()


@torch.no_grad()
def convert_group(model: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Converts one group.

    `model`: the model without weights. `group`: `inputs`, rows of name, element type, shape and
    file; `outputs`, rows of name and file. Returns `outputs`, rows of name, element type and shape
    of the contents of their files.
    """
    tensors = {name: _map_file(*row) for name, *row in group["inputs"]}
    found = revert_weight_conversion(model, tensors)
    files = dict(group["outputs"])
    for name, tensor in found.items():
        if name in files:
            bare = tensor.contiguous().reshape(-1).view(torch.uint8)
            Path(files[name]).write_bytes(memoryview(bare.numpy()))
    return {
        "outputs": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in found.items()
        ]
    }


def _map_file(dtype: str, shape: list[int], path: str) -> torch.Tensor:
    """Returns a tensor that is mapped from a file; changes do not reach the file."""
    kind = dtype_named(dtype)
    size = math.prod(shape) * kind.itemsize
    if not size:
        return torch.empty(shape, dtype=torch_dtype(kind))
    held = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    return held.view(torch_dtype(kind)).reshape(shape)


# Conversions of transformers, run backwards on tensors without elements
#
# A traced tensor records where its elements would have come from. Conversions are run on such
# tensors as they are, and arrive here as operations of ATen. Those that move elements are
# followed element by element. Any other is refused, so that a conversion that computes is never
# taken for one that only moves: it is run once more on tensors that have a dtype and a shape
# alone, which shows its sources and its results as a whole.
#
# Source: the schemas in PyTorch's `aten/src/ATen/native/native_functions.yaml`; transformers
# 5.23, `revert_weight_conversion` and `WeightConverter` in `core_model_loading.py`.


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
    return [source for each in listed for one in each for source, _ in one.arrangement.parts]
