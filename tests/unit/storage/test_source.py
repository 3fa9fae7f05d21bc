"""Directories on disk that are read: links, devices, changes meanwhile."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from ckptkit.core.errors import (
    InputError,
    MissingFileError,
    UnsafePathError,
)
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import LocalTarget
from tests.files import open_below

NATIVE = Disk()
PORTABLE = Disk.portable()
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a property of Linux")


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_bytes(b"data")
    (tmp_path / "link").symlink_to("real/x")
    with LocalSource(tmp_path) as source:
        assert source.read("link", 0, 4) == b"data"
        assert source.stat("link").size_bytes == 4


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "../root2/x"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "x").write_bytes(b"a name that begins alike")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "link").symlink_to(target)
    with LocalSource(tmp_path / "root") as source:
        with pytest.raises(UnsafePathError, match="root/link: a link that leads out"):
            source.stat("link")
        with pytest.raises(UnsafePathError):
            source.read("link", 0, 1)


def test_a_linked_folder_that_leads_out_is_refused_and_not_walked(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_bytes(b"x")
    (tmp_path / "root" / "folder").symlink_to("../other")
    with LocalSource(tmp_path / "root") as source:
        assert list(source.walk(3)) == []
        with pytest.raises(UnsafePathError):
            source.stat("folder/x")


def test_links_in_a_circle_end_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "here").symlink_to(".")
    with LocalSource(tmp_path) as source:
        assert list(source.walk(5)) == ["a", "b"]
        with pytest.raises(InputError, match="a: cannot be read"):
            source.stat("a")


def test_a_folder_that_is_removed_while_files_are_listed_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "x").touch()
    access = os.access

    def remove_at_last(path: Path, mode: int) -> bool:
        found = access(path, mode)
        if path == tmp_path / "b/part/":  # after the last look at it
            shutil.rmtree(tmp_path / "b")
        return found

    monkeypatch.setattr(os, "access", remove_at_last)
    with LocalSource(tmp_path) as source:
        assert list(source.walk(5)) == ["a/part/x", "c/part/x"]
    with pytest.raises(MissingFileError), LocalSource(tmp_path / "absent") as source:
        list(source.walk(5))


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_snapshot_in_the_hub_cache_may_link_to_its_blobs(tmp_path: Path, below: str) -> None:
    repository = tmp_path / "models--acme--tiny"
    root = repository / "snapshots" / "0a1b" / below
    root.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "d1").write_bytes(b"weights")
    (repository / "refs").write_bytes(b"not a blob")
    (root / "model.safetensors").symlink_to(os.path.relpath(repository / "blobs" / "d1", root))
    (root / "bad").symlink_to(repository / "refs")
    with LocalSource(root) as source:
        assert source.read("model.safetensors", 0, 7) == b"weights"
        with pytest.raises(UnsafePathError):
            source.stat("bad")


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_bytes(b"x")
    (tmp_path / "root").symlink_to("real")
    with LocalSource(tmp_path / "root") as source:
        assert source.read("x", 0, 1) == b"x"
        assert source.location == str(tmp_path / "root")


@ON_LINUX
def test_pipes_devices_and_folders_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with LocalSource(tmp_path) as source:
        for name, found in (("pipe", "a named pipe"), ("folder", "a directory")):
            expected = f"{name}: {found} was found where a regular file was expected"
            with pytest.raises(InputError, match=expected):
                source.stat(name)
            with pytest.raises(InputError, match=expected):
                source.read(name, 0, 1)
    with LocalSource(Path("/dev")) as source, pytest.raises(InputError, match="a device"):
        source.read("zero", 0, 1)


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="none: nothing was found there"):
        LocalSource(tmp_path / "none")
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(MissingFileError, match="a file was found where a directory was"):
        LocalSource(tmp_path / "x")


def test_a_name_longer_than_the_file_system_takes_is_an_error(tmp_path: Path) -> None:
    with LocalSource(tmp_path) as source, pytest.raises(InputError, match="too long"):
        source.stat("x" * 5000)


@pytest.mark.parametrize("disk", [NATIVE, PORTABLE])
def test_descriptors_are_bounded_and_given_back(tmp_path: Path, disk: Disk) -> None:
    for rank in range(1024):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(rank.to_bytes(4, "little"))
    source = LocalSource(tmp_path, disk=disk, open_files=16)
    for rank in (*range(1024), 5, 1023, 5):
        assert source.read(f"__{rank}_0.distcp", 0, 4) == rank.to_bytes(4, "little")
    if sys.platform == "linux":
        assert open_below(tmp_path) == 16
    source.close()
    if sys.platform == "linux":
        assert not open_below(tmp_path)
    with pytest.raises(ValueError, match="closed"):
        source.read("__0_0.distcp", 0, 4)


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"1234")
    with LocalSource(tmp_path) as source:
        refs = [source.stat(name) for name in ("a", "b", "c")]
        assert source.changed(refs) is None
        (tmp_path / "new").write_bytes(b"5678")
        (tmp_path / "new").replace(tmp_path / "c")
        assert source.changed(refs) == refs[2]
        status = (tmp_path / "b").stat()
        os.utime(tmp_path / "b", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert source.changed(refs) == refs[1]
        (tmp_path / "a").unlink()
        assert source.changed(refs) == refs[0]


def test_folders_in_which_an_output_is_staged_are_not_walked(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    target = LocalTarget(tmp_path / "out")
    target.create("y", 1)
    target.write("y", 0, memoryview(b"y"))
    with LocalSource(tmp_path) as source:
        assert list(source.walk(5)) == ["x"]
        target.commit("y")
        assert list(source.walk(5)) == ["out/y", "x"]
