"""DTensors and ShardedTensors in pickles, and where the local tensor is in the whole one.

No DTensor is built: its local tensor, mesh and placements are kept as inert values, as they were
pickled, and parsed where the position is needed.

Up to torch 2.8 a mesh has its ranks in the tensor `mesh`. Since 2.9 it has a layout (sizes and
steps of its dimensions) over the list of all ranks.

`Shard` follows `torch.chunk`: equal parts, the last ones shorter or empty. `_StridedShard(dim,
split_factor)` takes the same part of each of `split_factor` parts, so that a rank has several
blocks. FSDP2 over tensor parallelism uses it for a split that it makes after the splits to its
right; for uneven sizes only that order gives the true positions.

Source: torch/_tensor.py (`_rebuild_from_type_v2`), torch/_utils.py (`_rebuild_wrapper_subclass`),
torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py,
torch/distributed/_shard/sharded_tensor/{api,metadata,shard}.py; torch 2.1 to 2.13;
torch/distributed/device_mesh.py and torch/distributed/_mesh_layout.py, 2.1 to 2.13;
torch/distributed/tensor/placement_types.py (`_split_tensor` of both), _utils.py
(`compute_local_shape_and_global_offset`), _dtensor_spec.py for the order, torch 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError, FormatError, LimitError, UnsupportedError
from ckptkit.core.index import Box, Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count
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
    return _attributes(value.state if isinstance(value, InertObject) else None, what)


def _attributes(state: object, what: str) -> Mapping[Any, Any]:
    """Returns the state of an object; of a class with slots it is a dictionary and the slots."""
    match state:
        case dict(own) | (dict(own), None) | (None, dict(own)):
            return own
        case (dict(own), dict(slots)):
            return {**own, **slots}
    raise FormatError(f"{what} has no attributes that can be read")


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
    fields = _attributes(state, "DTensor")
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
    tensor = fields.get("tensor")
    metadata = fields_of(fields.get("metadata"), "metadata of a shard")
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


ReadIntegers = Callable[[TensorRef], Sequence[int]]
"""Returns the elements of a small tensor of integers."""
MAX_RANKS = 1 << 20
_INTEGERS = {BY_NAME["int32"]: "<i4", BY_NAME["int64"]: "<i8"}


class Mesh(Struct, frozen=True):
    """A mesh as it was on the rank that pickled a tensor."""

    sizes: Shape  # of its dimensions, in ranks
    names: tuple[str, ...]  # of its dimensions; empty if they have none
    coordinate: Shape  # the coordinate of the rank
    highest_rank: int  # the highest rank in the mesh, or in the mesh that it is a slice of


def read_integers(tensor: TensorRef, read: Callable[[], bytes]) -> list[int]:
    """Returns the elements of a tensor of integers; `read` returns all bytes of its storage."""
    kind = _INTEGERS.get(tensor.dtype)
    if kind is None or not tensor.row_major:
        raise FormatError(f"mesh of devices is a tensor of {tensor.dtype.name}")
    count = math.prod(tensor.shape)
    if count > MAX_RANKS or tensor.storage.size_bytes > 2 * 8 * MAX_RANKS:
        raise LimitError(f"mesh of devices has {count:,} ranks")
    start = tensor.storage_offset
    numbers: list[int] = np.frombuffer(read(), kind)[start : start + count].tolist()
    return numbers


def parse_mesh(value: InertObject, rank: int, read: ReadIntegers) -> Mesh:
    """Parses an inert `DeviceMesh` that a rank pickled."""
    fields = fields_of(value, "mesh of devices")
    layout = fields.get("_layout")
    has_layout = isinstance(layout, InertObject)
    axes = _axes(layout) if has_layout else []
    listed = fields.get("_flatten_rank_map") if has_layout else None
    tensor = fields.get("_rank_map" if has_layout else "mesh")
    if isinstance(listed, tuple) and listed and all(map(is_count, listed)):
        ranks: Sequence[int] = listed
    elif isinstance(tensor, TensorRef):
        ranks = read(tensor)
    else:
        raise FormatError("mesh of devices does not contain its ranks")
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise FormatError("mesh of devices names a rank twice, or none")
    if rank not in ranks:
        raise FormatError(
            f"mesh of devices has no rank {rank}, which the file is named after",
            hint="the file was given another name, or belongs to another run",
        )
    at = ranks.index(rank)
    if has_layout:
        if sum((n - 1) * step for axis in axes for n, step in axis) >= len(ranks):
            raise FormatError(f"mesh of devices reaches beyond its {len(ranks):,} ranks")
        sizes = tuple(math.prod(n for n, _ in axis) for axis in axes)
        here = []
        for axis in axes:
            here.append(0)
            for size, step in axis:
                here[-1] = here[-1] * size + (at // step % size if step and size else 0)
        coordinate = tuple(here)
    else:
        sizes = tensor.shape if isinstance(tensor, TensorRef) else ()
        coordinate = compute_coordinate(at, sizes)
    stored, stored_rank = fields.get("_coordinate_on_dim"), fields.get("_rank")
    agrees = not isinstance(stored, (tuple, list)) or tuple(stored) == coordinate
    if not agrees or (stored_rank is not None and stored_rank != rank):
        raise FormatError(
            f"file is named after rank {rank}, and was written by another",
            hint="give the files of all ranks the names that they were saved under",
        )
    names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
    has_names = isinstance(names, (tuple, list)) and len(names) == len(sizes)
    return Mesh(sizes, tuple(map(str, names)) if has_names else (), coordinate, max(ranks))


def compute_coordinate(position: int, sizes: Shape) -> Shape:
    """Returns the coordinate in a mesh of the rank at a row-major position."""
    coordinate = []
    for size in reversed(sizes):
        position, here = divmod(position, size)
        coordinate.append(here)
    return tuple(reversed(coordinate))


_Axis = list[tuple[int, int]]  # sizes and steps; several if dimensions were flattened into one


def _axes(layout: object) -> list[_Axis]:
    """Returns the dimensions of a layout; torch 2.9 stores all in one."""
    parts = fields_of(layout, "layout of a mesh").get("axes")
    if isinstance(parts, tuple):
        return [[pair for axis in _pairs(part) for pair in axis] for part in parts]
    return _pairs(layout)


def _pairs(layout: object) -> list[_Axis]:
    fields = fields_of(layout, "layout of a mesh")
    sizes, steps = (
        value if isinstance(value, tuple) else (value,)
        for value in (fields.get("shape"), fields.get("stride"))
    )
    if len(sizes) != len(steps) or len(sizes) > MAX_DIMENSIONS:
        raise FormatError("layout of a mesh has sizes and steps that do not belong together")
    return [_axis(size, step) for size, step in zip(sizes, steps, strict=True)]


def _axis(size: object, step: object) -> _Axis:
    match size, step:
        case (tuple(sizes), tuple(steps)):
            pairs = list(zip(sizes, steps, strict=False))
            whole = len(sizes) == len(steps)
        case _:
            pairs, whole = [(size, step)], True
    if not whole or not all(is_count(number, MAX_RANKS) for pair in pairs for number in pair):
        raise FormatError("layout of a mesh has sizes and steps that do not belong together")
    return pairs


_MAX_RANGES = 1 << 12  # of one dimension on one rank; real tensors have at most a few
_MAX_BLOCKS = 1 << 14
IndexRanges = list[tuple[int, int]]  # half-open, in the order of the local tensor


class Placement(Struct, frozen=True):
    """How a tensor is distributed along one dimension of a mesh."""

    dim: int | None = None  # the dimension that is split, or None for replicas
    factor: int = 1  # for a strided split the number of parts that were split before; 1 otherwise


class LocalPart(Struct, frozen=True):
    """A rank's part of a tensor: the shape of the local tensor, and its blocks.

    Of each block: its box in the whole tensor, and its offsets in the local one.
    """

    shape: Shape
    blocks: tuple[tuple[Box, Shape], ...]


def parse_placements(value: object, dimensions: int) -> tuple[Placement, ...]:
    if not isinstance(value, (tuple, list)):
        raise FormatError("DTensor has no placements")
    return tuple(_parse_placement(item, dimensions) for item in value)


def _parse_placement(value: object, dimensions: int) -> Placement:
    name = class_of(value)
    if name == "Replicate":
        return Placement()
    if name not in {"Shard", "_StridedShard"} or not isinstance(value, InertObject):
        raise UnsupportedError(
            f"DTensor is placed as {name.lstrip('_')}, which is not a part of its values",
            hint="save it again after `redistribute` to shards or replicas",
        )
    fields = fields_of(value, "placement")
    factor = fields.get("split_factor", 1) if name == "_StridedShard" else 1
    return make_split(fields.get("dim"), factor, dimensions)


def make_split(dim: object, factor: object, dimensions: int) -> Placement:
    if type(dim) is not int or not -dimensions <= dim < dimensions:
        raise FormatError(f"tensor of {dimensions} dimensions is split along {dim!r}")
    if not is_count(factor) or not factor:
        raise FormatError("strided split has no split factor")
    if factor > MAX_RANKS:
        raise LimitError(f"strided split has a split factor of {factor:,}")
    return Placement(dim % dimensions, factor)


def compute_local_part(
    shape: Shape, mesh: Mesh, placements: Sequence[Placement], *, inner_first: bool
) -> LocalPart | None:
    """Returns the part of a tensor that a rank has; None if splits cannot have this order.

    With `inner_first`, strided splits were made after those to their right, as FSDP2 does;
    otherwise in the order of the mesh, as `distribute_tensor` does.
    """
    if len(placements) != len(mesh.sizes):
        raise FormatError(
            f"DTensor has {len(placements)} placements on a mesh of {len(mesh.sizes)} dimensions"
        )
    ranges = []
    for dim, size in enumerate(shape):
        splits = [
            (n, at, placement.factor)
            for n, at, placement in zip(mesh.sizes, mesh.coordinate, placements, strict=True)
            if placement.dim == dim
        ]
        ordered = _inner_first(splits) if inner_first else splits
        if ordered is None:
            return None
        ranges.append(_local_ranges(size, ordered))
    if math.prod(map(len, ranges)) > _MAX_BLOCKS:
        raise LimitError("DTensor is cut into more pieces than any real one")
    placed = []  # of each dimension, the ranges with their offsets in the local tensor
    for along in ranges:
        lengths = [stop - start for start, stop in along]
        offsets = itertools.accumulate(lengths, initial=0)
        placed.append(
            [(start, n, at) for (start, _), n, at in zip(along, lengths, offsets, strict=False)]
        )
    local_shape = tuple(sum(n for _, n, _ in along) for along in placed)
    blocks = []
    for combined in itertools.product(*placed):
        box = Box(tuple(start for start, _, _ in combined), tuple(n for _, n, _ in combined))
        blocks.append((box, tuple(at for _, _, at in combined)))
    return LocalPart(local_shape, tuple(blocks))


LocalTensor = tuple[Shape, Shape, Mesh, Sequence[Placement]]
"""The shapes of a rank's local tensor and of the whole tensor, with mesh and placements."""


def find_local_parts(tensors: Sequence[LocalTensor], *, where: str) -> list[LocalPart] | None:
    """Returns the parts of all ranks, splits made in the order that gives the sizes they have."""
    for inner_first in (True, False):
        parts = []
        for local_shape, shape, mesh, placements in tensors:
            try:
                part = compute_local_part(shape, mesh, placements, inner_first=inner_first)
            except CkptkitError as error:
                raise error.located(where) from error
            if part is None or not fits(local_shape, part):
                break
            parts.append(part)
        else:
            return parts
    return None


def fits(local_shape: Shape, part: LocalPart) -> bool:
    # Releases of torch differ in which dimension of a part without elements is empty.
    return local_shape == part.shape or (0 in local_shape and 0 in part.shape)


_Split = tuple[int, int, int]
"""Of each of `factor` earlier parts, that many parts were made, of which the rank has one: the
number of parts, that of the rank's, and the factor."""


def _inner_first(splits: Sequence[_Split]) -> list[_Split] | None:
    """Moves strided splits behind those to their right, whose parts their factor counts."""
    order: list[_Split] = []
    for parts, index, factor in reversed(splits):
        at, before = 0, 1
        while before < factor and at < len(order):
            before, at = before * order[at][0], at + 1
        if before != factor:
            return None
        order.insert(at, (parts, index, 1))
    return order


def _local_ranges(size: int, splits: Sequence[_Split]) -> IndexRanges:
    """Returns the indexes of a dimension that a rank has, in the order of its local tensor."""
    ranges: IndexRanges = [(0, size)] if size else []
    for parts, index, factor in splits:
        count = sum(stop - start for start, stop in ranges)
        if factor > _MAX_RANGES:
            raise LimitError(f"strided split has a split factor of {factor:,}")
        taken: IndexRanges = []
        for number in range(factor):
            outer, end = _chunk_bounds(count, factor, number)
            low, high = (outer + bound for bound in _chunk_bounds(end - outer, parts, index))
            at = 0  # in the local tensor so far
            for start, stop in ranges:
                first, last = max(start, start + low - at), min(stop, start + high - at)
                at += stop - start
                if first < last and taken and taken[-1][1] == first:
                    taken[-1] = (taken[-1][0], last)
                elif first < last:
                    taken.append((first, last))
        ranges = taken
        if len(ranges) > _MAX_RANGES:
            raise LimitError("DTensor is cut into more pieces than any real one")
    return ranges


def _chunk_bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Returns one of the parts that `torch.chunk` makes; those beyond the last are empty."""
    each = -(-count // parts) if parts else 0
    return min(index * each, count), min((index + 1) * each, count)
