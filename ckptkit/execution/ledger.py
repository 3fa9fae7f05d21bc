"""Checksums of source records, folded from the pieces in which they happen to be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, CkptkitError
from ckptkit.kernels.checksums import ChecksumPiece as Piece
from ckptkit.kernels.checksums import crc32_combine, joined_pieces

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
        """Returns the record with what two processes have read of it.

        Raises:
            ChecksumError: If they found different data, or another checksum stored for it.
        """
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
        """Returns JSON values."""
        pieces = [list(piece) for piece in self.pieces]
        return [self.start, self.stop, self.expected, self.where, pieces]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> OpenRecord:
        """Reads what `to_json` gave."""
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
        """Books a piece that was read.

        Raises:
            ChecksumError: If it completes the record and the checksum is another one.
            CkptkitError: If it completes the record, and that cannot be read where it has to be.
        """
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

        Raises:
            ChecksumError: If something of that has another checksum than the stored one.
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
        """Has `finish` call that of records whose checksums are kept elsewhere."""
        self._others.append(finish)

    def _finish_others(self) -> None:
        for other in self._others:
            other()

    def finish(self) -> None:
        """Reads what is missing of every open record, and settles it.

        Raises:
            ChecksumError: If a record has another checksum than the stored one, and `add` has
                not said so.
        """
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
