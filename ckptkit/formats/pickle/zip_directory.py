"""The directory of an uncompressed zip archive, as `torch.save` writes it.

Only archives that `torch.save` can produce are accepted: stored (never compressed) records without
gaps from the archive's first byte to its directory, and an end record without a comment. All others
are refused, so that a record's bytes can be found in one way only.

Source: APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3, https://pkware.cachefly.net/webdocs/APPNOTE/
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from operator import itemgetter
from types import MappingProxyType

from msgspec import Struct

from ckptkit.core.errors import FormatError, LimitError, TruncatedFileError, UnsupportedError
from ckptkit.formats.parsing import Read

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
    """A record as the directory describes it."""

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
    count, directory_start, directory_stop = _read_end(read, size_bytes, where)
    data = read(directory_start, directory_stop)
    rows = _read_rows(data, count, directory_start, where)
    rows.sort(key=itemgetter(1))
    limits = [*(row[1] for row in rows), directory_start][1:]
    entries: dict[str, ZipEntry] = {}
    expected = 0
    for (name, start, size, crc32, flags, crc_at), limit in zip(rows, limits, strict=True):
        if start < expected or expected == 0 < start:
            raise FormatError(
                f"record {name!r} starts at byte {start:,} but {expected:,} is the first free one",
                where=where,
            )
        expected = start + _LOCAL.size + len(name) + size
        if name in entries:
            raise FormatError(f"two records are called {name!r}", where=where)
        stored_crc32 = None if crc32 == 0 < size else crc32
        entries[name] = ZipEntry(name, start, size, stored_crc32, limit, flags, crc_at)
    if expected > directory_start:
        raise FormatError(
            f"records reach byte {expected:,} but the directory starts at {directory_start:,}",
            where=where,
        )
    return MappingProxyType(entries)


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


def _read_end(read: Read, size_bytes: int, where: str) -> tuple[int, int, int]:
    """Reads the end record, and the zip64 one before it where there is one."""
    if size_bytes < _END.size:
        raise TruncatedFileError(
            f"{size_bytes:,} bytes are fewer than the {_END.size} of an empty zip archive",
            where=where,
        )
    stop = size_bytes - _END.size
    both = _LOCATOR.size + _END.size
    tail = read(max(0, size_bytes - both), size_bytes)
    signature, disk, first, here, count, length, start, comment = _END.unpack(tail[-_END.size :])
    if signature != _END_SIGNATURE or comment:
        if read(0, 4) == LOCAL_SIGNATURE:
            raise TruncatedFileError(
                f"zip archive has no end record in the last bytes of its {size_bytes:,}",
                where=where,
                hint="the file was cut short or appended to; compare its size with the original's",
            )
        raise FormatError("neither starts nor ends like a zip archive", where=where)
    fields = (count, length, start)
    if (disk, first, here) != (0, 0, count):
        raise FormatError("end record names several disks, which torch never writes", where=where)
    if len(tail) == both and tail.startswith(_LOCATOR_SIGNATURE):
        stop -= _LOCATOR.size + _END64.size
        count, length, start = _read_end64(read, stop, tail, where)
        limits = (_IN_END64, _IN_EXTRA, _IN_EXTRA)
        pairs = zip(fields, (count, length, start), limits, strict=True)
        if any(short not in {full, limit} for short, full, limit in pairs):
            raise FormatError("the two end records of the zip archive disagree", where=where)
    if start + length != stop:
        raise FormatError(
            f"directory of {length:,} bytes from byte {start:,} does not end at {stop:,}",
            where=where,
        )
    if not count * _CENTRAL.size <= length or (count == 0 < length):
        raise FormatError(
            f"{count:,} records do not fit a directory of {length:,} bytes", where=where
        )
    if length > count * MAX_ENTRY_BYTES:
        raise LimitError(
            f"directory of {count:,} records takes {length:,} bytes, at most "
            f"{count * MAX_ENTRY_BYTES:,} were expected",
            where=where,
        )
    return count, start, stop


def _read_end64(read: Read, start: int, tail: bytes, where: str) -> tuple[int, int, int]:
    """Reads the zip64 end record, which has to be right before its locator."""
    _, disk, located, disks = _LOCATOR.unpack_from(tail)
    if start < 0 or (disk, located, disks) != (0, start, 1):
        raise FormatError(
            f"zip64 end record is said to be at byte {located:,}, not at {start:,}",
            where=where,
        )
    fields = _END64.unpack(read(start, start + _END64.size))
    signature, length, disk, first, here, count, directory_bytes, directory_start = fields
    if (signature, length, disk, first) != (_END64_SIGNATURE, _END64.size - 12, 0, 0):
        raise FormatError("zip64 end record is damaged", where=where)
    if here != count:
        raise FormatError(f"zip64 end record counts {here:,} and {count:,} records", where=where)
    return count, directory_bytes, directory_start


def _read_rows(data: bytes, count: int, start_of_data: int, where: str) -> list[_Row]:
    """Reads every entry of a directory."""
    rows = []
    position = 0
    for number in range(count):
        crc_at = start_of_data + position + _CENTRAL_CRC
        if position + _CENTRAL.size > len(data):
            raise FormatError(f"directory ends inside entry {number:,}", where=where)
        fields = _CENTRAL.unpack_from(data, position)
        signature, flags, method, crc32, packed, size, name_bytes, extra_bytes = fields[:8]
        comment_bytes, disk, start = fields[8:]
        name_start = position + _CENTRAL.size
        extra_start = name_start + name_bytes
        position = extra_start + extra_bytes + comment_bytes
        if signature != _CENTRAL_SIGNATURE or disk or comment_bytes or position > len(data):
            raise FormatError(f"entry {number:,} of the directory is damaged", where=where)
        name = _checked_name(data[name_start:extra_start], where)
        if _IN_EXTRA in {size, packed, start}:
            extra = data[extra_start:position]
            size, packed, start = _from_extra(extra, (size, packed, start), f"{where}: {name!r}")
        if method or size != packed or flags & ~_KNOWN_FLAGS:
            if name.split("/")[1:2] == ["code"]:  # `torch.jit.save` alone writes it, compressed
                raise torchscript_error(where)
            raise UnsupportedError(
                f"record {name!r} is compressed or encrypted, which torch never does"
                f" (method {method}, flags {flags:#06x})",
                where=where,
                hint="a flipped bit looks like this: take another copy of the file; if another tool"
                " has packed it, save it again with torch.save",
            )
        rows.append((name, start, size, crc32, flags, crc_at))
    if position != len(data):
        raise FormatError(
            f"{len(data) - position:,} bytes follow the last of {count:,} entries",
            where=where,
        )
    return rows


def torchscript_error(where: str) -> UnsupportedError:
    """Returns the error for an archive of `torch.jit.save`."""
    return UnsupportedError(
        "archive holds a TorchScript program, not values",
        where=where,
        hint="load it with `torch.jit.load` and save its `state_dict()` with `torch.save`",
    )


def _checked_name(raw: bytes, where: str) -> str:
    if len(raw) > MAX_NAME_BYTES:
        raise LimitError(
            f"record name has {len(raw):,} bytes, {MAX_NAME_BYTES:,} at most",
            where=where,
        )
    # Names are ASCII in every archive torch writes under an ASCII file name; others are UTF-8.
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"record name {raw!r} is not UTF-8", where=where) from error
    if not name or "\\" in name or "\0" in name or ".." in name.split("/") or name[0] == "/":
        raise FormatError(f"record name {name!r} is not a relative path", where=where)
    return name


def _from_extra(extra: bytes, fields: tuple[int, ...], where: str) -> tuple[int, ...]:
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
    raise FormatError("zip64 extra field is missing or damaged", where=where)
