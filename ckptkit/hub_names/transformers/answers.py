"""What `save_pretrained` of the installed transformers would make of a model's tensors.

Source: transformers 5.23, `PreTrainedModel.save_pretrained`, and
`convert_and_load_state_dict_in_model` in `core_model_loading.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, Shape
from ckptkit.hub_names.names import Computation, HubNames, HubTensor, NamingRequest
from ckptkit.hub_names.transformers.models import build_model
from ckptkit.hub_names.transformers.tracing import ComputedTensor, TracedTensor, reverted

Specs = Mapping[Fqn, tuple[DType, Shape]]


def answer(request: NamingRequest, conversions: Sequence[Any] | None = None) -> HubNames:
    """Finds out what the tensors of a model become on disk.

    Args:
        request: The model and its tensors.
        conversions: Those that loading left at the model, where it is known; None leaves them to
            the names of the base.
    """
    model = model_of(request, conversions)
    own = _own_tensors(model)
    live = own if request.tensors is None else _traced(request.tensors)
    unknown = live.keys() - model.state_dict().keys()
    ignored = set(model._keys_to_ignore_on_save or ())  # noqa: SLF001  as saving does
    saved = {name: tensor for name, tensor in live.items() if name not in ignored}
    is_done = bool(unknown) and _is_of_disk(live, own, model)
    disk = saved if is_done else reverted(model, saved)
    return HubNames(
        library=transformers.__version__,
        live={name: tuple(tensor.shape) for name, tensor in live.items()},
        tensors={Fqn(n): _described(Fqn(n), tensor) for n, tensor in disk.items()},
        unsaved=tuple(name for name in live if name in ignored),
        unknown=() if is_done else tuple(sorted(unknown)),
    )


def model_of(request: NamingRequest, conversions: Sequence[Any] | None = None) -> Any:
    """Returns a model without weights that reverts the conversions as the one in question does.

    Args:
        request: The model and its tensors.
        conversions: Those that loading left at it, where they are known.
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


def _described(name: Fqn, tensor: TracedTensor | ComputedTensor) -> HubTensor:
    if isinstance(tensor, TracedTensor):
        return tensor.arrangement.to_tensor(name)
    dtype = dtype_named(str(tensor.dtype).removeprefix("torch."))
    return HubTensor(name, tensor.shape, tensor.shape, (), Computation(dtype, tensor.sources))


def _is_of_disk(given: Mapping[Fqn, TracedTensor], own: Mapping[Fqn, Any], model: Any) -> bool:
    disk = reverted(model, own).keys()
    return bool(given.keys() & (disk - own.keys())) and not given.keys() & (own.keys() - disk)


def _traced(tensors: Specs) -> dict[Fqn, TracedTensor]:
    return {
        name: TracedTensor.of_live(name, shape, torch_dtype(dtype))
        for name, (dtype, shape) in tensors.items()
    }


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
    first releases of transformers 5 do not tell which were used: None, as of a new model.
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
