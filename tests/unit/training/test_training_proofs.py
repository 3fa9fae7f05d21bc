"""Checksums of blobs of which every rank reads parts, joined on one rank."""

from __future__ import annotations

import random
import time
import zlib

import numpy as np
import pytest

from ckptkit.core.errors import ChecksumError
from ckptkit.engine.checksum_tracker import NumberedRecord, OpenRecord
from ckptkit.training.load import load_pieces as proofs
from ckptkit.training.load.load_pieces import cross_check, pack, table_of, unpack

DATA = bytes(range(256)) * 20


def blob(number: int, *cuts: tuple[int, int], data: bytes = DATA) -> NumberedRecord:
    parts = tuple((a, b - a, zlib.crc32(data[a:b])) for a, b in cuts)
    return number, OpenRecord(0, len(DATA), zlib.crc32(DATA), "where", parts)


def checked(*blobs: NumberedRecord) -> int:
    return cross_check([table_of([one]) for one in blobs], "blob {}".format)


def test_parts_that_follow_one_another_prove_a_blob_whoever_read_them() -> None:
    middle = random.Random(3)  # noqa: S311
    cuts = sorted(middle.sample(range(1, len(DATA)), 40))
    parts = list(zip([0, *cuts], [*cuts, len(DATA)], strict=True))
    middle.shuffle(parts)
    singles = [blob(at % 3, part) for at in range(3) for part in parts]
    assert checked(*singles, *singles[:50], blob(5), blob(7, (0, 9))) == 2


def test_overlapping_parts_prove_a_blob_and_gaps_do_not() -> None:
    assert checked(blob(1, (0, 4_000), (4_000, 5_120)), blob(1, (100, 4_000))) == 0
    assert checked(blob(1, (0, 5_120)), blob(1, (7, 90))) == 0
    assert checked(blob(1, (0, 4_000)), blob(1, (4_001, 5_120))) == 1


def test_another_byte_is_found_and_so_is_a_rank_that_reads_differently() -> None:
    other = bytearray(DATA)
    other[4_500] ^= 1
    with pytest.raises(ChecksumError, match="blob 1: CRC-32"):
        checked(blob(1, (0, 4_000)), blob(1, (4_000, 5_120), data=bytes(other)), blob(0))
    for cut in ((4_000, 5_120), (0, 5_120)):
        with pytest.raises(ChecksumError, match="blob 1: two ranks read different bytes"):
            checked(
                blob(1, (0, 4_000), (4_000, 5_120)),
                blob(1, cut, data=bytes(other)),
                blob(1, (3, 9)),
            )


def test_one_limit_holds_for_all_that_a_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(4)  # noqa: S311
    blobs = [
        (
            n,
            OpenRecord(
                *(0, 1 << 40, 1, ""), ((noise.randrange(1 << 40), 5, noise.randrange(1 << 32)),)
            ),
        )
        for n in range(4_000)
    ]
    monkeypatch.setattr(proofs, "_MOST_CHARACTERS", 100_000)
    monkeypatch.setattr(proofs, "_MOST_ROWS", 6_000)
    packed = pack({"a": blobs, "b": blobs, "c": blobs}, world_size=2)
    assert sum(map(len, packed["tables"].values())) <= 50_000
    rows = {name: unpack(text) for name, text in packed["tables"].items()}
    kept = sum(map(len, rows.values()))
    assert 0 < kept <= 3_000
    assert packed["left_out"] == 12_000 - kept
    assert np.array_equal(rows["a"], table_of(blobs)[: len(rows["a"])])


def test_what_512_ranks_read_of_a_model_is_joined_within_seconds() -> None:
    world, length = 512, 1_000
    rows = np.zeros((world, 1_000, 6), np.int64)  # 500,000 parts in 1,000 blobs
    zeros = zlib.crc32(bytes(length))
    rows[:, :, 0] = np.arange(1_000)
    rows[:, :, 1:3] = world * length, zlib.crc32(bytes(world * length))
    rows[:, :, 3] = length * np.arange(world)[:, None]
    rows[:, :, 4:] = length, zeros
    began = time.perf_counter()
    assert cross_check(list(rows), str) == 0
    assert time.perf_counter() - began < 10
    rows[300, 700, 5] ^= 8
    with pytest.raises(ChecksumError, match=r"^700: CRC-32"):
        cross_check(list(rows), str)


def test_more_than_can_be_joined_singly_stays_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_MOST_ROWS_JOINED_SINGLY", 3)
    whole, part = (0, 5_120), (7, 90)
    assert checked(blob(1, whole), blob(1, part), blob(2, whole), blob(2, part)) == 1
