"""The pickles of `torch.save`, written opcode by opcode so that torch is not needed.

Sources: torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3` and torch/serialization.py
`persistent_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.geometry import row_major_strides
from ckptkit.layouts.opcodes import (
    call,
    global_name,
    integer,
    items,
    mapping,
    numbers,
    pickled,
    scalar,
    sequence,
    text,
)
from ckptkit.planning.plan import TensorSpec


def tensor(spec: TensorSpec, storage: str) -> bytes:
    """Pushes a dense tensor that fills the storage record `data/{storage}`."""
    dtype = spec.dtype
    name = dtype.storage or "UntypedStorage"
    module = "torch" if dtype.storage else "torch.storage"
    length = spec.elements if dtype.storage else spec.size_bytes
    identity = sequence(
        [text("storage"), global_name(module, name), text(storage), text("cpu"), integer(length)]
    )
    arguments = [
        identity + b"Q",
        integer(0),
        numbers(spec.shape),
        numbers(row_major_strides(spec.shape)),
        b"\x89",
        call(global_name("collections", "OrderedDict"), b")"),
    ]
    if dtype.storage:
        return call(global_name("torch._utils", "_rebuild_tensor_v2"), sequence(arguments))
    arguments.append(global_name("torch", dtype.name))
    return call(global_name("torch._utils", "_rebuild_tensor_v3"), sequence(arguments))


def state_dict_pickle(specs: Sequence[TensorSpec]) -> bytes:
    """Returns `data.pkl` of a state dict whose tensors lie in the records 0, 1 and so on."""
    items = [(text(spec.name), tensor(spec, str(i))) for i, spec in enumerate(specs)]
    return pickled(mapping(items))


def tensor_pickle(spec: TensorSpec) -> bytes:
    """Returns `data.pkl` of a single tensor in the record 0."""
    return pickled(tensor(spec, "0"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor among plain values, which fills the storage record `data/{storage}`."""

    spec: TensorSpec
    storage: str


def value_opcodes(value: Any) -> bytes:
    """Pushes a plain value: numbers, texts, None, and tuples, lists and dictionaries of them.

    Args:
        value: `Stored` tensors may be in it.

    Raises:
        TypeError: If something else is.
    """
    if isinstance(value, Stored):
        return tensor(value.spec, value.storage)
    if isinstance(value, dict):
        return mapping([(scalar(key), value_opcodes(inner)) for key, inner in value.items()])
    if isinstance(value, list):
        return items(map(value_opcodes, value))
    if isinstance(value, tuple):
        return sequence(map(value_opcodes, value))
    return scalar(value)
