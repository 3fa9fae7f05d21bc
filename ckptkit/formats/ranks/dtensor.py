"""Where the local tensor of a DTensor lies in the whole, from mesh and placements.

`Shard` follows the rule of `torch.chunk`: equal parts, the last ones shorter or empty.
`_StridedShard(dim, split_factor)` takes the same part of each of `split_factor` parts, which in
general are several places. FSDP2 over tensor parallelism writes it for what it does after the
splits to its right; of uneven sizes only that order tells the true places.

Source: torch/distributed/tensor/placement_types.py (`_split_tensor` of both), _utils.py
(`compute_local_shape_and_global_offset`), torch 2.13; _dtensor_spec.py for the order.

The mesh of a DTensor: which ranks it is spread over, and where among them a rank is.

Up to torch 2.8 a mesh has its ranks in the tensor `mesh`. Since 2.9 it has a layout (sizes and
steps of its dimensions) over the list of all ranks, from which parts of a mesh are cut out.

Source: torch/distributed/device_mesh.py and torch/distributed/_mesh_layout.py, 2.1 to 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError, LimitError, UnsupportedError
from ckptkit.core.index import Box, Shape
from ckptkit.formats.pickle.pickles import InertObject
from ckptkit.formats.pickle.torch_values import MAX_DIMENSIONS, TensorRef
from ckptkit.formats.ranks.sharded_values import class_of, fields_of, is_count

ReadNumbers = Callable[[TensorRef], Sequence[int]]
"""Returns the elements of a small tensor of integers."""
MAX_RANKS = 1 << 20
_INTEGERS = {BY_NAME["int32"]: "<i4", BY_NAME["int64"]: "<i8"}


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh as the rank sees it that pickled a tensor.

    Attributes:
        sizes: Of its dimensions, in ranks.
        names: Of its dimensions; empty where it has none.
        coordinate: Where the rank is.
        highest_rank: The highest rank that the mesh, or the one it was cut out of, has.
    """

    sizes: Shape
    names: tuple[str, ...]
    coordinate: Shape
    highest_rank: int


def read_numbers(tensor: TensorRef, read: Callable[[], bytes]) -> list[int]:
    """Returns the elements of a tensor of integers.

    Args:
        tensor: The tensor.
        read: Returns all bytes of its storage.
    """
    kind = _INTEGERS.get(tensor.dtype)
    if kind is None or not tensor.row_major:
        raise FormatError(f"mesh of devices is a tensor of {tensor.dtype.name}")
    count = math.prod(tensor.shape)
    if count > MAX_RANKS or tensor.storage.size_bytes > 2 * 8 * MAX_RANKS:
        raise LimitError(f"mesh of devices has {count:,} ranks")
    start = tensor.storage_offset
    numbers: list[int] = np.frombuffer(read(), kind)[start : start + count].tolist()
    return numbers


def mesh_of(value: InertObject, rank: int, read: ReadNumbers) -> Mesh:
    """Returns what an inert `DeviceMesh` says, as seen from a rank.

    Args:
        value: As the pickle has it.
        rank: The rank that wrote the pickle.
        read: Returns the elements of the tensors in it.
    """
    held = fields_of(value, "mesh of devices")
    sizes, coordinate, highest = _placed(held, rank, read)
    _check_coordinate(held, rank, coordinate)
    names = held.get("_mesh_dim_names", held.get("mesh_dim_names"))
    known = tuple(map(str, names)) if isinstance(names, (tuple, list)) else ()
    return Mesh(sizes, known if len(known) == len(sizes) else (), coordinate, highest)


def _placed(held: Mapping[Any, Any], rank: int, read: ReadNumbers) -> tuple[Shape, Shape, int]:
    """Returns the sizes of a mesh, where a rank is in it, and its highest rank."""
    layout = held.get("_layout")
    if isinstance(layout, InertObject):
        axes = _axes(layout)
        ranks = _ranks_of_layout(held, read)
        at = _position(ranks, rank)
        reach = 1 + sum((n - 1) * step for axis in axes for n, step in axis)
        if reach > len(ranks):
            raise FormatError(f"mesh of devices reaches beyond its {len(ranks):,} ranks")
        sizes = tuple(math.prod(n for n, _ in axis) for axis in axes)
        return sizes, tuple(_along(axis, at) for axis in axes), max(ranks)
    mesh = held.get("mesh")
    if not isinstance(mesh, TensorRef):
        raise FormatError("mesh of devices does not tell its ranks")
    ranks = read(mesh)
    return mesh.shape, coordinate_of(_position(ranks, rank), mesh.shape), max(ranks)


def coordinate_of(position: int, sizes: Shape) -> Shape:
    """Returns where in a mesh the rank is that is at a position of all, row-major."""
    coordinate = []
    for size in reversed(sizes):
        position, here = divmod(position, size)
        coordinate.append(here)
    return tuple(reversed(coordinate))


def _ranks_of_layout(held: Mapping[Any, Any], read: ReadNumbers) -> Sequence[int]:
    ranks = held.get("_flatten_rank_map")
    if isinstance(ranks, tuple) and ranks and all(map(is_count, ranks)):
        return ranks
    tensor = held.get("_rank_map")
    if not isinstance(tensor, TensorRef):
        raise FormatError("mesh of devices does not tell its ranks")
    return read(tensor)


def _position(ranks: Sequence[int], rank: int) -> int:
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise FormatError("mesh of devices names a rank twice, or none")
    if rank not in ranks:
        raise FormatError(
            f"mesh of devices has no rank {rank}, which the file is named after",
            hint="the file was given another name, or belongs to another run",
        )
    return ranks.index(rank)


_Axis = list[tuple[int, int]]  # sizes and steps; several where dimensions were made one


def _axes(layout: InertObject) -> list[_Axis]:
    """Returns the dimensions of a layout; torch 2.9 has all in one, later releases one by one."""
    held = fields_of(layout, "layout of a mesh")
    parts = held.get("axes")
    if isinstance(parts, tuple):
        return [[pair for axis in _pairs(part) for pair in axis] for part in parts]
    return _pairs(layout)


def _pairs(layout: object) -> list[_Axis]:
    held = fields_of(layout, "layout of a mesh")
    sizes, steps = (
        value if isinstance(value, tuple) else (value,)
        for value in (held.get("shape"), held.get("stride"))
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
    if not whole or not all(_is_small(number) for pair in pairs for number in pair):
        raise FormatError("layout of a mesh has sizes and steps that do not belong together")
    return pairs


def _is_small(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_RANKS


def _along(axis: _Axis, at: int) -> int:
    """Returns the coordinate in one dimension of the rank at a position among all."""
    found = 0
    for size, step in axis:
        found = found * size + (at // step % size if step and size else 0)
    return found


def _check_coordinate(held: Mapping[Any, Any], rank: int, coordinate: Shape) -> None:
    """Compares with where the rank believed itself to be when it wrote the file."""
    told, own = held.get("_coordinate_on_dim"), held.get("_rank")
    same_place = not isinstance(told, (tuple, list)) or tuple(told) == coordinate
    if not same_place or (own is not None and own != rank):
        raise FormatError(
            f"file is named after rank {rank}, and was written by another",
            hint="give the files of all ranks the names that they were saved under",
        )


_MAX_RUNS = 1 << 12  # pieces of one dimension on one rank; real ones have at most a few
_MAX_BOXES = 1 << 14
Runs = list[tuple[int, int]]  # half-open ranges of indexes, in the order of the local tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies along one dimension of a mesh.

    Attributes:
        dim: The dimension that is split, or None where all ranks have the same.
        factor: For a strided split in how many parts the dimension was cut before; 1 otherwise.
    """

    dim: int | None = None
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a local tensor: where it lies in the whole, and its first element's place here."""

    box: Box
    local: Shape


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What a rank has of a tensor: the shape of it, and the blocks that it is made of."""

    shape: Shape
    pieces: tuple[Piece, ...]


def placements_of(value: object, dimensions: int) -> tuple[Placement, ...]:
    """Returns what the `placements` of an inert specification say.

    Args:
        value: A tuple or list of inert placements.
        dimensions: Of the tensor.
    """
    if not isinstance(value, (tuple, list)):
        raise FormatError("DTensor has no placements")
    return tuple(_placement(one, dimensions) for one in value)


def _placement(value: object, dimensions: int) -> Placement:
    name = class_of(value)
    if name == "Replicate":
        return Placement()
    if name not in {"Shard", "_StridedShard"} or not isinstance(value, InertObject):
        raise UnsupportedError(
            f"DTensor is placed as {name.lstrip('_')}, which is not a part of its values",
            hint="save it again after `redistribute` to shards or replicas",
        )
    held = fields_of(value, "placement")
    dim, factor = held.get("dim"), held.get("split_factor", 1)
    strided = name == "_StridedShard"
    if type(dim) is not int or not -dimensions <= dim < dimensions:
        raise FormatError(f"DTensor of {dimensions} dimensions is split along {dim!r}")
    if strided and not (is_count(factor) and factor):
        raise FormatError("strided split has no split factor")
    return Placement(dim % dimensions, factor if strided else 1)


def local_part(
    shape: Shape, mesh: Mesh, placements: Sequence[Placement], *, inner_first: bool
) -> LocalPart | None:
    """Returns where the local tensor of a rank lies in the whole.

    Args:
        shape: Of the whole tensor.
        mesh: With the coordinate of the rank.
        placements: One for each dimension of the mesh.
        inner_first: Whether strided splits come after those to their right, as FSDP2 makes
            them; or in the order of the mesh, as `distribute_tensor` makes them.

    Returns:
        The part, possibly empty; None where the splits cannot have been made in that order.
    """
    if len(placements) != len(mesh.sizes):
        raise FormatError(
            f"DTensor has {len(placements)} placements on a mesh of {len(mesh.sizes)} dimensions"
        )
    runs = []
    for dim, size in enumerate(shape):
        steps = [
            _Split(n, at, placement.factor)
            for n, at, placement in zip(mesh.sizes, mesh.coordinate, placements, strict=True)
            if placement.dim == dim
        ]
        ordered = _inner_first(steps) if inner_first else steps
        if ordered is None:
            return None
        runs.append(_runs(size, ordered))
    if math.prod(map(len, runs)) > _MAX_BOXES:
        raise LimitError("DTensor is cut into more pieces than any real one")
    here = tuple(sum(stop - start for start, stop in one) for one in runs)
    parts = itertools.product(*map(_with_places, runs))
    return LocalPart(here, tuple(_piece(combined) for combined in parts))


@dataclass(frozen=True, slots=True)
class _Split:
    """One split: into how many parts, which is ours, and into how many it was cut before."""

    parts: int
    index: int
    factor: int


def _inner_first(steps: Sequence[_Split]) -> list[_Split] | None:
    """Puts strided splits after those to their right, whose parts their factor counts."""
    order: list[_Split] = []
    for step in reversed(steps):
        at, before = 0, 1
        while before < step.factor and at < len(order):
            before, at = before * order[at].parts, at + 1
        if before != step.factor:
            return None
        order.insert(at, _Split(step.parts, step.index, 1))
    return order


def _runs(size: int, steps: Sequence[_Split]) -> Runs:
    """Returns which indexes of a dimension a rank has, in the order in which it has them."""
    runs: Runs = [(0, size)] if size else []
    for step in steps:
        count = sum(stop - start for start, stop in runs)
        if step.factor > _MAX_RUNS:
            raise LimitError(f"strided split has a split factor of {step.factor:,}")
        found: Runs = []
        for part in range(step.factor):
            outer = _part(count, step.factor, part)
            inner = _part(outer[1] - outer[0], step.parts, step.index)
            found += _taken(runs, outer[0] + inner[0], outer[0] + inner[1])
        runs = _joined(found)
        if len(runs) > _MAX_RUNS:
            raise LimitError("DTensor is cut into more pieces than any real one")
    return runs


def _part(count: int, parts: int, index: int) -> tuple[int, int]:
    """Returns one of the parts that `torch.chunk` makes; those beyond the last are empty."""
    each = -(-count // parts) if parts else 0
    return min(index * each, count), min((index + 1) * each, count)


def _taken(runs: Runs, low: int, high: int) -> Runs:
    """Returns the ranges behind the positions `[low, high)` of a list of indexes."""
    found, at = [], 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            found.append((start + first, start + last))
        at += stop - start
    return found


def _joined(runs: Runs) -> Runs:
    joined: Runs = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _with_places(runs: Runs) -> list[tuple[int, int, int]]:
    """Adds to each range where it begins in the local tensor."""
    found, at = [], 0
    for start, stop in runs:
        found.append((start, stop, at))
        at += stop - start
    return found


def _piece(combined: Sequence[tuple[int, int, int]]) -> Piece:
    offsets = tuple(start for start, _, _ in combined)
    sizes = tuple(stop - start for start, stop, _ in combined)
    return Piece(Box(offsets, sizes), tuple(at for _, _, at in combined))
