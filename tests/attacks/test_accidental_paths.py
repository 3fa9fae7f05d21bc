"""Paths that a shell can make by accident, and neighbours that have nothing to do with a model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, RefusedError, UsageError

SOURCE = (
    Path(__file__).resolve().parents[2] / "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE, tmp_path / "run" / "checkpoint-5")
    return tmp_path / "run" / "checkpoint-5"


@pytest.mark.parametrize("out", ["", "x" * 300, "a\0b"], ids=["empty", "long", "null"])
def test_an_impossible_output_is_refused_before_anything_is_touched(
    out: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = checkpoint.parent.parent / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work", encoding="utf-8")
    monkeypatch.chdir(home)
    with pytest.raises(UsageError):
        ckptkit.consolidate(checkpoint, out, overwrite=True)
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]


def test_the_current_directory_is_never_replaced(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = checkpoint.parent.parent / "home"
    (home / "below").mkdir(parents=True)
    monkeypatch.chdir(home / "below")
    for out in (".", ".."):
        (home / "below" / "thesis.txt").write_text("years of work", encoding="utf-8")
        with pytest.raises(RefusedError, match="directory that this command runs in"):
            ckptkit.consolidate(checkpoint, out, overwrite=True)
    assert (home / "below" / "thesis.txt").exists()


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="SRC"):
        ckptkit.consolidate(tmp_path / "a", tmp_path / "out")


def test_odd_neighbours_do_not_stop_a_consolidation(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "notes.txt").symlink_to("/etc/hostname")
    (checkpoint / "gone.json").symlink_to("nowhere")
    (checkpoint / "vocab.txt").symlink_to("/etc/hostname")
    os.mkfifo(checkpoint / "pipe")
    os.mkfifo(checkpoint.parent / "merges.txt")
    manifest = ckptkit.consolidate(checkpoint, tmp_path / "out")
    assert "config.json" in manifest.files
    assert "vocab.txt" not in manifest.files


def test_a_newer_step_behind_a_link_is_named(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "elsewhere")
    (checkpoint.parent / "checkpoint-9").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AmbiguousSourceError, match="checkpoint-9"):
        ckptkit.inspect(checkpoint.parent)
    assert ckptkit.inspect(checkpoint.parent / "checkpoint-9").step == 9


def test_an_output_inside_a_checkpoint_given_by_its_file_is_refused(checkpoint: Path) -> None:
    folder = checkpoint / "pytorch_model_fsdp_0"
    with pytest.raises(RefusedError, match="inside the source"):
        ckptkit.consolidate(folder / ".metadata", folder / "out")
