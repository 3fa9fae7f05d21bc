"""What pickles say of tensors that are spread over ranks: DTensors and ShardedTensors, inert.

Nothing of a DTensor is built: its local tensor, its mesh and its placements are kept as the pickle
has them, and looked at by `dtensor_places`. Names that moved between releases are all known.

Source: torch/_tensor.py (`_rebuild_from_type_v2`), torch/_utils.py (`_rebuild_wrapper_subclass`),
torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py, torch/distributed/device_mesh.py,
torch/distributed/_shard/sharded_tensor/{api,metadata,shard}.py; torch 2.1 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import FormatError, UnsafePickleError, UnsupportedError
from ckptkit.core.index import Shape
from ckptkit.formats.pickle.pickles import Builder, Global, InertObject, shown
from ckptkit.formats.pickle.torch_values import (
    ALLOWED,
    MAX_DIMENSIONS,
    DTypeName,
    TensorRef,
    rebuild_tensor_v2,
)

_MAX_BYTES = 2**63 - 1
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_PLAIN = Global("torch._utils", "_rebuild_tensor_v2")
_TENSOR = Global("torch", "Tensor")
_SHARDED = "torch.distributed._shard.sharded_tensor"
_GROUP_STATE = "ShardedTensor.ProcessGroupState"
_DTENSOR_HOMES = (
    *("torch.distributed.tensor", "torch.distributed.tensor._api"),
    *("torch.distributed._tensor", "torch.distributed._tensor.api"),
)
_SPEC_HOMES = (
    *("torch.distributed.tensor._dtensor_spec", "torch.distributed.tensor.placement_types"),
    *("torch.distributed._tensor._dtensor_spec", "torch.distributed._tensor.placement_types"),
)
_PLACEMENT_HOMES = (
    *("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"),
)
_MESH_HOMES = ("torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh")


@dataclass(frozen=True, slots=True)
class DTensorRef:
    """A DTensor as one rank has it.

    Attributes:
        local: What lies on this rank.
        shape: Of the whole tensor.
        spec: Its mesh and placements, as the pickle has them.
    """

    local: TensorRef
    shape: Shape
    spec: InertObject

    @property
    def dtype(self) -> DType:
        return self.local.dtype


@dataclass(frozen=True, slots=True)
class ShardRef:
    """A shard of a ShardedTensor: a tensor, and its first element's place in the whole."""

    tensor: TensorRef
    offsets: Shape


@dataclass(frozen=True, slots=True)
class ShardedTensorRef:
    """A ShardedTensor as one rank has it.

    Attributes:
        shards: What lies on this rank; none where it got no rows.
        shape: Of the whole tensor.
        dtype: Element type.
        rank: The rank that pickled it, as it knew itself.
        world_size: The number of ranks of its run.
    """

    shards: tuple[ShardRef, ...]
    shape: Shape
    dtype: DType
    rank: int
    world_size: int


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_BYTES


def fields_of(value: object, what: str) -> Mapping[Any, Any]:
    """Returns the attributes of an inert object, whether it has slots or a dictionary."""
    state = value.state if isinstance(value, InertObject) else None
    if isinstance(state, tuple):
        state = _joined(state)
    if not isinstance(state, dict):
        raise FormatError(f"{what} has no attributes that can be read")
    return state


def _joined(state: tuple[object, ...]) -> dict[Any, Any] | None:
    """Joins what pickle gives for a class with slots: its dictionary, and its slots."""
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
        case (Global() as function, Global() as cls, tuple(inner), state):
            if (function, cls) == (_PLAIN, _TENSOR):  # attributes do not change a tensor's values
                return rebuild_tensor_v2(*inner)
            if function == _WRAPPER and cls.name == "DTensor":
                return _dtensor(inner, state)
            if function == _WRAPPER and cls.name == "ShardedTensor":
                return _sharded(inner, state)
    raise UnsupportedError("tensor is of a class that is not modelled")


def _outside(inner: tuple[object, ...]) -> tuple[Shape, DType]:
    """Returns shape and element type of what `_rebuild_wrapper_subclass` is called for."""
    match inner:
        case (Global(), DTypeName(name), tuple(shape), *_):
            return checked_shape(shape, dtype_named(name)), dtype_named(name)
    raise FormatError("tensor subclass is rebuilt from something that does not describe one")


def checked_shape(shape: Sequence[object], dtype: DType) -> Shape:
    """Returns the shape of a tensor that could be there."""
    if len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        raise FormatError("tensor has sizes that are no natural numbers")
    sizes = tuple(size for size in shape if isinstance(size, int))
    if math.prod(size or 1 for size in sizes) * dtype.itemsize > _MAX_BYTES:
        raise FormatError(f"size of a tensor of shape {list(sizes)} overflows")
    return sizes


def _dtensor(inner: tuple[object, ...], state: object) -> DTensorRef:
    shape, dtype = _outside(inner)
    held = _joined(state) if isinstance(state, tuple) else state
    if not isinstance(held, dict):
        raise FormatError("DTensor has no attributes that can be read")
    local, spec = held.get("_local_tensor"), held.get("_spec")
    if not isinstance(local, TensorRef) or not isinstance(spec, InertObject):
        raise FormatError("DTensor has no local tensor, or no specification")
    if local.dtype != dtype or len(local.shape) != len(shape):
        raise FormatError(
            f"DTensor of {dtype.name} {list(shape)} has {local.dtype.name} {list(local.shape)}"
            " on its rank"
        )
    return DTensorRef(local, shape, spec)


def _sharded(inner: tuple[object, ...], state: object) -> ShardedTensorRef:
    shape, dtype = _outside(inner)
    match state:
        case (list(shards), InertObject(), InertObject() as group, _, _):
            known = fields_of(group, "process group of a ShardedTensor")
        case _:
            raise FormatError("ShardedTensor has another state than torch gives it")
    rank, size = known.get("global_rank"), known.get("global_world_size")
    if not (is_count(rank) and is_count(size) and isinstance(rank, int) and isinstance(size, int)):
        raise FormatError("ShardedTensor does not tell the rank that it is from")
    found = tuple(_shard(shard, shape, dtype) for shard in shards)
    return ShardedTensorRef(found, shape, dtype, rank, size)


def _shard(value: object, shape: Shape, dtype: DType) -> ShardRef:
    held = fields_of(value, "shard")
    tensor, metadata = held.get("tensor"), fields_of(held.get("metadata"), "metadata of a shard")
    offsets, sizes = metadata.get("shard_offsets"), metadata.get("shard_sizes")
    if not isinstance(tensor, TensorRef) or tensor.dtype != dtype:
        raise FormatError(f"shard of a tensor of {dtype.name} holds something else")
    if not isinstance(offsets, (list, tuple)) or not all(map(is_count, offsets)):
        raise FormatError("shard has offsets that are no natural numbers")
    ends = [at + size for at, size in zip(offsets, tensor.shape, strict=False)]
    fits = len(offsets) == len(tensor.shape) == len(shape)
    if not fits or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise FormatError(f"shard lies outside its tensor of shape {list(shape)}")
    if not isinstance(sizes, (list, tuple)) or tuple(sizes) != tensor.shape:
        raise FormatError(f"shard of shape {list(tensor.shape)} has another size in its metadata")
    return ShardRef(tensor, tuple(offsets))


def _getattr(*args: object) -> Global:
    # How python pickles a nested class below protocol 4.
    match args:
        case (Global(module, "ShardedTensor"), "ProcessGroupState"):
            return Global(module, _GROUP_STATE)
    raise UnsafePickleError("pickle looks up an attribute, other than of a ShardedTensor")


def _kept(module: str, name: str) -> Builder:
    cls = Global(module, name)

    def build(*args: object) -> InertObject:
        return InertObject(cls, args)

    return build


_CLASSES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_SPEC_HOMES, ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    (
        _PLACEMENT_HOMES,
        ("Shard", "Replicate", "_StridedShard", "Partial", "_Partial", "_MaskPartial"),
    ),
    (("torch.distributed.tensor._ops._embedding_ops",), ("_MaskPartial", "MaskPartial")),
    (("torch.fx.passes.shape_prop",), ("TensorMetadata",)),
    (_MESH_HOMES, ("DeviceMesh", "_MeshLayout", "_FlatLayout")),
    (("torch.distributed._mesh_layout",), ("_MeshLayout", "_FlatLayout")),
    ((f"{_SHARDED}.shard",), ("Shard",)),
    ((f"{_SHARDED}.metadata",), ("ShardedTensorMetadata", "TensorProperties")),
    ((f"{_SHARDED}.metadata",), ("MEM_FORMAT_ENCODING",)),
    ((f"{_SHARDED}.api",), (_GROUP_STATE,)),
    (("torch.distributed._shard.metadata",), ("ShardMetadata",)),
    (("torch.distributed._shard.sharding_spec.api",), ("EnumerableShardingSpec",)),
    (
        ("torch.distributed._shard.sharding_spec.chunk_sharding_spec",),
        ("ChunkShardingSpec",),
    ),
    (("torch.distributed.remote_device",), ("_remote_device",)),
)
SHARDED_ALLOWED: Mapping[tuple[str, str], object] = {
    **ALLOWED,
    **{(m, n): _kept(m, n) for homes, names in _CLASSES for m in homes for n in names},
    **{(home, "DTensor"): Global(home, "DTensor") for home in _DTENSOR_HOMES},
    (f"{_SHARDED}.api", "ShardedTensor"): Global(f"{_SHARDED}.api", "ShardedTensor"),
    (_WRAPPER.module, _WRAPPER.name): _WRAPPER,
    ("torch", "Tensor"): _TENSOR,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("__builtin__", "getattr"): _getattr,
    ("builtins", "getattr"): _getattr,
}
"""What a pickle with tensors that are spread over ranks may name, and what stands for it."""


def class_of(value: object) -> str:
    return value.cls.name if isinstance(value, InertObject) else shown(type(value).__name__)
