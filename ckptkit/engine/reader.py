"""Reads ranges of tensors out of a source, whatever the layout of their chunks."""

from __future__ import annotations

import posixpath
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.crc import crc32
from ckptkit.core.geometry import flat_offset, hull, intersect
from ckptkit.core.index import Box, FileRange, Key, Span, TensorIndex
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.engine.locate import (
    Account,
    ChecksumLedger,
    Located,
    LocatedChunks,
    Locator,
    OpenRecord,
)
from ckptkit.engine.prefetch import (
    READ_AHEAD_BYTES,
    ChunkLookup,
    FetchedRanges,
    Piece,
    Run,
    ranges_of,
)
from ckptkit.engine.zstd import DecodedRecords
from ckptkit.storage.base import Source, distant

# Large enough that Python's share of a read is small, and that pieces of many column chunks stay
# worth one; small enough that a checksum finds the bytes still in a cache.
RUN_BYTES = 4 << 20
_Place = tuple[Box, NDArray[Any]]  # a box of a chunk, and where its elements go
_LOOKUPS = 16
_MOST_RUNS = 8  # of chunks that are smaller, several are better read with one request
_LOCATED = 4096


class Origin:
    """A source with its index, opened for reading tensors.

    Attributes:
        ledger: The checksums of its records.
        unverified: Keys of tensors of which some bytes had no stored checksum.
        located: The chunks that somebody has looked into already.
        decoded: What is decoded of its compressed records.
    """

    def __init__(self, name: str, source: Source, index: TensorIndex) -> None:
        self.name = name
        self.source = source
        self.index = index
        self.ledger = ChecksumLedger(len(index.records))
        self.unverified: set[Key] = set()
        self.located = LocatedChunks()
        self.decoded = DecodedRecords(source, index)
        self.ledger.finish_with(self.decoded.finish)

    def adopt(self, records: Mapping[int, OpenRecord]) -> None:
        """Takes over what other processes have left open in their ledgers."""
        for record, found in records.items():
            path = self.index.files[self.index.records[record].file].path
            self.ledger.adopt(record, found, partial(self.source.read_into, path))


class TensorReader:
    """Fills buffers with elements of tensors; one per thread, it owns its scratch memory.

    Attributes:
        bytes_read: How much of the source it has read so far.
    """

    def __init__(self, origin: Origin) -> None:
        self.bytes_read = 0
        self._origin = origin
        far = distant(origin.source)
        self._ahead = None if far is None else FetchedRanges(far)
        self._foreseen: Sequence[tuple[Key, Span]] = ()
        self._locator = Locator(self._ahead or origin.source, origin.index)
        self._lookups: OrderedDict[Key, ChunkLookup] = OrderedDict()
        self._located: OrderedDict[tuple[Key, int], Located] = OrderedDict()
        self._scratch: memoryview | None = None
        self._unrounded: memoryview | None = None

    def fill(self, key: Key, span: Span, target: memoryview) -> None:
        """Writes the elements of `span` into `target`, which has exactly their size in bytes."""
        lookup = self._lookup(key)
        itemsize = lookup.entry.dtype.itemsize
        for part in self._windows(lookup, span):
            low, high = part.start - span.start, part.stop - span.start
            view = target[low * itemsize : high * itemsize]
            if lookup.entry.rounded_from is None:
                self._fill_stored(lookup, part, view)
            else:
                self._fill_rounded(lookup, part, view)

    @property
    def is_distant(self) -> bool:
        """Whether reading costs round trips, so that `foresee` is worth a call."""
        return self._ahead is not None

    def runs(self, key: Key, span: Span) -> Sequence[Run]:
        """Returns the runs that a span consists of; none where it has others, or too many.

        Nothing is read: chunks that nobody has looked into yet are not known to hold runs.
        """
        lookup = self._lookup(key)
        itemsize = lookup.entry.stored_dtype.itemsize
        runs: list[Run] = []
        for piece in lookup.pieces(span):
            known = self._origin.located.get((key, piece.row))
            if known is None or piece.placement is not None or len(runs) == _MOST_RUNS:
                return ()
            if known.strides is not None or known.compressed is not None:
                return ()
            located = self._locate(lookup, piece.row)
            start = located.origin + piece.source_start * itemsize
            runs.append(
                Run(
                    FileRange(located.path, start, start + piece.elements * itemsize),
                    piece.target_start * itemsize,
                    int(lookup.chunks.record[piece.row]),
                    None if located.crc32 is None else start - located.start,
                )
            )
        return () if lookup.entry.rounded_from is not None else runs

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        """Fills buffers from a distant source; what they hold is still to be booked."""
        far = distant(self._origin.source)
        assert far is not None  # noqa: S101  nobody asks for it otherwise
        far.fetch(reads)
        self.bytes_read += sum(wanted.size_bytes for wanted, _ in reads)

    def book(self, run: Run, data: memoryview) -> None:
        """Checks the bytes of a run, as soon as all of its record are read."""
        if run.checked_at is not None:
            self._origin.ledger.add(run.record, (run.checked_at, len(data), crc32(data)))

    def forget(self) -> None:
        """Frees the memory of what was fetched."""
        if self._ahead is not None:
            self._ahead.forget()
        self._foreseen = ()

    def foresee(self, wanted: Sequence[tuple[Key, Span]]) -> None:
        """Fetches what the following calls of `fill` read, if it is not at hand already.

        Args:
            wanted: Tensors and spans of them, `READ_AHEAD_BYTES` together at most; a call for a
                part of a span is served too.
        """
        if self._ahead is None or all(self._is_foreseen(key, span) for key, span in wanted):
            return
        index, located = self._origin.index, self._origin.located
        ranges = (ranges_of(index, self._lookup(key), span, located) for key, span in wanted)
        self._ahead.fetch(one for group in ranges for one in group)
        self._foreseen = tuple(wanted)

    def _is_foreseen(self, key: Key, span: Span) -> bool:
        return any(
            key == other and known.start <= span.start and span.stop <= known.stop
            for other, known in self._foreseen
        )

    def _windows(self, lookup: ChunkLookup, span: Span) -> Iterator[Span]:
        """Yields the span as a whole, or in parts each of which is fetched first."""
        key = lookup.entry.key
        if self._ahead is None or self._is_foreseen(key, span):
            yield span
            return
        step = READ_AHEAD_BYTES // lookup.entry.stored_dtype.itemsize
        for start in range(span.start, span.stop, step):
            part = Span(start, min(start + step, span.stop))
            self.foresee([(key, part)])
            yield part

    def _fill_rounded(self, lookup: ChunkLookup, span: Span, target: memoryview) -> None:
        """Reads elements block by block, and rounds them to what the live tensor has."""
        entry = lookup.entry
        caster = Caster(entry.stored_dtype, entry.dtype)
        step = RUN_BYTES // entry.stored_dtype.itemsize
        if self._unrounded is None:
            self._unrounded = memoryview(bytearray(RUN_BYTES))
        for start in range(span.start, span.stop, step):
            part = Span(start, min(start + step, span.stop))
            count, low = part.stop - part.start, (start - span.start) * entry.dtype.itemsize
            block = self._unrounded[: count * entry.stored_dtype.itemsize]
            self._fill_stored(lookup, part, block)
            view = target[low : low + count * entry.dtype.itemsize]
            overflow = caster.cast(np.frombuffer(block, np.uint8), np.frombuffer(view, np.uint8))
            if overflow is not None:
                where = f"tensor {entry.key!r}"
                raise overflow_error(overflow, entry.dtype, where=where, block_start=start)

    def _fill_stored(self, lookup: ChunkLookup, span: Span, target: memoryview) -> None:
        """Fills a buffer with elements as they are stored."""
        itemsize = lookup.entry.stored_dtype.itemsize
        step = max(1, RUN_BYTES // itemsize)
        scattered = False
        for start in range(span.start, span.stop, step):
            part = Span(start, min(start + step, span.stop))
            low = (start - span.start) * itemsize
            view = target[low : low + (part.stop - part.start) * itemsize]
            for piece in lookup.pieces(part):
                located = self._locate(lookup, piece.row)
                if located.strides is None:
                    self._fill_piece(lookup, located, piece, view)
                else:
                    scattered = True
        if scattered:
            self._fill_scattered(lookup, span, target)

    def _fill_scattered(self, lookup: ChunkLookup, span: Span, target: memoryview) -> None:
        """Fills in what is not stored row-major: over the whole range, however long, at once."""
        places: dict[int, list[_Place]] = {}
        for piece in lookup.pieces(span):
            if self._locate(lookup, piece.row).strides is not None:
                array = _target_array(target, piece, lookup.entry.stored_dtype.itemsize)
                places.setdefault(piece.row, []).append((piece.place, array))
        for row, wanted in places.items():
            self._gather(self._locate(lookup, row), wanted)

    def _fill_piece(
        self, lookup: ChunkLookup, located: Located, piece: Piece, view: memoryview
    ) -> None:
        itemsize = lookup.entry.stored_dtype.itemsize
        if piece.placement is None:
            low = piece.target_start * itemsize
            run = view[low : low + piece.elements * itemsize]
            self._read_run(lookup, located, piece, run)
        else:
            scratch = self._scratch_of(piece.elements * itemsize)
            self._read_run(lookup, located, piece, scratch)
            _target_array(view, piece, itemsize)[...] = _elements(scratch, itemsize).reshape(
                piece.place.sizes
            )

    def _read_run(
        self, lookup: ChunkLookup, located: Located, piece: Piece, target: memoryview
    ) -> None:
        start = located.origin + piece.source_start * lookup.entry.stored_dtype.itemsize
        self._read_into(located, start, target)
        if located.crc32 is not None:
            booked = (start - located.start, len(target), crc32(target))
            self._origin.ledger.add(int(lookup.chunks.record[piece.row]), booked)

    def _read_into(self, located: Located, start: int, target: memoryview) -> None:
        if located.compressed is not None:
            self._origin.decoded.read_into(located.compressed, start, target)
        elif self._ahead is None:
            self._origin.source.read_into(located.path, start, target)
        else:
            self._ahead.read_into(located.path, start, target)
        self.bytes_read += len(target)

    def _gather(self, located: Located, wanted: Sequence[_Place]) -> None:
        """Collects boxes of a chunk that is not stored row-major; `finish` checks its CRC.

        What lies between the elements of one box are those of the next, so all are collected
        from the same reads.
        """
        strides = located.strides or ()
        itemsize = wanted[0][1].itemsize
        box = hull([place for place, _ in wanted])
        reach = [(n - 1) * s for n, s in zip(box.sizes, strides, strict=True)]
        extent = (sum(reach) + 1) * itemsize
        if extent <= RUN_BYTES:
            scratch = self._scratch_of(extent)
            start = located.origin + flat_offset(box.offsets, strides) * itemsize
            self._read_into(located, start, scratch)
            steps = [s * itemsize for s in strides]
            whole = _elements(scratch, itemsize)
            found = np.lib.stride_tricks.as_strided(whole, box.sizes, steps, writeable=False)
            for place, target in wanted:
                target[...] = _part_of(found, box, place)
            return
        axis = max(range(len(reach)), key=lambda i: reach[i])
        rest = extent - reach[axis] * itemsize
        count = max(1, (RUN_BYTES - rest) // (strides[axis] * itemsize) + 1)
        for part in _cut(box, axis, min(count, max(1, box.sizes[axis] - 1))):
            inside = [(intersect(part, place), place, target) for place, target in wanted]
            parts = [(i, _part_of(target, place, i)) for i, place, target in inside if i]
            if parts:
                self._gather(located, parts)

    def _lookup(self, key: Key) -> ChunkLookup:
        found = self._lookups.get(key)
        if found is None:
            found = self._lookups[key] = ChunkLookup(self._origin.index.tensors[key])
            if len(self._lookups) > _LOOKUPS:
                self._lookups.popitem(last=False)
        return found

    def _locate(self, lookup: ChunkLookup, row: int) -> Located:
        key = (lookup.entry.key, row)
        found = self._located.get(key)
        if found is None:
            found = self._located[key] = self._locate_anew(lookup, row)
            if len(self._located) > _LOCATED:
                self._located.popitem(last=False)
        return found

    def _locate_anew(self, lookup: ChunkLookup, row: int) -> Located:
        chunk = (lookup.entry.key, row)
        located = self._origin.located.get(chunk)
        if located is None:
            located = self._locator.locate(lookup.entry, lookup.chunks, row)
            if located.compressed is not None:
                located = self._look_into_stream(lookup, row)
            self._origin.located.put(chunk, located)
        if located.compressed is not None:
            return located
        if located.crc32 is None:
            self._origin.unverified.add(lookup.entry.key)
            return located
        source, path = self._origin.source, located.path
        where = f"{posixpath.join(source.location, path)}, tensor {lookup.entry.key!r}"
        self._origin.ledger.expect(
            int(lookup.chunks.record[row]),
            Account(
                start=located.start,
                stop=located.stop,
                expected=located.crc32,
                where=where,
                read_into=partial(source.read_into, path),
            ),
        )
        return located

    def _look_into_stream(self, lookup: ChunkLookup, row: int) -> Located:
        mark = partial(self._origin.unverified.add, lookup.entry.key)
        return self._origin.decoded.locate(lookup.entry, lookup.chunks, row, mark)

    def _scratch_of(self, size_bytes: int) -> memoryview:
        if self._scratch is None or len(self._scratch) < size_bytes:
            self._scratch = memoryview(bytearray(max(size_bytes, RUN_BYTES)))
        return self._scratch[:size_bytes]


def _elements(data: memoryview, itemsize: int) -> NDArray[Any]:
    return np.frombuffer(data, f"V{itemsize}")


def _part_of(array: NDArray[Any], box: Box, part: Box) -> NDArray[Any]:
    """Returns what an array that holds `box` holds of `part`."""
    return array[
        tuple(
            slice(p - b, p - b + n)
            for b, p, n in zip(box.offsets, part.offsets, part.sizes, strict=True)
        )
    ]


def _cut(box: Box, axis: int, count: int) -> Iterator[Box]:
    """Cuts a box across `axis` into boxes of `count` indexes, the last one thinner."""
    for low in range(0, box.sizes[axis], count):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += low
        sizes[axis] = min(count, sizes[axis] - low)
        yield Box(tuple(offsets), tuple(sizes))


def _target_array(view: memoryview, piece: Piece, itemsize: int) -> NDArray[Any]:
    """Returns the part of a buffer that a piece goes to, in the piece's own shape."""
    whole = _elements(view, itemsize)
    if piece.placement is None:
        run = whole[piece.target_start : piece.target_start + piece.elements]
        return run.reshape(piece.place.sizes)
    outer = piece.placement.outer
    block = whole[piece.target_start :][: int(np.prod(outer, dtype=np.int64))].reshape(outer)
    inner = piece.placement.inner
    return block[tuple(slice(o, o + s) for o, s in zip(inner.offsets, inner.sizes, strict=True))]
