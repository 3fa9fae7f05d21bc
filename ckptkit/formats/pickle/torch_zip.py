"""The zip archive that `torch.save` writes: its tensors, and the positions of their bytes.

A DCP file is a sequence of such archives, one per chunk; a `.pt` file is one archive. Nothing here
reads a storage's bytes: positions come from the archive's directory, from two or three local
headers and from the pickle, and the caller checks the CRC while it copies.

Only archives that `torch.save` can produce are accepted: stored (never compressed) records without
gaps from the archive's first byte to its directory, and an end record without a comment. All others
are refused, so that a record's bytes can be found in one way only.

Archives of chunks of one dtype and shape differ only in the data, their checksums, and a
serialization id. So the directory of the first one is parsed and kept as a template; of further
archives every other byte is compared with it. The bytes that are not compared are bytes that the
parser accepts in any form.

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc;
APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3, https://pkware.cachefly.net/webdocs/APPNOTE/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    TruncatedFileError,
    UnsupportedError,
)
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.base import errors_at
from ckptkit.formats.parsing import Read
from ckptkit.formats.pickle.torch_values import StorageRef, TensorRef, explain_value, parse_values

_Row = tuple[str, int, int, int, int, int]  # name, header start, size, CRC, flags, place of the CRC

# A record's entry takes 46 bytes, its name and, above 4 GiB, 28 more; torch's names are short.
MAX_NAME_BYTES = 1_024
MAX_ENTRY_BYTES = 2 * MAX_NAME_BYTES
LOCAL_SIGNATURE = b"PK\3\4"
_LOCAL = struct.Struct("<4s2xHH4xIIIHH")
_CENTRAL = struct.Struct("<4s4xHH4xIIIHHHH6xI")
_CENTRAL_CRC = 16  # position in an entry
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQ4xIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_READ_BYTES = 1 << 20
_CENTRAL_SIGNATURE = b"PK\1\2"
_END_SIGNATURE = b"PK\5\6"
_END64_SIGNATURE = b"PK\6\6"
_LOCATOR_SIGNATURE = b"PK\6\7"
_IN_EXTRA = 0xFFFFFFFF
_IN_END64 = 0xFFFF
_ZIP64_EXTRA = 1
_DESCRIPTOR_FLAG = 0x0008
_KNOWN_FLAGS = 0x0808  # sizes follow in a descriptor; the name is UTF-8
_DESCRIPTOR_SIZES = (16, 24)  # with signature; 24 where the sizes are zip64


class ZipEntry(Struct, frozen=True):
    name: str  # the full name, such as `archive/data/0`
    header_start: int  # of the local header, from the archive's start
    size_bytes: int
    crc32: int | None  # None where the writer did not compute checksums
    limit: int  # first byte after the record, its descriptor included
    flags: int  # which the local header has to repeat
    crc_at: int  # position of the checksum in the directory, from the archive's start

    @property
    def has_descriptor(self) -> bool:
        """Whether the checksum comes after the data, and not before."""
        return bool(self.flags & _DESCRIPTOR_FLAG)


def read_directory(read: Read, size_bytes: int, *, where: str) -> Mapping[str, ZipEntry]:
    """Reads the directory of an archive that is exactly the bytes `[0, size_bytes)`."""
    with errors_at(where):
        return MappingProxyType(_read_entries(read, size_bytes))


def data_start(read: Read, entry: ZipEntry, *, where: str) -> int:
    """Finds the first byte of a record's data from its local header."""
    name = entry.name.encode()
    stop = entry.header_start + _LOCAL.size + len(name)
    head = read(entry.header_start, stop)
    signature, flags, method, crc32, packed, size, name_bytes, extra_bytes = _LOCAL.unpack_from(
        head
    )
    if (
        signature != LOCAL_SIGNATURE
        or (flags, method, name_bytes) != (entry.flags, 0, len(name))
        or head[_LOCAL.size :] != name
    ):
        raise FormatError(f"local header of {entry.name!r} contradicts the directory", where=where)
    start: int = stop + extra_bytes
    gap = entry.limit - start - entry.size_bytes
    if entry.has_descriptor:
        agrees = gap in _DESCRIPTOR_SIZES
    else:
        agrees = gap == 0 and packed == size and size in {entry.size_bytes, _IN_EXTRA}
        agrees = agrees and crc32 == (entry.crc32 or 0)
    if not agrees:
        raise FormatError(
            f"{entry.size_bytes:,} bytes of {entry.name!r} from byte {start:,} do not end where "
            f"the directory has them end, at {entry.limit:,}",
            where=where,
        )
    return start


def _read_entries(read: Read, size_bytes: int) -> Mapping[str, ZipEntry]:
    """Reads the directory of an archive that is exactly the bytes `[0, size_bytes)`."""
    count, directory_start, directory_stop = _read_end(read, size_bytes)
    data = read(directory_start, directory_stop)
    rows = _read_rows(data, count, directory_start)
    rows.sort(key=itemgetter(1))
    limits = [*(row[1] for row in rows), directory_start][1:]
    entries: dict[str, ZipEntry] = {}
    expected = 0
    for (name, start, size, crc, flags, crc_at), limit in zip(rows, limits, strict=True):
        if start < expected or expected == 0 < start:
            raise FormatError(
                f"record {name!r} starts at byte {start:,} but {expected:,} is the first free one"
            )
        expected = start + _LOCAL.size + len(name) + size
        if name in entries:
            raise FormatError(f"two records are called {name!r}")
        stored = None if crc == 0 < size else crc
        entries[name] = ZipEntry(name, start, size, stored, limit, flags, crc_at)
    if expected > directory_start:
        raise FormatError(
            f"records reach byte {expected:,} but the directory starts at {directory_start:,}"
        )
    return entries


def _read_end(read: Read, size_bytes: int) -> tuple[int, int, int]:
    """Reads the end record, and the zip64 one before it where there is one."""
    if size_bytes < _END.size:
        raise TruncatedFileError(
            f"{size_bytes:,} bytes are fewer than the {_END.size} of an empty zip archive"
        )
    stop = size_bytes - _END.size
    both = _LOCATOR.size + _END.size
    tail = read(max(0, size_bytes - both), size_bytes)
    signature, disk, first, here, count, length, start, comment = _END.unpack(tail[-_END.size :])
    if signature != _END_SIGNATURE or comment:
        if read(0, 4) == LOCAL_SIGNATURE:
            raise TruncatedFileError(
                f"zip archive has no end record in the last bytes of its {size_bytes:,}",
                hint="the file was cut short or appended to; compare its size with the original's",
            )
        raise FormatError("neither starts nor ends like a zip archive")
    fields = (count, length, start)
    if (disk, first, here) != (0, 0, count):
        raise FormatError("end record names several disks, which torch never writes")
    if len(tail) == both and tail.startswith(_LOCATOR_SIGNATURE):
        stop -= _LOCATOR.size + _END64.size
        count, length, start = _read_end64(read, stop, tail)
        limits = (_IN_END64, _IN_EXTRA, _IN_EXTRA)
        pairs = zip(fields, (count, length, start), limits, strict=True)
        if any(short not in {full, limit} for short, full, limit in pairs):
            raise FormatError("the two end records of the zip archive disagree")
    if start + length != stop:
        raise FormatError(
            f"directory of {length:,} bytes from byte {start:,} does not end at {stop:,}"
        )
    if not count * _CENTRAL.size <= length or (count == 0 < length):
        raise FormatError(f"{count:,} records do not fit a directory of {length:,} bytes")
    if length > count * MAX_ENTRY_BYTES:
        raise LimitError(
            f"directory of {count:,} records takes {length:,} bytes, at most "
            f"{count * MAX_ENTRY_BYTES:,} were expected"
        )
    return count, start, stop


def _read_end64(read: Read, start: int, tail: bytes) -> tuple[int, int, int]:
    """Reads the zip64 end record, which has to be right before its locator."""
    _, disk, located, disks = _LOCATOR.unpack_from(tail)
    if start < 0 or (disk, located, disks) != (0, start, 1):
        raise FormatError(f"zip64 end record is said to be at byte {located:,}, not at {start:,}")
    fields = _END64.unpack(read(start, start + _END64.size))
    signature, length, disk, first, here, count, directory_bytes, directory_start = fields
    if (signature, length, disk, first) != (_END64_SIGNATURE, _END64.size - 12, 0, 0):
        raise FormatError("zip64 end record is damaged")
    if here != count:
        raise FormatError(f"zip64 end record counts {here:,} and {count:,} records")
    return count, directory_bytes, directory_start


def _read_rows(data: bytes, count: int, start_of_data: int) -> list[_Row]:
    rows = []
    position = 0
    for number in range(count):
        crc_at = start_of_data + position + _CENTRAL_CRC
        if position + _CENTRAL.size > len(data):
            raise FormatError(f"directory ends inside entry {number:,}")
        fields = _CENTRAL.unpack_from(data, position)
        signature, flags, method, crc32, packed, size, name_bytes, extra_bytes = fields[:8]
        comment_bytes, disk, start = fields[8:]
        name_start = position + _CENTRAL.size
        extra_start = name_start + name_bytes
        position = extra_start + extra_bytes + comment_bytes
        if signature != _CENTRAL_SIGNATURE or disk or comment_bytes or position > len(data):
            raise FormatError(f"entry {number:,} of the directory is damaged")
        name = _checked_name(data[name_start:extra_start])
        if _IN_EXTRA in {size, packed, start}:
            extra = data[extra_start:position]
            size, packed, start = _from_extra(extra, (size, packed, start), name)
        if method or size != packed or flags & ~_KNOWN_FLAGS:
            if name.split("/")[1:2] == ["code"]:  # `torch.jit.save` alone writes it, compressed
                raise torchscript_error()
            raise UnsupportedError(
                f"record {name!r} is compressed or encrypted, which torch never does"
                f" (method {method}, flags {flags:#06x})",
                hint="a flipped bit looks like this: take another copy of the file; if another tool"
                " has packed it, save it again with torch.save",
            )
        rows.append((name, start, size, crc32, flags, crc_at))
    if position != len(data):
        raise FormatError(f"{len(data) - position:,} bytes follow the last of {count:,} entries")
    return rows


def torchscript_error() -> UnsupportedError:
    return UnsupportedError(
        "archive holds a TorchScript program, not values",
        hint="load it with `torch.jit.load` and save its `state_dict()` with `torch.save`",
    )


def _checked_name(raw: bytes) -> str:
    if len(raw) > MAX_NAME_BYTES:
        raise LimitError(f"record name has {len(raw):,} bytes, {MAX_NAME_BYTES:,} at most")
    # Names are ASCII in every archive torch writes under an ASCII file name; others are UTF-8.
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"record name {raw!r} is not UTF-8") from error
    if not name or "\\" in name or "\0" in name or ".." in name.split("/") or name[0] == "/":
        raise FormatError(f"record name {name!r} is not a relative path")
    return name


def _from_extra(extra: bytes, fields: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Replaces the fields that did not fit in 32 bits by those of the zip64 extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        body = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if kind != _ZIP64_EXTRA:
            continue
        wanted = fields.count(_IN_EXTRA)
        if len(body) != length or length != 8 * wanted:
            break
        values = iter(struct.unpack(f"<{wanted}Q", body))
        return tuple(next(values) if field == _IN_EXTRA else field for field in fields)
    raise FormatError(f"zip64 extra field of {name!r} is missing or damaged")


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
        if size_bytes <= 2 * WINDOW_BYTES:
            whole = read(0, size_bytes)
            return cls(size_bytes, whole, whole)
        tail_start = size_bytes - WINDOW_BYTES
        return cls(size_bytes, read(0, WINDOW_BYTES), read(tail_start, size_bytes))

    @property
    def tail_start(self) -> int:
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
            is_unknown = stored == 0 and payload.stop > payload.start
            return replace(payload, crc32=None if is_unknown else stored)
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

    def prove(self) -> int:
        """Compares all records that have a checksum with it; returns how many these are."""
        proven = 0
        for entry in self.entries.values():
            if entry.crc32 is None:
                continue
            start = data_start(self.read, entry, where=self.where)
            stop, actual = start + entry.size_bytes, 0
            for at in range(start, stop, _READ_BYTES):
                actual = crc32(self.read(at, min(at + _READ_BYTES, stop)), actual)
            if actual != entry.crc32:
                name = entry.name.rpartition("/")[2]
                raise ChecksumError(
                    f"{name!r} has CRC-32 {actual:#010x}, {entry.crc32:#010x} was stored",
                    where=self.where,
                )
            proven += 1
        return proven

    def extent(self, storage: StorageRef) -> tuple[int, int, int | None]:
        """Returns the start and the end of a storage, and the checksum stored for it."""
        entry = self.record(storage)
        start = data_start(self.read, entry, where=self.where)
        return start, start + entry.size_bytes, entry.crc32

    def record(self, storage: StorageRef) -> ZipEntry:
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
    with errors_at(where):
        if prefix + "constants.pkl" in entries:
            raise torchscript_error()
        if prefix + _PICKLE not in entries:
            raise FormatError("zip archive has no 'data.pkl', so torch did not write it")
        # Older writers left the record out; in practice they ran on little-endian machines only.
        entry = entries.get(prefix + _BYTE_ORDER)
        if entry is not None:
            start = data_start(read, entry, where=where)
            order = read(start, start + min(entry.size_bytes, _MAX_BYTE_ORDER))
            if order == b"big":
                raise UnsupportedError(
                    "numbers are stored big-endian, only little-endian is modelled"
                )
            if order != _LITTLE:
                raise FormatError(f"byte order is {order!r}, not b'little'")
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
