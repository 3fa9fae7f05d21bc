"""How many parameters a stored tensor stands for, and what it is where its name and shape say so.

Source: bitsandbytes 0.50, `functional.py` (two codes of 4 bits in a byte, in a column of any
element type); AutoGPTQ and AutoAWQ, whose `qweight` and `qzeros` pack as many numbers into 32 bits;
compressed-tensors, `pack-quantized` (`weight_packed` by columns, `weight_zero_point` by rows) and
`nvfp4-pack-quantized` (two in a byte); openai/gpt-oss, MXFP4 (`_blocks`); peft,
`tuners/lora/layer.py` (A has the rank first, B second).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.index import Shape
from ckptkit.plan.weight_kinds import find_dense_name, looks_packed

_FACTOR = re.compile(r"(?:^|\.)lora_(?:embedding_)?([AB])(?:\.|$)")
_MATRIX = 2
_WORD_BITS = 32
_BITS = (2, 3, 4, 8)
# What is stored with a packed weight, by the ending of its name.
_COMPANIONS = (
    ("scales", re.compile(r"(\.(nested_)?absmax|\.SCB|[._]scales?(_inv|_2)?)$")),
    ("zero points", re.compile(r"(\.qzeros|_zero_point)$")),
    (
        "settings",
        re.compile(
            r"(\.(nested_)?quant_map|\.quant_state\.bitsandbytes__\w+|_shape|g_idx|\.weight_format)$"
        ),
    ),
)
FOUR_BIT = "4-bit"
_BASE_LAYER = ".base_layer."
_STATE = "quant_state.bitsandbytes__"


class StoredWeight(Struct, frozen=True):
    """What a stored tensor is."""

    parameters: int  # how many parameters of the model it holds; none for scales
    label: str = ""  # such as `4-bit`, `scales` or `rank 8`; empty for a plain tensor


def describe_stored(tensors: Iterable[tuple[str, Shape, str]]) -> dict[str, StoredWeight]:
    """Describes the tensors of one model.

    `tensors`: names, shapes and element types.

    >>> found = describe_stored([("q_proj.weight", (8, 1), "uint8"), ("q_proj.lora_A", (4, 3), "")])
    >>> found["q_proj.weight"], found["q_proj.lora_A"]
    (StoredWeight(parameters=16, label='4-bit'), StoredWeight(parameters=12, label='rank 4'))
    """
    rows = list(tensors)
    groups: dict[str, dict[str, Shape]] = {}
    for name, shape, _ in rows:
        groups.setdefault(find_dense_name(name), {})[name] = shape
    return {
        name: _describe(name, shape, dtype, groups[find_dense_name(name)])
        for name, shape, dtype in rows
    }


def _describe(name: str, shape: Shape, dtype: str, group: Mapping[str, Shape]) -> StoredWeight:
    """Describes a tensor; `group` has the shapes of all that are stored for its weight."""
    elements = math.prod(shape)
    factor = _FACTOR.search(name)
    if factor is not None and len(shape) >= _MATRIX:
        return StoredWeight(elements, f"rank {shape[0 if factor[1] == 'A' else 1]:,}")
    if len(group) > 1:
        for label, ending in _COMPANIONS:
            if ending.search(name):
                return StoredWeight(0, label)
    labels = {label for label, ending in _COMPANIONS if any(map(ending.search, group))}
    if name.endswith(".qweight"):
        bits = _find_bits(group, "qzeros", "scales", 1)
        return StoredWeight(elements * _WORD_BITS // bits if bits else elements, _bits_text(bits))
    is_eight_bit = any(other.endswith("SCB") for other in group)
    if any(_STATE in other for other in group) or (not is_eight_bit and _is_column(name, shape)):
        return StoredWeight(2 * elements * dtype_named(dtype).itemsize, FOUR_BIT)
    is_paired = (
        name.endswith(("_blocks", "weight_packed")) or f"{name}_scale_2" in group
    ) and "scales" in labels
    if is_paired and dtype == "uint8":
        return StoredWeight(2 * elements, FOUR_BIT)
    if name.endswith("weight_packed"):  # without zero points, the configuration alone has the bits
        bits = _find_bits(group, "weight_zero_point", "weight_scale", 0)
        return StoredWeight(elements * _WORD_BITS // bits if bits else elements, _bits_text(bits))
    if "scales" in labels and dtype in {"int8", "uint8"}:
        return StoredWeight(elements, _bits_text(8))
    return StoredWeight(elements)


def _bits_text(bits: int) -> str:
    return f"{bits}-bit" if bits else "packed"


def _is_column(name: str, shape: Shape) -> bool:
    """Returns whether a weight is packed by its shape, also where PEFT has it as `base_layer`."""
    if shape[1:] != (1,):
        return False
    return looks_packed(name.replace(_BASE_LAYER, "."), shape) or (
        _BASE_LAYER in name and name.endswith(".weight") and shape[0] > 1
    )


def _find_bits(group: Mapping[str, Shape], zeros: str, scales: str, packed: int) -> int:
    """Returns the bits of a number where zero points show them, else 0.

    `group`: shapes of what is stored for a weight, by name. `zeros`: how the name of its zero
    points ends, which are packed as the weight is. `scales`: how that of its scales ends. `packed`:
    the dimension in which zero points are packed.
    """
    first, second = (
        next((shape for name, shape in group.items() if name.endswith(f".{ending}")), ())
        for ending in (zeros, scales)
    )
    if len(first) != _MATRIX or len(second) != _MATRIX or not second[packed]:
        return 0
    bits = _WORD_BITS * first[packed] // second[packed]
    return bits if bits in _BITS and bits * second[packed] == _WORD_BITS * first[packed] else 0
