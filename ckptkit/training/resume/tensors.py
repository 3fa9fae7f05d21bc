"""Filling the live tensors of a rank from the chunks of a checkpoint, reading only what it needs.

Elements go straight from the files into the tensors' memory where both are one run of bytes, and
through a bounded buffer otherwise. Every byte that is read is checked against the checksum
stored for it: blobs that are read whole at once, others as far as the ranks together read them.

Reading what is wanted of single blobs: small `torch.save` archives, one per stored chunk.
"""

from __future__ import annotations

import math
import posixpath
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    IncompleteCheckpointError,
    ResumeError,
    UnsupportedError,
)
from ckptkit.core.geometry import (
    Overlap,
    contiguous_parts,
    find_defect,
    flat_offset,
    intersect,
    overlaps,
    relative,
    row_major_strides,
    widened,
    without_replicas,
)
from ckptkit.core.index import Box, ChunkTable, Key, Record, Shape, TensorEntry, TensorIndex
from ckptkit.core.threads import run_crew, usable_cores
from ckptkit.formats.pickle.torch_zip import WINDOW_BYTES, Payload, TensorCache, locate_tensor
from ckptkit.storage.base import Source, distant
from ckptkit.training.resume.target_memory import TargetMemory, byte_type, memories_of, slices_of
from ckptkit.training.state.pieces import Piece

# Small enough that a checksum finds the bytes still in a cache, large enough for one read.
RUN_BYTES = 4 << 20
# Where a column of a matrix is wanted, runs below a page are read with what lies between.
_SHORT_RUN_BYTES = 4 << 10
_MOST_PARTS = 256  # of one blob; matrices split by columns have thousands, and stay unproven
_CACHED = 1 << 10


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of a chunk, and where it goes."""

    overlap: Overlap
    memory: TargetMemory


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored chunk of which something is wanted."""

    entry: TensorEntry
    number: int
    record: Record
    wishes: tuple[Wish, ...]

    @property
    def size_bytes(self) -> int:
        return self.record.stop - self.record.start

    @property
    def wanted_bytes(self) -> int:
        elements = sum(math.prod(wish.overlap.source.sizes) for wish in self.wishes)
        return elements * self.entry.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PartialBlob:
    """A blob of which a rank read parts only.

    Attributes:
        number: Its record in the index, which is the same on every rank.
        where: File and tensor, for messages.
        size_bytes: Of its data.
        expected: The CRC-32 stored for them.
        parts: Start within the data, length and CRC-32 of what was read; without overlaps.
    """

    number: int
    where: str
    size_bytes: int
    expected: int
    parts: tuple[tuple[int, int, int], ...]


class BlobReader:
    """Reads blobs into the tensors that want them; one per thread, it owns its scratch memory.

    Attributes:
        bytes_read: So far.
        unverified: Keys of tensors of which something had no checksum.
        partial: What could not be checked alone.
    """

    def __init__(self, source: Source, index: TensorIndex) -> None:
        self._source = source
        self._location = source.location
        self._files = index.files
        self._cache = TensorCache(_CACHED)
        self._scratch = memoryview(bytearray(RUN_BYTES))
        self.bytes_read = 0
        self.unverified: set[Key] = set()
        self.partial: list[PartialBlob] = []

    def read(self, group: Sequence[Blob]) -> None:
        """Reads blobs of one file; several are neighbours, and small enough for one read."""
        file = self._files[group[0].record.file].path
        view = _View(self, file)
        if len(group) > 1 or group[0].size_bytes <= 2 * WINDOW_BYTES:
            view.keep(group[0].record.start, group[-1].record.stop)
        for blob in group:
            self._read_blob(view, blob)

    def fetch(self, path: str, start: int, target: memoryview) -> None:
        self._source.read_into(path, start, target)
        self.bytes_read += len(target)

    def _read_blob(self, view: _View, blob: Blob) -> None:
        where = f"{posixpath.join(self._location, view.path)}, tensor {blob.entry.key!r}"
        payload = self._locate(view, blob, where)
        parts = _Parts(payload)
        kept = view.kept(blob.record.start + payload.start, blob.record.start + payload.stop)
        if kept is not None:
            parts.book_all(kept)
        if payload.row_major:
            for wish in sorted(blob.wishes, key=lambda wish: wish.overlap.source.offsets):
                self._read_wish(view.at(blob.record.start), payload, wish, parts)
        else:
            self._read_scattered(view.at(blob.record.start), payload, blob.wishes, parts)
        if payload.crc32 is None:
            self.unverified.add(blob.entry.key)
            return
        if parts.complete:
            check_crc32(parts.booked[0][2], payload.crc32, where=where)
        size_bytes = payload.stop - payload.start
        if blob.wanted_bytes < size_bytes or not parts.complete:
            # Others may have read parts only, and learn from this one that the whole is sound.
            booked = () if parts.given_up else tuple(parts.booked)
            self.partial.append(PartialBlob(blob.number, where, size_bytes, payload.crc32, booked))

    def _locate(self, view: _View, blob: Blob, where: str) -> Payload:
        """Finds the data of a blob in its archive, and checks that it is what was promised."""
        read = view.at(blob.record.start).read
        payload = locate_tensor(read, blob.size_bytes, where=where, cache=self._cache)
        chunk = blob.wishes[0].overlap.chunk
        if (payload.dtype, payload.shape) != (blob.entry.dtype, chunk):
            raise FormatError(
                f"holds {payload.dtype.name} {list(payload.shape)} against"
                f" {blob.entry.dtype.name} {list(chunk)} in '.metadata'",
                where=where,
                hint="the file belongs to another save, or was damaged",
            )
        return payload

    def _read_wish(self, view: _Shifted, payload: Payload, wish: Wish, parts: _Parts) -> None:
        itemsize = payload.dtype.itemsize
        chunk, box = wish.overlap.chunk, wish.overlap.source
        strides = row_major_strides(chunk)
        wide = widened(box, chunk, _SHORT_RUN_BYTES // itemsize)
        for part in contiguous_parts(wide, chunk, RUN_BYTES // itemsize):
            wanted = intersect(part, box)
            first = payload.storage_offset + flat_offset(part.offsets, strides)
            length = math.prod(part.sizes) * itemsize
            place = _moved(wanted, wish.overlap) if wanted is not None else None
            direct = wish.memory.direct(place) if place is not None and wanted == part else None
            run = self._scratch[:length] if direct is None else direct
            view.fetch(payload.start + first * itemsize, run)
            parts.book(first * itemsize, run)
            if direct is None and wanted is not None and place is not None:
                elements = np.frombuffer(run, byte_type(itemsize)).reshape(part.sizes)
                wish.memory.put(place, elements[slices_of(relative(wanted, part))])

    def _read_scattered(
        self, view: _Shifted, payload: Payload, wishes: Sequence[Wish], parts: _Parts
    ) -> None:
        """Reads the whole of a chunk that is not stored row-major, and picks from it."""
        data = memoryview(bytearray(payload.stop - payload.start))
        view.fetch(payload.start, data)
        parts.book(0, data)
        itemsize = payload.dtype.itemsize
        array = np.ndarray(
            payload.shape,
            byte_type(itemsize),
            buffer=data,
            offset=payload.storage_offset * itemsize,
            strides=[stride * itemsize for stride in payload.strides],
        )
        for wish in wishes:
            wish.memory.put(wish.overlap.target, array[slices_of(wish.overlap.source)])


def check_crc32(found: int, expected: int, *, where: str) -> None:
    """Compares a checksum with the stored one."""
    if found != expected:
        raise ChecksumError(
            f"CRC-32 {found:08x} was found against {expected:08x} stored", where=where
        )


class _Parts:
    """The checksums of what was read of one blob, neighbours joined."""

    def __init__(self, payload: Payload) -> None:
        self._size_bytes = payload.stop - payload.start
        self._checked = payload.crc32 is not None
        self.booked: list[tuple[int, int, int]] = []
        self.given_up = False

    @property
    def complete(self) -> bool:
        return len(self.booked) == 1 and self.booked[0][:2] == (0, self._size_bytes)

    def book_all(self, data: memoryview) -> None:
        """Books the whole, of which parts need not be booked then."""
        if self._checked:
            self.booked = [(0, len(data), crc32(data))]

    def book(self, start: int, run: memoryview) -> None:
        if not self._checked or self.given_up or self.complete:
            return
        if self.booked and sum(self.booked[-1][:2]) == start:
            first, length, before = self.booked.pop()
            self.booked.append((first, length + len(run), crc32(run, before)))
        else:
            self.booked.append((start, len(run), crc32(run)))
        self.given_up = len(self.booked) > _MOST_PARTS


class _View:
    """A file, some ranges of which are kept because several parts of them are asked for."""

    def __init__(self, reader: BlobReader, path: str) -> None:
        self._reader = reader
        self.path = path
        self._kept: list[tuple[int, memoryview]] = []

    def keep(self, start: int, stop: int) -> None:
        """Reads a range at once; only the two kept last are remembered."""
        data = memoryview(bytearray(stop - start))
        self._reader.fetch(self.path, start, data)
        self._kept = [*self._kept[-1:], (start, data)]

    def fetch(self, start: int, target: memoryview) -> None:
        found = self.kept(start, start + len(target))
        if found is None:
            self._reader.fetch(self.path, start, target)
        else:
            target[:] = found

    def at(self, start: int) -> _Shifted:
        return _Shifted(self, start)

    def kept(self, start: int, stop: int) -> memoryview | None:
        """Returns a range if all of it was kept."""
        for first, data in self._kept:
            if first <= start and stop <= first + len(data):
                return data[start - first : stop - first]
        return None


@dataclass(frozen=True, slots=True)
class _Shifted:
    """The same file, its positions counted from the start of a blob."""

    view: _View
    start: int

    def fetch(self, start: int, target: memoryview) -> None:
        self.view.fetch(self.start + start, target)

    def read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.fetch(start, memoryview(data))
        return bytes(data)


def _moved(wanted: Box, overlap: Overlap) -> Box:
    """Returns where a box of the chunk goes, counted from the wanted box's corner."""
    inside = relative(wanted, overlap.source)
    return Box(
        tuple(i + t for i, t in zip(inside.offsets, overlap.target.offsets, strict=True)),
        inside.sizes,
    )


_MOST_THREADS = 2
_DISTANT_THREADS = 8  # which mostly wait for a store to answer
_SHOWN_NAMES = 5
# Blobs up to this size are read whole, headers included, together with their neighbours.
_SMALL_BYTES = 64 << 10
_GROUP_BYTES = 1 << 20
_GROUP_GAP_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What filling the pieces took, and what was proven of the bytes.

    Attributes:
        bytes_read: From data files, headers and trailers of blobs included.
        bytes_needed: What the pieces hold.
        seconds: From the first byte to the last.
        unverified: Keys of tensors of which bytes were read that had no checksum stored.
        partial: Blobs of which this rank read parts only; `cross_check` proves them.
    """

    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0
    unverified: tuple[Key, ...] = ()
    partial: tuple[PartialBlob, ...] = ()


@dataclass(slots=True)
class _Work:
    """What the threads found, each with its own reader."""

    readers: list[BlobReader] = field(default_factory=list)


def load_pieces(
    index: TensorIndex, source: Source, pieces: Sequence[Piece], *, threads: int = 0
) -> LoadReport:
    """Fills the live tensors of pieces from a checkpoint.

    Args:
        index: Of the DCP directory that holds them.
        source: Where its files lie.
        pieces: What to fill; one without elements only has to be in the checkpoint.
        threads: How many read at once; 0 for two, or one where there is one core, and for more
            where the files lie in an object store.

    Returns:
        What was read, and what is left to be proven.
    """
    start = time.perf_counter()
    entries = match_entries(index, pieces)
    blobs = _blobs(index, pieces, entries)
    work = _Work()

    def read(groups: Iterator[Sequence[Blob]]) -> None:
        reader = BlobReader(source, index)
        work.readers.append(reader)
        for group in groups:
            reader.read(group)

    near = min(_MOST_THREADS, usable_cores())
    count = threads or (near if distant(source) is None else _DISTANT_THREADS)
    run_crew(count, iter(list(_groups(blobs))), read)
    return LoadReport(
        bytes_read=sum(reader.bytes_read for reader in work.readers),
        bytes_needed=sum(piece.size_bytes for piece in pieces),
        seconds=time.perf_counter() - start,
        unverified=tuple(sorted({key for reader in work.readers for key in reader.unverified})),
        partial=tuple(part for reader in work.readers for part in reader.partial),
    )


def match_entries(index: TensorIndex, pieces: Sequence[Piece]) -> list[TensorEntry]:
    """Finds the stored tensor of each piece.

    Returns:
        One for each piece, in order.
    """
    found = [_entry(index, piece) for piece in pieces]
    missing = [piece.key for piece, entry in zip(pieces, found, strict=True) if entry is None]
    if missing:
        raise ResumeError(
            f"{len(missing):,} of {len(pieces):,} tensors are not in the checkpoint: "
            + first_few(missing),
            hint="it was saved from another model or optimizer, or under other names",
        )
    entries = [entry for entry in found if entry is not None]
    for piece, entry in zip(pieces, entries, strict=True):
        _check_fit(piece, entry)
    return entries


def unexpected_keys(index: TensorIndex, pieces: Sequence[Piece]) -> list[Key]:
    """Returns the stored tensors, sorted, that no piece asks for under any of its names."""
    wanted = {name for piece in pieces for name in names_of(piece)}
    return sorted(key for key in index.tensors if key not in wanted)


def first_few(names: Sequence[str]) -> str:
    """Lists the first names, and says how many more there are."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (f" and {more:,} more" if more > 0 else "")


def names_of(piece: Piece) -> Iterator[Key]:
    yield Key(piece.key)
    yield from (Key(".".join(map(str, path))) for path in piece.aliases)


def _entry(index: TensorIndex, piece: Piece) -> TensorEntry | None:
    return next((index.tensors[name] for name in names_of(piece) if name in index.tensors), None)


def _check_fit(piece: Piece, entry: TensorEntry) -> None:
    expected = dtype_named(str(piece.local.dtype), where=piece.key)
    if entry.shape != piece.shape:
        raise ResumeError(
            f"shape {list(entry.shape)} was found in the checkpoint against"
            f" {list(piece.shape)} in the model",
            where=piece.key,
            hint="build the model with the configuration that the checkpoint was saved with",
        )
    if entry.dtype != expected:
        raise ResumeError(
            f"dtype {entry.dtype.name} was found in the checkpoint against {expected.name} in the"
            " model",
            where=piece.key,
            hint=f"build the model in {entry.dtype.name}, or convert the checkpoint with"
            f" `ckptkit convert --dtype {expected.name}`; a resume never casts",
        )


def _blobs(
    index: TensorIndex, pieces: Sequence[Piece], entries: Sequence[TensorEntry]
) -> Iterator[Blob]:
    """Yields every blob that something is wanted from, once."""
    cuts, tables = _Cuts(), dict[Key, _Cut]()
    wishes: dict[tuple[Key, int], list[Wish]] = defaultdict(list)
    for piece, entry in zip(pieces, entries, strict=True):
        if piece.elements:
            if entry.key not in tables:
                tables[entry.key] = cuts.proven(entry)
            for place, memory in zip(piece.places, _memories(piece), strict=True):
                for overlap in cuts.overlaps(tables[entry.key], place):
                    wishes[entry.key, overlap.row].append(Wish(overlap, memory))
    for (key, row), wanted in wishes.items():
        number = int(tables[key].chunks.record[row])
        yield Blob(index.tensors[key], number, index.records[number], tuple(wanted))


def _memories(piece: Piece) -> list[TargetMemory]:
    try:
        return memories_of(piece)
    except ResumeError as error:
        raise error.located(piece.key) from error


@dataclass(frozen=True, slots=True)
class _Cut:
    """The chunks of one tensor, each element in exactly one of them, and what says where."""

    chunks: ChunkTable
    layout: tuple[Shape, bytes, bytes]


class _Cuts:
    """Ways to cut tensors into chunks; tensors of one shape are mostly cut alike."""

    def __init__(self) -> None:
        self._proven: set[tuple[Shape, bytes, bytes]] = set()
        self._overlaps: dict[tuple[tuple[Shape, bytes, bytes], Box], tuple[Overlap, ...]] = {}

    def proven(self, entry: TensorEntry) -> _Cut:
        """Returns the chunks that hold a tensor."""
        chunks = entry.chunks
        if chunks.flat:
            raise UnsupportedError("is stored in spans, not in boxes", where=entry.key)
        layout = (entry.shape, chunks.offsets.tobytes(), chunks.sizes.tobytes())
        if layout in self._proven:
            return _Cut(chunks, layout)
        distinct = without_replicas(chunks)
        defect = find_defect(distinct, entry.shape)
        if defect is not None:
            raise IncompleteCheckpointError(
                f"elements {defect.place} are stored {defect.copies} times", where=entry.key
            )
        if distinct is chunks:
            self._proven.add(layout)
        return _Cut(distinct, layout)

    def overlaps(self, cut: _Cut, place: Box) -> tuple[Overlap, ...]:
        """Returns what each chunk holds of a box."""
        found = self._overlaps.get((cut.layout, place))
        if found is None:
            found = self._overlaps[cut.layout, place] = tuple(overlaps(cut.chunks, place))
        return found


def _groups(blobs: Iterable[Blob]) -> Iterator[Sequence[Blob]]:
    """Yields what to read together: small neighbours of one file, or one blob alone."""
    group: list[Blob] = []
    for blob in sorted(blobs, key=lambda blob: (blob.record.file, blob.record.start)):
        if group and not _joins(group, blob):
            yield group
            group = []
        group.append(blob)
    if group:
        yield group


def _joins(group: Sequence[Blob], blob: Blob) -> bool:
    first, last = group[0].record, group[-1].record
    return (
        last.file == blob.record.file
        and _is_small(group[-1])
        and _is_small(blob)
        and 0 <= blob.record.start - last.stop <= _GROUP_GAP_BYTES
        and blob.record.stop - first.start <= _GROUP_BYTES
    )


def _is_small(blob: Blob) -> bool:
    """Whether so much of a small blob is wanted that it is best read from end to end."""
    return blob.size_bytes <= _SMALL_BYTES and (
        blob.size_bytes <= _GROUP_GAP_BYTES or 2 * blob.wanted_bytes > blob.size_bytes
    )
