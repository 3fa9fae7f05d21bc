"""Several directories that are read as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptkit.core.errors import FormatError, MissingFileError
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.overlay import OverlaySource


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    files = {
        "a/unit/one": b"first",
        "a/both": b"same",
        "a/unequal": b"longer",
        "b/unit/two": b"second",
        "b/both": b"same",
        "b/unequal": b"short",
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
    assert list(overlay.walk(0)) == ["both", "unequal"]
    assert list(overlay.walk(1)) == ["both", "unequal", "unit/one", "unit/two"]


def test_a_file_of_two_sizes_is_refused_and_both_places_are_named(
    overlay: OverlaySource, places: tuple[Path, Path]
) -> None:
    with pytest.raises(FormatError, match="6 bytes were found against 5") as caught:
        overlay.stat("unequal")
    assert str(places[0]) in caught.value.where
    assert str(places[1]) in caught.value.message


@pytest.mark.parametrize(("name", "place"), [("b", 0), ("b", 3 << 20), ("compared", 17 << 20)])
def test_files_of_one_size_are_compared(
    overlay: OverlaySource, places: tuple[Path, Path], name: str, place: int
) -> None:
    size_bytes = max(4 << 20, place + 1)
    for folder in places:
        with (folder / name).open("wb") as file:
            file.truncate(size_bytes)
    assert overlay.stat(name).size_bytes == size_bytes
    with (places[1] / name).open("r+b") as file:
        file.seek(place)
        file.write(b"!")
    with ExitStack() as stack:
        folders = [stack.enter_context(LocalSource(folder)) for folder in places]
        with pytest.raises(FormatError, match="other bytes were found"):
            OverlaySource(folders, compared=["compared"]).stat(name)


def test_large_files_are_compared_from_their_first_to_their_last_byte(
    places: tuple[Path, Path],
) -> None:
    size_bytes = 1 << 30  # sparse ones
    for place in (0, size_bytes - 1):
        with ExitStack() as stack:
            for folder in places:
                with (folder / "large").open("wb") as file:
                    file.truncate(size_bytes)
            with (places[1] / "large").open("r+b") as file:
                file.seek(place)
                file.write(b"!")
            folders = [stack.enter_context(LocalSource(folder)) for folder in places]
            with pytest.raises(FormatError, match="other bytes were found"):
                OverlaySource(folders).stat("large")


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
    overlay.lay_over({}, without=["unit"])
    assert list(overlay.walk(1)) == ["both", "unequal"]


def test_a_change_in_any_directory_is_noticed(
    overlay: OverlaySource, places: tuple[Path, Path]
) -> None:
    refs = [overlay.stat("unit/one"), overlay.stat("unit/two")]
    assert overlay.changed(refs) is None
    (places[1] / "unit/two").write_bytes(b"another")
    found = overlay.changed(refs)
    assert found is not None
    assert found.path == "unit/two"
