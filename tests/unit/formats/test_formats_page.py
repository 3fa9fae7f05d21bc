"""The page about formats keeps up with the readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptkit.core.dtypes import BY_NAME
from ckptkit.formats.registry import READERS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "formats.md").read_text(
    encoding="utf-8"
)
BESIDE = {"foreign", "torch optimizer"}  # no formats of their own
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:]  # after what holds for all
TITLES = [section.split("\n", 1)[0] for section in SECTIONS]
BULLETS = (
    "Read",
    "Refused",
    "Cannot be seen",
    "Proven by",
    "Versions",
)  # others where the table does not say it


def anchor(title: str) -> str:
    """How GitHub names a heading in a link."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_reader_stands_in_the_table() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[1])}
    assert {reader.name for reader in READERS} - BESIDE <= named
    assert all(all(row.strip("| ").split(" | ")) for row in rows[:-1])  # written and recognised by


def test_every_section_is_linked_from_the_table_and_every_link_leads_somewhere() -> None:
    links = re.findall(r"^\| \[[^\]]+\]\(#([^)]+)\)", PAGE, flags=re.MULTILINE)
    assert links == [anchor(title) for title in TITLES]
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= {anchor(title) for title in TITLES}


@pytest.mark.parametrize("section", SECTIONS[:-1], ids=TITLES[:-1])
def test_a_section_says_what_is_read_refused_unseen_and_proven(section: str) -> None:
    for bullet in BULLETS:
        assert re.search(rf"^- \*\*{bullet}\*\*\S? \S", section, flags=re.MULTILINE), bullet


def test_dtypes_of_torch_that_are_refused_stand_on_the_page() -> None:
    torch = pytest.importorskip("torch")
    found = {str(one)[6:] for one in vars(torch).values() if isinstance(one, torch.dtype)}
    refused = found - BY_NAME.keys()
    ranges = re.compile(r"u?int[1-7]|bits\w+|qu?int\w+")
    assert {"complex32", "float4_e2m1fn_x2"} <= refused
    assert [
        name for name in refused if f"`{name}`" not in PAGE and not ranges.fullmatch(name)
    ] == []
