"""Scales of packed 4-bit weights, without which a saved weight cannot be unpacked.

They are attributes of the packed parameter, which writes them into the state dict. Wrapping the
model in FSDP2, or in FSDP1's flat parameters, makes a plain parameter of it: the state dict lacks
the scales then, and the module still has them.

`QuantState.as_dict(packed=True)` of bitsandbytes makes two tensors anew: the JSON with block sizes
and the offset of nested scales, whose length depends on the digits of the offset, and
`nested_quant_map`. What is read into these reaches no weight. So these scales, and those that the
state dict lacks, are read apart, compared with how the live weight was packed, and put in place.

Source: bitsandbytes/functional.py (`QuantState`), utils.py (`pack_dict_to_tensor`) and
nn/modules.py (`Params4bit`, `fix_4bit_weight_quant_state_from_module`) of 0.50.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict, replace
from torch import nn

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Span, TensorEntry, TensorIndex
from ckptkit.engine.reader import Origin, read_span
from ckptkit.lora.quantized import FourBitState
from ckptkit.storage.base import Source
from ckptkit.training.step_names import clean_fqn

_JSON, _TABLE = "quant_state.", "nested_quant_map"
_MOST_JSON_BYTES = 1 << 16  # real ones have up to 300

StoredScale = tuple[TensorIndex, Source, TensorEntry]


ScalePlan = tuple[list[str], list[Callable[[], object]]]
"""How weights were packed otherwise than the live ones; what puts scales in place once all fits."""


def is_made_anew(key: str) -> bool:
    """Whether a state dict has a new tensor under the name of a scale."""
    return key.startswith((_JSON, _TABLE))


def scale_names(packed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the names of weights and their scales, such as ("a.weight", "absmax")."""
    for weight, state in packed.items():
        yield from ((weight, key) for key in _tensors_of(state))


def plan_scales(packed: Mapping[str, Any], stored: Mapping[str, StoredScale]) -> ScalePlan:
    """Reads scales that nothing else fills, and compares how weights were packed."""
    problems: list[str] = []
    changes: list[Callable[[], object]] = []
    for weight, state in packed.items():
        live = _tensors_of(state)
        for key, tensor in live.items():
            name = f"{weight}.{key}"
            if name not in stored:
                continue
            index, source, entry = stored[name]
            if key.startswith(_JSON):
                _plan_json((problems, changes), name, (state, tensor), stored[name])
                continue
            target = state.state2.code if key == _TABLE else tensor
            if str(tensor.dtype) != f"torch.{entry.dtype.name}" or tensor.shape != entry.shape:
                problems.append(
                    f"{name}: {entry.dtype.name} {list(entry.shape)} was found, and the model has"
                    f" {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                )
                continue
            data = torch.frombuffer(_read(index, source, entry), dtype=torch.uint8)
            changes.append(partial(target.copy_, data.view(tensor.dtype).reshape(tensor.shape)))
    return problems, changes


def _tensors_of(state: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.as_dict(packed=True).items() if isinstance(v, torch.Tensor)}


def _plan_json(
    plan: ScalePlan, name: str, live: tuple[Any, torch.Tensor], stored: StoredScale
) -> None:
    """Compares the JSON of a live state with the stored one, and plans to take its offset."""
    (problems, changes), (state, json) = plan, live
    index, source, entry = stored
    if entry.dtype.name != "uint8" or entry.size_bytes > _MOST_JSON_BYTES:
        raise FormatError(
            f"{entry.size_bytes:,} bytes of {entry.dtype.name} were found where JSON in uint8 was"
            f" expected, {_MOST_JSON_BYTES:,} bytes at most",
            where=entry.name,
        )
    theirs = FourBitState.parse(bytes(_read(index, source, entry)), where=entry.name)
    own = FourBitState.parse(bytes(json.cpu().numpy()), where="the model's quantization state")
    found, expected = (asdict(replace(one, nested_offset=0.0)) for one in (theirs, own))
    apart = [key for key in expected if found[key] != expected[key]]
    problems.extend(
        f"{name}: {key} {found[key]!r} was found, and the model has {expected[key]!r}"
        for key in apart
    )
    if theirs.nested_blocksize and not apart:
        changes.append(partial(_put_offset, state, theirs.nested_offset))


def _read(index: TensorIndex, source: Source, entry: TensorEntry) -> bytearray:
    return read_span(Origin("source", source, index), entry, Span(0, entry.elements))


def _put_offset(state: Any, offset: float) -> None:
    state.offset = torch.full_like(state.offset, offset)  # weights may share the old one


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
