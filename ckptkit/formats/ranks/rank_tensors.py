"""Assembles tensors from the parts that ranks have; replicas are compared by their checksums.

FSDP1's optimizer works on a rank's part of a flat parameter. Its own `state_dict()` holds plain
tensors of that size, numbered and different on every rank, and nothing shows to which slices of
which flat parameter they belong. Such states are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, FormatError, LimitError
from ckptkit.core.geometry import is_row_major
from ckptkit.core.index import Box, Chunk, KeyPath, Shape
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.dtensor import (
    Mesh,
    Placement,
    compute_local_part,
    find_local_parts,
    fits,
    parse_mesh,
    parse_placements,
    read_integers,
)
from ckptkit.formats.ranks.rank_files import RankContents, RankParts, RankTensor
from ckptkit.formats.ranks.sharded_values import DTensorRef, ShardedTensorRef, fields_of
from ckptkit.formats.trees import join_path
from ckptkit.storage.base import Source

_MIN_CHUNKS = 1 << 16  # of one file, for a pickle of any length
_BYTES_OF_A_CHUNK = 8  # of the pickle; a tensor alone has over 70
UNASSIGNED_STATES = (
    "optimizer states are left alone: they belong to slices of flat parameters, and nothing shows"
    " to which"
)


class StoredChunk(Struct, frozen=True):
    """A chunk, and the tensor of a file from which it was made."""

    chunk: Chunk
    tensor: TensorRef


class AssembledTensor(Struct, frozen=True):
    """A tensor whose parts are in the files of several ranks."""

    dtype: DType
    shape: Shape  # of the whole tensor
    stored: tuple[StoredChunk, ...]  # its chunks, replicas included
    is_plain: bool  # whether every rank has a plain tensor, without any mark of a distribution


class _LocalDTensor(Struct, frozen=True):
    """A DTensor as one rank has it, with its parsed specification."""

    contents: RankContents
    tensor: DTensorRef
    mesh: Mesh
    placements: tuple[Placement, ...]


class TensorAssembler(Struct):
    """Makes the chunks of tensors, and caches the meshes of devices in the files."""

    source: Source
    table: ArchiveTable
    # every mesh of every file
    meshes: dict[tuple[int, int], tuple[InertObject, Mesh]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # how many chunks each file has so far

    def assemble(self, path: KeyPath, parts: RankParts) -> AssembledTensor:
        """Returns a tensor with the chunks of its parts."""
        first = parts[0][1]
        other = next((part for part in parts if _kind_of(part[1]) != _kind_of(first)), None)
        if other is not None:
            raise FormatError(
                f"{join_path(path)!r} is {_describe(other[1])} here and {_describe(first)} on rank"
                f" {parts[0][0].file.rank}",
                where=other[0].archive.where,
                hint="files of two saves, or slices that are not marked as such, are in one folder",
            )
        if isinstance(first, DTensorRef):
            stored = self._chunks_of_dtensors(path, parts)
        elif isinstance(first, ShardedTensorRef):
            stored = [
                self._chunk(contents, shard.tensor, Box(shard.offsets, shard.tensor.shape))
                for contents, tensor in parts
                if isinstance(tensor, ShardedTensorRef)
                for shard in tensor.shards
                if 0 not in shard.tensor.shape
            ]
        else:
            stored = [
                self._chunk(contents, tensor, Box((0,) * len(tensor.shape), tensor.shape))
                for contents, tensor in _plain_parts(parts)
            ]
        return AssembledTensor(
            first.dtype, first.shape, tuple(stored), is_plain=isinstance(first, TensorRef)
        )

    def _chunks_of_dtensors(self, path: KeyPath, parts: RankParts) -> list[StoredChunk]:
        local = [
            _LocalDTensor(contents, tensor, *self._parse_spec(contents, tensor))
            for contents, tensor in parts
            if isinstance(tensor, DTensorRef)
        ]
        sizes = sorted({math.prod(here.mesh.sizes) for here in local})
        if len(sizes) > 1:
            raise FormatError(
                f"{join_path(path)!r} is spread over {' and '.join(map(str, sizes))} ranks",
                where=local[0].contents.archive.where,
                hint="files of runs of different sizes are in one folder; take away those of one",
            )
        local_parts = find_local_parts(
            [
                (here.tensor.local.shape, here.tensor.shape, here.mesh, here.placements)
                for here in local
            ],
            where=f"{local[0].contents.archive.where}: {join_path(path)!r}",
        )
        if local_parts is None:
            misfits = []
            for here in local:
                shape, placements = here.tensor.shape, here.placements
                part = compute_local_part(shape, here.mesh, placements, inner_first=False)
                if part is None or not fits(here.tensor.local.shape, part):
                    misfits.append((here, part))
            here, part = misfits[0]
            expected = "none" if part is None else str(list(part.shape))
            raise FormatError(
                f"{join_path(path)!r} of shape {list(here.tensor.shape)} has a part of shape"
                f" {list(here.tensor.local.shape)} on rank {here.contents.file.rank}, where its"
                f" placements give {expected}: sizes do not add up",
                where=here.contents.archive.where,
            )
        return [
            self._chunk(
                here.contents,
                here.tensor.local,
                block.box,
                sum(
                    n * step for n, step in zip(block.local, here.tensor.local.strides, strict=True)
                ),
            )
            for here, part in zip(local, local_parts, strict=True)
            if 0 not in part.shape
            for block in part.blocks
        ]

    def _parse_spec(
        self, contents: RankContents, tensor: DTensorRef
    ) -> tuple[Mesh, tuple[Placement, ...]]:
        try:
            fields = fields_of(tensor.spec, "specification of a DTensor")
            placements = parse_placements(fields.get("placements"), len(tensor.shape))
            return self._parse_mesh(contents, fields.get("mesh")), placements
        except CkptkitError as error:
            raise error.located(contents.archive.where) from error

    def _parse_mesh(self, contents: RankContents, value: object) -> Mesh:
        if not isinstance(value, InertObject):
            raise FormatError("DTensor has no mesh of devices")
        key = contents.archive.number, id(value)
        if key not in self.meshes:

            def read(tensor: TensorRef) -> list[int]:
                start, stop, _ = contents.archive.archive.extent(tensor.storage)
                path = contents.archive.path
                return read_integers(tensor, lambda: self.source.read(path, start, stop))

            self.meshes[key] = value, parse_mesh(value, contents.file.rank, read)
        return self.meshes[key][1]

    def _chunk(
        self, contents: RankContents, tensor: TensorRef, box: Box, skipped: int = 0
    ) -> StoredChunk:
        archive = contents.archive
        # A pickle may name the same parts any number of times, so the chunks are limited.
        count = self.counts[archive.number] = self.counts.get(archive.number, 0) + 1
        if count > _MIN_CHUNKS + archive.pickle_bytes // _BYTES_OF_A_CHUNK:
            raise LimitError(
                "tensors are cut into far more pieces than any real ones", where=archive.where
            )
        chunk = Chunk(
            box,
            self.table.record(archive, tensor),
            byte_offset=(tensor.storage_offset + skipped) * tensor.dtype.itemsize,
            strides=None if is_row_major(box.sizes, tensor.strides) else tensor.strides,
            rank=contents.file.rank,
        )
        return StoredChunk(chunk, tensor)


def _plain_parts(parts: RankParts) -> list[tuple[RankContents, TensorRef]]:
    return [(contents, tensor) for contents, tensor in parts if isinstance(tensor, TensorRef)]


def _kind_of(tensor: RankTensor) -> tuple[type, DType, Shape]:
    return type(tensor), tensor.dtype, tensor.shape


def _describe(tensor: RankTensor) -> str:
    kind = {DTensorRef: "a DTensor", ShardedTensorRef: "a ShardedTensor"}
    return f"{kind.get(type(tensor), 'a tensor')} of {tensor.dtype.name} {list(tensor.shape)}"


def find_differing_ranks(
    tensor: AssembledTensor, crc32: Sequence[int | None]
) -> tuple[int, int] | None:
    """Finds two ranks whose values of the same elements have different checksums of records."""
    first: dict[object, tuple[StoredChunk, int | None]] = {}
    for stored, crc in zip(tensor.stored, crc32, strict=True):
        other, before = first.setdefault(stored.chunk.place, (stored, crc))
        if crc is None or before is None or crc == before:
            continue
        same_strides = other.tensor.strides == stored.tensor.strides
        if same_strides and _fills_storage(other) and _fills_storage(stored):
            return other.chunk.rank or 0, stored.chunk.rank or 0
    return None


def find_unproven_ranks(
    tensor: AssembledTensor, crc32: Sequence[int | None]
) -> tuple[int, int] | None:
    """Finds two ranks that nothing proves to hold the same plain tensor.

    The proof is that both have the same view of storages with the same checksum: slices of one
    tensor are saved as different views of the whole tensor.
    """
    if 0 in tensor.shape:
        return None
    first, expected = tensor.stored[0], crc32[0]
    for stored, crc in zip(tensor.stored[1:], crc32[1:], strict=True):
        if crc is None or crc != expected or _view_of(stored) != _view_of(first):
            return first.chunk.rank or 0, stored.chunk.rank or 0
    return None


def _view_of(stored: StoredChunk) -> tuple[int, int, Shape]:
    tensor = stored.tensor
    return tensor.storage.size_bytes, tensor.storage_offset, tensor.strides


def _fills_storage(stored: StoredChunk) -> bool:
    tensor = stored.tensor
    return math.prod(tensor.shape) * tensor.dtype.itemsize == tensor.storage.size_bytes


def is_of_optimizer(path: KeyPath) -> bool:
    return any(isinstance(step, str) and "optim" in step.lower() for step in path[:-1])


def drop_cut_states(
    parts_by_path: Mapping[KeyPath, RankParts], differ: Callable[[KeyPath], bool]
) -> tuple[dict[KeyPath, RankParts], int]:
    """Drops all states of an optimizer if some are slices; returns the rest, and how many went."""
    states = {path for path in parts_by_path if is_of_optimizer(path)}
    cut = {
        path[:1]
        for path in states
        if parts_by_path[path][0][1].shape
        and (len({t.shape for _, t in _plain_parts(parts_by_path[path])}) > 1 or differ(path))
    }
    dropped = {path for path in states if path[:1] in cut}
    rest = {path: parts for path, parts in parts_by_path.items() if path not in dropped}
    return rest, len(dropped)
