"""Notes by which processes that fill one output tell of themselves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptkit.core.errors import OutputError
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.target import WorkNotes

NATIVE = Disk()
each_platform = pytest.mark.parametrize("disk", [NATIVE, Disk.portable()])


@each_platform
def test_the_first_note_of_a_name_stays(tmp_path: Path, disk: Disk) -> None:
    notes = WorkNotes(tmp_path, tmp_path / "out", disk)
    assert notes.get("plan") is None
    assert notes.put("plan", b"first") == b"first"
    assert notes.put("plan", b"second") == b"first"
    assert notes.get("plan") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_of_many_at_once_one_is_first_and_all_learn_of_it(tmp_path: Path) -> None:
    found: list[bytes] = []
    gate = threading.Barrier(8)

    def put(number: int) -> None:
        notes = WorkNotes(tmp_path, tmp_path / "out", NATIVE)
        gate.wait()
        found.append(notes.put("plan", f"{number}".encode() * 1_000))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found[0]) == 1_000


def test_a_note_cannot_be_left_where_the_folder_is_gone(tmp_path: Path) -> None:
    notes = WorkNotes(tmp_path / "gone", tmp_path / "out", NATIVE)
    assert notes.get("plan") is None
    with pytest.raises(OutputError):
        notes.put("plan", b"")
    with notes.alone("commit") as alone:
        assert not alone


def test_one_process_is_alone_at_a_time(tmp_path: Path) -> None:
    notes = WorkNotes(tmp_path, tmp_path / "out", NATIVE)
    with notes.alone("commit") as alone, notes.alone("commit") as second:
        assert (alone, second) == (True, False)
    with notes.alone("commit") as alone:
        assert alone
