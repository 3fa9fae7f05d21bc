"""Optimizer state that is only valid with one rank's own part of the parameters.

Low-bit optimizers quantise in blocks: the scales belong to runs of elements of the local part,
so that neither they nor the codes have a place in the full tensor. Such state is stored rank by
rank, in its inner plain tensors:

    (…, "rank_bound", "3", "layers.0.weight", "exp_avg", "codes")

and `(…, "rank_layout", "3", "layers.0.weight")` has in JSON which part of each parameter the rank
held, for one optimizer, named by the first of them: stages of a pipeline have several on a rank. It
is restored only on a rank that holds the same parts.

Where each rank has whole parameters, all have the same state, and its keys are under `state` like
those of any other, a composed tensor as its inner ones: (…, "state", "layers.0.weight", "exp_avg",
"codes"). Then `(…, "composed", "layers.0.weight")` has in JSON which class it was of.

Also the scales of packed 4-bit weights, without which a saved weight cannot be unpacked. They are
attributes of the packed parameter, which writes them into the state dict. Wrapping the model in
FSDP2, or in FSDP1's flat parameters, makes a plain parameter of it: the state dict lacks the
scales then, and the module still has them.

Source: bitsandbytes/nn/modules.py (`Params4bit`, `fix_4bit_weight_quant_state_from_module`) and
functional.py (`QuantState`) of 0.50.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.index import KeyPath
from ckptkit.training.state.bound import unwrap_optimizer
from ckptkit.training.state.dtensors import (
    Copies,
    DTensor,
    is_composed,
    unwrap_dtensor,
)
from ckptkit.training.state.pieces import ObjectValue, ShardLayout
from ckptkit.training.state.structures import Leaf, Nodes
from ckptkit.training.step_names import clean_fqn

STATES = "rank_bound"
LAYOUTS = "rank_layout"
COMPOSED = "composed"
_LOW_BITS = 8


class ParameterState(Struct, frozen=True):
    slots: Sequence[ShardLayout]
    leaves: Sequence[Leaf]  # the values in its state, each with the path of names to it
    nodes: Nodes | None = None  # their structure, where their paths do not show it

    @property
    def name(self) -> str:
        return self.slots[0].fqn

    @property
    def sharded(self) -> bool:
        return any(slot.sharded for slot in self.slots)


def is_rank_bound(optimizer: Optimizer, held: Iterable[ParameterState]) -> bool:
    """Whether the state of an optimizer's sharded parameters has no place in full tensors.

    All ranks need the same answer, also one whose parts are too small to be quantised. So low-bit
    optimizers are recognised by their class, and others by any state that has no place.
    """
    return is_low_bit(optimizer) or any(
        isinstance(leaf.value, torch.Tensor) and not _has_place(leaf.value, slot)
        for parameter in held
        if parameter.sharded
        for leaf in parameter.leaves
        for slot in parameter.slots
    )


def is_low_bit(optimizer: Optimizer) -> bool:
    """Whether an optimizer quantises its state in blocks: those of bitsandbytes and torchao.

    Their libraries are not imported for that: their objects have attributes of their own.
    """
    optimizer = unwrap_optimizer(optimizer)
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    if "torchao" in packages:
        block: object = getattr(optimizer, "block_size", None)
        return isinstance(block, int)  # infinite where nothing is quantised
    if "bitsandbytes" in packages:
        return getattr(getattr(optimizer, "args", None), "optim_bits", 0) == _LOW_BITS
    return False


def is_paged(optimizer: Optimizer) -> bool:
    return bool(getattr(unwrap_optimizer(optimizer), "is_paged", False))


def _has_place(tensor: torch.Tensor, slot: ShardLayout) -> bool:
    """Whether the place of a state tensor in the full one follows from the parameter.

    A plain one has a place if it is cut like the parameter, is a single number, or belongs to a
    whole parameter.
    """
    if is_composed(tensor):
        return False
    if isinstance(tensor, DTensor):
        return True
    follows = bool(tensor.dim() and tuple(tensor.shape) == slot.held)
    return follows or tensor.numel() == 1 or (slot.whole and slot.start is None)


def layouts_of(
    held: Iterable[ParameterState], unit: str, path: KeyPath, world: Copies
) -> Iterator[ObjectValue]:
    """Yields a record that lists this rank's parts of sharded parameters and their state."""
    parameters: dict[str, Any] = {}
    for state in held:
        if state.sharded:
            tensors = [leaf for leaf in state.leaves if isinstance(leaf.value, torch.Tensor)]
            kinds = [(leaf.path, kind_of(leaf.value)) for leaf in tensors]
            placed = [
                (leaf.path, leaf.value.shape, list(map(repr, leaf.value.placements)))
                for leaf in tensors
                if isinstance(leaf.value, DTensor)
            ]
            parameters[state.name] = {**part_of(state.slots), "kinds": kinds, "placed": placed}
    if parameters:
        document = {"world_size": world.number, "parameters": parameters}
        key = (*path, LAYOUTS, str(world.own), next(iter(parameters)))
        yield ObjectValue(unit, key, json.dumps(document))


def composed_of(held: ParameterState, unit: str, path: KeyPath) -> Iterator[ObjectValue]:
    """Yields a record of the classes of the composed tensors in a whole parameter's state."""
    kinds = [
        (leaf.path, kind_of(leaf.value))
        for leaf in held.leaves
        if isinstance(leaf.value, torch.Tensor) and is_composed(leaf.value)
    ]
    if kinds and held.slots[0].values.own == 0:
        yield ObjectValue(unit, (*path, COMPOSED, held.name), json.dumps(kinds))


def part_of(slots: Sequence[ShardLayout]) -> dict[str, Any]:
    """Returns, as plain values, which elements of a parameter a rank holds and how."""
    return {
        "names": [slot.fqn for slot in slots],
        "sharded": any(slot.sharded for slot in slots),
        "held": list(slots[0].held),
        "places": [
            [[list(place.offsets), list(place.sizes)] for place in slot.places] for slot in slots
        ],
    }


def kind_of(tensor: torch.Tensor) -> str:
    """Returns what a state tensor is, such as `Tensor`, `DTensor` or `OptimState8bit`."""
    if is_composed(tensor):
        return type(unwrap_dtensor(tensor)).__name__
    return "DTensor" if isinstance(tensor, DTensor) else "Tensor"


def tensor_at(state: Any, names: KeyPath) -> torch.Tensor | None:
    """Returns the tensor at a place in a parameter's state, None where there is none."""
    for name in names:
        if isinstance(state, Mapping):
            state = next((value for key, value in state.items() if str(key) == str(name)), None)
        elif isinstance(state, list) and isinstance(name, int) and name < len(state):
            state = state[name]
        else:
            return None
    return state if isinstance(state, torch.Tensor) else None


_SCALE = re.compile(
    r"(?P<weight>.+)\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)"
)


def packed_weights(model: nn.Module, parallel: Sequence[str]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for raw, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False)).get("weight")
        own = getattr(own, "quant_state", None)
        state = vars(module).get("quant_state") if own is None else own
        if state is None or not hasattr(state, "as_dict"):
            continue
        if getattr(state, "packing_format_for_cpu", False):
            continue  # an evaluation on a CPU has rounded the scales, and changed their order
        weight = getattr(module, "weight", None)
        if getattr(weight, "quant_state", None) is not state:
            if not isinstance(weight, torch.Tensor) or state.shape is None:
                continue
            # It is that of another weight now if the sizes differ.
            if weight.numel() * weight.element_size() != -(-math.prod(state.shape) // 2):
                continue
        packed[clean_fqn(f"{raw}.weight" if raw else "weight", parallel)] = state
    return packed


def lost_scales(
    packed: Mapping[str, Any], names: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what bitsandbytes would have written into a state dict, and has not."""
    for name, state in packed.items():
        for key, value in state.as_dict(packed=True).items():
            if isinstance(value, torch.Tensor) and f"{name}.{key}" not in names:
                yield f"{name}.{key}", value


def lasting_scales(packed: Mapping[str, Any]) -> frozenset[int]:
    nested = [(state, state.state2) for state in packed.values()]
    states = [state for pair in nested for state in pair if state is not None]
    return frozenset(id(tensor) for state in states for tensor in (state.absmax, state.code))


def is_scale(key: str, tensors: Container[str]) -> bool:
    """Returns whether a tensor belongs to a packed weight among others.

    >>> is_scale("a.weight.absmax", {"a.weight"}), is_scale("a.absmax", {"a.weight"})
    (True, False)
    """
    match = _SCALE.fullmatch(key)
    return match is not None and match["weight"] in tensors
