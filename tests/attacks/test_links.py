"""Links in a checkpoint, swapped while it is read, and in the place of an output."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError, InputError, UnsafePathError
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import LocalTarget
from tests.made_up_runs import save_step

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SHARDED = "fsdp2_hsdp"
SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"


def data_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"__{rank}_0.distcp"


def test_a_link_out_of_the_checkpoint_is_refused(
    copied: Copied, refusal: Refusal, tmp_path: Path
) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, 2)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    error = refusal(checkpoint, UnsafePathError)
    assert error.where == str(file)
    assert "cp -rL" in error.hint


@pytest.mark.parametrize("depth", [0, 1])
def test_a_link_that_is_swapped_in_between_check_and_open_is_refused(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, or a folder above it, becomes a link right before it is opened."""
    inside, outside = tmp_path / "source", tmp_path / "outside"
    (inside / "a").mkdir(parents=True)
    outside.mkdir()
    (inside / "a" / "f").write_bytes(b"x" * len(SECRET))
    (outside / "f").write_bytes(SECRET)
    opens = Disk.open_for_reading

    def swap_first(disk: Disk, path: Path) -> object:
        if not (inside / "b").exists():
            (inside / "a").rename(inside / "b")
            if depth:
                (inside / "a").symlink_to(outside)
            else:
                (inside / "a").mkdir()
                (inside / "a" / "f").symlink_to(outside / "f")
        return opens(disk, path)

    monkeypatch.setattr(Disk, "open_for_reading", swap_first)
    with LocalSource(inside) as source, pytest.raises(InputError):
        source.read("a/f", 0, len(SECRET))


def test_links_that_are_swapped_all_the_time_never_show_what_is_outside(tmp_path: Path) -> None:
    inside, outside = tmp_path / "source", tmp_path / "outside"
    (inside / "real").mkdir(parents=True)
    outside.mkdir()
    (inside / "real" / "f").write_bytes(b"x" * len(SECRET))
    (outside / "f").write_bytes(SECRET)
    ends = threading.Event()

    def swap() -> None:
        while not ends.is_set():
            for target in ("real", str(outside)):
                (inside / "new").symlink_to(target)
                (inside / "new").rename(inside / "a")

    thread = threading.Thread(target=swap)
    thread.start()
    read = refused = 0
    try:
        stop = time.monotonic() + 2
        while time.monotonic() < stop and not (read > 500 and refused > 500):
            with LocalSource(inside) as source:
                try:
                    assert source.read("a/f", 0, len(SECRET)) == b"x" * len(SECRET)
                    read += 1
                except InputError:
                    refused += 1
    finally:
        ends.set()
        thread.join()
    assert read > 0
    assert refused > 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_becomes_a_link_is_not_followed(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the output is written, its place becomes a link to a folder with other things.

    `tests/crash/test_other_users.py` has links that another user has put there before.
    """
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    out = tmp_path / "box" / "out"
    commit = LocalTarget.commit

    def swap_first(target: LocalTarget, last: str) -> None:
        out.symlink_to(precious)
        commit(target, last)

    monkeypatch.setattr(LocalTarget, "commit", swap_first)
    with suppress(CkptkitError):
        ckptkit.consolidate(FIXTURES / "hf_tied" / "checkpoint", out, overwrite=overwrite)
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]


def test_a_hard_link_to_a_source_is_not_written_through(tmp_path: Path) -> None:
    """An earlier output whose files are links to something else is replaced, not overwritten."""
    source = FIXTURES / "hf_tied" / "checkpoint"
    out = tmp_path / "out"
    ckptkit.consolidate(source, out)
    weights = next(out.glob("*.safetensors"))
    kept = tmp_path / "kept.safetensors"
    shutil.copyfile(weights, kept)
    weights.unlink()
    os.link(kept, weights)
    before, inode = kept.read_bytes(), kept.stat().st_ino
    ckptkit.consolidate(source, out, overwrite=True, dtype="bfloat16")
    assert kept.read_bytes() == before
    assert next(out.glob("*.safetensors")).stat().st_ino != inode
    assert load_file(kept)


def test_a_step_that_is_a_link_is_not_pruned_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    save_step(elsewhere, 1)
    run = tmp_path / "run"
    save_step(run, 2)
    save_step(run, 3)
    (run / "checkpoint-1").symlink_to(elsewhere / "checkpoint-1")
    with suppress(CkptkitError):
        ckptkit.prune(run, keep_last=1)
    assert list((elsewhere / "checkpoint-1").rglob("*.distcp"))
