"""The directory of a zip archive: crafted ones, since `torch.save` never writes a broken one."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from ckptkit.core.errors import FormatError, LimitError
from ckptkit.formats.pickle.torch_zip import ZipEntry, data_start, read_directory


def reader(blob: bytes) -> Callable[[int, int], bytes]:
    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(blob)
        return blob[start:stop]

    return read


def archive_of(entries: list[bytes], count: int | None = None, padding: int = 0) -> bytes:
    """Makes an archive of the given directory entries, and no records at all."""
    directory = b"".join(entries)
    number = len(entries) if count is None else count
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, len(directory), padding, 0)
    return bytes(padding) + directory + end


def entry(
    name: bytes, start: int = 0, size: int = 0, *, extra: bytes = b"", flags: int = 0
) -> bytes:
    head = struct.pack(
        "<4sHHHHIIIIHHHHHII",
        b"PK\1\2",
        *(0, 0, flags, 0, 0),
        *(0, size, size),
        *(len(name), len(extra), 0, 0, 0, 0, start),
    )
    return head + name + extra


def directory(blob: bytes) -> Mapping[str, ZipEntry]:
    return read_directory(reader(blob), len(blob), where="x")


@pytest.mark.parametrize(
    "name",
    [b"", b"/a", b"../a", b"a/../b", b"a\\b", b"a\0b", b"\xff\xfe"],
)
def test_names_that_are_no_relative_paths_are_refused(name: bytes) -> None:
    with pytest.raises(FormatError):
        directory(archive_of([entry(name)], padding=100))


def test_equal_names_and_overlapping_records_are_refused() -> None:
    with pytest.raises(FormatError, match="two records are called 'a'"):
        directory(archive_of([entry(b"a"), entry(b"a", 31)], padding=100))
    with pytest.raises(FormatError, match="record 'b' starts at byte 40 but 41 is the first free"):
        directory(archive_of([entry(b"a", 0, 10), entry(b"b", 40)], padding=100))
    with pytest.raises(FormatError, match="records reach byte 131 but the directory starts at 100"):
        directory(archive_of([entry(b"a", 0, 100)], padding=100))
    with pytest.raises(FormatError, match="record 'a' starts at byte 3 but 0"):
        directory(archive_of([entry(b"a", 3)], padding=100))


def test_a_directory_too_large_for_its_records_is_refused_before_it_is_read() -> None:
    blob = archive_of([entry(b"a" * 60_000)], padding=100)

    def read(start: int, stop: int) -> bytes:
        assert stop - start < 1000
        return blob[start:stop]

    with pytest.raises(LimitError, match="directory of 1 records takes 60,046 bytes"):
        read_directory(read, len(blob), where="x")


@pytest.mark.parametrize("count", [0, 2, 1000, 65535])
def test_a_count_that_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(FormatError):
        directory(archive_of([entry(b"a")], count=count, padding=100))


def test_zip64_sizes_are_taken_from_the_extra_field() -> None:
    large = 5 * 2**30
    extra = struct.pack("<HHQQ", 1, 16, large, large)
    first = entry(b"a", 0, 0xFFFFFFFF, extra=extra, flags=0x808)
    far = large + 31 + 24
    second = entry(b"b", 0xFFFFFFFF, 5, extra=struct.pack("<HHQ", 1, 8, far))
    rows = first + second
    start = far + 31 + 5
    stop = start + len(rows)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(rows), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, stop, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2, 2, len(rows), 0xFFFFFFFF, 0)
    tail = rows + end64 + locator + end
    local = struct.pack("<4sHHHIIIIHH", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 1, 0) + b"a"

    def read(first: int, last: int) -> bytes:
        return (local if first == 0 else tail[first - start : last - start])[: last - first]

    found = read_directory(read, start + len(tail), where="x")
    assert [(e.header_start, e.size_bytes) for e in found.values()] == [
        (0, large),
        (far, 5),
    ]
    assert data_start(read, found["a"], where="x") == 31


@pytest.mark.parametrize("extra", [b"", b"\1\0", struct.pack("<HHQQ", 1, 16, 1, 1), b"\1\0\x08\0x"])
def test_a_damaged_zip64_extra_field_is_refused(extra: bytes) -> None:
    with pytest.raises(FormatError):
        directory(archive_of([entry(b"a", 0xFFFFFFFF, 5, extra=extra)], padding=100))


def test_positions_agree_with_numpy_for_a_checkpoint_of_many_storages() -> None:
    tensors = {str(n): torch.arange(n, n + 5) for n in range(20)}
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    blob = buffer.getvalue()
    entries = directory(blob)
    for number, tensor in enumerate(tensors.values()):
        one = entries[f"archive/data/{number}"]
        start = data_start(reader(blob), one, where="x")
        values = np.frombuffer(blob[start : start + one.size_bytes], np.int64)
        assert values.tolist() == tensor.tolist()
