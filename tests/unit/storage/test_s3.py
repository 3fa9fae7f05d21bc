"""What is sent to S3 in parts, and by which checksums it is proven, whichever the store tells."""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest

from ckptkit.core import object_parts
from ckptkit.core.errors import ChecksumError
from ckptkit.core.object_parts import (
    MIN_PART_BYTES,
    CopiedRange,
    ObjectPart,
    cut_into_parts,
)
from ckptkit.storage.base import CopySource
from ckptkit.storage.remote.s3 import (
    OF_PARTS,
    WHOLE,
    ObjectHead,
    ObjectSums,
    PartBuffers,
    S3Object,
    S3Uploads,
    SentPart,
    StoreChecksum,
    encode_crc32,
)

MIB = 1 << 20


def test_parts_are_put_together_from_writes_of_many_threads() -> None:
    data = bytes(n * n % 251 for n in range(100_000))
    parts = tuple(
        ObjectPart(number + 1, start, min(start + 7_001, len(data)))
        for number, start in enumerate(range(0, len(data), 7_001))
    )
    buffers, done = PartBuffers(parts), {}
    edges = sorted({0, len(data), *(n * n * 331 % len(data) for n in range(60))})
    pieces = list(pairwise(edges))

    def write(mine: list[tuple[int, int]]) -> None:
        for start, stop in mine:
            for part, whole in buffers.add(start, memoryview(data)[start:stop]):
                done[part.number] = whole.getvalue()

    threads = [threading.Thread(target=write, args=(pieces[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(done[number] for number in sorted(done)) == data


def test_bytes_that_the_store_copies_are_not_taken() -> None:
    copied = CopiedRange(6 * MIB, 12 * MIB, "a", 0, 0)
    buffers = PartBuffers(cut_into_parts(12 * MIB, [copied]))
    with pytest.raises(ValueError, match="not to be sent"):
        list(buffers.add(6 * MIB - 1, memoryview(b"12")))


PARTS = (b"first part", b"second", b"")
SUMS = ObjectSums.of([(zlib.crc32(part), len(part)) for part in PARTS])
COPIED = bytes(range(256)) * (2 * MIN_PART_BYTES // 256)


def test_the_sums_are_those_of_the_bytes_and_of_the_checksums_of_the_parts() -> None:
    of_each = b"".join(zlib.crc32(part).to_bytes(4, "big") for part in PARTS)
    assert ObjectSums(zlib.crc32(b"".join(PARTS)), zlib.crc32(of_each), 3) == SUMS


@pytest.mark.parametrize(
    ("told", "agrees"),
    [
        (StoreChecksum(SUMS.whole, WHOLE), True),
        (StoreChecksum(SUMS.whole), True),
        (StoreChecksum(SUMS.of_parts or 0), True),
        (StoreChecksum(SUMS.of_parts or 0, OF_PARTS, 3), True),
        (StoreChecksum(SUMS.of_parts or 0, OF_PARTS, 2), False),
        (StoreChecksum(SUMS.of_parts or 0, WHOLE), False),
        (StoreChecksum(SUMS.whole, OF_PARTS, 3), False),
        (StoreChecksum(SUMS.whole ^ 1), False),
        (StoreChecksum(SUMS.whole ^ 1, WHOLE), False),
    ],
)
def test_a_sum_is_compared_with_the_one_of_its_kind(told: StoreChecksum, agrees: bool) -> None:
    assert SUMS.matches(told) is agrees


def test_what_a_store_answers_is_read_in_all_its_forms() -> None:
    text = encode_crc32(SUMS.whole)
    assert StoreChecksum.from_answer({}) is None
    assert StoreChecksum.from_answer({"ChecksumCRC32": text}) == StoreChecksum(SUMS.whole)
    assert StoreChecksum.from_answer({"ChecksumCRC32": f"{text}-7"}) == StoreChecksum(
        SUMS.whole, OF_PARTS, 7
    )
    whole = {"ChecksumCRC32": text, "ChecksumType": WHOLE}
    assert StoreChecksum.from_answer(whole) == StoreChecksum(SUMS.whole, WHOLE)


@dataclass
class FakeUploads:
    """A bucket that copies, with what it is told to say of a copied part."""

    tells: int | None
    has_checksums: bool = True
    begun: list[bool] = field(default_factory=list)
    completed: list[tuple[list[SentPart], int | None]] = field(default_factory=list)

    def url(self, key: str) -> str:
        return f"s3://bucket/{key}"

    def begin(self, _key: str, *, sums_parts: bool = True) -> str:
        self.begun.append(sums_parts)
        return "upload"

    def copy(self, _key: str, _upload: str, number: int, *_: Any) -> SentPart:
        return SentPart(number, f"etag-{number}", self.tells)

    def complete(
        self, _key: str, _upload: str, parts: list[SentPart], whole: int | None = None
    ) -> None:
        self.completed.append((parts, whole))

    def head(self, _key: str) -> ObjectHead:
        parts, whole = self.completed[-1]
        if whole is not None:
            return ObjectHead(len(COPIED), StoreChecksum(whole, WHOLE))
        sums = [(part.crc32 or 0, 1) for part in parts]
        return ObjectHead(
            len(COPIED), StoreChecksum(ObjectSums.of(sums).of_parts or 0, OF_PARTS, len(parts))
        )


def _copied(uploads: FakeUploads) -> S3Object:
    whole = CopiedRange(0, len(COPIED), "chunk", 0, zlib.crc32(COPIED))
    store = cast("S3Uploads", uploads)
    item = S3Object.of_size(
        store, "key", len(COPIED), lambda sums: store.begin("key", sums_parts=sums), [whole]
    )
    for part in item.copied_parts:
        item.copy(part, CopySource(cast("Any", None), "bucket/chunk", "etag"))
    item.publish()
    return item


@pytest.mark.parametrize("tells", [None, zlib.crc32(COPIED)])
def test_a_copied_part_goes_into_the_object_with_the_checksum_stored_beside_its_source(
    tells: int | None,
) -> None:
    uploads = FakeUploads(tells)
    _copied(uploads)
    assert uploads.begun == [True]
    assert uploads.completed == [([SentPart(1, "etag-1", zlib.crc32(COPIED))], None)]


def test_a_store_that_says_it_copied_other_bytes_is_believed_at_once() -> None:
    uploads = FakeUploads(zlib.crc32(COPIED) ^ 1)
    with pytest.raises(ChecksumError, match="copied bytes with CRC-32"):
        _copied(uploads)
    assert not uploads.completed


def test_of_a_range_in_two_parts_the_whole_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_parts, "MOST_COPIED_BYTES", MIN_PART_BYTES)
    uploads = FakeUploads(None)
    _copied(uploads)
    assert uploads.begun == [False]
    (parts, whole), *_ = uploads.completed
    assert [part.crc32 for part in parts] == [None, None]
    assert whole == zlib.crc32(COPIED)
