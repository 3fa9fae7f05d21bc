"""CRC-32s folded from pieces that arrive in any order and from any thread.

`ChecksumTracker` compares the records of a source with their stored checksums.
`DeferredChecksums` computes those of output segments, which trailers contain: the directory of a
zip archive names the checksums of its records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.checksums import ChecksumPiece, crc32_of_pieces, join_pieces
from ckptkit.core.crc import crc32, crc32_combine
from ckptkit.core.errors import ChecksumError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.plan.plan import OutputFile, SegmentRange, Trailer, copied_ranges

READ_BYTES = 1 << 20
ReadInto = Callable[[int, memoryview], None]  # absolute position in the file
Slot = tuple[int, int]  # the number of a file in its plan, and of a segment in the file
_CRC_BYTES = 4


class TrackedRecord(Struct):
    """The data of a record, and the checksums of the parts that were read."""

    start: int  # first byte of the data in its file
    stop: int  # first byte after it
    expected: int  # the stored CRC-32
    where: str
    read_into: ReadInto  # reads from the file, for parts that nothing else reads
    pieces: list[ChecksumPiece] = field(default_factory=list)  # what was read so far
    seen_bytes: int = 0  # the lengths of all pieces together
    refusal: BaseException | None = None  # the error that was raised for it, or None
    is_given_up: bool = False  # whether it has more pieces than are kept


class OpenRecord(Struct, frozen=True):
    """A record that was read in part only, as a value that processes exchange."""

    start: int  # first byte of its data in its file
    stop: int  # first byte after it
    expected: int  # the stored CRC-32
    where: str
    pieces: tuple[ChecksumPiece, ...]  # what was read, joined where pieces touch

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
        return replace(self, pieces=tuple(join_pieces((*self.pieces, *other.pieces))))


NumberedRecord = tuple[int, OpenRecord]
"""An open record, and its number in the index, which is the same in every process."""


class ChecksumTracker:
    """Checks that source bytes which went into an output have the stored checksums.

    A record whose pieces cover it is compared at once and forgotten. The rest is compared by
    `finish`, which reads what is missing, or handed on as open records.
    """

    def __init__(
        self,
        records: int,
        *,
        most_pieces: int | None = None,
        finish_decoding: Callable[[], None] | None = None,
    ) -> None:
        """Starts without a record.

        `records`: how many the source has. `most_pieces`: of one record; beyond it the record stays
        open without any piece. None for no limit. `finish_decoding`: settles what is decoded from
        streams, which cannot be handed on.
        """
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[int, TrackedRecord] = {}
        self._finish_decoding = finish_decoding
        self._settled = bytearray(records)
        self._most_pieces = most_pieces

    def expect(self, number: int, record: TrackedRecord) -> None:
        """Starts tracking a record that will be read, as a whole or in part."""
        with self._lock:
            if number not in self._open and not self._settled[number]:
                self._open[number] = record

    def note(self, number: int, start: int, data: memoryview) -> None:
        """Adds bytes that were read, at their position in the record's data."""
        record = self._open.get(number)
        if record is not None and not record.is_given_up:
            self.add(number, (start, len(data), crc32(data)))

    def add(self, number: int, piece: ChecksumPiece) -> None:
        """Adds a piece whose checksum is known."""
        with self._lock:
            record = self._open.get(number)
            if record is None:
                return
            record.pieces.append(piece)
            record.seen_bytes += piece[1]
            if record.seen_bytes < record.stop - record.start or self._settled[number]:
                most = self._most_pieces
                if most is not None and len(record.pieces) > most:
                    record.pieces = join_pieces(record.pieces)
                    if len(record.pieces) > most // 2:
                        record.is_given_up, record.pieces = True, []
                return
            self._settled[number] = 1
        self._settle(number, record)

    def is_settled(self, number: int) -> bool:
        """Whether a record was read whole, and has the stored checksum."""
        return bool(self._settled[number]) and number not in self._open

    def settle(self, number: int, read_bytes: int = READ_BYTES) -> None:
        """Reads what is missing of a record, if it is still open, and compares it."""
        with self._lock:
            record = self._open.get(number)
            if record is None or self._settled[number]:
                return
            self._settled[number] = 1
        self._settle(number, record, read_bytes)

    def prove(self, read_bytes: int = READ_BYTES) -> None:
        """Settles all open records, and waits for those that other threads settle.

        A damaged record is an error in every call; one that could not be read is tried again.

        `read_bytes`: how much is read at a time of what is missing.
        """
        while True:
            with self._changed:
                number = self._next_open()
                if number is None:
                    if not self._open:
                        return
                    self._changed.wait()
                    continue
            self.settle(number, read_bytes)

    def _next_open(self) -> int | None:
        """Returns a record that no thread settles; None if there is none."""
        for number, record in self._open.items():
            if isinstance(record.refusal, ChecksumError):
                raise record.refusal
            if record.refusal is not None:
                record.refusal, self._settled[number] = None, 0
            if not self._settled[number]:
                return number
        return None

    def _settle(self, number: int, record: TrackedRecord, read_bytes: int = READ_BYTES) -> None:
        try:
            _compare(record, read_bytes)
        except BaseException as error:
            with self._changed:
                record.refusal = error  # it stays open: it is not proven
                self._changed.notify_all()
            raise
        with self._changed:  # not before: another thread must not take an open record for proven
            self._open.pop(number, None)
            self._changed.notify_all()

    def still_open(self) -> dict[int, OpenRecord]:
        """Returns the records that are not settled, for a tracker that has the other parts."""
        if self._finish_decoding is not None:
            self._finish_decoding()
        return self.open_now()

    def open_now(self) -> dict[int, OpenRecord]:
        """Returns the records that are not settled yet, and settles nothing."""
        with self._lock:
            return {
                number: OpenRecord(
                    *(record.start, record.stop, record.expected, record.where),
                    tuple(join_pieces(record.pieces)),
                )
                for number, record in self._open.items()
            }

    def adopt(self, number: int, record: OpenRecord, read_into: ReadInto) -> None:
        """Continues a record that other trackers have left open; `finish` settles it."""
        tracked = TrackedRecord(record.start, record.stop, record.expected, record.where, read_into)
        with self._lock:
            self._open.setdefault(number, tracked).pieces.extend(record.pieces)

    def finish(self) -> None:
        """Reads what is missing of every open record, and compares it."""
        if self._finish_decoding is not None:
            self._finish_decoding()
        while self._open:
            _, record = self._open.popitem()
            if record.refusal is None:
                _compare(record)


def _compare(record: TrackedRecord, read_bytes: int = READ_BYTES) -> None:
    crc = at = 0
    for start, length, piece in sorted(record.pieces):
        stop = start + length
        if stop <= at:
            continue  # read twice, and counted already
        if start > at:
            crc, at = _read_on(record, crc, at, start, read_bytes), start
        if start < at:
            crc = _read_on(record, crc, at, stop, read_bytes)
        else:
            crc = crc32_combine(crc, piece, length) if at else piece
        at = stop
    crc = _read_on(record, crc, at, record.stop - record.start, read_bytes)
    if crc != record.expected:
        raise ChecksumError(
            f"bytes [{record.start:,}, {record.stop:,}) have CRC-32 {crc:08x} against"
            f" {record.expected:08x} stored",
            where=record.where,
            hint="the file was damaged or changed after it was saved; copy it again, or take an"
            " earlier checkpoint. If an output of ckptkit was changed on purpose, remove its"
            f" {MANIFEST_NAME}",
        )


def _read_on(record: TrackedRecord, crc: int, start: int, stop: int, read_bytes: int) -> int:
    if start < stop:
        buffer = memoryview(bytearray(min(read_bytes, stop - start)))
        while start < stop:
            view = buffer[: stop - start]
            record.read_into(record.start + start, view)
            crc = crc32(view, crc)
            start += len(view)
    return crc


class DeferredChecksums:
    """Computes the CRC-32 of every segment that a trailer names, and fills trailers in.

    Also that of every segment that a store copies in part, since no task reads all of it.

    Tasks are taken in order, and each adds its pieces before it asks for a checksum, which is
    always that of a segment before. So a thread that waits here waits for a task that another
    thread is running, and never for one that has not started.
    """

    def __init__(self, files: Sequence[OutputFile]) -> None:
        self._changed = threading.Condition()
        self._given_up = False
        self._sizes: dict[Slot, int] = {}
        self._pieces: dict[Slot, list[ChecksumPiece]] = {}
        self._seen_bytes: dict[Slot, int] = {}
        for number, file in enumerate(files):
            bodies = [segment.body for segment in file.segments]
            named = {at for body in bodies if isinstance(body, Trailer) for _, at in body.fields}
            for position, segment in enumerate(file.segments):
                copied, slot = copied_ranges(segment), (number, position)
                if copied or position in named:
                    self._sizes[slot] = segment.stop - segment.start
                    self._pieces[slot], self._seen_bytes[slot] = [], 0
                    pieces = ((c.start - segment.start, c.size_bytes, c.crc32) for c in copied)
                    self.add(slot, pieces)

    def note(self, slot: Slot, start: int, data: memoryview) -> None:
        if slot in self._sizes:
            self.add(slot, [(start, len(data), crc32(data))])

    def add(self, slot: Slot, pieces: Iterable[ChecksumPiece]) -> None:
        """Adds pieces whose checksums are known."""
        with self._changed:
            for piece in pieces:
                if self._is_whole(slot):
                    break  # a part of it is run again
                self._pieces[slot].append(piece)
                self._seen_bytes[slot] += piece[1]
            if self._is_whole(slot):
                self._changed.notify_all()

    def fill(self, file: int, part: SegmentRange, view: memoryview) -> bool:
        """Fills a part of a trailer, and waits for the checksums that belong there.

        Returns False if another worker has failed meanwhile.
        """
        body = part.segment.body
        assert isinstance(body, Trailer)  # noqa: S101  narrows the type
        view[:] = body.template[part.start : part.stop]
        for position, named in body.fields:
            if part.start - _CRC_BYTES < position < part.stop:
                crc = self.value((file, named))
                if crc is None:
                    return False
                for at, byte in enumerate(crc.to_bytes(_CRC_BYTES, "little"), position):
                    if part.start <= at < part.stop:
                        view[at - part.start] = byte
        return True

    def give_up(self) -> None:
        """Wakes the threads that wait for pieces which will not come any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def pieces(self) -> list[tuple[Slot, list[ChecksumPiece]]]:
        with self._changed:
            return [(slot, join_pieces(some)) for slot, some in self._pieces.items() if some]

    def value(self, slot: Slot) -> int | None:
        """Returns the checksum of a segment once it is whole; None if another worker has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._is_whole(slot))
            if not self._is_whole(slot):
                return None
            return crc32_of_pieces(self._pieces[slot], self._sizes[slot])

    def _is_whole(self, slot: Slot) -> bool:
        return self._seen_bytes[slot] == self._sizes[slot]
