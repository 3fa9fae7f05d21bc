"""Tensors that several files of `torch.save` have in common, compared before any is read.

The checksums of storages decide where they can; elsewhere, as where all tensors of a file are views
of one storage, the bytes are read, up to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from ckptkit.core.index import FileRange
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.storage.base import Source

_COMPARED_BYTES = 256 << 20  # of copies without comparable checksums, in all
_WINDOW_BYTES = 8 << 20


class StoredTensor(Struct, frozen=True):
    """A tensor of one file."""

    archive: TorchArchive
    tensor: TensorRef

    @property
    def size_bytes(self) -> int:
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize


def find_differing_copies(
    source: Source, table: ArchiveTable, pairs: Sequence[tuple[StoredTensor, StoredTensor]]
) -> tuple[list[int], int]:
    """Compares tensors of equal shapes and element types, pair by pair."""
    differing, unknown = [], []
    for position, (mine, theirs) in enumerate(pairs):
        is_equal = _compare_checksums(table, mine, theirs)
        if is_equal is None:
            unknown.append(position)
        elif not is_equal:
            differing.append(position)
    left, unread = _COMPARED_BYTES, 0
    wanted: list[tuple[int, FileRange, FileRange]] = []
    for position in sorted(unknown, key=lambda position: pairs[position][0].size_bytes):
        mine, theirs = pairs[position]
        left -= mine.size_bytes
        if left < 0 or not (mine.tensor.row_major and theirs.tensor.row_major):
            unread += 1
        else:
            wanted.append((position, _range_of(table, mine), _range_of(table, theirs)))
    source.prefetch([place for _, *places in wanted for place in places])
    differing += [n for n, mine, theirs in wanted if not _have_equal_bytes(source, mine, theirs)]
    return sorted(differing), unread


def _compare_checksums(
    table: ArchiveTable, mine: StoredTensor, theirs: StoredTensor
) -> bool | None:
    """Returns whether stored checksums show that two tensors are equal; None if they do not."""
    crcs = [table.records[table.record(t.archive, t.tensor)].crc32 for t in (mine, theirs)]
    a, b = (
        (t.tensor.storage.size_bytes, t.tensor.storage_offset, t.tensor.strides)
        for t in (mine, theirs)
    )
    if None in crcs or a != b:
        return None
    if crcs[0] == crcs[1]:
        return True
    return False if mine.tensor.storage.size_bytes == mine.size_bytes else None


def _range_of(table: ArchiveTable, stored: StoredTensor) -> FileRange:
    record = table.records[table.record(stored.archive, stored.tensor)]
    start = record.start + stored.tensor.storage_offset * stored.tensor.dtype.itemsize
    return FileRange(stored.archive.path, start, start + stored.size_bytes)


def _have_equal_bytes(source: Source, mine: FileRange, theirs: FileRange) -> bool:
    return all(
        source.read(mine.path, mine.start + at, min(mine.start + at + _WINDOW_BYTES, mine.stop))
        == source.read(
            theirs.path, theirs.start + at, min(theirs.start + at + _WINDOW_BYTES, theirs.stop)
        )
        for at in range(0, mine.size_bytes, _WINDOW_BYTES)
    )
