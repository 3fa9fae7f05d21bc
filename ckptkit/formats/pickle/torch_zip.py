"""The zip archive that `torch.save` writes: its tensors, and the positions of their bytes.

A DCP file is a sequence of such archives, one per chunk; a `.pt` file is one archive. Nothing here
reads a storage's bytes: positions come from the archive's directory, from two or three local
headers and from the pickle, and the caller checks the CRC while it copies.

Archives of chunks of one dtype and shape differ only in the data, their checksums, and a
serialization id. So the directory of the first one is parsed and kept as a template; of further
archives every other byte is compared with it. The bytes that are not compared are bytes that the
parser accepts in any form.

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    UnsupportedError,
)
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import Read
from ckptkit.formats.pickle.torch_values import (
    StorageRef,
    TensorRef,
    explain_value,
    parse_values,
)
from ckptkit.formats.pickle.zip_directory import (
    ZipEntry,
    data_start,
    read_directory,
    torchscript_error,
)

WINDOW_BYTES = 1_024
"""In archives of one tensor everything but the storage is in the first 800 and the last 900 bytes,
for tensors of any size; where names are longer, more is read."""

_DESCRIPTOR_SIGNATURE = b"PK\7\x08"
_CRC_BYTES = 4


class ArchiveEnds(Struct, frozen=True):
    """The first and the last bytes of an archive; for a small archive, both are all of it."""

    size_bytes: int
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, read: Read, size_bytes: int) -> ArchiveEnds:
        """Reads both, in one or two reads."""
        if size_bytes <= 2 * WINDOW_BYTES:
            whole = read(0, size_bytes)
            return cls(size_bytes, whole, whole)
        tail_start = size_bytes - WINDOW_BYTES
        return cls(size_bytes, read(0, WINDOW_BYTES), read(tail_start, size_bytes))

    @property
    def tail_start(self) -> int:
        """Position of the tail's first byte."""
        return self.size_bytes - len(self.tail)

    def cache(self, read: Read) -> Read:
        """Returns `read` with reads inside the head or the tail answered from memory."""
        head, tail, tail_start = self.head, self.tail, self.tail_start

        def cached(start: int, stop: int) -> bytes:
            if stop <= len(head):
                return head[start:stop]
            if start >= tail_start:
                return tail[start - tail_start : stop - tail_start]
            return read(start, stop)

        return cached


class ArchiveTemplate:
    """The bytes around the data of an archive, and which of them may differ in another archive."""

    __slots__ = ("_crc_at", "_fixed", "_head", "_mask", "_stop")

    def __init__(self, ends: ArchiveEnds, start: int, storage: ZipEntry, free: list[range]) -> None:
        """Keeps the bytes around the data."""
        self._head = ends.head[:start]
        self._stop = start + storage.size_bytes
        self._crc_at = storage.crc_at - self._stop
        mask = bytearray(b"\xff" * (ends.size_bytes - self._stop))
        for positions in free:
            at = positions.start - self._stop
            mask[at : at + len(positions)] = bytes(len(positions))
        self._mask = int.from_bytes(mask, "little")
        self._fixed = self._mask & int.from_bytes(self._tail(ends), "little")

    def crc32_in(self, ends: ArchiveEnds) -> int | None:
        """Returns the checksum in an archive of the same length; None if it does not match."""
        tail = self._tail(ends)
        if int.from_bytes(tail, "little") & self._mask != self._fixed:
            return None
        if not ends.head.startswith(self._head):
            return None
        return int.from_bytes(tail[self._crc_at : self._crc_at + _CRC_BYTES], "little")

    def _tail(self, ends: ArchiveEnds) -> bytes:
        return ends.tail[self._stop - ends.tail_start :]


def _crc_fields(ends: ArchiveEnds, stop: int, entry: ZipEntry) -> Iterator[range]:
    """Yields the positions of a record's checksum: in the directory, and after its data."""
    yield range(entry.crc_at, entry.crc_at + _CRC_BYTES)
    at = stop - ends.tail_start
    if entry.has_descriptor and ends.tail[at : at + _CRC_BYTES] == _DESCRIPTOR_SIGNATURE:
        yield range(stop + _CRC_BYTES, stop + 2 * _CRC_BYTES)


_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_IDENTITY = ".data/serialization_id"
_LITTLE = b"little"
_MAX_BYTE_ORDER = 16
MAX_PICKLE_BYTES = 2**30
MAX_TENSOR_PICKLE_BYTES = 2**16  # of one tensor; real pickles have about 200 bytes
_TEMPLATES_OF_A_SIZE = 8


class Payload(Struct, frozen=True):
    """The position of the bytes of an archive's only tensor, and how to view them."""

    start: int  # of its storage, from the archive's start
    stop: int
    crc32: int | None  # of the whole storage, or None where none was stored
    dtype: DType
    shape: Shape
    strides: Shape  # in elements of the storage
    storage_offset: int  # in elements
    row_major: bool


class TensorCache:
    """Caches parsed archives and pickles, which chunks of one dtype and shape have in common.

    It holds at most `limit` pickles and as many archives, and may be shared by threads.
    """

    __slots__ = ("_archives", "_limit", "_tensors")

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._tensors: dict[bytes, tuple[TensorRef, bool]] = {}
        self._archives: dict[int, tuple[tuple[ArchiveTemplate, Payload], ...]] = {}

    def payload(self, ends: ArchiveEnds) -> Payload | None:
        """Returns the position of the data if the archive matches a template; else None."""
        for template, payload in self._archives.get(ends.size_bytes, ()):
            stored = template.crc32_in(ends)
            if stored is None:
                continue
            return Payload(  # takes a fifth of the time of `dataclasses.replace`
                payload.start,
                payload.stop,
                None if stored == 0 and payload.stop > payload.start else stored,
                payload.dtype,
                payload.shape,
                payload.strides,
                payload.storage_offset,
                payload.row_major,
            )
        return None

    def parse(self, ends: ArchiveEnds, read: Read, *, where: str) -> Payload:
        """Parses an archive, and keeps its template if its data and tail are between the ends."""
        archive = open_archive(ends.cache(read), ends.size_bytes, where=where)
        pickle = archive.pickle(max_bytes=MAX_TENSOR_PICKLE_BYTES)
        tensor, row_major = self.tensor(pickle, where=where)
        start, stop, crc32 = archive.extent(tensor.storage)
        payload = Payload(
            start,
            stop,
            crc32,
            tensor.dtype,
            tensor.shape,
            tensor.strides,
            tensor.storage_offset,
            row_major,
        )
        storage = archive.record(tensor.storage)
        if not storage.has_descriptor or start > len(ends.head) or stop < ends.tail_start:
            return payload
        free = [*_crc_fields(ends, stop, storage)]
        identity = archive.entries.get(archive.prefix + _IDENTITY)  # torch does not read it
        if identity is not None and identity.header_start >= stop:
            first = data_start(archive.read, identity, where=where)
            free.append(range(first, first + identity.size_bytes))
            free += _crc_fields(ends, first + identity.size_bytes, identity)
        if len(self._archives) >= self._limit:
            self._archives.clear()
        others = self._archives.get(ends.size_bytes, ())
        kept = ((ArchiveTemplate(ends, start, storage, free), payload), *others)
        self._archives[ends.size_bytes] = kept[:_TEMPLATES_OF_A_SIZE]
        return payload

    def tensor(self, pickle: bytes, *, where: str) -> tuple[TensorRef, bool]:
        """Returns the tensor that a pickle describes, and whether it is row-major."""
        cached = self._tensors.get(pickle)
        if cached is None:
            value = parse_values(pickle, where=where)
            if not isinstance(value, TensorRef):
                raise explain_value(value, where)
            cached = value, value.row_major
            if len(self._tensors) >= self._limit:
                self._tensors.clear()
            if len(pickle) <= WINDOW_BYTES:
                self._tensors[pickle] = cached
        return cached


class ZipArchive(Struct, frozen=True):
    """An opened archive: its directory is read and checked, its pickle is not."""

    read: Read
    entries: Mapping[str, ZipEntry]
    prefix: str  # the common start of all record names, `/` included
    where: str

    def pickle(self, *, max_bytes: int = MAX_PICKLE_BYTES) -> bytes:
        """Returns the checked bytes of `data.pkl`."""
        entry = self.entries[self.prefix + _PICKLE]
        if entry.size_bytes > max_bytes:
            raise LimitError(
                f"{entry.name!r} has {entry.size_bytes:,} bytes, more than the "
                f"{max_bytes:,} of any real one",
                where=self.where,
            )
        start = data_start(self.read, entry, where=self.where)
        data = self.read(start, start + entry.size_bytes)
        computed = crc32(data)
        if entry.crc32 not in {None, computed}:
            raise ChecksumError(
                f"{entry.name!r} has CRC-32 {computed:#010x}, {entry.crc32:#010x} was stored",
                where=self.where,
                hint="the file was damaged after it was written; take another copy",
            )
        return data

    def extent(self, storage: StorageRef) -> tuple[int, int, int | None]:
        """Returns the start and the end of a storage, and the checksum stored for it."""
        entry = self.record(storage)
        start = data_start(self.read, entry, where=self.where)
        return start, start + entry.size_bytes, entry.crc32

    def record(self, storage: StorageRef) -> ZipEntry:
        """Returns the record of a storage."""
        entry = self.entries.get(f"{self.prefix}data/{storage.key}")
        if entry is None:
            raise FormatError(
                f"record of storage {quote(storage.key)} is missing", where=self.where
            )
        if entry.size_bytes != storage.size_bytes:
            raise FormatError(
                f"{entry.name!r} has {entry.size_bytes:,} bytes, its tensors need "
                f"{storage.size_bytes:,}",
                where=self.where,
            )
        return entry


def open_archive(read: Read, size_bytes: int, *, where: str) -> ZipArchive:
    """Opens an archive that is exactly the bytes `[0, size_bytes)`."""
    entries = read_directory(read, size_bytes, where=where)
    prefix = next(iter(entries), "").partition("/")[0] + "/"
    if prefix + "constants.pkl" in entries:
        raise torchscript_error(where)
    if prefix + _PICKLE not in entries:
        raise FormatError("zip archive has no 'data.pkl', so torch did not write it", where=where)
    # Older writers left the record out; in practice they ran on little-endian machines only.
    entry = entries.get(prefix + _BYTE_ORDER)
    if entry is not None:
        start = data_start(read, entry, where=where)
        order = read(start, start + min(entry.size_bytes, _MAX_BYTE_ORDER))
        if order == b"big":
            raise UnsupportedError(
                "numbers are stored big-endian, only little-endian is modelled", where=where
            )
        if order != _LITTLE:
            raise FormatError(f"byte order is {order!r}, not b'little'", where=where)
    return ZipArchive(read, entries, prefix, where)


def locate_tensor(
    read: Read, size_bytes: int, *, where: str, cache: TensorCache | None = None
) -> Payload:
    """Returns the position of the bytes of the only tensor in an archive.

    A small archive is read at once, of others the first and the last `WINDOW_BYTES`; more is read
    only where names are longer.
    """
    ends = ArchiveEnds.of(read, size_bytes)
    cache = TensorCache() if cache is None else cache
    return cache.payload(ends) or cache.parse(ends, read, where=where)
