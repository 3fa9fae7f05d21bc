"""CRC-32, with the fast library and without."""

from __future__ import annotations

import subprocess
import sys
import zlib

import pytest

from ckptkit.core.crc import crc32

_WITHOUT = """
import sys
sys.modules["isal"] = sys.modules["isal.isal_zlib"] = None
from ckptkit.core.crc import crc32
print(crc32.__module__, crc32(b"123456789"))
"""


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 65, 4_097, (1 << 20) + 3])
def test_it_is_what_zip_archives_hold(size_bytes: int) -> None:
    data = bytes(i * i % 251 for i in range(size_bytes))
    assert crc32(data) == zlib.crc32(data)
    middle = size_bytes // 3
    view = memoryview(data)
    assert crc32(view[middle:], crc32(view[:middle])) == zlib.crc32(data)


def test_the_fast_library_is_used_where_it_is_installed() -> None:
    pytest.importorskip("isal")
    assert crc32 is not zlib.crc32


def test_without_the_fast_library_zlib_serves() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["zlib", str(0xCBF4_3926)]
