"""Compressed streams that become more than they say, or need more memory than they have bytes."""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

import ckptkit
from ckptkit.core.errors import CkptkitError, FormatError, InputError, LimitError
from ckptkit.deltas.encoding import Change, open_decoder
from ckptkit.formats.dcp.compression import decompress
from ckptkit.hub.secrets import secrets_in
from tests.campaigns.fuzz.seeds import strict

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
GIBIBYTE = 1 << 30


def bomb(size_bytes: int, *, announced: bool) -> bytes:
    """A frame of zeros, which is 16,000 times smaller than its content."""
    size = size_bytes if announced else -1
    packed, block = zstandard.ZstdCompressor(level=19).compressobj(size=size), bytes(1 << 20)
    parts = [packed.compress(block) for _ in range(size_bytes >> 20)]
    return b"".join([*parts, packed.flush()])


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)])
def gibibyte(request: pytest.FixtureRequest) -> bytes:
    return bomb(GIBIBYTE // 4, announced=request.param)


def test_a_value_that_becomes_a_quarter_gibibyte_is_refused(
    gibibyte: bytes, bounded: Callable[..., Any]
) -> None:
    with bounded(seconds=20, most_bytes=32 << 20), pytest.raises(LimitError):
        decompress(strict(gibibyte), len(gibibyte), most_bytes=1 << 20, where="x")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_change_that_goes_on_after_the_tensor_is_refused(
    encoding: Any, gibibyte: bytes, bounded: Callable[..., Any]
) -> None:
    def read_all() -> None:
        decoder = open_decoder(encoding, strict(gibibyte), len(gibibyte), 64, where="x")
        decoder.fold(0, Change(64))
        decoder.finish()

    with bounded(seconds=20, most_bytes=32 << 20), pytest.raises(FormatError):
        read_all()


def test_an_overwrite_of_four_gibibytes_of_positions_is_refused(
    bounded: Callable[..., Any],
) -> None:
    frame = zstandard.ZstdCompressor().compress(struct.pack("<I", 2**32 - 1))
    with bounded(seconds=5, most_bytes=32 << 20), pytest.raises(InputError):
        open_decoder("overwrite", strict(frame), len(frame), 1 << 20, where="x")


def test_a_window_of_gibibytes_is_refused(bounded: Callable[..., Any]) -> None:
    head = b"\x28\xb5\x2f\xfd" + bytes([0x00, (31 - 10) << 3])  # a window of 2 GiB
    data = head + b"\x01\x00\x00"
    with bounded(seconds=5, most_bytes=32 << 20), pytest.raises(LimitError, match="window"):
        decompress(strict(data), len(data), most_bytes=1 << 20, where="x")


def test_a_chunk_of_a_checkpoint_that_is_a_bomb_is_refused(
    tmp_path: Path, out: Path, bounded: Callable[..., Any]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "dcp_zstd_grid" / "checkpoint", source)
    file = source / "__0_0.distcp"
    size = file.stat().st_size
    data = bomb(64 << 20, announced=False)
    file.write_bytes(data[:size].ljust(size, b"\0"))
    with bounded(seconds=20, most_bytes=64 << 20), pytest.raises(CkptkitError):
        ckptkit.consolidate(source, out)
    assert list(out.parent.iterdir()) == []


def test_a_search_for_secrets_ends_in_an_archive_without_end(bounded: Callable[..., Any]) -> None:
    import gzip

    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    with bounded(seconds=60, most_bytes=80 << 20):
        assert secrets_in([packed.getvalue()]) == []
