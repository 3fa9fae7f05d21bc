"""Several directories that are read as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptkit.core.errors import FormatError, MissingFileError
from ckptkit.storage.local import LocalSource
from ckptkit.storage.overlay import OverlaySource


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    files = {
        "a/unit/one": b"first",
        "a/both": b"same",
        "a/unequal": b"longer",
        "a/compared": b"x1",
        "b/unit/two": b"second",
        "b/both": b"same",
        "b/unequal": b"short",
        "b/compared": b"x2",
    }
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def overlay(places: tuple[Path, Path]) -> Iterator[OverlaySource]:
    with ExitStack() as stack:
        folders = [stack.enter_context(LocalSource(place)) for place in places]
        yield OverlaySource(folders, compared=["compared"])


def test_a_file_is_found_in_whichever_directory_has_it(overlay: OverlaySource) -> None:
    assert overlay.read("unit/one", 0, 5) == b"first"
    assert overlay.read("unit/two", 1, 4) == b"eco"
    target = bytearray(4)
    overlay.read_into("both", 0, memoryview(target))
    assert target == b"same"


def test_each_path_is_listed_once_and_in_order(overlay: OverlaySource) -> None:
    assert list(overlay.walk(0)) == ["both", "compared", "unequal"]
    assert list(overlay.walk(1)) == ["both", "compared", "unequal", "unit/one", "unit/two"]


def test_a_file_of_two_sizes_is_refused_and_both_places_are_named(
    overlay: OverlaySource, places: tuple[Path, Path]
) -> None:
    with pytest.raises(FormatError, match="6 bytes were found against 5") as caught:
        overlay.stat("unequal")
    assert str(places[0]) in caught.value.where
    assert str(places[1]) in caught.value.message


def test_of_chosen_files_every_byte_is_compared(overlay: OverlaySource) -> None:
    with pytest.raises(FormatError, match="other bytes were found"):
        overlay.stat("compared")


def test_what_is_nowhere_is_said_to_be_in_none_of_them(
    overlay: OverlaySource, places: tuple[Path, Path]
) -> None:
    with pytest.raises(MissingFileError, match="nor in") as caught:
        overlay.stat("gone")
    assert str(places[1]) in caught.value.message


def test_what_is_laid_over_stands_for_the_files_below(overlay: OverlaySource) -> None:
    overlay.lay_over({"unequal": b"made", "unit/new": b"up"})
    assert overlay.read("unequal", 0, 4) == b"made"
    assert list(overlay.walk(1))[-3:] == ["unit/new", "unit/one", "unit/two"]


def test_a_change_in_any_directory_is_noticed(
    overlay: OverlaySource, places: tuple[Path, Path]
) -> None:
    refs = [overlay.stat("unit/one"), overlay.stat("unit/two")]
    assert overlay.changed(refs) is None
    (places[1] / "unit/two").write_bytes(b"another")
    found = overlay.changed(refs)
    assert found is not None
    assert found.path == "unit/two"
