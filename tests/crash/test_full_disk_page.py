"""A page on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import NoSpaceError
from tests.made_up_inspections import inspection_of


def test_a_full_disk_leaves_the_earlier_page_and_nothing_else(tiny_disk: Path) -> None:
    small = inspection_of([("w", "float32", (2,))], ranks=1)
    page = ckptkit.write_report(small, tiny_disk / "r.html")
    before = page.read_bytes()
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes((2 << 20) - len(before) - (64 << 10)))
    with pytest.raises(NoSpaceError, match="bytes more"):
        ckptkit.write_report(small, page, overwrite=True)
    assert page.read_bytes() == before
    assert sorted(tiny_disk.iterdir()) == [filler, page]
