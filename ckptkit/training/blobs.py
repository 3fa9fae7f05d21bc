"""Reading what is wanted of single blobs: small `torch.save` archives, one per stored chunk."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, FormatError
from ckptkit.core.geometry import flat_offset, intersect, row_major_strides
from ckptkit.core.index import Box, Key, Record, TensorEntry, TensorIndex
from ckptkit.execution.boxes import Overlap, contiguous_parts, relative, widened
from ckptkit.formats.torch_zip import WINDOW_BYTES, Payload, TensorCache, locate_tensor
from ckptkit.storage.base import Source
from ckptkit.training.target_memory import TargetMemory, byte_type, slices_of

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
        """Of the archive, headers and trailer included."""
        return self.record.stop - self.record.start

    @property
    def wanted_bytes(self) -> int:
        """Of its elements, as far as they are asked for."""
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
        """Reads blobs of one file; several are neighbours, and small enough for one read.

        Raises:
            InputError: If the file is damaged, or the bytes have another checksum.
        """
        file = self._files[group[0].record.file].path
        view = _View(self, file)
        if len(group) > 1 or group[0].size_bytes <= 2 * WINDOW_BYTES:
            view.keep(group[0].record.start, group[-1].record.stop)
        for blob in group:
            self._read_blob(view, blob)

    def fetch(self, path: str, start: int, target: memoryview) -> None:
        """Reads from a file, and counts."""
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
    """Compares a checksum with the stored one.

    Raises:
        ChecksumError: If they differ.
    """
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
