"""Reads boxes of tensors into memory of any kind, each byte of the source at most once.

`plan_chunk_reads` finds which chunks hold the boxes that are wanted. `read_chunks` reads them in
the order of the files, with several threads, straight into the memory where that is possible.
A process that needs a part of each tensor, as a rank does in a resume, reads only that part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import IncompleteCheckpointError, UnsupportedError
from ckptkit.core.geometry import Overlap, drop_replicas, find_defect, overlaps
from ckptkit.core.index import Box, ChunkTable, FileRange, Key, Record, Shape, TensorEntry
from ckptkit.core.threads import run_crew, usable_cores
from ckptkit.engine.checksum_tracker import NumberedRecord, OpenRecord
from ckptkit.engine.reader import BoxMemory, BoxTarget, ChunkRead, Origin, TensorReader
from ckptkit.formats.pickle.torch_zip import WINDOW_BYTES
from ckptkit.storage.base import distant

_MOST_THREADS = 2
_DISTANT_THREADS = 8  # which mostly wait for a store to answer
# Archives up to this size are read whole, headers included, together with their neighbours.
_SMALL_BYTES = 64 << 10
_GROUP_BYTES = 1 << 20
_GROUP_GAP_BYTES = 4 << 10

_Grid = tuple[Shape, bytes, bytes]  # a tensor's shape, and the offsets and sizes of its chunks


def plan_chunk_reads(wanted: Iterable[tuple[TensorEntry, Box, BoxMemory]]) -> list[ChunkRead]:
    """Finds which chunks hold some boxes of tensors.

    Args:
        wanted: Tensors, each with a box of it and the memory of that box.

    Returns:
        Every chunk that has to be read, once. The chunks of each of the tensors are proven to
        hold every element once.
    """
    chunkings = _Chunkings()
    tables: dict[Key, tuple[TensorEntry, _Chunking]] = {}
    targets: dict[tuple[Key, int], list[BoxTarget]] = defaultdict(list)
    for entry, box, memory in wanted:
        if entry.key not in tables:
            tables[entry.key] = entry, chunkings.prove(entry)
        for overlap in chunkings.overlaps(tables[entry.key][1], box):
            targets[entry.key, overlap.row].append((overlap, memory))
    reads = []
    for (key, row), of_chunk in targets.items():
        entry, chunking = tables[key]
        record = int(chunking.chunks.record[row])
        reads.append(ChunkRead(entry, chunking.chunks, row, record, tuple(of_chunk)))
    return reads


@dataclass(frozen=True, slots=True)
class _Chunking:
    """The chunks of one tensor, each element in exactly one of them."""

    chunks: ChunkTable
    grid: _Grid


class _Chunkings:
    """How tensors are cut into chunks; tensors of one shape are mostly cut alike."""

    def __init__(self) -> None:
        self._proven: set[_Grid] = set()
        self._overlaps: dict[tuple[_Grid, Box], tuple[Overlap, ...]] = {}

    def prove(self, entry: TensorEntry) -> _Chunking:
        """Returns the chunks of a tensor, which hold each element once."""
        chunks = entry.chunks
        if chunks.flat:
            raise UnsupportedError("is stored in spans, not in boxes", where=entry.key)
        if entry.rounded_from is not None:
            raise UnsupportedError("is stored in another element type", where=entry.key)
        grid = (entry.shape, chunks.offsets.tobytes(), chunks.sizes.tobytes())
        if grid in self._proven:
            return _Chunking(chunks, grid)
        distinct = drop_replicas(chunks)
        defect = find_defect(distinct, entry.shape)
        if defect is not None:
            raise IncompleteCheckpointError(
                f"elements {defect.place} are stored {defect.copies} times", where=entry.key
            )
        if distinct is chunks:
            self._proven.add(grid)
        return _Chunking(distinct, grid)

    def overlaps(self, chunking: _Chunking, box: Box) -> tuple[Overlap, ...]:
        """Returns what each chunk holds of a box."""
        shared = self._overlaps.get((chunking.grid, box))
        if shared is None:
            shared = tuple(overlaps(chunking.chunks, box))
            self._overlaps[chunking.grid, box] = shared
        return shared


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What `read_chunks` read.

    Attributes:
        bytes_read: From data files, headers and trailers of archives included.
        partial: By number, the records that this process wanted in part only, with the
            checksums of those that it read. Processes that together read all of a record can
            prove it from these.
    """

    bytes_read: int
    partial: tuple[NumberedRecord, ...]


def read_chunks(origin: Origin, reads: Sequence[ChunkRead], *, threads: int = 0) -> ReadReport:
    """Reads chunks into their memory; a record that is read whole is compared at once.

    Args:
        origin: The source, opened for this call only.
        reads: What to read, as `plan_chunk_reads` returns it.
        threads: How many read at once; 0 for two, or one where there is one core, and for more
            where the source is distant.
    """
    readers: list[TensorReader] = []
    whole: list[NumberedRecord] = []

    def work(groups: Iterator[Sequence[_RecordRead]]) -> None:
        reader = TensorReader(origin)
        readers.append(reader)
        for group in groups:
            whole.extend(list(_read_group(origin, reader, group)))

    if not threads:
        near = min(_MOST_THREADS, usable_cores())
        threads = near if distant(origin.source) is None else _DISTANT_THREADS
    pending = [_RecordRead(read, origin.index.records[read.record]) for read in reads]
    run_crew(threads, iter(list(_groups(pending))), work)
    return ReadReport(
        bytes_read=sum(reader.cache.bytes_read for reader in readers),
        partial=(*whole, *origin.checksums.still_open().items()),
    )


@dataclass(frozen=True, slots=True)
class _RecordRead:
    """A chunk to read, and the record that holds it."""

    read: ChunkRead
    record: Record

    @property
    def size_bytes(self) -> int:
        return self.record.stop - self.record.start

    @property
    def wanted_bytes(self) -> int:
        elements = sum(math.prod(overlap.source.sizes) for overlap, _ in self.read.targets)
        return elements * self.read.entry.stored_dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether so much of a small archive is wanted that it is best read from end to end."""
        return self.size_bytes <= _SMALL_BYTES and (
            self.size_bytes <= _GROUP_GAP_BYTES or 2 * self.wanted_bytes > self.size_bytes
        )


def _read_group(
    origin: Origin, reader: TensorReader, group: Sequence[_RecordRead]
) -> Iterator[NumberedRecord]:
    """Reads chunks of one file; several are neighbours, and small enough for one read.

    Yields:
        The records that were read whole although only a part of them was wanted: other processes
        may have read the other parts, and learn from these that the record is sound.
    """
    first, last = group[0].record, group[-1].record
    path = origin.index.files[first.file].path
    reader.clear()
    if len(group) > 1 or group[0].size_bytes <= 2 * WINDOW_BYTES:
        reader.cache.fetch([FileRange(path, first.start, last.stop)])
    elif reader.cache.is_distant and first.container == "torch_zip":
        start, stop = first.start + WINDOW_BYTES, first.stop - WINDOW_BYTES
        ends = [FileRange(path, first.start, start), FileRange(path, stop, first.stop)]
        reader.cache.fetch(ends)
    for pending in group:
        located = reader.read_chunk(pending.read)
        number, size_bytes = pending.read.record, located.stop - located.start
        if located.crc32 is None or located.compressed is not None:
            continue
        if located.strides is not None:
            origin.checksums.settle(number)  # it was read in an order that leaves gaps
        if pending.wanted_bytes < size_bytes and origin.checksums.is_settled(number):
            where = f"{path}, tensor {pending.read.entry.key!r}"
            pieces = ((0, size_bytes, located.crc32),)
            record = OpenRecord(located.start, located.stop, located.crc32, where, pieces)
            yield number, record


def _groups(pending: Iterable[_RecordRead]) -> Iterator[Sequence[_RecordRead]]:
    """Yields what to read together: small neighbours of one file, or one chunk alone."""
    group: list[_RecordRead] = []
    for read in sorted(pending, key=lambda read: (read.record.file, read.record.start)):
        if group and not (
            group[-1].record.file == read.record.file
            and group[-1].is_small
            and read.is_small
            and 0 <= read.record.start - group[-1].record.stop <= _GROUP_GAP_BYTES
            and read.record.stop - group[0].record.start <= _GROUP_BYTES
        ):
            yield group
            group = []
        group.append(read)
    if group:
        yield group
