"""The scales of packed 4-bit weights, without which nobody can unpack what was saved.

They are attributes of the packed parameter, which writes them into the state dict. Wrapping the
model in FSDP2, or in FSDP1's flat parameters, makes a plain parameter of it, and the scales are
lost to the state dict; the module has them still.

Source: bitsandbytes/nn/modules.py (`Params4bit`, `fix_4bit_weight_quant_state_from_module`) and
functional.py (`QuantState`) of 0.50.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckptkit.training.names import clean_fqn

_SCALE = re.compile(
    r"(?P<weight>.+)\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)"
)


def packed_weights(model: nn.Module, parallel: Sequence[str]) -> dict[str, Any]:
    """Returns how the 4-bit weights of a model were packed, by their names.

    Args:
        model: Wrapped or not.
        parallel: What `names.parallel_prefixes` returned for it.
    """
    return {
        clean_fqn(f"{raw}.weight" if raw else "weight", parallel): state
        for raw, module in model.named_modules(remove_duplicate=False)
        if (state := _state_of(module)) is not None
    }


def lost_scales(
    packed: Mapping[str, Any], known: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what bitsandbytes would have written into a state dict, and has not.

    Args:
        packed: What `packed_weights` returned.
        known: The names in the state dict.
    """
    for name, state in packed.items():
        for key, value in state.as_dict(packed=True).items():
            if isinstance(value, torch.Tensor) and f"{name}.{key}" not in known:
                yield f"{name}.{key}", value


def lasting_scales(packed: Mapping[str, Any]) -> frozenset[int]:
    """Returns the identities of the tensors that are there from one state dict to the next."""
    states = [one for state in packed.values() for one in (state, state.state2) if one is not None]
    return frozenset(id(tensor) for one in states for tensor in (one.absmax, one.code))


def is_scale(key: str, tensors: Container[str]) -> bool:
    """Tells whether a tensor belongs to a packed weight among others.

    >>> is_scale("a.weight.absmax", {"a.weight"}), is_scale("a.absmax", {"a.weight"})
    (True, False)
    """
    match = _SCALE.fullmatch(key)
    return match is not None and match["weight"] in tensors


def _state_of(module: nn.Module) -> Any:
    """Returns how a module's weight was packed, None where it was not, or is another one now."""
    state = vars(module).get("quant_state")
    if state is None or not hasattr(state, "as_dict"):
        return None
    if getattr(state, "packing_format_for_cpu", False):
        return None  # an evaluation on a CPU has rounded the scales, and changed their order
    weight = getattr(module, "weight", None)
    if getattr(weight, "quant_state", None) is state:
        return state
    if not isinstance(weight, torch.Tensor) or state.shape is None:
        return None
    packed_bytes = -(-math.prod(state.shape) // 2)
    return state if weight.numel() * weight.element_size() == packed_bytes else None
