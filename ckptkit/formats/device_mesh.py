"""The mesh of a DTensor: which ranks it is spread over, and where among them a rank is.

Up to torch 2.8 a mesh has its ranks in the tensor `mesh`. Since 2.9 it has a layout (sizes and
steps of its dimensions) over the list of all ranks, from which parts of a mesh are cut out.

Source: torch/distributed/device_mesh.py and torch/distributed/_mesh_layout.py, 2.1 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError, LimitError
from ckptkit.core.index import Shape
from ckptkit.formats.pickles import InertObject
from ckptkit.formats.sharded_values import fields_of, is_count
from ckptkit.formats.torch_values import MAX_DIMENSIONS, TensorRef

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

    Raises:
        FormatError: If it holds something else.
        LimitError: If there are more than any machine has ranks.
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

    Raises:
        FormatError: If the rank is not in it, or in another place than it says.
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
