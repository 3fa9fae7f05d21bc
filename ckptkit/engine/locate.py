"""Which stored bytes hold a range of a tensor's elements, and fetching them from remote sources.

`ChunkLookup` finds the chunks that a range overlaps. `Locator` finds the data of a chunk in its
file. A DCP index has only the extent of each archive, so archives are parsed when their tensors
are about to be read, not while planning: a million chunks would cost millions of small reads.

Every request to a remote source costs a round trip. The reads of one piece of work are known
before it begins, so they are joined, fetched together into memory (`RangeCache`), and served from
there. Bytes of gaps between them are read in vain, so they are limited to a hundredth of what is
wanted; gaps that cost less than the request itself do not count.
"""

from __future__ import annotations

import math
import posixpath
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

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
    is_contiguous_in,
    overlaps,
    row_major_strides,
    slabs,
)
from ckptkit.core.index import (
    COMPRESSED,
    ChunkTable,
    FileRange,
    Key,
    Record,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.pickle.torch_zip import WINDOW_BYTES, TensorCache, locate_tensor
from ckptkit.storage.base import Source


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
        at, touched = 0, self.chunks.take(np.array(rows, np.int64))
        # A range of elements is a box of one dimension.
        shape = (self.entry.elements,) if self.chunks.flat else self.entry.shape
        for slab in slabs(span, shape):
            for found in overlaps(touched, slab):
                places = found.chunk, found.source, found.target
                yield SpanOverlap(rows[found.row], *places, slab.sizes, at)
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


class Locator:
    """Finds chunks of one source, with a small cache of parsed headers."""

    def __init__(self, source: Source | RangeCache, index: TensorIndex) -> None:
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
                compressed=chunk.record if record.container in COMPRESSED else None,
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


class ByteRun(Struct, frozen=True):
    """Bytes of a tensor that are consecutive both where they are stored and where they go."""

    stored: FileRange  # where they are stored
    target: int  # the first of them, from the start of what was asked for
    record: int  # the record that they are part of
    # The first of them, from the start of what the record's checksum was stored for; None where
    # there is none.
    checked_at: int | None


REQUEST_BYTES = 8 << 20
"""Most bytes of one request: they take far longer than its latency, and are little to repeat."""

READ_AHEAD_BYTES = 8 << 20
"""Most bytes that one worker has prefetched."""

FREE_GAP_BYTES = 4 << 10
"""Gaps up to this size are always read: the directory of one archive and the next one's header."""

FREE_GAP_OF_ENDS_BYTES = 32 << 10
"""The same where only the ends of archives are wanted: those of small archives are close by."""

GAP_BYTES = 256 << 10
"""Gaps up to this size are read where what is wanted is large enough."""

VAIN_SHARE = 100
"""At most one byte in so many may be in larger gaps."""


def coalesce(
    wanted: Iterable[FileRange], *, free_gap_bytes: int = FREE_GAP_BYTES
) -> list[FileRange]:
    """Joins ranges into those that are read.

    `wanted`: in any order; they may overlap. `free_gap_bytes`: up to which a gap is read in any
    case. Returns ranges that cover them, apart from each other, sorted.
    """
    distinct = _joined(sorted(part for part in wanted if part.size_bytes > 0), free_gap_bytes)
    allowance = sum(part.size_bytes for part in distinct) // VAIN_SHARE
    limit = -1
    neighbours = pairwise(distinct)
    for gap in sorted(b.start - a.stop for a, b in neighbours if a.path == b.path):
        allowance -= gap
        if allowance < 0 or gap > GAP_BYTES:
            break
        limit = gap
    return distinct if limit < 0 else _joined(distinct, limit)


def requests(reads: Iterable[FileRange]) -> Iterator[FileRange]:
    """Cuts ranges into equal parts of at most `REQUEST_BYTES`."""
    for read in reads:
        count = -(-read.size_bytes // REQUEST_BYTES)
        step = -(-read.size_bytes // max(count, 1))
        for start in range(read.start, read.stop, max(step, 1)):
            yield FileRange(read.path, start, min(start + step, read.stop))


def _joined(ranges: Sequence[FileRange], gap_bytes: int) -> list[FileRange]:
    joined: list[FileRange] = []
    for part in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.path == part.path and part.start - last.stop <= gap_bytes:
            joined[-1] = FileRange(part.path, last.start, max(last.stop, part.stop))
        else:
            joined.append(part)
    return joined


_MOST_AROUND_BYTES = 16 << 10
"""Most bytes around the data of an archive that holds one chunk and nothing else."""


class RangeCache:
    """A source with some of its ranges in memory; for one thread at a time.

    `bytes_read`: how much of the source it has read so far.
    """

    def __init__(self, source: Source) -> None:
        self.bytes_read = 0
        self.location = source.location
        self._source = source
        self.is_remote = source.is_remote
        self._starts: Mapping[str, Sequence[int]] = {}
        self._ranges: dict[tuple[str, int], tuple[int, memoryview]] = {}

    def fetch(self, wanted: Iterable[FileRange], *, free_gap_bytes: int = FREE_GAP_BYTES) -> None:
        """Fetches ranges, in as few requests as they fit into; replaces those fetched before.

        `free_gap_bytes`: up to which a gap between two of them is always read.
        """
        self.clear()
        starts: dict[str, list[int]] = {}
        reads: list[tuple[FileRange, memoryview]] = []
        for joined in coalesce(wanted, free_gap_bytes=free_gap_bytes):
            data = memoryview(bytearray(joined.size_bytes))
            starts.setdefault(joined.path, []).append(joined.start)
            self._ranges[joined.path, joined.start] = joined.stop, data
            reads += (
                (request, data[request.start - joined.start :][: request.size_bytes])
                for request in requests([joined])
            )
        self._starts = starts
        self.read_direct(reads)

    def read_direct(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        """Fills buffers from the source, past the cache; many at a time if it is remote."""
        self.bytes_read += sum(wanted.size_bytes for wanted, _ in reads)
        self._source.fetch(reads)

    def clear(self) -> None:
        self._starts = {}
        self._ranges.clear()

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`; raises what the source raises."""
        cached = self.cached(path, start, stop)
        if cached is not None:
            return bytes(cached)
        self.bytes_read += stop - start
        return self._source.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on; raises what the source raises."""
        cached = self.cached(path, start, start + len(target))
        if cached is None:
            self.bytes_read += len(target)
            self._source.read_into(path, start, target)
        else:
            target[:] = cached

    def cached(self, path: str, start: int, stop: int) -> memoryview | None:
        """Returns a range if all of it is in memory."""
        starts = self._starts.get(path, ())
        at = bisect_right(starts, start)
        if not at:
            return None
        begin = starts[at - 1]
        end, data = self._ranges[path, begin]
        return data[start - begin : stop - begin] if stop <= end else None


def find_stored(index: TensorIndex, key: Key, span: Span) -> Iterator[tuple[Key, Span]]:
    """Yields the stored tensors that a span of a tensor is read from, and the spans of them."""
    derivation = index.tensors[key].derivation
    if derivation is None:
        yield key, span
        return
    for demand in derivation.demands(span):
        yield from find_stored(index, demand.key, demand.place)


def list_stored(index: TensorIndex, key: Key) -> Iterator[Key]:
    """Yields the stored tensors that a tensor is made of; itself where it is one."""
    derivation = index.tensors[key].derivation
    if derivation is None:
        yield key
        return
    for _, source in derivation.reads:
        yield from list_stored(index, source)


def ranges_of(
    index: TensorIndex,
    lookup: ChunkLookup,
    span: Span,
    located: Mapping[tuple[Key, int], Located],
) -> Iterator[FileRange]:
    """Yields the byte ranges that a span of a tensor is read from.

    Of an archive that was not parsed yet, the exact place of the data is not known: the range is
    then wider by the size of the headers, and both ends of the archive are read, where these are.

    `span`: elements of it. `located`: the chunks whose place is known, by key and row.
    """
    for overlap in lookup.overlaps(span):
        place = located.get((lookup.entry.key, overlap.row))
        itemsize = lookup.entry.stored_dtype.itemsize
        first, size = overlap.source_start * itemsize, overlap.elements * itemsize
        if place is not None:
            if place.strides is None and place.compressed is None:
                start = place.origin + first
                yield FileRange(place.path, start, start + size)
            continue
        record = index.records[int(lookup.chunks.record[overlap.row])]
        if record.container in COMPRESSED:
            continue  # its decoder reads it, from front to back
        path = index.files[record.file].path
        if record.container != "torch_zip":
            start = record.start + max(int(lookup.chunks.byte_offset[overlap.row]), 0) + first
            if lookup.chunks.strides.get(overlap.row) is None:
                yield FileRange(path, start, min(start + size, record.stop))
            continue
        around = record.stop - record.start - math.prod(overlap.chunk) * itemsize
        yield from windows_of(index, lookup, overlap.row)
        if 0 <= around <= _MOST_AROUND_BYTES:
            start = record.start + first
            yield FileRange(path, start, min(start + size + around, record.stop))


def windows_of(index: TensorIndex, lookup: ChunkLookup, row: int) -> Iterator[FileRange]:
    """Yields what is read of a chunk's archive to find its data: both its ends."""
    record = index.records[int(lookup.chunks.record[row])]
    if record.container == "torch_zip":
        path = index.files[record.file].path
        yield FileRange(path, record.start, min(record.start + WINDOW_BYTES, record.stop))
        yield FileRange(path, max(record.stop - WINDOW_BYTES, record.start), record.stop)
