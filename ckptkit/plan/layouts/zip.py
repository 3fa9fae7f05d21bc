"""A torch.save archive as segments: headers known beforehand, checksums filled in afterwards.

Sources: the ZIP application note (APPNOTE 6.3.9, sections 4.3 and 4.5) for the structures;
torch/csrc/jit `PyTorchStreamWriter` for names, order, flags and the padding of records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckptkit.core.crc import crc32
from ckptkit.plan.plan import Body, Compute, Copy, Literal, TensorSpec, Trailer

ALIGNMENT = 64  # torch pads every record's data to this, counted from the archive's start
_FLAGS = 0x0808  # sizes and checksum follow the data; names are UTF-8
_LOCAL, _DESCRIPTOR, _CENTRAL, _END = b"PK\3\4", b"PK\7\x08", b"PK\1\2", b"PK\5\6"
_END64, _LOCATOR64 = b"PK\6\6", b"PK\6\7"
_ZIP64_LIMIT = 0xFFFFFFFF
_ZIP64_COUNT = 0xFFFF
_VERSION, _VERSION64 = 20, 45
_DOS_DATE = 0x0021  # 1 January 1980, so that equal content gives equal bytes

Row = tuple[int, Body, TensorSpec | None]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    header_start: int
    size_bytes: int
    crc32: int | None
    segment: int


class ZipParts:
    """Collects the rows of one archive, in order.

    Args:
        prefix: What every record name starts with, without `/`.
        first_segment: How many segments the file has before this archive.
    """

    def __init__(self, prefix: str, first_segment: int = 0) -> None:
        self.rows: list[Row] = []
        self.size_bytes = 0
        self._prefix = prefix
        self._first = first_segment
        self._entries: list[_Entry] = []

    def add_bytes(self, name: str, data: bytes) -> None:
        """Adds a record whose content is known."""
        crc = crc32(data)
        start = self._open(name)
        segment = self._put(len(data), Literal(data))
        self._close(name, start, len(data), crc, segment)

    def add_tensor(self, name: str, spec: TensorSpec, body: Copy | Compute) -> None:
        """Adds a record with the bytes of a tensor."""
        start = self._open(name)
        segment = self._put(spec.size_bytes, body, spec)
        self._close(name, start, spec.size_bytes, None, segment)

    def finish(self) -> None:
        """Adds the central directory."""
        start = self.size_bytes
        template, fields = b"", []
        for entry in self._entries:
            record, at = _central(entry)
            if entry.crc32 is None:
                fields.append((len(template) + at, entry.segment))
            template += record
        template += _end(len(self._entries), start, len(template))
        self._put(len(template), Trailer(template, tuple(fields)))

    def _open(self, name: str) -> int:
        start = self.size_bytes
        full = f"{self._prefix}/{name}".encode()
        fixed = start + 30 + len(full)
        padding = -(fixed + 4) % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        header = _LOCAL + struct.pack(
            "<5H3I2H", _VERSION, _FLAGS, 0, 0, _DOS_DATE, 0, 0, 0, len(full), len(extra)
        )
        self._put(fixed + len(extra) - start, Literal(header + full + extra))
        return start

    def _close(self, name: str, start: int, size: int, crc: int | None, segment: int) -> None:
        full = f"{self._prefix}/{name}".encode()
        self._entries.append(_Entry(full, start, size, crc, segment))
        sizes = struct.pack("<2Q" if size > _ZIP64_LIMIT else "<2I", size, size)
        template = _DESCRIPTOR + struct.pack("<I", crc or 0) + sizes
        fields = () if crc is not None else ((4, segment),)
        self._put(len(template), Trailer(template, fields) if fields else Literal(template))

    def _put(self, size: int, body: Body, spec: TensorSpec | None = None) -> int:
        self.rows.append((size, body, spec))
        self.size_bytes += size
        return self._first + len(self.rows) - 1


def _central(entry: _Entry) -> tuple[bytes, int]:
    """Returns a directory record, and where its checksum lies in it."""
    large = [n for n in (entry.size_bytes, entry.size_bytes) if n >= _ZIP64_LIMIT]
    far = entry.header_start >= _ZIP64_LIMIT
    wide = large + ([entry.header_start] if far else [])
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = _ZIP64_LIMIT if large else entry.size_bytes
    version = _VERSION64 if wide else _VERSION
    record = _CENTRAL + struct.pack(
        "<6H3I5H2I",
        version,
        version,
        _FLAGS,
        0,
        0,
        _DOS_DATE,
        entry.crc32 or 0,
        size,
        size,
        len(entry.name),
        len(extra),
        0,
        0,
        0,
        0,
        _ZIP64_LIMIT if far else entry.header_start,
    )
    return record + entry.name + extra, 16


def _end(count: int, start: int, size: int) -> bytes:
    wide = count >= _ZIP64_COUNT or start >= _ZIP64_LIMIT or size >= _ZIP64_LIMIT
    end = b""
    if wide:
        end = _END64 + struct.pack(
            "<Q2H2I4Q", 44, _VERSION64, _VERSION64, 0, 0, count, count, size, start
        )
        end += _LOCATOR64 + struct.pack("<IQI", 0, start + size, 1)
    short = min(count, _ZIP64_COUNT)
    return (
        end
        + _END
        + struct.pack(
            "<4H2IH", 0, 0, short, short, min(size, _ZIP64_LIMIT), min(start, _ZIP64_LIMIT), 0
        )
    )
