"""DTensors and ShardedTensors in pickles, as inert values.

No DTensor is built: its local tensor, mesh and placements are kept as they were pickled, and parsed
by `ckptkit.formats.ranks.dtensor`.

Source: torch/_tensor.py (`_rebuild_from_type_v2`), torch/_utils.py (`_rebuild_wrapper_subclass`),
torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py, torch/distributed/device_mesh.py,
torch/distributed/_shard/sharded_tensor/{api,metadata,shard}.py; torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import is_count
from ckptkit.formats.pickle.machine import Global, InertObject
from ckptkit.formats.pickle.torch_values import (
    TensorRef,
    UnreadTensor,
    rebuild_from_type,
    shape_and_dtype,
)
from ckptkit.formats.trees import TRAINING_VALUES

_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_TORCH = "torch.distributed."  # where the classes are has changed several times


class DTensorRef(Struct, frozen=True):
    """A DTensor as one rank has it."""

    local: TensorRef
    shape: Shape  # of the whole tensor
    spec: InertObject  # its mesh and placements, as they were pickled

    @property
    def dtype(self) -> DType:
        return self.local.dtype


class ShardRef(Struct, frozen=True):
    """A shard of a ShardedTensor: a tensor, and its offsets in the whole tensor."""

    tensor: TensorRef
    offsets: Shape


class ShardedTensorRef(Struct, frozen=True):
    """A ShardedTensor as one rank has it."""

    shards: tuple[ShardRef, ...]  # the shards of this rank; none if it got no rows
    shape: Shape  # of the whole tensor
    dtype: DType
    rank: int  # the rank that pickled it, as stored in the pickle
    world_size: int  # the number of ranks of its run


def fields_of(value: object, what: str) -> Mapping[Any, Any]:
    """Returns the attributes of an inert object, with slots or with a dictionary."""
    state = value.state if isinstance(value, InertObject) else None
    if isinstance(state, tuple):
        state = _join_slots(state)
    if not isinstance(state, dict):
        raise FormatError(f"{what} has no attributes that can be read")
    return state


def _join_slots(state: tuple[object, ...]) -> dict[Any, Any] | None:
    """Joins the two parts of the state of a class with slots: its dictionary, and its slots."""
    match state:
        case (None, dict(slots)):
            return slots
        case (dict(own), None):
            return own
        case (dict(own), dict(slots)):
            return {**own, **slots}
    return None


def _rebuild_from_type(*args: object) -> object:
    match args:
        case (Global() as function, Global() as cls, tuple(inner), state) if (
            function == _WRAPPER and cls.module.startswith(_TORCH)
        ):
            if cls.name == "DTensor":
                return _dtensor(inner, state)
            if cls.name == "ShardedTensor":
                return _sharded_tensor(inner, state)
    return rebuild_from_type(*args)


def _dtensor(inner: tuple[object, ...], state: object) -> DTensorRef | UnreadTensor:
    shape, dtype = shape_and_dtype(inner)
    fields = _join_slots(state) if isinstance(state, tuple) else state
    if not isinstance(fields, dict):
        raise FormatError("DTensor has no attributes that can be read")
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    if isinstance(local, UnreadTensor):
        return local
    if not isinstance(local, TensorRef) or not isinstance(spec, InertObject):
        raise FormatError("DTensor has no local tensor, or no specification")
    if local.dtype != dtype or len(local.shape) != len(shape):
        raise FormatError(
            f"DTensor of {dtype.name} {list(shape)} has {local.dtype.name} {list(local.shape)}"
            " on its rank"
        )
    return DTensorRef(local, shape, spec)


def _sharded_tensor(inner: tuple[object, ...], state: object) -> ShardedTensorRef:
    shape, dtype = shape_and_dtype(inner)
    match state:
        case (list(shards), InertObject(), InertObject() as group, _, _):
            fields = fields_of(group, "process group of a ShardedTensor")
        case _:
            raise FormatError("ShardedTensor has a state that torch does not write")
    rank, size = fields.get("global_rank"), fields.get("global_world_size")
    if not is_count(rank) or not is_count(size):
        raise FormatError("ShardedTensor does not contain the rank that wrote it")
    parsed = tuple(_shard(shard, shape, dtype) for shard in shards)
    return ShardedTensorRef(parsed, shape, dtype, rank, size)


def _shard(value: object, shape: Shape, dtype: DType) -> ShardRef:
    fields = fields_of(value, "shard")
    tensor, metadata = (
        fields.get("tensor"),
        fields_of(fields.get("metadata"), "metadata of a shard"),
    )
    offsets, sizes = metadata.get("shard_offsets"), metadata.get("shard_sizes")
    if not isinstance(tensor, TensorRef) or tensor.dtype != dtype:
        raise FormatError(f"shard of a tensor of {dtype.name} holds something else")
    if not isinstance(offsets, (list, tuple)) or not all(map(is_count, offsets)):
        raise FormatError("shard has offsets that are not natural numbers")
    ends = [at + size for at, size in zip(offsets, tensor.shape, strict=False)]
    fits = len(offsets) == len(tensor.shape) == len(shape)
    if not fits or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise FormatError(f"shard is outside its tensor of shape {list(shape)}")
    if not isinstance(sizes, (list, tuple)) or tuple(sizes) != tensor.shape:
        raise FormatError(f"shard of shape {list(tensor.shape)} has another size in its metadata")
    return ShardRef(tensor, tuple(offsets))


SHARDED_ALLOWED: Mapping[tuple[str, str], object] = {
    **TRAINING_VALUES,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
}
"""What is made of globals in a pickle with distributed tensors, as in `parse_pickle`."""


def class_of(value: object) -> str:
    """Returns the name of an object's class, with its module if it is not torch's."""
    if not isinstance(value, InertObject):
        return quote(type(value).__name__)
    return value.cls.name if value.cls.module.startswith(_TORCH) else quote(str(value.cls))
