"""Reads elements of tensors out of a source, whatever the layout of their chunks.

`TensorReader` reads either a span of a tensor into a buffer (`fill`), or boxes of one chunk into
any memory (`read_chunk`). Both read byte runs of at most `RUN_BYTES`, straight into the memory
where it is contiguous and through a scratch buffer elsewhere, and hand each run to the checksum
tracker of the source.
"""

from __future__ import annotations

import math
import posixpath
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.geometry import (
    Overlap,
    Walk,
    contiguous_parts,
    cut,
    cut_span,
    flat_offset,
    hull,
    intersect,
    relative,
    row_major_strides,
    slices_of,
    widen,
)
from ckptkit.core.index import (
    Box,
    ChunkTable,
    Derivation,
    FileRange,
    Key,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.engine.casts import Caster
from ckptkit.engine.checksum_tracker import ChecksumTracker, OpenRecord, TrackedRecord
from ckptkit.engine.decompress import DecodedRecords
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.locate import (
    READ_AHEAD_BYTES,
    ByteRun,
    ChunkLookup,
    Located,
    Locator,
    RangeCache,
    SpanOverlap,
    find_stored,
    ranges_of,
)
from ckptkit.storage.base import Source

# Large enough that Python's share of a read is small, and that a scratch buffer of many column
# chunks is worth a read; small enough that a checksum finds the bytes still in a cache.
RUN_BYTES = 4 << 20
# Where a column of a matrix is wanted, runs below a page are read with what is between them.
_SHORT_RUN_BYTES = 4 << 10
_DIRECT_READS = 8  # of `RUN_BYTES` each, that a distant source is asked for together
SHORT_REMOTE_RUN_BYTES = 256 << 10
"""The same of a distant source, where each run is a request."""
# Blocks of tensors that are made from others; what they are made from takes up to twice as much.
_DERIVED_BYTES = 2 << 20
_ALIGNMENT = 16  # bytes, of an element of any type
_LOOKUPS = 16
_MOST_RUNS = 8  # of chunks that are smaller, several are better read with one request
_LOCATED, _MOST_LOCATED = 4096, 16384  # chunks that a reader keeps, and an origin
_BYTE_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


class BoxMemory:
    """Memory for a box of a tensor, in host memory or on a device.

    Elements are moved as bytes, so that their type does not matter; see `byte_type`.
    """

    __slots__ = ()

    def direct(self, _box: Box) -> memoryview | None:
        """Returns the memory of a part of the box as one writable run, None if it is not one."""
        return None

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        """Copies elements, in the shape of a part of the box, to their place."""
        raise NotImplementedError

    def walked(self, start: Shape, walks: Sequence[Walk], sizes: Shape) -> BoxMemory:
        """Returns the memory of some of the elements, as that of another box.

        `start`: the place of the first of them. `walks`: for each dimension of the other box, how a
        step along it moves in this one. `sizes`: those of the other box.
        """
        raise NotImplementedError


class ArrayMemory(BoxMemory, Struct, frozen=True, eq=False):
    """A numpy array of any strides as the memory of a box."""

    array: NDArray[Any]

    def direct(self, box: Box) -> memoryview | None:
        part = self.array[slices_of(box)]
        return part.reshape(-1).view(np.uint8).data if part.flags.c_contiguous else None

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        self.array[slices_of(box)] = elements

    def walked(self, start: Shape, walks: Sequence[Walk], sizes: Shape) -> ArrayMemory:
        rest: tuple[Any, ...] = (*(slice(at, None) for at in start), Ellipsis)
        first = self.array[rest]
        strides = [first.strides[axis] * step if step else 0 for axis, step in walks]
        return ArrayMemory(np.lib.stride_tricks.as_strided(first, sizes, strides))


BoxTarget = tuple[Overlap, BoxMemory]
"""A box of a chunk, and the memory that it goes to."""


class ChunkRead(Struct, frozen=True):
    """Boxes of one chunk, and the memory that each of them goes to."""

    entry: TensorEntry
    chunks: ChunkTable  # its chunks, without replicas
    row: int
    record: int  # the number of its record
    targets: tuple[BoxTarget, ...]


class Origin:
    """A source with its index, opened for reading tensors.

    `checksums`: the checksums of its records. `unverified`: keys of tensors with bytes that had no
    stored checksum. `located`: the chunks that were located already. `decoded`: what is decoded of
    its compressed records.
    """

    def __init__(
        self, name: str, source: Source, index: TensorIndex, *, most_pieces: int | None = None
    ) -> None:
        """Opens it.

        `name`: what plans call it. `most_pieces`: as for `ChecksumTracker`.
        """
        self.name = name
        self.source = source
        self.index = index
        self.unverified: set[Key] = set()
        self.located: dict[tuple[Key, int], Located] = {}
        self._lock = threading.Lock()
        self.decoded = DecodedRecords(source, index)
        self.checksums = ChecksumTracker(
            len(index.records), most_pieces=most_pieces, finish_decoding=self.decoded.finish
        )

    def keep_located(self, chunk: tuple[Key, int], located: Located) -> None:
        """Keeps the place of a chunk, by its tensor's key and its row, and drops the oldest one."""
        with self._lock:
            if len(self.located) >= _MOST_LOCATED:
                del self.located[next(iter(self.located))]
            self.located[chunk] = located

    def adopt(self, records: Mapping[int, OpenRecord]) -> None:
        """Continues the records that the trackers of other processes have left open."""
        for number, record in records.items():
            path = self.index.files[self.index.records[number].file].path
            self.checksums.adopt(number, record, partial(self.source.read_into, path))


class TensorReader:
    """Reads elements of tensors; one per thread, it owns its scratch memory.

    `cache`: the source, with what was prefetched.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.cache = RangeCache(origin.source)
        self._prefetched: Sequence[tuple[Key, Span]] = ()
        self._locator = Locator(self.cache, origin.index)
        self._lookups: OrderedDict[Key, ChunkLookup] = OrderedDict()
        self._located: OrderedDict[tuple[Key, int], Located] = OrderedDict()
        self._scratch: memoryview | None = None
        self._unrounded: memoryview | None = None
        # What the last elements of a derived tensor were made from: the next ones may be, too.
        self._input_memory = memoryview(bytearray())
        self._inputs: list[NDArray[Any]] = []
        self._derived_from: tuple[Any, ...] = ()

    def fill(self, key: Key, span: Span, target: memoryview) -> None:
        """Writes the elements of `span` into `target`, which has exactly their size in bytes."""
        entry = self._origin.index.tensors[key]
        if entry.derivation is not None:
            self._derive(entry, entry.derivation, span, target)
            return
        lookup = self._lookup(key)
        itemsize = lookup.entry.dtype.itemsize
        for part in self._windows(lookup, span):
            low, high = part.start - span.start, part.stop - span.start
            view = target[low * itemsize : high * itemsize]
            if lookup.entry.rounded_from is None:
                self._fill_stored(lookup, part, view)
            else:
                self._fill_rounded(lookup, part, view)

    def read_chunk(self, read: ChunkRead) -> Located:
        """Reads boxes of a chunk into their memory.

        What was fetched into `cache` is taken from there. Of a chunk that is there as a whole,
        all bytes are added to the checksum, and else those that are read.

        Returns where the chunk is.
        """
        located = self._locate(read.entry, read.chunks, read.row)
        if located.compressed is None and located.crc32 is not None:
            whole = self.cache.cached(located.path, located.start, located.stop)
            if whole is not None:
                self._origin.checksums.note(read.record, 0, whole)
        short = SHORT_REMOTE_RUN_BYTES if self.cache.is_remote else _SHORT_RUN_BYTES
        self._read_boxes(located, read, short)
        return located

    def _read_boxes(self, located: Located, read: ChunkRead, short_bytes: int) -> None:
        itemsize, targets = read.entry.stored_dtype.itemsize, read.targets
        if located.strides is not None:
            self._gather(located, read.record, itemsize, targets)
            return
        if len(targets) > 1:
            targets = tuple(sorted(targets, key=lambda target: target[0].source.offsets))
        for overlap, memory in targets:
            self._read_box(located, read.record, itemsize, overlap, memory, short_bytes)

    def byte_runs(self, key: Key, span: Span) -> Sequence[ByteRun]:
        """Returns the runs that a span consists of; none where it has others, or too many.

        Nothing is read: chunks that were not located yet count as others.
        """
        derivation = self._origin.index.tensors[key].derivation
        if derivation is not None:
            demands = derivation.demands(span) if isinstance(derivation, StoredOperand) else ()
            return self.byte_runs(demands[0].key, demands[0].place) if demands else ()
        lookup = self._lookup(key)
        itemsize = lookup.entry.stored_dtype.itemsize
        runs: list[ByteRun] = []
        for overlap in lookup.overlaps(span):
            located = self._origin.located.get((key, overlap.row))
            if located is None or not overlap.is_contiguous or len(runs) == _MOST_RUNS:
                return ()
            if located.strides is not None or located.compressed is not None:
                return ()
            self._locate(lookup.entry, lookup.chunks, overlap.row)  # so that it is tracked
            start = located.origin + overlap.source_start * itemsize
            runs.append(
                ByteRun(
                    FileRange(located.path, start, start + overlap.elements * itemsize),
                    overlap.target_start * itemsize,
                    int(lookup.chunks.record[overlap.row]),
                    None if located.crc32 is None else start - located.start,
                )
            )
        return () if lookup.entry.rounded_from is not None else runs

    def note(self, run: ByteRun, data: memoryview) -> None:
        """Adds the bytes of a run, which were read past `fill`, to the checksum of its record."""
        if run.checked_at is not None:
            self._origin.checksums.note(run.record, run.checked_at, data)

    def clear(self) -> None:
        """Frees the memory of what was prefetched."""
        self.cache.clear()
        self._prefetched = ()

    def prefetch(self, wanted: Sequence[tuple[Key, Span]]) -> None:
        """Fetches what the following calls of `fill` read from a distant source.

        `wanted`: tensors and spans of them, `READ_AHEAD_BYTES` together at most; a call for a part
        of a span is served too.
        """
        if not self.cache.is_remote:
            return
        index, located = self._origin.index, self._origin.located
        wanted = [stored for key, span in wanted for stored in find_stored(index, key, span)]
        if all(self._is_prefetched(key, span) for key, span in wanted):
            return
        ranges = (ranges_of(index, self._lookup(key), span, located) for key, span in wanted)
        self.cache.fetch(part for group in ranges for part in group)
        self._prefetched = tuple(wanted)

    def _derive(
        self, entry: TensorEntry, derivation: Derivation, span: Span, target: memoryview
    ) -> None:
        """Makes elements from those of other tensors, block by block."""
        if isinstance(derivation, StoredOperand):
            (demand,) = derivation.demands(span)
            self.fill(demand.key, demand.place, target)
            if demand.key in self._origin.unverified:
                self._origin.unverified.add(entry.key)
            return
        elements = np.frombuffer(target, numpy_dtype(entry.dtype))
        for part in cut_span(span, _DERIVED_BYTES // entry.dtype.itemsize):
            demands = derivation.demands(part)
            if demands != self._derived_from:
                self.prefetch([(entry.key, part)])
                self._read_inputs(demands)
            if any(demand.key in self._origin.unverified for demand in demands):
                self._origin.unverified.add(entry.key)
            inputs = self._inputs
            low, high = part.start - span.start, part.stop - span.start
            derivation.put(part, inputs, elements[low:high])

    def _read_inputs(self, demands: tuple[Any, ...]) -> None:
        """Reads what elements are made from, into memory that is used again."""
        self._derived_from, self._inputs = (), []
        dtypes = [self._origin.index.tensors[demand.key].dtype for demand in demands]
        sizes = [
            (demand.place.stop - demand.place.start) * dtype.itemsize
            for demand, dtype in zip(demands, dtypes, strict=True)
        ]
        wanted, at = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), 0
        if len(self._input_memory) < wanted:
            self._input_memory = memoryview(bytearray(wanted))
        for demand, dtype, size in zip(demands, dtypes, sizes, strict=True):
            values = self._input_memory[at : at + size]
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
            self.fill(demand.key, demand.place, values)
            self._inputs.append(np.frombuffer(values, numpy_dtype(dtype)))
        self._derived_from = demands

    def _is_prefetched(self, key: Key, span: Span) -> bool:
        return any(
            key == other and window.start <= span.start and span.stop <= window.stop
            for other, window in self._prefetched
        )

    def _windows(self, lookup: ChunkLookup, span: Span) -> Iterator[Span]:
        """Yields the span as a whole, or in parts; each part is fetched first."""
        key = lookup.entry.key
        if not self.cache.is_remote or self._is_prefetched(key, span):
            yield span
            return
        for part in cut_span(span, READ_AHEAD_BYTES // lookup.entry.stored_dtype.itemsize):
            self.prefetch([(key, part)])
            yield part

    def _fill_rounded(self, lookup: ChunkLookup, span: Span, target: memoryview) -> None:
        """Reads elements block by block, and rounds them to what the live tensor has."""
        entry = lookup.entry
        caster = Caster(entry.stored_dtype, entry.dtype)
        if self._unrounded is None:
            self._unrounded = memoryview(bytearray(RUN_BYTES))
        for part in cut_span(span, RUN_BYTES // entry.stored_dtype.itemsize):
            count, low = part.stop - part.start, (part.start - span.start) * entry.dtype.itemsize
            block = self._unrounded[: count * entry.stored_dtype.itemsize]
            self._fill_stored(lookup, part, block)
            view = target[low : low + count * entry.dtype.itemsize]
            stored, rounded = np.frombuffer(block, np.uint8), np.frombuffer(view, np.uint8)
            caster.cast_all(stored, rounded, where=f"tensor {entry.key!r}", block_start=part.start)

    def _fill_stored(self, lookup: ChunkLookup, span: Span, target: memoryview) -> None:
        """Fills a buffer with elements as they are stored."""
        entry, chunks = lookup.entry, lookup.chunks
        targets: dict[int, list[BoxTarget]] = {}
        for overlap in lookup.overlaps(span):
            memory = _block(target, overlap, entry.stored_dtype.itemsize)
            targets.setdefault(overlap.row, []).append((overlap, memory))
        for row, of_chunk in targets.items():
            read = ChunkRead(entry, chunks, row, int(chunks.record[row]), tuple(of_chunk))
            self._read_boxes(self._locate(entry, chunks, row), read, _SHORT_RUN_BYTES)

    def _read_box(
        self,
        located: Located,
        record: int,
        itemsize: int,
        overlap: Overlap,
        memory: BoxMemory,
        short_bytes: int,
    ) -> None:
        """Reads a box of a chunk that is stored row-major, run by run.

        Runs below `short_bytes` are read with what is between them.
        """
        chunk, box = overlap.chunk, overlap.source
        strides = row_major_strides(chunk)
        wide = widen(box, chunk, short_bytes // itemsize)
        direct_reads: list[tuple[FileRange, memoryview]] = []
        for part in contiguous_parts(wide, chunk, RUN_BYTES // itemsize):
            start = located.origin + flat_offset(part.offsets, strides) * itemsize
            stop = start + math.prod(part.sizes) * itemsize
            wanted = intersect(part, box)
            place = None if wanted is None else _moved(wanted, overlap)
            direct = memory.direct(place) if place is not None and wanted == part else None
            if (
                direct is not None
                and self.cache.is_remote
                and located.compressed is None
                and self.cache.cached(located.path, start, stop) is None
            ):
                direct_reads.append((FileRange(located.path, start, stop), direct))
                if len(direct_reads) == _DIRECT_READS:
                    self._read_direct(located, record, direct_reads)
                    direct_reads = []
                continue
            run = self._scratch_of(stop - start) if direct is None else direct
            self._read_run(located, record, start, run)
            if direct is None and wanted is not None and place is not None:
                elements = np.frombuffer(run, byte_type(itemsize)).reshape(part.sizes)
                memory.put(place, elements[slices_of(relative(wanted, part))])
        if direct_reads:
            self._read_direct(located, record, direct_reads)

    def _read_direct(
        self, located: Located, record: int, reads: Sequence[tuple[FileRange, memoryview]]
    ) -> None:
        self.cache.read_direct(reads)
        for wanted, data in reads if located.crc32 is not None else ():
            self._origin.checksums.note(record, wanted.start - located.start, data)

    def _read_run(self, located: Located, record: int, start: int, target: memoryview) -> None:
        if located.compressed is not None:
            self._origin.decoded.read_into(located.compressed, start, target)
            self.cache.bytes_read += len(target)
            return
        self.cache.read_into(located.path, start, target)
        if located.crc32 is not None:
            self._origin.checksums.note(record, start - located.start, target)

    def _gather(
        self, located: Located, record: int, itemsize: int, targets: Sequence[BoxTarget]
    ) -> None:
        """Reads boxes of a chunk that is not stored row-major.

        The bytes between the elements of one box are those of the next, so all boxes are
        collected from the same reads.
        """
        strides = located.strides or ()
        pending = [hull([overlap.source for overlap, _ in targets])]
        while pending:
            part = pending.pop()
            inside = [
                (shared, overlap, memory)
                for overlap, memory in targets
                if (shared := intersect(part, overlap.source)) is not None
            ]
            if not inside:
                continue
            outer = hull([box for box, _, _ in inside])
            reach = [(n - 1) * s for n, s in zip(outer.sizes, strides, strict=True)]
            extent = (sum(reach) + 1) * itemsize
            if extent > RUN_BYTES:
                axis = max(range(len(reach)), key=lambda i: reach[i])
                rest = extent - reach[axis] * itemsize
                count = max(1, (RUN_BYTES - rest) // (strides[axis] * itemsize) + 1)
                parts = list(cut(outer, axis, min(count, max(1, outer.sizes[axis] - 1))))
                pending += reversed(parts)
                continue
            scratch = self._scratch_of(extent)
            start = located.origin + flat_offset(outer.offsets, strides) * itemsize
            self._read_run(located, record, start, scratch)
            elements = np.lib.stride_tricks.as_strided(
                np.frombuffer(scratch, byte_type(itemsize)),
                outer.sizes,
                [stride * itemsize for stride in strides],
                writeable=False,
            )
            for box, overlap, memory in inside:
                memory.put(_moved(box, overlap), elements[slices_of(relative(box, outer))])

    def _lookup(self, key: Key) -> ChunkLookup:
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = ChunkLookup(self._origin.index.tensors[key])
            if len(self._lookups) > _LOOKUPS:
                self._lookups.popitem(last=False)
        return lookup

    def _locate(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        chunk = (entry.key, row)
        known = self._located.get(chunk)
        if known is not None:
            return known
        located = self._origin.located.get(chunk)
        if located is None:
            located = self._locator.locate(entry, chunks, row)
            if located.compressed is not None:
                mark = partial(self._origin.unverified.add, entry.key)
                located = self._origin.decoded.locate(entry, chunks, row, mark)
            self._origin.keep_located(chunk, located)
        if located.crc32 is not None and located.compressed is None:
            source, path = self._origin.source, located.path
            where = posixpath.join(source.location, path)
            if located.start:  # else it may be the whole file
                where += f", tensor {entry.key!r}"
            self._origin.checksums.expect(
                int(chunks.record[row]),
                TrackedRecord(
                    start=located.start,
                    stop=located.stop,
                    expected=located.crc32,
                    where=where,
                    read_into=partial(source.read_into, path),
                ),
            )
        elif located.compressed is None:
            self._origin.unverified.add(entry.key)
        self._located[chunk] = located
        if len(self._located) > _LOCATED:
            self._located.popitem(last=False)
        return located

    def _scratch_of(self, size_bytes: int) -> memoryview:
        if self._scratch is None or len(self._scratch) < size_bytes:
            self._scratch = memoryview(bytearray(max(size_bytes, RUN_BYTES)))
        return self._scratch[:size_bytes]


def byte_type(itemsize: int) -> str:
    """Returns numpy's name of a type of that size whose values are not interpreted."""
    return _BYTE_TYPES[itemsize]


def _moved(part: Box, overlap: Overlap) -> Box:
    """Returns where a part of an overlap goes, counted as `overlap.target` is."""
    inside = relative(part, overlap.source)
    offsets = zip(inside.offsets, overlap.target.offsets, strict=True)
    return Box(tuple(i + t for i, t in offsets), inside.sizes)


def _block(view: memoryview, overlap: SpanOverlap, itemsize: int) -> ArrayMemory:
    """Returns the part of a span's buffer that holds the block of an overlap."""
    start, size = overlap.block_start * itemsize, math.prod(overlap.block) * itemsize
    elements = np.frombuffer(view[start : start + size], byte_type(itemsize))
    return ArrayMemory(elements.reshape(overlap.block))


def same_bytes(first: memoryview, second: memoryview) -> bool:
    """Compares two buffers of one length; `memoryview` itself compares byte by byte."""
    whole = len(first) // 8 * 8
    words, others = (np.frombuffer(side[:whole], np.uint64) for side in (first, second))
    return np.array_equal(words, others) and first[whole:] == second[whole:]


def same_values(reader: TensorReader, first: TensorEntry, second: TensorEntry) -> bool:
    """Returns whether two tensors of one element type and shape have the same bytes."""
    itemsize = first.dtype.itemsize
    buffers = [memoryview(bytearray(RUN_BYTES)) for _ in range(2)]
    for span in cut_span(Span(0, first.elements), RUN_BYTES // itemsize):
        views = [buffer[: (span.stop - span.start) * itemsize] for buffer in buffers]
        reader.fill(first.key, span, views[0])
        reader.fill(second.key, span, views[1])
        if not same_bytes(*views):
            return False
    return True


def read_span(origin: Origin, entry: TensorEntry, span: Span) -> bytearray:
    """Reads consecutive elements of a tensor, and compares every stored checksum."""
    data = bytearray((span.stop - span.start) * entry.dtype.itemsize)
    TensorReader(origin).fill(entry.key, span, memoryview(data))
    origin.checksums.finish()
    return data
