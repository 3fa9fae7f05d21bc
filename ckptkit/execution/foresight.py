"""What a worker is about to read, known before it is read, and fetched all at once.

A near source is read piece by piece, which costs next to nothing. From a distant one every piece
would cost a round trip: those of one piece of work are joined, fetched together into memory, and
read from there. What was not foreseen is still read from the source.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptkit.core.index import Key, Shape, Span, TensorIndex
from ckptkit.core.ranges import FileRange
from ckptkit.execution.locate import Located, LocatedChunks
from ckptkit.execution.pieces import ChunkLookup, Piece
from ckptkit.formats.torch_zip import WINDOW_BYTES
from ckptkit.planning.reads import FREE_GAP_BYTES, coalesce, requests
from ckptkit.storage.base import Distant

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
        """The place as the user named it, for messages."""
        return self._source.location

    def fetch(self, wanted: Iterable[FileRange], *, free_gap_bytes: int = FREE_GAP_BYTES) -> None:
        """Fetches ranges, in as few requests as they fit into; what was there before is gone.

        Args:
            wanted: The ranges.
            free_gap_bytes: Up to which a gap between two of them is always read.

        Raises:
            InputError: If one cannot be read.
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
        """Frees the memory of what was fetched."""
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
