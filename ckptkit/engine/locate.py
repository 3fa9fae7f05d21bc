"""Where the data of a record really starts, and what checksum was stored for it.

A DCP index knows only the extent of each blob, so blobs are looked into when their tensors are
about to be read, not while planning: a million chunks would cost millions of small reads.

Checksums of source records, folded from the pieces in which they happen to be read.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ckptkit.core.checksums import ChecksumPiece as Piece
from ckptkit.core.checksums import crc32_combine, joined_pieces
from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, CkptkitError, FormatError
from ckptkit.core.index import ChunkTable, Key, Shape, TensorEntry, TensorIndex
from ckptkit.formats.pickle.torch_zip import TensorCache, locate_tensor


@dataclass(frozen=True, slots=True)
class Located:
    """A chunk's data.

    Attributes:
        path: The file.
        start: First byte of the record's data.
        stop: First byte after it.
        crc32: Checksum of `[start, stop)`, or None where none was stored.
        origin: Byte of the chunk's first element.
        strides: In elements; None for row-major.
        compressed: The record, where all positions are those in what it decodes to; its checksum
            is then proven by whoever decodes it. Else None.
    """

    path: str
    start: int
    stop: int
    crc32: int | None
    origin: int
    strides: Shape | None
    compressed: int | None = None


class Readable(Protocol):
    """As much of a source as is needed here."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`."""
        ...


class LocatedChunks:
    """Where chunks lie that were looked into lately; threads share it."""

    def __init__(self, limit: int = 16384) -> None:
        self._limit = limit
        self._found: dict[tuple[Key, int], Located] = {}
        self._lock = threading.Lock()

    def get(self, chunk: tuple[Key, int]) -> Located | None:
        """Returns the place of a chunk, by its tensor's key and its row; None if it is unknown."""
        return self._found.get(chunk)

    def put(self, chunk: tuple[Key, int], located: Located) -> None:
        """Keeps the place of a chunk, and forgets the one that was kept longest if need be."""
        with self._lock:
            if len(self._found) >= self._limit:
                del self._found[next(iter(self._found))]
            self._found[chunk] = located


class Locator:
    """Finds chunks of one source. Remembers nothing but a bounded cache: looking is cheap."""

    def __init__(self, source: Readable, index: TensorIndex) -> None:
        self._source = source
        self._index = index
        self._cache = TensorCache()

    def locate(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        """Finds the data of chunk `row` of a table of a tensor's chunks.

        Returns:
            Where its bytes are, and what is known of them; of a compressed record just that it
            is one.
        """
        chunk = chunks[row]
        record = self._index.records[chunk.record]
        path = self._index.files[record.file].path
        if record.container == "torch_zip":
            return self._in_torch_zip(entry, chunks, row)
        return Located(
            path=path,
            start=record.start,
            stop=record.stop,
            crc32=record.crc32,
            origin=record.start + (chunk.byte_offset or 0),
            strides=chunk.strides,
            compressed=chunk.record if record.container == "zstd_torch_zip" else None,
        )

    def _in_torch_zip(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        record = self._index.records[int(chunks.record[row])]
        path = self._index.files[record.file].path
        where = f"{posixpath.join(self._source.location, path)}, tensor {entry.key!r}"

        def read(start: int, stop: int) -> bytes:
            return self._source.read(path, record.start + start, record.start + stop)

        payload = locate_tensor(read, record.stop - record.start, where=where, cache=self._cache)
        sizes = tuple(chunks.sizes[row].tolist())
        if payload.dtype != entry.dtype or payload.shape != sizes:
            raise FormatError(
                f"holds {payload.dtype.name} {list(payload.shape)} against {entry.dtype.name}"
                f" {list(sizes)} in the index",
                where=where,
                hint="the file belongs to another save, or was damaged",
            )
        start = record.start + payload.start
        return Located(
            path=path,
            start=start,
            stop=record.start + payload.stop,
            crc32=payload.crc32,
            origin=start + payload.storage_offset * entry.dtype.itemsize,
            strides=None if payload.row_major else payload.strides,
        )


READ_BYTES = 1 << 20
ReadInto = Callable[[int, memoryview], None]  # absolute position in the file


@dataclass(slots=True)
class Account:
    """What is known of one record's data.

    Attributes:
        start: First byte of the data in its file.
        stop: First byte after it.
        expected: The stored CRC-32.
        where: File and tensor, for messages.
        read_into: Reads from the file, for pieces that nobody else reads.
        pieces: What was read so far.
        seen_bytes: The lengths of all pieces together.
        is_refused: Whether what is wrong with it was told already.
    """

    start: int
    stop: int
    expected: int
    where: str
    read_into: ReadInto
    pieces: list[Piece] = field(default_factory=list)
    seen_bytes: int = 0
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A record of which only a part was read, as a value that can be handed on.

    Attributes:
        start: First byte of its data in its file.
        stop: First byte after it.
        expected: The stored CRC-32.
        where: File and tensor, for messages.
        pieces: What was read, joined where pieces touch.
    """

    start: int
    stop: int
    expected: int
    where: str
    pieces: tuple[Piece, ...]

    def joined(self, other: OpenRecord) -> OpenRecord:
        """Returns the record with what two processes have read of it."""
        if (self.start, self.stop, self.expected) != (other.start, other.stop, other.expected):
            raise ChecksumError(
                f"one process found bytes [{self.start:,}, {self.stop:,}) with CRC-32"
                f" {self.expected:08x} stored, another bytes [{other.start:,}, {other.stop:,})"
                f" with {other.expected:08x}",
                where=self.where,
                hint="the file changed while it was read, or is another one on another machine",
            )
        return replace(self, pieces=tuple(joined_pieces((*self.pieces, *other.pieces))))

    def to_json(self) -> list[Any]:
        pieces = [list(piece) for piece in self.pieces]
        return [self.start, self.stop, self.expected, self.where, pieces]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> OpenRecord:
        start, stop, expected, where, pieces = values
        return cls(start, stop, expected, where, tuple((at, n, crc) for at, n, crc in pieces))


class ChecksumLedger:
    """Proves that the source bytes that went into an output have the stored checksums.

    Pieces may come in any order and from any thread. A record whose pieces cover it is settled
    at once and forgotten; the rest is settled by `finish`, which reads what is missing.
    """

    def __init__(self, records: int) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Account] = {}
        self._others: list[Callable[[], None]] = []
        self._settled = bytearray(records)

    def expect(self, record: int, account: Account) -> None:
        """Opens an account for a record of which something will be read."""
        with self._lock:
            if record not in self._open and not self._settled[record]:
                self._open[record] = account

    def add(self, record: int, piece: Piece) -> None:
        """Books a piece that was read."""
        with self._lock:
            account = self._open.get(record)
            if account is None:
                return
            account.pieces.append(piece)
            account.seen_bytes += piece[1]
            if account.seen_bytes < account.stop - account.start or self._settled[record]:
                return
            self._settled[record] = 1
        try:
            _settle(account)
        except CkptkitError:
            account.is_refused = True  # it stays open: it is not proven
            raise
        with self._lock:  # not before: whoever asks what is open must not take it for proven
            self._open.pop(record, None)

    def still_open(self) -> dict[int, OpenRecord]:
        """Returns the records that are not settled, for a ledger that knows the other parts.

        What is kept elsewhere is settled here: it cannot be handed on.
        """
        self._finish_others()
        return self.open_now()

    def open_now(self) -> dict[int, OpenRecord]:
        """Returns the records that are not settled yet, and settles nothing."""
        with self._lock:
            return {
                record: OpenRecord(
                    *(account.start, account.stop, account.expected, account.where),
                    tuple(joined_pieces(account.pieces)),
                )
                for record, account in self._open.items()
            }

    def adopt(self, record: int, found: OpenRecord, read_into: ReadInto) -> None:
        """Takes over a record that other ledgers have left open; `finish` settles it."""
        account = Account(found.start, found.stop, found.expected, found.where, read_into)
        with self._lock:
            known = self._open.setdefault(record, account)
            known.pieces.extend(found.pieces)

    def finish_with(self, finish: Callable[[], None]) -> None:
        self._others.append(finish)

    def _finish_others(self) -> None:
        for other in self._others:
            other()

    def finish(self) -> None:
        """Reads what is missing of every open record, and settles it."""
        self._finish_others()
        while self._open:
            _, account = self._open.popitem()
            if not account.is_refused:
                _settle(account)


def _settle(account: Account) -> None:
    crc = at = 0
    for start, length, piece in sorted(account.pieces):
        stop = start + length
        if stop <= at:
            continue  # read twice, and booked already
        if start > at:
            crc, at = _read_on(account, crc, at, start), start
        fits = start == at
        crc = crc32_combine(crc, piece, length) if fits else _read_on(account, crc, at, stop)
        at = stop
    crc = _read_on(account, crc, at, account.stop - account.start)
    if crc != account.expected:
        raise ChecksumError(
            f"bytes [{account.start:,}, {account.stop:,}) have CRC-32 {crc:08x} against"
            f" {account.expected:08x} stored",
            where=account.where,
            hint="the file was damaged after it was saved; copy it again, or take an earlier"
            " checkpoint",
        )


def _read_on(account: Account, crc: int, start: int, stop: int) -> int:
    if start < stop:
        buffer = memoryview(bytearray(min(READ_BYTES, stop - start)))
        while start < stop:
            view = buffer[: stop - start]
            account.read_into(account.start + start, view)
            crc = crc32(view, crc)
            start += len(view)
    return crc
