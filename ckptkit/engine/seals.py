"""Checksums that parts of an output wait for: a zip's directory names those of its records."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from ckptkit.core.checksums import ChecksumPiece, RangeChecksum, joined_pieces
from ckptkit.core.crc import crc32
from ckptkit.plan.plan import OutputFile, Part, Segment, ServerCopy, Trailer

Slot = tuple[int, int]  # the number of a file in its plan, and of a segment in the file
_CRC_BYTES = 4


class Seals:
    """Collects the CRC-32 of every segment that a trailer names, and fills trailers in.

    Also that of every segment of which a store copies a part, since nobody else sees all of it.

    Tasks are taken in order, and each adds its pieces before it asks for a checksum, which is
    always that of a segment before. So whoever waits here waits for a task that is being worked
    on, and never for one that nobody has taken.
    """

    def __init__(self, files: Sequence[OutputFile]) -> None:
        self._changed = threading.Condition()
        self._given_up = False
        self._sums = {
            (number, named): _Sum(file.segments[named].stop - file.segments[named].start)
            for number, file in enumerate(files)
            for segment in file.segments
            if isinstance(segment.body, Trailer)
            for _, named in segment.body.fields
        }
        for number, file in enumerate(files):
            for position, segment in enumerate(file.segments):
                if isinstance(segment.body, ServerCopy):
                    self._take_copies((number, position), segment, segment.body)

    def _take_copies(self, slot: Slot, segment: Segment, body: ServerCopy) -> None:
        one = self._sums.setdefault(slot, _Sum(segment.stop - segment.start))
        one.add((c.start - segment.start, c.size_bytes, c.crc32) for c in body.copied)

    def note(self, slot: Slot, start: int, data: memoryview) -> None:
        if slot in self._sums:
            self.add(slot, [(start, len(data), crc32(data))])

    def add(self, slot: Slot, pieces: Iterable[ChecksumPiece]) -> None:
        """Adds pieces whose checksums are known."""
        with self._changed:
            if self._sums[slot].add(pieces):
                self._changed.notify_all()

    def fill(self, file: int, part: Part, view: memoryview) -> bool:
        """Fills a part of a trailer, and waits for the checksums that belong there.

        Returns:
            Whether it could; not if another worker has given up meanwhile.
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
        """Wakes whoever waits for a piece that will not come any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def pieces(self) -> Mapping[Slot, Sequence[ChecksumPiece]]:
        with self._changed:
            return {slot: joined_pieces(s.pieces) for slot, s in self._sums.items() if s.pieces}

    def value(self, slot: Slot) -> int | None:
        """Returns the checksum of a segment once it is whole; None if somebody has given up."""
        one = self._sums[slot]
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or one.is_whole)
            return one.value() if one.is_whole else None


class _Sum:
    """The pieces of one segment."""

    __slots__ = ("_seen_bytes", "_size_bytes", "pieces")

    def __init__(self, size_bytes: int) -> None:
        self.pieces: list[ChecksumPiece] = []
        self._size_bytes = size_bytes
        self._seen_bytes = 0

    @property
    def is_whole(self) -> bool:
        return self._seen_bytes == self._size_bytes

    def add(self, pieces: Iterable[ChecksumPiece]) -> bool:
        for piece in pieces:
            if self.is_whole:
                break  # a part of it is run again
            self.pieces.append(piece)
            self._seen_bytes += piece[1]
        return self.is_whole

    def value(self) -> int:
        whole = RangeChecksum()
        for piece in self.pieces:
            whole.add(*piece)
        return whole.value(self._size_bytes)
