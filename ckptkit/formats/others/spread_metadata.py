"""What torch_checkpointing's `metadata.pkl` says: how each tensor is spread, and where ranks wrote.

The pickle holds nothing but dictionaries, lists, texts and numbers.

Source: torch_checkpointing/distributed_metadata.py, dtensor_metadata.py, checkpoint_layout.py,
0.1.1.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import FormatError, LimitError, UnsafePathError, UnsupportedError
from ckptkit.core.index import KeyPath, Shape
from ckptkit.formats.pickle.pickles import parse_pickle, shown
from ckptkit.formats.pickle.torch_values import MAX_DIMENSIONS
from ckptkit.formats.ranks.dtensor import MAX_RANKS, Mesh, Placement, coordinate_of
from ckptkit.formats.torch_files.reader import loads_strictly
from ckptkit.storage.base import Source

MAX_METADATA_BYTES = 2**28
_VERSION = "2.0"
_DTENSOR = "DTensorShardingMetadata"
_LAYOUTS = {"TorchSerialization": False, "SafetensorsSerialization": True}


@dataclass(frozen=True, slots=True)
class Spreading:
    """How a tensor is spread over a mesh of ranks.

    Attributes:
        shape: Of the whole tensor.
        ranks: The ranks of the mesh, row-major.
        mesh: Sizes of its dimensions.
        placements: One for each dimension of the mesh.
    """

    shape: Shape
    ranks: tuple[int, ...]
    mesh: Shape
    placements: tuple[Placement, ...]

    def seen_from_ranks(self) -> dict[int, Mesh]:
        """Returns for each rank of the mesh how it sees it."""
        highest = max(self.ranks)
        return {
            rank: Mesh(self.mesh, (), coordinate_of(at, self.mesh), highest)
            for at, rank in enumerate(self.ranks)
        }


@dataclass(frozen=True, slots=True)
class ItemFile:
    """The file of a rank: its path relative to the checkpoint, and whether it is safetensors."""

    path: str
    is_safetensors: bool


@dataclass(frozen=True, slots=True)
class SpreadItem:
    """An item of the state, such as the model.

    Attributes:
        files: By rank.
        tensors: By path of keys.
    """

    files: Mapping[int, ItemFile]
    tensors: Mapping[KeyPath, Spreading]


@dataclass(frozen=True, slots=True)
class SpreadMetadata:
    """The number of ranks, and the items whose tensors are described."""

    world_size: int
    items: Mapping[str, SpreadItem]


def read_spread_metadata(source: Source, path: str) -> SpreadMetadata:
    """Returns what the file at a path says."""
    where = posixpath.join(source.location, path)
    size = source.stat(path).size_bytes
    if size > MAX_METADATA_BYTES:
        raise LimitError(
            f"has {size:,} bytes, at most {MAX_METADATA_BYTES:,} are read", where=where
        )
    root = parse_pickle(source.read(path, 0, size), {}, where=where)
    try:
        return _Parser(size).metadata(root)
    except (FormatError, LimitError, UnsupportedError, UnsafePathError) as error:
        raise error.located(where) from None


class _Parser:
    """Checks the parsed pickle; parts may be shared, so what was looked at is counted."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._meshes: dict[int, tuple[Shape, tuple[int, ...]]] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}

    def metadata(self, root: object) -> SpreadMetadata:
        content = _dictionary(root, "metadata")
        version = content.get("version", "1.0")
        if version != _VERSION:
            raise UnsupportedError(
                f"metadata is of version {shown(str(version))}; read is {_VERSION}",
                hint="save the checkpoint again with torch_checkpointing 0.1",
            )
        world = content.get("world_size")
        if type(world) is not int or not 0 < world <= MAX_RANKS:
            raise FormatError("metadata does not tell the number of ranks")
        items = _dictionary(content.get("metadata"), "items")
        return SpreadMetadata(
            world, {str(name): self._item(str(name), item, world) for name, item in items.items()}
        )

    def _item(self, name: str, value: object, world: int) -> SpreadItem:
        content = _dictionary(value, f"item {shown(name)}")
        layouts = _dictionary(content.get("rank_to_layout_info"), f"layout of {shown(name)}")
        tensors = _dictionary(content.get("nested_path_to_metadata"), f"item {shown(name)}")
        self._count(len(layouts) + sum(map(_length, tensors)))
        if len(layouts) != world or not all(rank in layouts for rank in range(world)):
            raise FormatError(f"item {shown(name)} does not tell the files of {world} ranks")
        return SpreadItem(
            {rank: _file(name, rank, layouts[rank]) for rank in range(world)},
            {_key_path(path): self._spreading(str(path), g, world) for path, g in tensors.items()},
        )

    def _spreading(self, path: str, value: object, world: int) -> Spreading:
        """Returns how a tensor is spread: in one way, which all the ranks of its mesh have."""
        if not isinstance(value, list) or len(value) != 1:
            raise UnsupportedError(f"tensor {shown(path)} is spread by ranks in several ways")
        packed = _dictionary(_dictionary(value[0], path).get("sharding_metadata"), path)
        if packed.get("type") != _DTENSOR:
            raise UnsupportedError(
                f"tensor {shown(path)} is spread as {shown(str(packed.get('type')))}, where"
                " DTensors are read"
            )
        data = _dictionary(packed.get("data"), path)
        shape = _counts(data.get("global_shape"))
        sizes, ranks = self._mesh(_dictionary(data.get("mesh_spec"), path), world)
        placements = data.get("placements")
        if not isinstance(placements, list) or len(placements) != len(sizes):
            raise FormatError(f"tensor {shown(path)} has not one placement for each dimension")
        placed = tuple(_placement(one, len(shape)) for one in placements)
        return Spreading(shape, ranks, sizes, placed)

    def _mesh(self, mesh: Mapping[Any, Any], world: int) -> tuple[Shape, tuple[int, ...]]:
        known = self._meshes.get(id(mesh))
        if known is None:
            sizes = _counts(mesh.get("mesh_shape"))
            ranks = self._ranks_of(mesh.get("mesh_data"), world)
            if len(ranks) != math.prod(sizes):
                raise FormatError(f"a mesh has other ranks than the run of {world}")
            known = self._meshes[id(mesh)] = sizes, ranks
        return known

    def _ranks_of(self, value: object, world: int) -> tuple[int, ...]:
        """Returns the ranks of a mesh, once for all meshes that share them."""
        known = self._ranks.get(id(value))
        if known is None:
            known = _counts(value, MAX_RANKS)
            if not known or len(set(known)) != len(known) or max(known) >= world:
                raise FormatError(f"a mesh has other ranks than the run of {world}")
            self._ranks[id(value)] = known
        return known

    def _count(self, looked_at: int) -> None:
        self._left -= looked_at
        if self._left < 0:
            raise LimitError("unfolds into more values than it has bytes")


def _length(path: object) -> int:
    return len(path) if isinstance(path, str) else 1


def _file(item: str, rank: int, layout: object) -> ItemFile:
    if layout is None:
        return ItemFile(f"{item}_{rank}.pt", is_safetensors=False)
    content = _dictionary(layout, "layout")
    path = content.get("file_path")
    kind = _dictionary(content.get("serialization_format"), "serialization").get("type")
    if not isinstance(path, str) or {"", ".", ".."} & set(path.split("/")) or "\0" in path:
        raise UnsafePathError(f"layout names {shown(str(path))}, which may lie elsewhere")
    if kind not in _LAYOUTS:
        raise UnsupportedError(f"tensors of {shown(item)} are stored by {shown(str(kind))}")
    return ItemFile(path, _LAYOUTS[str(kind)])


def _key_path(path: object) -> KeyPath:
    keys = loads_strictly(path.encode(), where="metadata") if isinstance(path, str) else None
    if not isinstance(keys, list) or not all(type(key) in {str, int} for key in keys):
        raise FormatError("metadata names a tensor by something that is no path")
    return tuple(keys)


def _placement(value: object, dimensions: int) -> Placement:
    content = _dictionary(value, "placement")
    kind, dim, factor = (content.get(key) for key in ("type", "dim", "split_factor"))
    if kind == "Replicate":
        return Placement()
    if kind not in {"Shard", "StridedShard"}:
        raise UnsupportedError(f"tensor is placed as {shown(str(kind))}")
    if type(dim) is not int or not -dimensions <= dim < dimensions:
        raise FormatError(f"tensor of {dimensions} dimensions is split along {dim!r}")
    strided = kind == "StridedShard"
    if strided and not (type(factor) is int and 0 < factor <= MAX_RANKS):
        raise FormatError("strided split has no split factor")
    return Placement(dim % dimensions, factor if strided and isinstance(factor, int) else 1)


def _dictionary(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a dictionary")
    return value


def _counts(value: object, most: int = MAX_DIMENSIONS) -> Shape:
    whole = isinstance(value, (list, tuple)) and len(value) <= most
    if not whole or not all(type(n) is int and 0 <= n < 2**62 for n in _sequence(value)):
        raise FormatError("a shape, or a list of ranks, is not one of natural numbers")
    return tuple(_sequence(value))


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()
