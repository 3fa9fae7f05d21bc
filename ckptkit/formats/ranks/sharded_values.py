"""DTensors and ShardedTensors in pickles, as inert values.

No DTensor is built: its local tensor, mesh and placements are kept as they were pickled, and parsed
by `ckptkit.formats.ranks.dtensor`. Classes that moved between releases of torch are accepted under
all their names.

Source: torch/_tensor.py (`_rebuild_from_type_v2`), torch/_utils.py (`_rebuild_wrapper_subclass`),
torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py, torch/distributed/device_mesh.py,
torch/distributed/_shard/sharded_tensor/{api,metadata,shard}.py; torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import FormatError, UnsafePickleError, UnsupportedError
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count, overflows
from ckptkit.formats.pickle.machine import Global, InertObject
from ckptkit.formats.pickle.torch_values import (
    ALLOWED,
    DTypeName,
    TensorRef,
    inert_value,
    rebuild_tensor_v2,
)

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
        local: The local tensor.
        shape: Of the whole tensor.
        spec: Its mesh and placements, as they were pickled.
    """

    local: TensorRef
    shape: Shape
    spec: InertObject

    @property
    def dtype(self) -> DType:
        return self.local.dtype


@dataclass(frozen=True, slots=True)
class ShardRef:
    """A shard of a ShardedTensor: a tensor, and its offsets in the whole tensor."""

    tensor: TensorRef
    offsets: Shape


@dataclass(frozen=True, slots=True)
class ShardedTensorRef:
    """A ShardedTensor as one rank has it.

    Attributes:
        shards: The shards of this rank; none if it got no rows.
        shape: Of the whole tensor.
        dtype: Element type.
        rank: The rank that pickled it, as stored in the pickle.
        world_size: The number of ranks of its run.
    """

    shards: tuple[ShardRef, ...]
    shape: Shape
    dtype: DType
    rank: int
    world_size: int


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
        case (Global() as function, Global() as cls, tuple(inner), state):
            if (function, cls) == (_PLAIN, _TENSOR):  # attributes do not change a tensor's values
                return rebuild_tensor_v2(*inner)
            if function == _WRAPPER and cls.name == "DTensor":
                return _dtensor(inner, state)
            if function == _WRAPPER and cls.name == "ShardedTensor":
                return _sharded_tensor(inner, state)
    raise UnsupportedError("tensor is of a class that is not modelled")


def _shape_and_dtype(inner: tuple[object, ...]) -> tuple[Shape, DType]:
    """Returns the shape and element type in the arguments of `_rebuild_wrapper_subclass`."""
    match inner:
        case (Global(), DTypeName(name), tuple(shape), *_):
            dtype = dtype_named(name)
        case _:
            raise FormatError(
                "tensor subclass is rebuilt from something that does not describe one"
            )
    if len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        raise FormatError("tensor has sizes that are not natural numbers")
    sizes = tuple(size for size in shape if isinstance(size, int))
    if overflows(sizes, dtype):
        raise FormatError(f"size of a tensor of shape {list(sizes)} overflows")
    return sizes, dtype


def _dtensor(inner: tuple[object, ...], state: object) -> DTensorRef:
    shape, dtype = _shape_and_dtype(inner)
    fields = _join_slots(state) if isinstance(state, tuple) else state
    if not isinstance(fields, dict):
        raise FormatError("DTensor has no attributes that can be read")
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    if not isinstance(local, TensorRef) or not isinstance(spec, InertObject):
        raise FormatError("DTensor has no local tensor, or no specification")
    if local.dtype != dtype or len(local.shape) != len(shape):
        raise FormatError(
            f"DTensor of {dtype.name} {list(shape)} has {local.dtype.name} {list(local.shape)}"
            " on its rank"
        )
    return DTensorRef(local, shape, spec)


def _sharded_tensor(inner: tuple[object, ...], state: object) -> ShardedTensorRef:
    shape, dtype = _shape_and_dtype(inner)
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


def _getattr(*args: object) -> Global:
    # Python's form of a nested class below protocol 4.
    match args:
        case (Global(module, "ShardedTensor"), "ProcessGroupState"):
            return Global(module, _GROUP_STATE)
    raise UnsafePickleError("pickle looks up an attribute, other than of a ShardedTensor")


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
    **{(m, n): inert_value(m, n) for homes, names in _CLASSES for m in homes for n in names},
    **{(home, "DTensor"): Global(home, "DTensor") for home in _DTENSOR_HOMES},
    (f"{_SHARDED}.api", "ShardedTensor"): Global(f"{_SHARDED}.api", "ShardedTensor"),
    (_WRAPPER.module, _WRAPPER.name): _WRAPPER,
    ("torch", "Tensor"): _TENSOR,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("__builtin__", "getattr"): _getattr,
    ("builtins", "getattr"): _getattr,
}
"""The globals that a pickle with distributed tensors may name, as in `parse_pickle`."""


def class_of(value: object) -> str:
    return value.cls.name if isinstance(value, InertObject) else quote(type(value).__name__)
