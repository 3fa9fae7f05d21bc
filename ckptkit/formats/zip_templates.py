"""Recognising archives that differ from an earlier one in their tensor's values alone.

Chunks of one dtype and shape lie in archives that are equal from end to end, but for the data,
their checksums, and the random-looking name that torch gives the contents. So the directory is
parsed once, and of the others every byte is compared. What is left out of the comparison is what
the parser takes as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit.formats.zip_directory import Read, ZipEntry, data_start

WINDOW_BYTES = 1_024
"""In archives of one tensor everything but the storage lies within the first 800 and the last
900 bytes, whatever the tensor's size; where names are longer, more is read."""

_DESCRIPTOR_SIGNATURE = b"PK\7\x08"
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ends:
    """What an archive begins and ends with; of a small one, both are the whole.

    Attributes:
        size_bytes: The archive's length.
        head: Its first bytes.
        tail: Its last bytes.
    """

    size_bytes: int
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, read: Read, size_bytes: int) -> Ends:
        """Reads them, in one or two reads.

        Args:
            read: Returns the bytes `[start, stop)` of the archive.
            size_bytes: The archive's length.
        """
        if size_bytes <= 2 * WINDOW_BYTES:
            whole = read(0, size_bytes)
            return cls(size_bytes, whole, whole)
        tail_start = size_bytes - WINDOW_BYTES
        return cls(size_bytes, read(0, WINDOW_BYTES), read(tail_start, size_bytes))

    @property
    def tail_start(self) -> int:
        """Position of the tail's first byte."""
        return self.size_bytes - len(self.tail)

    def before(self, read: Read) -> Read:
        """Returns a way to read that serves what it can from the ends."""
        head, tail, tail_start = self.head, self.tail, self.tail_start

        def cached(start: int, stop: int) -> bytes:
            if stop <= len(head):
                return head[start:stop]
            if start >= tail_start:
                return tail[start - tail_start : stop - tail_start]
            return read(start, stop)

        return cached


class Template:
    """Everything around the data of an archive, and which of it another one may have otherwise."""

    __slots__ = ("_crc_at", "_fixed", "_head", "_mask", "_stop")

    def __init__(self, ends: Ends, start: int, storage: ZipEntry, free: list[range]) -> None:
        """Keeps what lies around the data.

        Args:
            ends: Of the archive.
            start: Where the data begin; they and what comes before lie in the head.
            storage: The record of the data.
            free: Positions in the tail that may differ.
        """
        self._head = ends.head[:start]
        self._stop = start + storage.size_bytes
        self._crc_at = storage.crc_at - self._stop
        mask = bytearray(b"\xff" * (ends.size_bytes - self._stop))
        for positions in free:
            at = positions.start - self._stop
            mask[at : at + len(positions)] = bytes(len(positions))
        self._mask = int.from_bytes(mask, "little")
        self._fixed = self._mask & int.from_bytes(self._tail(ends), "little")

    def crc32_in(self, ends: Ends) -> int | None:
        """Returns the stored checksum of an archive of the same length, None for another kind."""
        tail = self._tail(ends)
        if int.from_bytes(tail, "little") & self._mask != self._fixed:
            return None
        if not ends.head.startswith(self._head):
            return None
        return int.from_bytes(tail[self._crc_at : self._crc_at + _CRC_BYTES], "little")

    def _tail(self, ends: Ends) -> bytes:
        return ends.tail[self._stop - ends.tail_start :]


def template_of(
    ends: Ends, read: Read, storage: ZipEntry, identity: ZipEntry | None, *, where: str
) -> Template | None:
    """Returns the template of an archive that was parsed, or None where it does not lend itself.

    Args:
        ends: Of the archive.
        read: Returns the bytes `[start, stop)` of the archive.
        storage: The record of its only storage.
        identity: The record that names the contents, where there is one; nobody reads it.
        where: The file, for messages.

    Raises:
        FormatError: If the local header of a record contradicts the directory.
    """
    start = data_start(read, storage, where=where)
    stop = start + storage.size_bytes
    if not storage.has_descriptor or start > len(ends.head) or stop < ends.tail_start:
        return None
    free = [*_crc_fields(ends, stop, storage)]
    if identity is not None and identity.header_start >= stop:
        first = data_start(read, identity, where=where)
        free.append(range(first, first + identity.size_bytes))
        free += _crc_fields(ends, first + identity.size_bytes, identity)
    return Template(ends, start, storage, free)


def _crc_fields(ends: Ends, stop: int, entry: ZipEntry) -> Iterator[range]:
    """Yields where the checksum of a record lies: in the directory, and behind its data."""
    yield range(entry.crc_at, entry.crc_at + _CRC_BYTES)
    at = stop - ends.tail_start
    if entry.has_descriptor and ends.tail[at : at + _CRC_BYTES] == _DESCRIPTOR_SIGNATURE:
        yield range(stop + _CRC_BYTES, stop + 2 * _CRC_BYTES)
