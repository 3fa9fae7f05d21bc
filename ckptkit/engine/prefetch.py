"""Reads from a remote source, joined into few requests and fetched ahead of their use.

Every request to a remote source costs a round trip. The reads of one piece of work are known
before it begins, so they are joined, fetched together into memory, and served from there. A read
that was not prefetched goes to the source.

Ranges that touch or overlap become one, and so do those with a small gap between them. Bytes of
gaps are read in vain, so they are limited to a hundredth of what is wanted; gaps that cost less
than the request itself do not count.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from ckptkit.core.index import FileRange, Key, Span, TensorIndex
from ckptkit.engine.locate import ChunkLookup, Located, LocatedChunks
from ckptkit.formats.pickle.torch_zip import WINDOW_BYTES
from ckptkit.storage.base import Source


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


def ranges_of(
    index: TensorIndex,
    lookup: ChunkLookup,
    span: Span,
    located: LocatedChunks | Mapping[tuple[Key, int], Located],
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
        if record.container == "zstd_torch_zip":
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
