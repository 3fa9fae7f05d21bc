"""Which stored bytes hold a range of a tensor's elements.

`ChunkLookup` finds the chunks that a range overlaps. `Locator` finds the data of a chunk in its
file. A DCP index has only the extent of each archive, so archives are parsed when their tensors
are about to be read, not while planning: a million chunks would cost millions of small reads.
"""

from __future__ import annotations

import math
import posixpath
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from msgspec import Struct

from ckptkit.core.checksums import leaf_digest, leaf_ranges, tree_digest
from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, FormatError
from ckptkit.core.geometry import (
    Overlap,
    drop_replicas,
    flat_hulls,
    flat_offset,
    intersect,
    is_contiguous_in,
    relative,
    row_major_strides,
    slabs,
)
from ckptkit.core.index import (
    Box,
    ChunkTable,
    Key,
    Record,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.pickle.torch_zip import TensorCache, locate_tensor


class SpanOverlap(Overlap, frozen=True):
    """What a chunk holds of one block of a span, counted as in `Overlap` from the block.

    The shared elements are always consecutive in the chunk, counted row-major.
    """

    block: Shape  # shape of the block, which is stored row-major in the span
    block_start: int  # its first element, counted from the start of the span

    @property
    def elements(self) -> int:
        return math.prod(self.source.sizes)

    @property
    def source_start(self) -> int:
        """The first element, counted row-major in the chunk."""
        return flat_offset(self.source.offsets, row_major_strides(self.chunk))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are consecutive in the span too."""
        return is_contiguous_in(self.target.sizes, self.block)

    @property
    def target_start(self) -> int:
        """The first element, counted from the start of the span."""
        return self.block_start + flat_offset(self.target.offsets, row_major_strides(self.block))


class ChunkLookup:
    """The chunks of one tensor, without replicas, ready to be searched."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.chunks = drop_replicas(entry.chunks)
        self._start, self._stop = flat_hulls(self.chunks, entry.shape)

    def overlaps(self, span: Span) -> Iterator[SpanOverlap]:
        """Yields what each chunk holds of a range of elements; with proven coverage they fill it.

        The range is cut into boxes that are full behind their first varying dimension.
        """
        rows = np.flatnonzero((self._start < span.stop) & (self._stop > span.start)).tolist()
        for row in rows if self.chunks.flat else ():
            start, stop = int(self._start[row]), int(self._stop[row])
            low, size = max(start, span.start), min(stop, span.stop) - max(start, span.start)
            source, target = Box((low - start,), (size,)), Box((low - span.start,), (size,))
            yield SpanOverlap(row, (stop - start,), source, target, (span.stop - span.start,), 0)
        if self.chunks.flat:
            return
        at, table = 0, self.chunks
        boxes = [
            (row, Box(tuple(table.offsets[row].tolist()), tuple(table.sizes[row].tolist())))
            for row in rows
        ]
        for slab in slabs(span, self.entry.shape):
            for row, box in boxes:
                shared = intersect(slab, box)
                if shared is not None:
                    source, target = relative(shared, box), relative(shared, slab)
                    yield SpanOverlap(row, box.sizes, source, target, slab.sizes, at)
            at += math.prod(slab.sizes)


class Located(Struct, frozen=True):
    """A chunk's data."""

    path: str
    start: int  # first byte of the record's data
    stop: int  # first byte after it
    crc32: int | None  # checksum of `[start, stop)`, or None where none was stored
    origin: int  # byte of the chunk's first element
    strides: Shape | None  # in elements; None for row-major
    # The record, where all positions are those in what it decodes to; its checksum is then compared
    # by its decoder. Else None.
    compressed: int | None = None


class ByteSource(Protocol):
    """The part of a source that is needed to parse archives."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`."""
        ...


_MOST_LOCATED = 16384


class LocatedChunks:
    """The places of chunks that were located lately; threads share it."""

    def __init__(self) -> None:
        self._located: dict[tuple[Key, int], Located] = {}
        self._lock = threading.Lock()

    def get(self, chunk: tuple[Key, int]) -> Located | None:
        """Returns the place of a chunk, by its tensor's key and its row; None if it is unknown."""
        return self._located.get(chunk)

    def put(self, chunk: tuple[Key, int], located: Located) -> None:
        """Keeps the place of a chunk; beyond the limit the oldest one is dropped."""
        with self._lock:
            if len(self._located) >= _MOST_LOCATED:
                del self._located[next(iter(self._located))]
            self._located[chunk] = located


class Locator:
    """Finds chunks of one source, with a small cache of parsed headers."""

    def __init__(self, source: ByteSource, index: TensorIndex) -> None:
        self._source = source
        self._index = index
        self._cache = TensorCache()

    def locate(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        """Finds the data of chunk `row` of a table of a tensor's chunks.

        Returns where its bytes are, and what is known of them; of a compressed record just that it
        is one.
        """
        record = self._index.records[int(chunks.record[row])]
        path = self._index.files[record.file].path
        if record.container != "torch_zip":
            chunk = chunks[row]
            return Located(
                path=path,
                start=record.start,
                stop=record.stop,
                crc32=self._crc32_of(record, chunk.record, entry.key),
                origin=record.start + (chunk.byte_offset or 0),
                strides=chunk.strides,
                compressed=chunk.record if record.container == "zstd_torch_zip" else None,
            )
        sizes = tuple(chunks.sizes[row].tolist())
        where = f"{posixpath.join(self._source.location, path)}, tensor {entry.key!r}"

        def read(start: int, stop: int) -> bytes:
            return self._source.read(path, record.start + start, record.start + stop)

        payload = locate_tensor(read, record.stop - record.start, where=where, cache=self._cache)
        if payload.dtype != entry.dtype or payload.shape != sizes:
            raise FormatError(
                f"holds {payload.dtype.name} {list(payload.shape)} against {entry.dtype.name}"
                f" {list(sizes)} in the index",
                where=where,
                hint="the file belongs to another save, or was damaged",
            )
        start = record.start + payload.start
        return Located(
            path=path,
            start=start,
            stop=record.start + payload.stop,
            crc32=payload.crc32,
            origin=start + payload.storage_offset * entry.dtype.itemsize,
            strides=None if payload.row_major else payload.strides,
        )

    def _crc32_of(self, record: Record, number: int, key: Key) -> int | None:
        """Returns the CRC-32 of a raw record.

        Where only a digest of it is known, all of it is read and compared first: what is read
        later has the same bytes if it has the same CRC-32.
        """
        expected = self._index.records.digests.get(number)
        if record.crc32 is not None or expected is None:
            return record.crc32
        path, crc, leaves = self._index.files[record.file].path, 0, []
        for start, stop in leaf_ranges(record.stop - record.start):
            data = memoryview(self._source.read(path, record.start + start, record.start + stop))
            crc = crc32(data, crc)
            leaves.append(leaf_digest(data))
        found = tree_digest(leaves)
        if found != expected:
            raise ChecksumError(
                f"has digest {found} against {expected} in {MANIFEST_NAME}",
                where=f"{posixpath.join(self._source.location, path)}, tensor {key!r}",
                hint="the file was damaged or changed after it was written; copy it again, or"
                f" remove {MANIFEST_NAME} if the change is meant",
            )
        return crc
