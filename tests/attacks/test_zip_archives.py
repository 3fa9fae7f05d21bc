"""Zip archives that unpack to more than they are, or describe themselves in two ways."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import CkptkitError, InputError, UnsupportedError
from ckptkit.formats.pickle.torch_zip import locate_tensor, open_archive, read_directory
from tests.campaigns.fuzz.archive_targets import TENSOR
from tests.campaigns.fuzz.mutation import pack_archive
from tests.campaigns.fuzz.seeds import strict

Refusal = Callable[..., CkptkitError]
LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


def test_a_zip_bomb_is_refused_before_it_is_unpacked(source: Path, refusal: Refusal) -> None:
    with zipfile.ZipFile(source / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))
    tracemalloc.start()
    started = time.monotonic()
    try:
        error = refusal(source, UnsupportedError)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5
    assert "compress" in str(error)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_any_compression_is_refused(method: int, source: Path, refusal: Refusal) -> None:
    with zipfile.ZipFile(source / "pytorch_model.bin", "w", method) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/data/0", bytes(1 << 20))
    refusal(source, UnsupportedError)


def positions(mark: bytes) -> list[int]:
    return [at for at in range(len(TENSOR)) if TENSOR.startswith(mark, at)]


def with_number(at: int, form: str, number: int) -> bytes:
    data = bytearray(TENSOR)
    struct.pack_into(form, data, at, number)
    return bytes(data)


def lies() -> dict[str, bytes]:
    """Archives of one tensor whose headers, directory or end say something else."""
    local, central, end = positions(LOCAL), positions(CENTRAL), positions(END)[0]
    storage = local[2]
    found = {
        "the size in the directory": with_number(central[2] + 24, "<I", 8),
        "a size in the local header": with_number(storage + 22, "<I", 8),
        "another checksum in the local header": with_number(storage + 14, "<I", 1),
        "a compressed local header": with_number(storage + 8, "<H", 8),
        "an encrypted entry": with_number(central[2] + 8, "<H", 1),
        "a record in another one": with_number(central[2] + 42, "<I", local[1]),
        "records before the first byte": with_number(central[0] + 42, "<I", 2**31),
        "two records at one place": with_number(central[1] + 42, "<I", local[0]),
        "a name of the local header": TENSOR.replace(b"archive/data/0", b"archive/data/1", 1),
        "a name that is a path": TENSOR.replace(b"archive/data/0", b"../../../xxxx/"),
        "an absolute name": TENSOR.replace(b"archive/data/0", b"/rchive/data/0"),
        "a name with a null": TENSOR.replace(b"archive/data/0", b"archive\0data/0"),
        "a name with a backslash": TENSOR.replace(b"archive/data/0", b"archive\\data/0"),
        "more entries than there are": with_number(end + 10, "<H", 9),
        "65,535 entries": with_number(end + 10, "<H", 0xFFFF),
        "a directory of 4 GiB": with_number(end + 12, "<I", 2**32 - 1),
        "a directory elsewhere": with_number(end + 16, "<I", 0),
        "a comment": with_number(end + 20, "<H", 3) + b"abc",
        "a second archive behind it": TENSOR + TENSOR,
        "bytes before it": b"MZ" + TENSOR,
        "an empty archive": END + bytes(18),
        "an end without a beginning": TENSOR[-22:],
        "a disk of several": with_number(end + 4, "<H", 1),
    }
    twice = [("archive/data.pkl", b"N."), ("archive/data.pkl", b"\x80\x02N.")]
    found["two entries of one name"] = pack_archive(twice)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, 10, 1)
    end64 = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 4, 4, 2**62, 2**62)
    body = TENSOR[:end]
    found["a zip64 record that says 2^62"] = body + end64 + locator + TENSOR[end:]
    right = b"PK\6\7" + struct.pack("<IQI", 0, len(body), 1)
    found["a zip64 record that disagrees"] = body + end64 + right + TENSOR[end:]
    return found


@pytest.mark.parametrize("kind", lies())
def test_an_archive_that_says_two_things_is_refused(
    kind: str, source: Path, out: Path, bounded: Callable[..., Any]
) -> None:
    data = lies()[kind]
    (source / "pytorch_model.bin").write_bytes(data)
    with bounded(seconds=5, most_bytes=32 << 20):
        with pytest.raises(InputError):
            locate_tensor(strict(data), len(data), where="x")
        with pytest.raises(CkptkitError):
            ckptkit.consolidate(source, out)
    assert list(out.parent.iterdir()) == []


def test_the_archive_without_lies_is_read() -> None:
    assert len(read_directory(strict(TENSOR), len(TENSOR), where="x")) == 4
    assert locate_tensor(strict(TENSOR), len(TENSOR), where="x").shape == (2, 3)


def test_records_that_share_their_bytes_are_refused() -> None:
    """As in a bomb of overlapping records: many entries of one large record."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        for number in range(50):
            archive.writestr(f"archive/data/{number}", bytes(64))
    data = bytearray(buffer.getvalue())
    entries = [at for at in range(len(data)) if data.startswith(CENTRAL, at)]
    first = data[entries[1] + 42 : entries[1] + 46]
    for at in entries[2:]:
        data[at + 42 : at + 46] = first
    with pytest.raises(InputError, match="first free one"):
        open_archive(strict(bytes(data)), len(data), where="x")
