"""What earlier jobs left in a run is put back or removed, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.core.errors import RefusedError
from ckptkit.writer.sweep import discard, leftovers, sweep


def put(path: Path, *, whole: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / ("ckptkit.json" if whole else "half")).write_text(path.name)
    return path


def test_an_interrupted_replacement_is_undone(tmp_path: Path) -> None:
    put(tmp_path / ".checkpoint-5.ckptkit-old-12ab")
    put(tmp_path / ".checkpoint-5.ckptkit-12ab-1")
    notes = sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert (tmp_path / "checkpoint-5/ckptkit.json").read_text().startswith(".checkpoint-5.ckptkit-")
    assert "was restored" in notes[0]
    assert "removed" in notes[1]


def test_a_finished_replacement_is_cleared_away(tmp_path: Path) -> None:
    put(tmp_path / "checkpoint-5")
    put(tmp_path / ".checkpoint-5.ckptkit-old-12ab")
    put(tmp_path / ".checkpoint-4.ckptkit-trash-12ab", whole=False)
    assert [item.kind for item in leftovers(tmp_path)] == ["trash", "old"]
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert (tmp_path / "checkpoint-5/ckptkit.json").read_text() == "checkpoint-5"


def test_of_other_steps_only_what_is_a_day_old_is_cleared_away(tmp_path: Path) -> None:
    put(tmp_path / ".step-5.ckptkit-12ab-1")
    put(tmp_path / ".step-6.ckptkit-12ab-2")
    old = put(tmp_path / ".step-7.ckptkit-12ab-3")
    put(tmp_path / ".step-8.ckptkit-12ab-4/model")
    for path in (old, *old.iterdir(), tmp_path / ".step-8.ckptkit-12ab-4"):
        os.utime(path, (0, 0))
    sweep(tmp_path, "step-5")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".step-6.ckptkit-12ab-2", ".step-8.ckptkit-12ab-4"]


def test_half_of_a_step_is_not_put_back(tmp_path: Path) -> None:
    put(tmp_path / ".checkpoint-5.ckptkit-old-12ab", whole=False)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_saves_did_not_make_stays(tmp_path: Path) -> None:
    others = [
        put(tmp_path / "checkpoint-5", whole=False),
        put(tmp_path / ".merged.ckptkit-0123456789abcdef"),
        put(tmp_path / ".checkpoint-x.ckptkit-1"),
        put(tmp_path / "checkpoint-6.ckptkit-1"),
        put(tmp_path / ".ckptkit"),
    ]
    locked = put(tmp_path / ".checkpoint-7.ckptkit-0123456789abcdef")
    (locked / ".lock").touch()
    (tmp_path / ".checkpoint-8.ckptkit-1").write_text("a file")
    (tmp_path / ".checkpoint-9.ckptkit-1").symlink_to(others[0])
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path) == ()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_not_there_is_told(tmp_path: Path) -> None:
    (note,) = sweep(tmp_path / "none")
    assert "could not be searched" in note


@pytest.mark.parametrize("name", ["checkpoint-5", ".checkpoint-5.ckptkit-old-1", ".ssh", "x"])
def test_only_working_folders_are_discarded(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    with pytest.raises(RefusedError):
        discard(str(path))
    assert path.is_dir()


def test_a_working_folder_is_discarded_once(tmp_path: Path) -> None:
    path = put(tmp_path / ".checkpoint-5.ckptkit-12ab-1")
    assert discard(str(path)) == ()
    assert discard(str(path)) == ()
    assert not path.exists()
