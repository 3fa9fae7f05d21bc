"""Full disks and mount points, tried on small file systems that only root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.core.errors import NoSpaceError, OutputError, OutputExistsError
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.target import LocalTarget
from ckptkit.storage.place_identity import PlaceRelation, find_overlap

NATIVE = Disk()
PORTABLE = Disk.portable()


def fill(target: LocalTarget, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target.create(path, len(data))
        target.write(path, 0, memoryview(data))


def contents(out: Path) -> dict[str, bytes]:
    found = (path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in found}


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mounts something over a new folder, or skips the test."""
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    if mount is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    done = subprocess.run([mount, *options, str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mount was refused: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)  # noqa: S607 - found by mount's name


TMPFS = ("-t", "tmpfs", "-o", "size=1m", "tmpfs")


def test_a_full_disk_is_reported_when_the_file_is_created(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", *TMPFS) as small:
        target = LocalTarget(small / "out")
        with pytest.raises(NoSpaceError) as caught:
            target.create("x", 5_000_000)
        assert caught.value.message.startswith("needs 5,000,000 bytes more, but 1,0")
        assert caught.value.message.endswith(f"are free at '{small}'")
        assert caught.value.exit_status == 4
        target.abandon()
        assert list(small.iterdir()) == []


def test_a_full_disk_is_reported_when_it_fills_while_writing(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", *TMPFS) as small:
        target = LocalTarget(small / "out", disk=PORTABLE)
        for name in ("x", "y"):  # without reservation, both seem to fit
            target.create(name, 900_000)
        target.write("x", 0, memoryview(bytes(900_000)))
        with pytest.raises(NoSpaceError, match=r"needs 900,000 bytes more, but 0 are free"):
            target.write("y", 0, memoryview(bytes(900_000)))
        target.abandon()
        assert list(small.iterdir()) == []


@pytest.mark.parametrize("options", [TMPFS, ("--bind", "bound")], ids=["disk", "bind"])
@pytest.mark.parametrize("disk", [NATIVE, PORTABLE], ids=["native", "portable"])
def test_an_empty_mount_point_is_filled_file_by_file(
    tmp_path: Path, options: tuple[str, ...], disk: Disk
) -> None:
    (tmp_path / "bound").mkdir()
    options = tuple(str(tmp_path / "bound") if part == "bound" else part for part in options)
    with mounted(tmp_path / "out", *options) as out:
        (out / "lost+found").mkdir()
        first = LocalTarget(out, disk=disk)
        second = LocalTarget(out, disk=disk)
        third = LocalTarget(out, disk=disk)
        fill(first, {"x": b"x", "folder/y": b"y" * 1000, "last": b"last"})
        fill(second, {"x": b"other", "last": b"last"})
        first.commit("last")
        with pytest.raises(OutputExistsError):
            second.commit("last")
        second.abandon()
        third.abandon()
        assert contents(out) == {"x": b"x", "folder/y": b"y" * 1000, "last": b"last"}
        assert {path.name for path in out.iterdir()} == {"lost+found", "x", "folder", "last"}
        with pytest.raises(OutputExistsError):
            LocalTarget(out)
        with pytest.raises(OutputError, match="cannot be renamed"):
            LocalTarget(out, overwrite=True)


def test_a_mount_point_in_a_parent_that_is_read_only_is_filled(tmp_path: Path) -> None:
    with mounted(tmp_path / "parent", *TMPFS) as parent:
        (parent / "out").mkdir()
        with mounted(parent / "out", *TMPFS) as out:
            mount = shutil.which("mount") or "mount"
            subprocess.run([mount, "-o", "remount,ro", str(parent)], check=True)
            target = LocalTarget(out)
            fill(target, {"x": b"x"})
            target.commit("x")
            assert contents(out) == {"x": b"x"}
            with pytest.raises(OutputError, match="read-only file system"):
                LocalTarget(parent / "other")


def test_a_folder_that_is_mounted_twice_is_one_place(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    with mounted(tmp_path / "mounted here", "--bind", str(tmp_path / "runs")) as twice:
        assert find_overlap(twice, tmp_path / "runs") is PlaceRelation.SAME
        assert find_overlap(twice / "a" / "new", run) is PlaceRelation.INSIDE
        assert find_overlap(run, twice) is PlaceRelation.INSIDE
        assert find_overlap(twice, run) is PlaceRelation.AROUND
        assert find_overlap(twice, tmp_path / "other") is PlaceRelation.NONE
