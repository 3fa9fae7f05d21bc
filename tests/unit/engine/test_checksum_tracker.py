"""Checksums of records, whatever the order and the pieces in which they are read."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.checksums import ChecksumPiece as Piece
from ckptkit.core.errors import ChecksumError
from ckptkit.engine.checksum_tracker import READ_BYTES, ChecksumTracker, TrackedRecord

DATA = random.Random(0).randbytes(5_000)  # noqa: S311
START = 1_000  # of the record in its file


class Reads:
    """A file whose reads are counted."""

    def __init__(self, record: bytes = DATA) -> None:
        self.file = bytes(START) + record
        self.size_bytes = 0

    def __call__(self, position: int, target: memoryview) -> None:
        target[:] = self.file[position : position + len(target)]
        self.size_bytes += len(target)


def tracked(reads: Reads, expected: int | None = None) -> TrackedRecord:
    crc = zlib.crc32(reads.file[START:]) if expected is None else expected
    return TrackedRecord(START, len(reads.file), crc, "a file, tensor 'w'", reads)


def piece(start: int, stop: int, data: bytes = DATA) -> Piece:
    return start, stop - start, zlib.crc32(data[start:stop])


def settled(pieces: list[Piece], reads: Reads, expected: int | None = None) -> None:
    tracker = ChecksumTracker(1)
    tracker.expect(0, tracked(reads, expected))
    for one in pieces:
        tracker.add(0, one)
    tracker.finish()


SPANS = st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(sorted)


@settings(max_examples=150)
@given(st.lists(SPANS, max_size=12), st.booleans())
def test_any_pieces_prove_a_record_that_is_whole_and_expose_one_that_is_not(
    spans: list[list[int]], damaged: bool
) -> None:
    pieces = [piece(start, stop) for start, stop in spans]
    if not damaged:
        settled(pieces, Reads())
        return
    with pytest.raises(ChecksumError, match="stored") as caught:
        settled(pieces, Reads(), expected=zlib.crc32(DATA) ^ 1)
    assert caught.value.where == "a file, tensor 'w'"


@settings(max_examples=80)
@given(st.lists(st.integers(1, len(DATA) - 1), max_size=10, unique=True), st.randoms())
def test_pieces_that_tile_a_record_need_no_reading_in_any_order(
    cuts: list[int], order: random.Random
) -> None:
    edges = [0, *sorted(cuts), len(DATA)]
    pieces = [piece(*pair) for pair in itertools.pairwise(edges)]
    order.shuffle(pieces)
    reads = Reads()
    settled(pieces, reads)
    assert reads.size_bytes == 0


def test_only_what_is_missing_is_read_at_the_end() -> None:
    reads = Reads()
    settled([piece(0, 1_000), piece(3_000, 5_000)], reads)
    assert reads.size_bytes == 2_000


def test_a_long_record_is_read_in_bounded_steps() -> None:
    record = bytes(2 * READ_BYTES + 5)
    largest = 0
    reads = Reads(record)

    def read(position: int, target: memoryview) -> None:
        nonlocal largest
        largest = max(largest, len(target))
        reads(position, target)

    tracker = ChecksumTracker(1)
    tracker.expect(0, TrackedRecord(START, START + len(record), zlib.crc32(record), "here", read))
    tracker.finish()
    assert (largest, reads.size_bytes) == (READ_BYTES, len(record))


def test_an_empty_record_is_settled_against_the_checksum_of_nothing() -> None:
    settled([], Reads(b""))
    with pytest.raises(ChecksumError):
        settled([], Reads(b""), expected=1)


def test_a_settled_record_is_not_opened_again() -> None:
    tracker, reads = ChecksumTracker(1), Reads()
    tracker.expect(0, tracked(reads))
    tracker.add(0, piece(0, len(DATA)))
    tracker.expect(0, tracked(reads, expected=7))
    tracker.add(0, piece(0, 10))
    tracker.finish()
    assert reads.size_bytes == 0


def test_a_piece_of_a_record_without_checksum_is_ignored() -> None:
    ChecksumTracker(2).add(1, piece(0, 10))


def test_a_failing_record_does_not_hide_the_others() -> None:
    tracker = ChecksumTracker(3)
    for record, expected in enumerate((None, 1, 2)):
        tracker.expect(record, tracked(Reads(), expected))
    for _ in range(2):
        with pytest.raises(ChecksumError):
            tracker.finish()
    tracker.finish()


def test_what_was_told_of_a_damaged_record_is_not_told_again_and_it_is_never_taken_for_proven() -> (
    None
):
    tracker = ChecksumTracker(1)
    tracker.expect(0, tracked(Reads(), expected=1))
    with pytest.raises(ChecksumError):
        tracker.add(0, piece(0, len(DATA)))
    assert set(tracker.open_now()) == {0}
    tracker.finish()
