"""From what each rank has of a tensor to its chunks; replicas are compared by their checksums.

Optimizer states that belong to slices of flat parameters, and do not tell to which.

FSDP1's optimizer works on what a rank has of a flat parameter. Its own `state_dict()` holds plain
tensors of that size, numbered, which are different on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, FormatError, LimitError
from ckptkit.core.geometry import is_row_major
from ckptkit.core.index import Box, Chunk, KeyPath, Shape
from ckptkit.formats.pickle.pickles import InertObject
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.contents import RankContents, Tensor
from ckptkit.formats.ranks.dtensor import (
    LocalPart,
    Mesh,
    Placement,
    local_part,
    mesh_of,
    placements_of,
    read_numbers,
)
from ckptkit.formats.ranks.sharded_values import DTensorRef, ShardedTensorRef, fields_of
from ckptkit.storage.base import Source

_MIN_CHUNKS = 1 << 16  # of one file, whatever the length of its pickle
_BYTES_OF_A_CHUNK = 8  # of the pickle; a tensor alone takes over 70
Held = Sequence[tuple[RankContents, Tensor]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk, and the tensor of a file that it was taken from."""

    chunk: Chunk
    tensor: TensorRef


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor that lies in the files of several ranks.

    Attributes:
        dtype: Its element type.
        shape: Of the whole.
        stored: Where its elements lie, replicas included.
        is_plain: Whether every rank has it whole, and does not know of the others.
    """

    dtype: DType
    shape: Shape
    stored: tuple[Stored, ...]
    is_plain: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    """A DTensor as one rank has it, with what its specification says."""

    contents: RankContents
    tensor: DTensorRef
    mesh: Mesh
    placements: tuple[Placement, ...]

    def part(self, *, inner_first: bool) -> LocalPart | None:
        return local_part(self.tensor.shape, self.mesh, self.placements, inner_first=inner_first)


@dataclass(slots=True)
class Placing:
    """Finds the places of tensors, and remembers the meshes that it met.

    Attributes:
        source: Where the files lie.
        table: The records in them.
        meshes: Every mesh of every file.
        counts: How many chunks each file was found to have.
    """

    source: Source
    table: ArchiveTable
    meshes: dict[tuple[int, int], tuple[InertObject, Mesh]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def place(self, path: KeyPath, held: Held) -> Spread:
        """Returns the chunks of a tensor that some ranks have parts of.

        Args:
            path: Of the tensor, for messages.
            held: What the ranks have.
        """
        first, other = held[0][1], _odd_one(held)
        if other is not None:
            raise FormatError(
                f"{_dotted(path)!r} is {_said(other[1])} here and {_said(first)} on rank"
                f" {held[0][0].file.rank}",
                where=other[0].archive.where,
                hint="files of two saves, or slices that are not marked as such, lie together",
            )
        if isinstance(first, DTensorRef):
            stored = self._dtensors(path, held)
        elif isinstance(first, ShardedTensorRef):
            stored = self._shards(held)
        else:
            stored = [self._stored(one, t, _whole(t.shape)) for one, t in _plain(held)]
        return Spread(first.dtype, first.shape, tuple(stored), isinstance(first, TensorRef))

    def _shards(self, held: Held) -> list[Stored]:
        return [
            self._stored(one, shard.tensor, Box(shard.offsets, shard.tensor.shape))
            for one, tensor in held
            if isinstance(tensor, ShardedTensorRef)
            for shard in tensor.shards
            if 0 not in shard.tensor.shape
        ]

    def _dtensors(self, path: KeyPath, held: Held) -> list[Stored]:
        seen = [
            _Seen(one, tensor, *self._spec(one, tensor))
            for one, tensor in held
            if isinstance(tensor, DTensorRef)
        ]
        _check_meshes(path, seen)
        parts = _parts(seen, inner_first=True) or _parts(seen, inner_first=False)
        if parts is None:
            raise _misfit(path, seen)
        return [
            self._block(here, part, number)
            for here, part in zip(seen, parts, strict=True)
            if 0 not in part.shape
            for number in range(len(part.pieces))
        ]

    def _spec(self, one: RankContents, tensor: DTensorRef) -> tuple[Mesh, tuple[Placement, ...]]:
        try:
            held = fields_of(tensor.spec, "specification of a DTensor")
            placements = placements_of(held.get("placements"), len(tensor.shape))
            return self._mesh(one, held.get("mesh")), placements
        except CkptkitError as error:
            raise error.located(one.archive.where) from error

    def _mesh(self, one: RankContents, value: object) -> Mesh:
        if not isinstance(value, InertObject):
            raise FormatError("DTensor has no mesh of devices")
        key = one.archive.number, id(value)
        if key not in self.meshes:

            def read(tensor: TensorRef) -> list[int]:
                return read_numbers(tensor, lambda: self._bytes(one.archive, tensor))

            self.meshes[key] = value, mesh_of(value, one.file.rank, read)
        return self.meshes[key][1]

    def _bytes(self, archive: TorchArchive, tensor: TensorRef) -> bytes:
        start, stop, _ = archive.archive.extent(tensor.storage)
        return self.source.read(archive.path, start, stop)

    def _block(self, here: _Seen, part: LocalPart, number: int) -> Stored:
        piece, local = part.pieces[number], here.tensor.local
        skipped = sum(at * step for at, step in zip(piece.local, local.strides, strict=True))
        return self._stored(here.contents, local, piece.box, skipped)

    def _stored(self, one: RankContents, tensor: TensorRef, box: Box, skipped: int = 0) -> Stored:
        self._count(one.archive)
        dense = is_row_major(box.sizes, tensor.strides)
        chunk = Chunk(
            box,
            self.table.record(one.archive, tensor),
            byte_offset=(tensor.storage_offset + skipped) * tensor.dtype.itemsize,
            strides=None if dense else tensor.strides,
            rank=one.file.rank,
        )
        return Stored(chunk, tensor)

    def _count(self, archive: TorchArchive) -> None:
        """Limits the memory of chunks: a pickle may name the same parts any number of times."""
        counted = self.counts[archive.number] = self.counts.get(archive.number, 0) + 1
        if counted > _MIN_CHUNKS + archive.pickle_bytes // _BYTES_OF_A_CHUNK:
            raise LimitError(
                "tensors are cut into far more pieces than any real ones", where=archive.where
            )


def _check_meshes(path: KeyPath, seen: Sequence[_Seen]) -> None:
    sizes = sorted({math.prod(here.mesh.sizes) for here in seen})
    if len(sizes) > 1:
        raise FormatError(
            f"{_dotted(path)!r} is spread over {' and '.join(map(str, sizes))} ranks",
            where=seen[0].contents.archive.where,
            hint="files of runs of different sizes lie together; take away those of one",
        )


def _parts(seen: Sequence[_Seen], *, inner_first: bool) -> list[LocalPart] | None:
    """Returns what all ranks have, if splits in this order give every part the size it has."""
    found = []
    for here in seen:
        part = here.part(inner_first=inner_first)
        if part is None or not _fits(here.tensor.local.shape, part):
            return None
        found.append(part)
    return found


def _misfit(path: KeyPath, seen: Sequence[_Seen]) -> FormatError:
    parts = [here.part(inner_first=False) for here in seen]
    here, part = next(
        (
            (one, part)
            for one, part in zip(seen, parts, strict=True)
            if part is None or not _fits(one.tensor.local.shape, part)
        ),
        (seen[0], parts[0]),
    )
    given = "none" if part is None else str(list(part.shape))
    return FormatError(
        f"{_dotted(path)!r} of shape {list(here.tensor.shape)} has a part of shape"
        f" {list(here.tensor.local.shape)} on rank {here.contents.file.rank}, where its placements"
        f" give {given}: sizes do not add up",
        where=here.contents.archive.where,
    )


def _fits(shape: Shape, part: LocalPart) -> bool:
    # Of a part without elements, releases of torch differ in which dimension they call empty.
    return shape == part.shape or (0 in shape and 0 in part.shape)


def _plain(held: Held) -> list[tuple[RankContents, TensorRef]]:
    return [(one, tensor) for one, tensor in held if isinstance(tensor, TensorRef)]


def _whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def _odd_one(held: Held) -> tuple[RankContents, Tensor] | None:
    """Returns the first that is of another kind, element type or shape than the first of all."""
    known = _nature(held[0][1])
    return next(((one, tensor) for one, tensor in held if _nature(tensor) != known), None)


def is_cut(held: Held) -> bool:
    return len({tensor.shape for _, tensor in _plain(held)}) > 1


def _nature(tensor: Tensor) -> tuple[type, DType, Shape]:
    return type(tensor), tensor.dtype, tensor.shape


def _said(tensor: Tensor) -> str:
    kind = {DTensorRef: "a DTensor", ShardedTensorRef: "a ShardedTensor"}
    return f"{kind.get(type(tensor), 'a tensor')} of {tensor.dtype.name} {list(tensor.shape)}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def differing_ranks(spread: Spread, crc32: Sequence[int | None]) -> tuple[int, int] | None:
    """Finds two ranks that hold different values of the same elements, as far as checksums tell.

    Args:
        spread: The tensor.
        crc32: Of the record of each of its chunks, in order.

    Returns:
        The ranks; None where no difference is known of.
    """
    known: dict[object, tuple[Stored, int | None]] = {}
    for stored, crc in zip(spread.stored, crc32, strict=True):
        other, before = known.setdefault(stored.chunk.place, (stored, crc))
        if other is not stored and _differ(other, stored) and crc is not None and crc != before:
            if before is None:
                continue
            return other.chunk.rank or 0, stored.chunk.rank or 0
    return None


def unproven_ranks(spread: Spread, crc32: Sequence[int | None]) -> tuple[int, int] | None:
    """Finds two ranks of which nothing proves that they hold the same plain tensor.

    Proof is that both have the same view of storages of the same checksum: slices of one tensor
    are saved as different views of the whole of it.

    Args:
        spread: The tensor, which every rank has whole.
        crc32: Of the record of each of its chunks, in order.

    Returns:
        The ranks; None where all are proven to be alike.
    """
    if 0 in spread.shape:
        return None
    first, known = spread.stored[0], crc32[0]
    for stored, crc in zip(spread.stored[1:], crc32[1:], strict=True):
        if crc is None or crc != known or _view(stored) != _view(first):
            return first.chunk.rank or 0, stored.chunk.rank or 0
    return None


def _view(stored: Stored) -> tuple[int, int, Shape]:
    tensor = stored.tensor
    return tensor.storage.size_bytes, tensor.storage_offset, tensor.strides


def _differ(first: Stored, second: Stored) -> bool:
    same = first.tensor.strides == second.tensor.strides
    return same and _fills(first) and _fills(second)


def _fills(stored: Stored) -> bool:
    tensor = stored.tensor
    return math.prod(tensor.shape) * tensor.dtype.itemsize == tensor.storage.size_bytes


NOTE = (
    "optimizer states are left alone: they belong to slices of flat parameters, and nothing tells"
    " to which"
)


def is_of_optimizer(path: KeyPath) -> bool:
    return any(isinstance(step, str) and "optim" in step.lower() for step in path[:-1])


def without_cut_states(
    held: Mapping[KeyPath, Held], differ: Callable[[KeyPath], bool]
) -> tuple[dict[KeyPath, Held], int]:
    """Leaves out all states of an optimizer of which some are cut.

    Args:
        held: What the ranks have, by path.
        differ: Tells whether ranks hold different values of a plain tensor of equal shapes.

    Returns:
        The rest, and how many states were left out.
    """
    states = {path for path in held if is_of_optimizer(path)}
    cut = {
        path[:1]
        for path in states
        if held[path][0][1].shape and (is_cut(held[path]) or differ(path))
    }
    if not cut:
        return dict(held), 0
    left = {path for path in states if path[:1] in cut}
    return {path: one for path, one in held.items() if path not in left}, len(left)
