"""Packed weights and adapters by their names: what Transformers would load wrongly, or not at all.

A state dict with packed weights, or with the tensors of an adapter of PEFT, loads without an error
as a model with random weights. Such state dicts are refused unless their raw form is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.plan.peft_names import find_adapter, own_adapters, title_of

PACKED_WEIGHT = "a packed 4-bit or 8-bit weight"
# GPTQ, AWQ and AQLM store their tensors instead of `weight`; bitsandbytes in addition to it; fp8
# and compressed tensors with an ending; MXFP4 with blocks and scales of fused experts.
_IN_PLACE = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|codes|codebooks|weight_packed|weight_shape|weight_scale"
    r"|weight_scale_inv|weight_scale_2|weight_global_scale|weight_zero_point|weight_g_idx"
    r"|input_scale|input_global_scale|input_zero_point|k_scale|v_scale|q_scale|SCB|weight_format"
    r"|activation_scale|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB"
    r"|quant_state\.bitsandbytes__\w+))$"
)
_ENDING = re.compile(r"(_blocks|_scales|_scale_inv|_scale|_packed)$")
# The names of scales: of `x.weight` in fp8 and compressed tensors, and `x.qweight` in GPTQ and AWQ.
_SCALE_ENDINGS = ("_scale", "_scale_inv", "_scale_2", "_scales")
_SCALE = re.compile(r"(.*)(?:_scale|_scale_inv|_scale_2|_scales|\.scales)")
# Layers that have more than one input in every model: with one column, their weight is packed.
_PROJECTION = re.compile(
    r"(\b(q|k|v|o|qkv|gate|up|down|gate_up|out)_proj|\bc_attn|\bc_fc|query_key_value|\bw[123]"
    r"|dense_h_to_4h|dense_4h_to_h)\.weight$"
)
_MATRIX = 2
_PACKED = re.compile(r"\.(quant_state\.bitsandbytes__\w+|absmax|quant_map|SCB)$")


def find_dense_name(name: str) -> str:
    """Returns the name of the weight that a packed tensor stands for, or belongs to.

    >>> find_dense_name("layers.0.q_proj.qweight"), find_dense_name("layers.0.q_proj.weight.absmax")
    ('layers.0.q_proj.weight', 'layers.0.q_proj.weight')
    >>> find_dense_name("mlp.experts.down_proj_blocks"), find_dense_name("norm.weight")
    ('mlp.experts.down_proj', 'norm.weight')
    """
    dense = _IN_PLACE.sub(".weight", name)
    return dense if dense != name else _ENDING.sub("", name)


def looks_packed(name: str, shape: Shape, dtype: str = "") -> bool:
    """Returns whether a tensor seems to be a packed weight, or stored with one.

    >>> looks_packed("layers.0.q_proj.weight", (2048, 1)), looks_packed("score.weight", (2, 1))
    (True, False)
    >>> looks_packed("fc1.weight", (64, 64), "int8"), looks_packed("mask", (64, 64), "int8")
    (True, False)
    """
    in_one_column = shape[1:] == (1,) and shape[0] > 1 and _PROJECTION.search(name)
    of_bytes = len(shape) == _MATRIX and dtype in {"int8", "uint8"} and name.endswith(".weight")
    return bool(in_one_column or of_bytes or _PACKED.search(name))


def explain_random_weights(
    tensors: Iterable[tuple[str, Shape, str]],
    *,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Explains why Transformers would load another model without an error; empty if it would not.

    Bytes that have a scale are known to Transformers, as in compressed tensors.

    Args:
        tensors: Names, shapes and element types of a whole model.
        config: The model's configuration: adapters that it declares are a part of the model.
    """
    rows = list(tensors)
    sign = find_adapter((name for name, _, _ in rows), own_adapters(config))
    if sign is not None:
        return random_weights_message(sign.name, title_of(sign.method))
    return _explain_packed(rows)


def _explain_packed(tensors: Sequence[tuple[str, Shape, str]]) -> str:
    names = {name for name, _, _ in tensors}
    for name, shape, dtype in tensors:
        is_scaled = any(name + end in names for end in _SCALE_ENDINGS)
        if looks_packed(name, shape, "" if is_scaled else dtype):
            return random_weights_message(name, PACKED_WEIGHT)
    return ""


def random_weights_message(name: str, what: str) -> str:
    """Explains why a state dict with tensor `name` is no model that Transformers loads."""
    return (
        f"tensor {name!r} belongs to {what}; under these names Transformers would load a"
        " model with random weights"
    )


def refuse_random_weights(
    entries: Iterable[TensorEntry],
    *,
    location: str,
    advice: str = "",
    config: Mapping[str, Any] | None = None,
) -> None:
    """Refuses adapters and packed weights, which load as another model without an error.

    Args:
        entries: What would be written.
        location: The source, for messages.
        advice: What to do instead, for the hint.
        config: See `explain_random_weights`.
    """
    if reason := explain_random_weights(map(_describe, entries), config=config):
        raise RefusedError(reason, where=location, hint=hint_at_raw_names(advice))


def refuse_packed(entries: Iterable[TensorEntry], *, location: str) -> None:
    """Refuses packed weights; see `refuse_random_weights`."""
    if reason := _explain_packed(list(map(_describe, entries))):
        raise RefusedError(reason, where=location, hint=hint_at_raw_names())


def _describe(entry: TensorEntry) -> tuple[str, Shape, str]:
    return entry.name, entry.shape, entry.dtype.name


def hint_at_raw_names(advice: str = "") -> str:
    """Returns a hint that ends with the option that writes the raw state dict."""
    raw = "pass --names live to write the raw state dict all the same"
    return f"{advice}; {raw}" if advice else raw


def is_quantized(name: Fqn, names: Mapping[Fqn, DType]) -> bool:
    scale = _SCALE.fullmatch(name)
    if scale is not None:
        base = names.get(Fqn(scale[1]), names.get(Fqn(f"{scale[1]}.qweight")))
        return base is not None and (base.itemsize == 1 or base.kind == "int")
    return names[name].itemsize == 1 and any(Fqn(name + end) in names for end in _SCALE_ENDINGS)
