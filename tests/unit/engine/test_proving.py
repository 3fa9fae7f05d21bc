"""Records that are proven before their bytes are used, by several threads."""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.core.errors import ChecksumError, StorageError
from ckptkit.engine.checksum_tracker import ChecksumTracker, TrackedRecord

DATA = bytes(range(256)) * 64


class SlowFile:
    """Bytes whose reading waits until a test allows it."""

    def __init__(self) -> None:
        self.begun, self.allowed = threading.Event(), threading.Event()
        self.reads = 0
        self.failures: list[Exception] = []

    def read_into(self, start: int, target: memoryview) -> None:
        self.reads += 1
        self.begun.set()
        assert self.allowed.wait(30)
        if self.failures:
            raise self.failures.pop()
        target[:] = DATA[start : start + len(target)]


def tracker(file: SlowFile, *, expected: int) -> ChecksumTracker:
    made = ChecksumTracker(1)
    record = TrackedRecord(0, len(DATA), expected, "file, tensor 'w'", file.read_into)
    made.expect(0, record)
    made.note(0, 0, memoryview(DATA[:100]))
    return made


def test_a_second_thread_waits_until_a_record_is_proven() -> None:
    file = SlowFile()
    made = tracker(file, expected=zlib.crc32(DATA))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(made.prove)
        assert file.begun.wait(30)
        second = pool.submit(made.prove)
        assert not second.done()
        assert not made.is_settled(0)
        file.allowed.set()
        first.result(30)
        second.result(30)
    assert made.is_settled(0)
    assert file.reads == 1


def test_damage_is_an_error_in_each_thread_and_in_each_call() -> None:
    file = SlowFile()
    made = tracker(file, expected=zlib.crc32(DATA) ^ 1)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(made.prove) for _ in range(2)]
        file.allowed.set()
        for future in asked:
            with pytest.raises(ChecksumError, match="have CRC-32"):
                future.result(30)
    with pytest.raises(ChecksumError, match="have CRC-32"):
        made.prove()
    assert not made.is_settled(0)
    assert file.reads == 1


def test_a_record_that_could_not_be_read_is_read_again() -> None:
    file = SlowFile()
    file.allowed.set()
    file.failures.append(StorageError("no answer", where="s3://bucket"))
    made = tracker(file, expected=zlib.crc32(DATA))
    with pytest.raises(StorageError, match="no answer"):
        made.prove()
    made.prove()
    assert made.is_settled(0)
