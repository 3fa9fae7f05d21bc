"""What `save_pretrained` of the installed transformers writes: names, shapes, converted tensors.

A converting program receives a model first, and then groups of tensors, one a line; their elements
are exchanged in files. It ends at the end of its input.

Source: transformers 5.23, `PreTrainedModel.save_pretrained`, and
`convert_and_load_state_dict_in_model` in `core_model_loading.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import CannotPlanError, CkptkitError
from ckptkit.core.index import Fqn, Shape
from ckptkit.hub_names.disk_tensors import Computation, HubNames, HubTensor, NamingRequest
from ckptkit.hub_names.transformers.model_classes import build_model, list_kept, unsaved_names
from ckptkit.hub_names.transformers.tracing import ComputedTensor, TracedTensor, revert_conversions

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
    return HubTensor(name, tensor.shape, tensor.shape, (), Computation(dtype, tensor.sources))


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
