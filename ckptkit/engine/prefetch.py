"""What a worker is about to read, known before it is read, and fetched all at once.

A near source is read piece by piece, which costs next to nothing. From a distant one every piece
would cost a round trip: those of one piece of work are joined, fetched together into memory, and
read from there. What was not foreseen is still read from the source.

Which stored pieces make up a range of a tensor's elements.

Which bytes are asked for at once, where every question costs a round trip.

What a piece of work wants is known before it begins. Ranges that touch or overlap become one, and
so do those with little between them. What lies between is read in vain, so it is kept to a
hundredth of what is wanted; gaps that cost less than the question itself do not count.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ckptkit.core.geometry import (
    flat_hulls,
    flat_offset,
    intersect,
    is_contiguous_in,
    row_major_strides,
    slabs,
    without_replicas,
)
from ckptkit.core.index import Box, FileRange, Key, Shape, Span, TensorEntry, TensorIndex
from ckptkit.engine.locate import Located, LocatedChunks
from ckptkit.formats.pickle.torch_zip import WINDOW_BYTES
from ckptkit.storage.base import Distant


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a piece that is not one run lands: the box `inner` of a block of shape `outer`."""

    inner: Box
    outer: Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one chunk, and where it goes.

    Attributes:
        row: The chunk, in the table of `ChunkLookup`.
        place: The piece as a box of the chunk, for chunks that are not stored row-major.
        source_start: First element, counted row-major in the chunk.
        elements: How many.
        target_start: First element, counted from the start of the range asked for, of the
            piece itself or, with a `placement`, of the block that it lies in.
        placement: Set when the piece is scattered over the range.
    """

    row: int
    place: Box
    source_start: int
    elements: int
    target_start: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a tensor that lie together where they are stored and where they go.

    Attributes:
        place: Where they are stored.
        target: The first of them, from the start of what was asked for.
        record: The record that they are part of.
        checked_at: The first of them, from the start of what the record's checksum was stored
            for; None where there is none.
    """

    place: FileRange
    target: int
    record: int
    checked_at: int | None


class ChunkLookup:
    """The chunks of one tensor, without replicas, ready to be searched."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.chunks = without_replicas(entry.chunks)
        self._start, self._stop = flat_hulls(self.chunks, entry.shape)

    def pieces(self, span: Span) -> Iterator[Piece]:
        """Yields the pieces of a range of elements; with proven coverage they fill it.

        A piece is always one run of its chunk's row-major elements, because the range is cut
        into boxes that are full behind their first varying dimension.
        """
        rows = np.flatnonzero((self._start < span.stop) & (self._stop > span.start)).tolist()
        if self.chunks.flat:
            yield from (self._flat_piece(row, span) for row in rows)
            return
        at = 0
        places = [(row, self._box(row)) for row in rows]
        for slab in slabs(span, self.entry.shape):
            for row, box in places:
                inter = intersect(slab, box)
                if inter is not None:
                    yield _piece(row, box, inter, slab, at)
            at += math.prod(slab.sizes)

    def _box(self, row: int) -> Box:
        return Box(tuple(self.chunks.offsets[row].tolist()), tuple(self.chunks.sizes[row].tolist()))

    def _flat_piece(self, row: int, span: Span) -> Piece:
        start, stop = int(self._start[row]), int(self._stop[row])
        low, high = max(start, span.start), min(stop, span.stop)
        return Piece(
            row, Box((low - start,), (high - low,)), low - start, high - low, low - span.start
        )


def _piece(row: int, chunk: Box, inter: Box, slab: Box, at: int) -> Piece:
    local = tuple(i - c for i, c in zip(inter.offsets, chunk.offsets, strict=True))
    inner = tuple(i - s for i, s in zip(inter.offsets, slab.offsets, strict=True))
    contiguous = is_contiguous_in(inter.sizes, slab.sizes)
    return Piece(
        row=row,
        place=Box(local, inter.sizes),
        source_start=flat_offset(local, row_major_strides(chunk.sizes)),
        elements=math.prod(inter.sizes),
        target_start=at + flat_offset(inner, row_major_strides(slab.sizes)) if contiguous else at,
        placement=None if contiguous else Placement(Box(inner, inter.sizes), slab.sizes),
    )


REQUEST_BYTES = 8 << 20
"""Of a single request at most: far more than its latency costs, and little to repeat."""

READ_AHEAD_BYTES = 8 << 20
"""What one worker has in memory of what it is about to use."""

FREE_GAP_BYTES = 4 << 10
"""Up to which a gap is always read: the directory of one archive and the header of the next."""

FREE_GAP_OF_ENDS_BYTES = 32 << 10
"""The same where all that is wanted are the ends of archives: those of small ones lie close."""

GAP_BYTES = 256 << 10
"""Up to which a gap is read where what is wanted is large enough."""

VAIN_SHARE = 100
"""One byte in so many may lie in larger gaps."""


def coalesce(
    wanted: Iterable[FileRange], *, free_gap_bytes: int = FREE_GAP_BYTES
) -> list[FileRange]:
    """Joins ranges into those that are read.

    Args:
        wanted: In any order; they may overlap.
        free_gap_bytes: Up to which a gap is read in any case.

    Returns:
        Ranges that cover them, apart from each other, sorted.
    """
    distinct = _joined(sorted(one for one in wanted if one.size_bytes > 0), free_gap_bytes)
    allowance = sum(one.size_bytes for one in distinct) // VAIN_SHARE
    limit = -1
    for gap in sorted(_gaps(distinct)):
        allowance -= gap
        if allowance < 0 or gap > GAP_BYTES:
            break
        limit = gap
    return distinct if limit < 0 else _joined(distinct, limit)


def requests(reads: Iterable[FileRange]) -> Iterator[FileRange]:
    """Cuts ranges into equal parts of at most `REQUEST_BYTES`."""
    for one in reads:
        count = -(-one.size_bytes // REQUEST_BYTES)
        step = -(-one.size_bytes // max(count, 1))
        for start in range(one.start, one.stop, max(step, 1)):
            yield FileRange(one.path, start, min(start + step, one.stop))


def _joined(ranges: Sequence[FileRange], gap_bytes: int) -> list[FileRange]:
    found: list[FileRange] = []
    for one in ranges:
        last = found[-1] if found else None
        if last is not None and last.path == one.path and one.start - last.stop <= gap_bytes:
            found[-1] = FileRange(one.path, last.start, max(last.stop, one.stop))
        else:
            found.append(one)
    return found


def _gaps(ranges: Sequence[FileRange]) -> Iterator[int]:
    for one, following in pairwise(ranges):
        if one.path == following.path:
            yield following.start - one.stop


_MOST_AROUND_BYTES = 16 << 10
"""What surrounds the data of an archive at most, where it holds one chunk and nothing else."""


class FetchedRanges:
    """A distant source with some of its ranges in memory; one thread's own."""

    def __init__(self, source: Distant) -> None:
        self._source = source
        self._starts: Mapping[str, Sequence[int]] = {}
        self._ranges: dict[tuple[str, int], tuple[int, memoryview]] = {}

    @property
    def location(self) -> str:
        return self._source.location

    def fetch(self, wanted: Iterable[FileRange], *, free_gap_bytes: int = FREE_GAP_BYTES) -> None:
        """Fetches ranges, in as few requests as they fit into; what was there before is gone.

        Args:
            wanted: The ranges.
            free_gap_bytes: Up to which a gap between two of them is always read.
        """
        reads = coalesce(wanted, free_gap_bytes=free_gap_bytes)
        self.forget()
        starts: dict[str, list[int]] = {}
        jobs: list[tuple[FileRange, memoryview]] = []
        for one in reads:
            data = memoryview(bytearray(one.size_bytes))
            starts.setdefault(one.path, []).append(one.start)
            self._ranges[one.path, one.start] = one.stop, data
            jobs += ((part, data[part.start - one.start :]) for part in requests([one]))
        self._starts = starts
        if jobs:
            self._source.fetch([(part, view[: part.size_bytes]) for part, view in jobs])

    def forget(self) -> None:
        self._starts = {}
        self._ranges.clear()

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`; raises what the source raises."""
        found = self._find(path, start, stop)
        return self._source.read(path, start, stop) if found is None else bytes(found)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on; raises what the source raises."""
        found = self._find(path, start, start + len(target))
        if found is None:
            self._source.read_into(path, start, target)
        else:
            target[:] = found

    def _find(self, path: str, start: int, stop: int) -> memoryview | None:
        starts = self._starts.get(path, ())
        at = bisect_right(starts, start)
        if not at:
            return None
        begin = starts[at - 1]
        end, data = self._ranges[path, begin]
        return data[start - begin : stop - begin] if stop <= end else None


def ranges_of(
    index: TensorIndex,
    lookup: ChunkLookup,
    span: Span,
    located: LocatedChunks | Mapping[tuple[Key, int], Located],
) -> Iterator[FileRange]:
    """Yields the byte ranges that a span of a tensor is read from.

    Of an archive that was not looked into yet, the exact place of the data is not known: so much
    more is read as surrounds them, and both its ends, where the archive tells what it holds.

    Args:
        index: Of the source.
        lookup: The tensor.
        span: Elements of it.
        located: The chunks whose place is known, by key and row.
    """
    for piece in lookup.pieces(span):
        found = located.get((lookup.entry.key, piece.row))
        if found is not None:
            yield from _known(lookup, piece, found)
            continue
        record = index.records[int(lookup.chunks.record[piece.row])]
        if record.container == "zstd_torch_zip":
            continue  # is fetched by whoever decodes it, from front to back
        path = index.files[record.file].path
        first, size = _bytes_of(lookup, piece)
        if record.container != "torch_zip":
            start = record.start + max(int(lookup.chunks.byte_offset[piece.row]), 0) + first
            if lookup.chunks.strides.get(piece.row) is None:
                yield FileRange(path, start, min(start + size, record.stop))
            continue
        around = record.stop - record.start - _chunk_bytes(lookup, piece.row)
        yield from windows_of(index, lookup, piece.row)
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


def _known(lookup: ChunkLookup, piece: Piece, found: Located) -> Iterator[FileRange]:
    if found.strides is None and found.compressed is None:
        first, size = _bytes_of(lookup, piece)
        start = found.origin + first
        yield FileRange(found.path, start, start + size)


def _bytes_of(lookup: ChunkLookup, piece: Piece) -> tuple[int, int]:
    itemsize = lookup.entry.stored_dtype.itemsize
    return piece.source_start * itemsize, piece.elements * itemsize


def _chunk_bytes(lookup: ChunkLookup, row: int) -> int:
    sizes: Shape = tuple(lookup.chunks.sizes[row].tolist())
    return math.prod(sizes) * lookup.entry.stored_dtype.itemsize
