"""Reads boxes of tensors into memory of any kind, each byte of the source at most once.

`plan_chunk_reads` finds which chunks hold the boxes that are wanted. `read_chunks` reads them in
the order of the files, with several threads, straight into the memory where that is possible.
A process that needs a part of each tensor, as a rank does in a resume, reads only that part.

`find_stored_boxes` comes before them where tensors are made from others, are stored in spans, or
are to be cast: it finds the boxes of stored tensors that a wanted box consists of. What has to be
computed is read block by block instead.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import IncompleteCheckpointError, UnsupportedError
from ckptkit.core.geometry import (
    BoxWalk,
    Overlap,
    Part,
    Tile,
    Walk,
    contiguous_parts,
    drop_replicas,
    find_defect,
    find_tile,
    flat_offset,
    hull,
    intersect,
    overlaps,
    relative,
    row_major_strides,
    slabs,
    slices_of,
    walk_boxes,
    whole_tile,
    widen,
)
from ckptkit.core.index import (
    CONTAINERS,
    Box,
    Chunk,
    ChunkTable,
    FileRange,
    Fqn,
    Key,
    Record,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.threads import run_crew, usable_cores
from ckptkit.engine.casts import Caster
from ckptkit.engine.checksum_tracker import NumberedRecord, OpenRecord
from ckptkit.engine.kernels import (
    ComputedOperand,
    Operand,
    RearrangeKernel,
    StoredOperand,
)
from ckptkit.engine.reader import (
    RUN_BYTES,
    BoxMemory,
    BoxTarget,
    ChunkRead,
    Origin,
    TensorReader,
    byte_type,
)
from ckptkit.formats.pickle.torch_zip import WINDOW_BYTES

_MOST_THREADS = 2
_DISTANT_THREADS = 8  # which mostly wait for a store to answer


class _Limits(Struct, frozen=True):
    """Which archives are read whole, headers included, together with their neighbours."""

    small_bytes: int  # up to this size
    group_bytes: int  # in one read
    gap_bytes: int  # between two of them


_NEAR = _Limits(64 << 10, 1 << 20, 4 << 10)
_DISTANT = _Limits(4 << 20, 4 << 20, 256 << 10)  # a request takes as long as a megabyte
# Of computed tensors, rows are read whole where a part of them would be shorter.
_SHORT_ROW_BYTES = 4 << 10
_MOST_SPREAD_BOXES = 1 << 12  # that a tensor is taken apart into if they are short
_SHORT_BOX_BYTES = 1 << 10
_FEW_BOXES = 8  # of one tensor that are read one by one
_MOST_AROUND = 4  # times the elements that are wanted, read in one box around them
_RAW = CONTAINERS.index("raw")

_Item = TypeVar("_Item")
WantedBox = tuple[TensorEntry, Box, BoxMemory]
"""A tensor, a box of it, and the memory that the box goes to."""

_Grid = tuple[Shape, bytes, bytes]  # a tensor's shape, and the offsets and sizes of its chunks


class CastMemory(BoxMemory, Struct, frozen=True, eq=False):
    """Memory of another element type than what is read; elements are cast on their way.

    Which values they become is as `Caster` says.
    """

    memory: BoxMemory  # of elements of the type `target`
    source: DType  # of what is read
    target: DType  # another one
    where: str

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        values = np.ascontiguousarray(elements).reshape(-1).view(numpy_dtype(self.source))
        cast = np.empty(len(values), numpy_dtype(self.target))
        Caster(self.source, self.target).cast_all(values, cast, where=self.where)
        self.memory.put(box, cast.view(byte_type(self.target.itemsize)).reshape(box.sizes))

    def walked(self, start: Shape, walks: Sequence[Walk], sizes: Shape) -> CastMemory:
        memory = self.memory.walked(start, walks, sizes)
        return CastMemory(memory, self.source, self.target, self.where)


class SpanRead(Struct, frozen=True):
    """A box of a tensor that has to be computed, or decoded, in row-major order."""

    entry: TensorEntry
    box: Box
    memory: BoxMemory


def find_stored_boxes(index: TensorIndex, wanted: WantedBox) -> Iterator[WantedBox | SpanRead]:
    """Yields the boxes of stored tensors that one box of any tensor consists of.

    `index`: what both are in. Yields boxes for `plan_chunk_reads`, and what has to be read in
    another way.
    """
    entry, box, memory = wanted
    if 0 in box.sizes:
        return
    if entry.derivation is not None:
        tiles = _tiles_of(index, entry)
        found = [(source, list(walk_boxes(tile, box))) for source, tile in tiles]
        sizes = [math.prod(walk.box.sizes) for _, walks in found for walk in walks]
        short = sum(size * entry.dtype.itemsize < _SHORT_BOX_BYTES for size in sizes)
        if sum(sizes) != math.prod(box.sizes) or short > _MOST_SPREAD_BOXES:
            yield SpanRead(entry, box, memory)
            return
        for source, walks in found:
            for part, of_part in join_walks(source, walks, memory):
                yield from find_stored_boxes(index, (source, part, of_part))
        return
    if entry.rounded_from is not None:
        memory = CastMemory(memory, entry.rounded_from, entry.dtype, f"tensor {entry.key!r}")
        entry = replace(entry, dtype=entry.rounded_from, rounded_from=None)
    boxed = _in_boxes(index, entry)
    yield SpanRead(*wanted) if boxed is None else (boxed, box, memory)


class JoinedMemory(BoxMemory, Struct, frozen=True, eq=False):
    """Memory of smaller boxes within one large box; other elements of the large one are dropped."""

    parts: Sequence[tuple[Box, BoxMemory]]  # disjoint, counted from the large one's first corner

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        for part, memory in self.parts:
            shared = intersect(part, box)
            if shared is not None:
                memory.put(relative(shared, part), elements[slices_of(relative(shared, box))])


def join_walks(
    entry: TensorEntry, walks: Sequence[BoxWalk], memory: BoxMemory
) -> Iterator[tuple[Box, BoxMemory]]:
    """Yields what to read of a tensor for some boxes of it, each with its memory.

    Many boxes that are close together, as rows that alternate, are read as one: for each of them
    the same bytes would be read once more.

    `walks`: the boxes, and where their elements are in the memory. `memory`: of what they are parts
    of.
    """
    parts = [(w.box, memory.walked(w.start, w.walks, w.box.sizes)) for w in walks]
    if len(parts) > _FEW_BOXES and entry.derivation is None:
        around = hull([box for box, _ in parts])
        wanted = sum(math.prod(box.sizes) for box, _ in parts)
        if math.prod(around.sizes) <= _MOST_AROUND * wanted:
            yield around, JoinedMemory([(relative(box, around), own) for box, own in parts])
            return
    yield from parts


def _tiles_of(index: TensorIndex, entry: TensorEntry) -> Iterator[tuple[TensorEntry, Tile]]:
    """Yields what a tensor is made of; nothing where it is computed, or not all is found."""
    made = entry.derivation
    parts: Sequence[Part]
    operands: Mapping[Fqn, Operand]
    if isinstance(made, StoredOperand):
        parts, operands = [(entry.name, whole_tile(entry.shape))], {entry.name: made}
    elif isinstance(made, ComputedOperand) and isinstance(made.kernel, RearrangeKernel):
        if made.kernel.has_padding:
            return
        parts, operands = made.kernel.pieces, made.kernel.operands
    else:
        return
    found: list[tuple[TensorEntry, Tile]] = []
    for name, piece in parts:
        operand = operands[name]
        if not isinstance(operand, StoredOperand):  # it is computed
            return
        source = index.tensors[operand.key]
        tile = find_tile(piece, source.shape, operand.start)
        if tile is None or source.dtype != entry.dtype:
            return
        found.append((source, tile.swapped))
    yield from found


def _in_boxes(index: TensorIndex, entry: TensorEntry) -> TensorEntry | None:
    """Returns a stored tensor with its chunks as boxes; None where spans have to stay spans.

    A span is at most a few boxes, which follow each other in its record. Archives are located by
    the shape of their chunk, so that these cannot be taken apart.
    """
    table = entry.chunks
    if not table.flat:
        return entry
    if (index.records.container[table.record] != _RAW).any() or table.strides:
        return None
    chunks: list[Chunk] = []
    for chunk in drop_replicas(table):
        if not isinstance(chunk.place, Span):
            return None
        at = chunk.byte_offset or 0
        for box in slabs(chunk.place, entry.shape):
            chunks.append(Chunk(box, chunk.record, at, None, chunk.rank))
            at += math.prod(box.sizes) * entry.dtype.itemsize
    return replace(entry, chunks=ChunkTable.of(chunks, len(entry.shape)))


def plan_chunk_reads(wanted: Iterable[WantedBox]) -> list[ChunkRead]:
    """Finds which chunks hold some boxes of tensors.

    `wanted`: tensors, each with a box of it and the memory of that box. Returns every chunk that
    has to be read, once. The chunks of each of the tensors are proven to hold every element once.
    """
    proven: set[_Grid] = set()  # tensors of one shape are mostly cut alike
    shared: dict[tuple[_Grid, Box], tuple[Overlap, ...]] = {}
    tables: dict[Key, tuple[TensorEntry, ChunkTable, _Grid]] = {}
    targets: dict[tuple[Key, int], list[BoxTarget]] = defaultdict(list)
    for entry, box, memory in wanted:
        if entry.key not in tables:
            tables[entry.key] = entry, *_prove(entry, proven)
        _, chunks, grid = tables[entry.key]
        if (grid, box) not in shared:
            shared[grid, box] = tuple(overlaps(chunks, box))
        for overlap in shared[grid, box]:
            targets[entry.key, overlap.row].append((overlap, memory))
    reads = []
    for (key, row), of_chunk in targets.items():
        entry, chunks, _ = tables[key]
        reads.append(ChunkRead(entry, chunks, row, int(chunks.record[row]), tuple(of_chunk)))
    return reads


def _prove(entry: TensorEntry, proven: set[_Grid]) -> tuple[ChunkTable, _Grid]:
    """Returns the chunks of a tensor, which hold each element once, as those of proven grids do."""
    chunks = entry.chunks
    if chunks.flat:
        raise UnsupportedError("is stored in spans, not in boxes", where=entry.key)
    if entry.rounded_from is not None:
        raise UnsupportedError("is stored in another element type", where=entry.key)
    grid = (entry.shape, chunks.offsets.tobytes(), chunks.sizes.tobytes())
    if grid in proven:
        return chunks, grid
    distinct = drop_replicas(chunks)
    defect = find_defect(distinct, entry.shape)
    if defect is not None:
        raise IncompleteCheckpointError(
            f"elements {defect.place} are stored {defect.copies} times", where=entry.key
        )
    if distinct is chunks:
        proven.add(grid)
    return distinct, grid


Done = Callable[[BoxMemory], object]
"""Is called when a box was read, with its memory; from any thread."""


def read_chunks(
    origin: Origin, reads: Sequence[ChunkRead], *, threads: int = 0, done: Done | None = None
) -> tuple[int, tuple[NumberedRecord, ...]]:
    """Reads chunks into their memory; a record that is read whole is compared at once.

    `origin`: the source, opened for this call only. `reads`: what to read, as `plan_chunk_reads`
    returns it. `threads`: how many read at once; 0 for two, or one where there is one core, and for
    more where the source is distant. `done`: is called for each of the boxes.

    Returns how many bytes were read from data files, headers and trailers of archives included; and
    by number, the records that this process wanted in part only, with the checksums of those that
    it read. Processes that together read all of a record can prove it from these.
    """
    whole: list[NumberedRecord] = []
    limits = _DISTANT if origin.source.is_remote else _NEAR

    def read_group(reader: TensorReader, group: Sequence[_RecordRead]) -> None:
        whole.extend(list(_read_group(origin, reader, group, limits)))
        if done is not None:
            for _, memory in itertools.chain.from_iterable(read.targets for read, _ in group):
                done(memory)

    pending = [(read, origin.index.records[read.record]) for read in reads]
    bytes_read = _run_readers(origin, list(_groups(pending, limits)), read_group, threads)
    return bytes_read, (*whole, *origin.checksums.still_open().items())


def read_spans(origin: Origin, reads: Sequence[SpanRead], *, done: Done | None = None) -> int:
    """Reads boxes of tensors that are computed or decoded, block by block.

    `origin`: the source, opened for this call only. `done`: is called for each of the boxes.
    Returns how many bytes were read.
    """

    def read_one(reader: TensorReader, read: SpanRead) -> None:
        _read_span(reader, read)
        if done is not None:
            done(read.memory)

    bytes_read = _run_readers(origin, reads, read_one)
    origin.decoded.finish()
    return bytes_read


def _run_readers(
    origin: Origin,
    items: Sequence[_Item],
    read: Callable[[TensorReader, _Item], None],
    threads: int = 0,
) -> int:
    """Has several threads read items, and returns how many bytes they read."""
    readers: list[TensorReader] = []

    def work(shared: Iterator[_Item]) -> None:
        reader = TensorReader(origin)
        readers.append(reader)
        for item in shared:
            read(reader, item)

    if items:
        own = _DISTANT_THREADS if origin.source.is_remote else min(_MOST_THREADS, usable_cores())
        run_crew(threads or own, iter(items), work)
    return sum(reader.cache.bytes_read for reader in readers)


def _read_span(reader: TensorReader, read: SpanRead) -> None:
    entry, box = read.entry, read.box
    itemsize, strides = entry.dtype.itemsize, row_major_strides(entry.shape)
    wide = widen(box, entry.shape, _SHORT_ROW_BYTES // itemsize)
    buffer = memoryview(bytearray(min(RUN_BYTES, math.prod(wide.sizes) * itemsize)))
    for part in contiguous_parts(wide, entry.shape, RUN_BYTES // itemsize):
        shared = intersect(part, box)
        if shared is None:
            continue
        start, count = flat_offset(part.offsets, strides), math.prod(part.sizes)
        values = buffer[: count * itemsize]
        reader.fill(entry.key, Span(start, start + count), values)
        elements = np.frombuffer(values, byte_type(itemsize)).reshape(part.sizes)
        read.memory.put(relative(shared, box), elements[slices_of(relative(shared, part))])


_RecordRead = tuple[ChunkRead, Record]
"""A chunk to read, and the record that holds it."""


def _wanted_bytes(read: ChunkRead) -> int:
    elements = sum(math.prod(overlap.source.sizes) for overlap, _ in read.targets)
    return elements * read.entry.stored_dtype.itemsize


def _is_small(read: ChunkRead, record: Record, limits: _Limits) -> bool:
    """Whether so much of a small archive is wanted that it is best read from end to end."""
    size_bytes = record.stop - record.start
    return size_bytes <= limits.small_bytes and (
        size_bytes <= limits.gap_bytes or 2 * _wanted_bytes(read) > size_bytes
    )


def _read_group(
    origin: Origin, reader: TensorReader, group: Sequence[_RecordRead], limits: _Limits
) -> Iterator[NumberedRecord]:
    """Reads chunks of one file; several are neighbours, and small enough for one read.

    Yields the records that were read whole although only a part of them was wanted: other processes
    may have read the other parts, and learn from these that the record is sound.
    """
    (_, first), (_, last) = group[0], group[-1]
    path = origin.index.files[first.file].path
    reader.clear()
    is_archive = first.container == "torch_zip"  # whose header has to be read as well
    if len(group) > 1 or (is_archive and _is_small(*group[0], limits)):
        reader.cache.fetch([FileRange(path, first.start, last.stop)])
    elif reader.cache.is_remote and is_archive:
        start, stop = first.start + WINDOW_BYTES, first.stop - WINDOW_BYTES
        ends = [FileRange(path, first.start, start), FileRange(path, stop, first.stop)]
        reader.cache.fetch(ends)
    for read, _ in group:
        located = reader.read_chunk(read)
        number, size_bytes = read.record, located.stop - located.start
        if located.crc32 is None or located.compressed is not None:
            continue
        if located.strides is not None:
            origin.checksums.settle(number)  # it was read in an order that leaves gaps
        if _wanted_bytes(read) < size_bytes and origin.checksums.is_settled(number):
            where = f"{path}, tensor {read.entry.key!r}"
            pieces = ((0, size_bytes, located.crc32),)
            record = OpenRecord(located.start, located.stop, located.crc32, where, pieces)
            yield number, record


def _groups(pending: Iterable[_RecordRead], limits: _Limits) -> Iterator[Sequence[_RecordRead]]:
    """Yields what to read together: small neighbours of one file, or one chunk alone."""
    group: list[_RecordRead] = []
    for read, record in sorted(pending, key=lambda pair: (pair[1].file, pair[1].start)):
        if group and not (
            group[-1][1].file == record.file
            and _is_small(*group[-1], limits)
            and _is_small(read, record, limits)
            and 0 <= record.start - group[-1][1].stop <= limits.gap_bytes
            and record.stop - group[0][1].start <= limits.group_bytes
        ):
            yield group
            group = []
        group.append((read, record))
    if group:
        yield group
