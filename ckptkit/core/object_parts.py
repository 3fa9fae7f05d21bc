"""What of an output moves in parts: by upload, by copy at a store, by sharing blocks of a disk.

Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html (the limits)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:  # the process that uploads reads this without numpy
    from ckptkit.core.index import FileRange

MIN_PART_BYTES = 5 << 20
"""Of every part but an object's last."""
MOST_PARTS = 10_000
MOST_COPIED_BYTES = 4 << 30
"""By one request, which may take 5 GiB: what is too short for a part of its own comes on top."""
PART_BYTES = 6 << 20
"""What is sent at a time where the limits leave a choice: little, since it waits in memory."""
_MOST_COPIES = MOST_PARTS // 2  # the rest is for the bytes between them


class CopiedRange(Struct, frozen=True):
    """A range of an output that is a range of one source object, byte for byte."""

    start: int  # first byte in the output
    stop: int  # first byte after it
    path: str
    source_start: int  # first byte in it
    crc32: int  # the stored checksum of these bytes

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start


class SharedRange(Struct, frozen=True):
    """Whole blocks of a file to write that a file system can take from a file of a source."""

    origin: str  # the source
    stored: FileRange
    start: int  # the first byte in the file to write

    @property
    def stop(self) -> int:
        """The first byte after it."""
        return self.start + self.stored.size_bytes


class ObjectPart(Struct, frozen=True):
    """One part of a multipart upload: bytes `[start, stop)` of the object."""

    number: int  # from 1 on, in the order of the bytes
    start: int
    stop: int  # first byte after it
    # What the store copies it from, or None where the bytes are sent.
    copied: CopiedRange | None = None

    @property
    def source_start(self) -> int:
        """The first byte in the source, of a part that is copied."""
        assert self.copied is not None  # noqa: S101  only copied parts have it
        return self.copied.source_start + self.start - self.copied.start


def choose_copies(size_bytes: int, copyable: Sequence[CopiedRange]) -> tuple[CopiedRange, ...]:
    """Chooses what the store is to copy, so that all between can be sent as parts.

    The bytes before, between and behind must be none, or enough for a part, except at the end of
    the object: of two neighbours, the smaller one is dropped.

    `copyable`: what could be copied, by its start, without overlaps. Returns those that are to be
    copied, in order.
    """
    least = MIN_PART_BYTES
    while True:
        chosen = _drop_short_gaps([copied for copied in copyable if copied.size_bytes >= least])
        copies = sum(-(-copied.size_bytes // MOST_COPIED_BYTES) for copied in chosen)
        if len(chosen) <= _MOST_COPIES and copies + len(chosen) + 1 < MOST_PARTS and size_bytes:
            return tuple(chosen)
        least *= 2


def cut_into_parts(size_bytes: int, copies: Sequence[CopiedRange] = ()) -> tuple[ObjectPart, ...]:
    """Cuts an object, of one byte at least, into parts without holes around chosen copies."""
    runs: list[tuple[int, int, CopiedRange | None]] = []
    at = 0
    for copied in copies:
        if at < copied.start:
            runs.append((at, copied.start, None))
        runs.append((copied.start, copied.stop, copied))
        at = copied.stop
    if at < size_bytes:
        runs.append((at, size_bytes, None))
    sent = sum(stop - start for start, stop, source in runs if source is None)
    step = choose_part_bytes(sent, MOST_PARTS - 2 * len(runs))
    parts: list[ObjectPart] = []
    for start, stop, source in runs:
        largest, low = step if source is None else MOST_COPIED_BYTES, start
        while low < stop:
            high = min(low + largest, stop)
            if stop - high < MIN_PART_BYTES:  # too short for a part, so it is added to this one
                high = stop
            parts.append(ObjectPart(len(parts) + 1, low, high, source))
            low = high
    return tuple(parts)


def choose_part_bytes(size_bytes: int, most_parts: int = MOST_PARTS - 2) -> int:
    """Returns the size of the parts in which so many bytes are sent, but for the last of a run."""
    return max(PART_BYTES, -(-size_bytes // most_parts))


def _drop_short_gaps(copyable: Sequence[CopiedRange]) -> list[CopiedRange]:
    chosen: list[CopiedRange] = []
    for copied in copyable:
        while True:
            gap = copied.start - (chosen[-1].stop if chosen else 0)
            if gap == 0 or gap >= MIN_PART_BYTES:
                chosen.append(copied)
                break
            if not chosen or chosen[-1].size_bytes >= copied.size_bytes:
                break
            chosen.pop()
    return chosen
