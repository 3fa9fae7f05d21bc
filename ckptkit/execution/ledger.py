"""Checksums of source records, folded from the pieces in which they happen to be read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError
from ckptkit.kernels.checksums import crc32_combine

Piece = tuple[int, int, int]  # start within the record's data, length, CRC-32
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
    """

    start: int
    stop: int
    expected: int
    where: str
    read_into: ReadInto
    pieces: list[Piece] = field(default_factory=list)
    seen_bytes: int = 0


class ChecksumLedger:
    """Proves that the source bytes that went into an output have the stored checksums.

    Pieces may come in any order and from any thread. A record whose pieces cover it is settled
    at once and forgotten; the rest is settled by `finish`, which reads what is missing.
    """

    def __init__(self, records: int) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Account] = {}
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
        """
        with self._lock:
            account = self._open.get(record)
            if account is None:
                return
            account.pieces.append(piece)
            account.seen_bytes += piece[1]
            if account.seen_bytes < account.stop - account.start:
                return
            del self._open[record]
            self._settled[record] = 1
        _settle(account)

    def finish(self) -> None:
        """Reads what is missing of every open record, and settles it.

        Raises:
            ChecksumError: If a record has another checksum than the stored one.
        """
        while self._open:
            _, account = self._open.popitem()
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
