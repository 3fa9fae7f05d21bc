"""What only directories on disk have: links, devices, changes meanwhile, direct I/O."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.errors import (
    InputError,
    MissingFileError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    UnsafePathError,
)
from ckptkit.storage.local import target as staged_files
from ckptkit.storage.local.disk import Disk, OpenFile
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import LocalTarget

NATIVE = Disk()
PORTABLE = Disk.portable()
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a property of Linux")
AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away"
)
NOT_ROOT = pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere"
)


def open_below(folder: Path) -> int:
    """Counts the open files in a folder; all others may be closed at any time.

    Sockets of idle connections are closed by threads, those of gloo by the garbage collector.
    """
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that listed them
            count += entry.readlink().is_relative_to(folder)
    return count


def fill(target: LocalTarget, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target.create(path, len(data))
        target.write(path, 0, memoryview(data))


def contents(out: Path) -> dict[str, bytes]:
    found = (path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in found}


# Reading


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
    fill(target, {"y": b"y"})
    with LocalSource(tmp_path) as source:
        assert list(source.walk(5)) == ["x"]
        target.commit("y")
        assert list(source.walk(5)) == ["out/y", "x"]


# Writing


class Refusing(OpenFile):
    """A file whose direct writes are refused from the second on."""

    count = 0

    def write_at(self, start: int, data: memoryview) -> None:
        type(self).count += 1
        if self.count > 1:
            raise OSError(22, "Invalid argument")
        super().write_at(start, data)


def test_a_file_goes_on_through_the_page_cache_when_a_direct_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusing, "count", 0)

    class Directly(Disk):
        def open_direct(self, path: Path) -> OpenFile:
            return Refusing(path, os.O_WRONLY, self)

    target = LocalTarget(tmp_path / "out", disk=Directly())
    data = aligned_buffer(1 << 20)
    data[:] = bytes(range(256)) * 4096
    target.create("x", 3 << 20)
    for piece in range(3):
        target.write("x", piece << 20, data)
    target.commit("x")
    assert contents(tmp_path / "out") == {"x": bytes(data) * 3}
    assert Refusing.count == 2


@pytest.mark.parametrize(("shift", "direct"), [(0, 1), (4096, 1), (17, 1), (1, 0)])
def test_only_congruent_addresses_go_past_the_page_cache(
    tmp_path: Path, shift: int, direct: int
) -> None:
    pieces: list[tuple[int, int]] = []

    class Recording(OpenFile):
        def write_at(self, start: int, data: memoryview) -> None:
            pieces.append((start, len(data)))
            super().write_at(start, data)

    class Directly(Disk):
        def open_direct(self, path: Path) -> OpenFile:
            return Recording(path, os.O_WRONLY, self)

    start = shift if shift != 1 else 0
    buffer = aligned_buffer(1 << 20)
    buffer[:] = os.urandom(1 << 20)
    data = buffer[shift : shift + 900_001]
    target = LocalTarget(tmp_path / "out", disk=Directly())
    target.create("x", 1 << 20)
    target.write("x", start, data)
    target.commit("x")
    assert len(pieces) == direct
    assert all(at % 4096 == 0 and length % 4096 == 0 for at, length in pieces)
    assert contents(tmp_path / "out")["x"][start : start + 900_001] == bytes(data)


def test_more_files_than_descriptors_are_written_in_turn(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path / "out")
    count = staged_files.OPEN_FILES * 2
    for turn in range(2):
        for i in range(count):
            if not turn:
                target.create(f"{i}", 200_000)
            target.write(f"{i}", turn * 100_000, memoryview(bytes([i, turn]) * 50_000))
    if sys.platform == "linux":
        assert staged_files.OPEN_FILES <= open_below(tmp_path) <= 2 * staged_files.OPEN_FILES + 4
    target.commit("0")
    for i in range(count):
        expected = bytes([i, 0]) * 50_000 + bytes([i, 1]) * 50_000
        assert (tmp_path / "out" / f"{i}").read_bytes() == expected
    if sys.platform == "linux":
        assert not open_below(tmp_path)


def test_an_empty_directory_is_filled_and_keeps_its_mode(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o700)
    target = LocalTarget(out)
    fill(target, {"x": b"x"})
    target.commit("x")
    assert contents(out) == {"x": b"x"}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@AS_ROOT
@pytest.mark.parametrize("disk", [NATIVE, PORTABLE], ids=["native", "portable"])
def test_a_directory_keeps_its_owner_and_its_group_which_its_files_get(
    tmp_path: Path, disk: Disk
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.chown(out, 1234, 100)
    out.chmod(0o2770)
    for overwrite in (False, True):
        before = out.stat()  # disks give the number of a directory that is gone to another
        target = LocalTarget(out, overwrite=overwrite, disk=disk)
        fill(target, {"folder/x": b"x"})
        target.commit("folder/x")
        now = out.stat()
        assert (now.st_uid, now.st_gid, now.st_mode) == (1234, 100, before.st_mode)
        assert now.st_ino != before.st_ino
        assert {path.stat().st_gid for path in out.rglob("*")} == {100}


@AS_ROOT
def test_an_empty_directory_whose_owner_cannot_be_given_away_is_filled_and_a_full_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.chown(out, 1234, 100)
    before, change = out.stat(), os.chown

    def give_group(path: Path, user: int, group: int) -> None:
        if user != os.geteuid():
            raise PermissionError
        change(path, user, group)

    monkeypatch.setattr(os, "chown", give_group)
    for overwrite in (False, True):
        target = LocalTarget(out, overwrite=overwrite)
        fill(target, {"x": b"x", "y": b"y"})
        target.commit("x")
        assert contents(out) == {"x": b"x", "y": b"y"}
        assert (out.stat().st_ino == before.st_ino) is not overwrite
        assert (out.stat().st_uid, out.stat().st_gid) == (0 if overwrite else 1234, 100)


@pytest.mark.parametrize("disk", [NATIVE, PORTABLE], ids=["native", "portable"])
def test_the_current_directory_is_filled_and_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    first, second = LocalTarget(Path(), disk=disk), LocalTarget(Path(), disk=disk)
    fill(first, {"folder/x": b"x", "last": b"last"})
    fill(second, {"y": b"y", "last": b"other"})
    first.commit("last")
    with pytest.raises(OutputExistsError):
        second.commit("last")
    second.abandon()
    assert sorted(os.listdir()) == ["folder", "last"]  # noqa: PTH208  of where the process is
    assert contents(out) == {"folder/x": b"x", "last": b"last"}
    assert list(tmp_path.iterdir()) == [out]


def test_a_directory_with_something_hidden_counts_as_empty_and_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".out.ckptkit-publish").touch()  # as a kill leaves it
    target = LocalTarget(out)
    fill(target, {"x": b"x"})
    target.commit("x")
    assert contents(out) == {"x": b"x"}


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(OutputError, match="out: a file was found where an empty or absent") as e:
        LocalTarget(tmp_path / "out", overwrite=True)
    assert e.value.exit_status == 4
    with pytest.raises(OutputError, match="cannot be written: not a directory"):
        LocalTarget(tmp_path / "out" / "below")
    assert contents(tmp_path) == {"out": b"mine"}


@NOT_ROOT
def test_a_parent_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="cannot be written: permission denied"):
            LocalTarget(tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


@ON_LINUX
def test_a_place_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(OutputError, match="/proc/none/out: cannot be written"):
        LocalTarget(Path("/proc/none/out"))


def test_a_filled_output_is_refused_with_exit_5_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"mine")
    with pytest.raises(OutputExistsError, match="out: the directory holds files") as caught:
        LocalTarget(tmp_path / "out")
    assert caught.value.exit_status == 5
    assert contents(tmp_path) == {"out/mine": b"mine"}


@pytest.mark.parametrize("disk", [NATIVE, PORTABLE, dataclasses.replace(NATIVE, exchange=False)])
def test_an_output_filled_meanwhile_is_left_alone(tmp_path: Path, disk: Disk) -> None:
    target = LocalTarget(tmp_path / "out", disk=disk)
    fill(target, {"x": b"x"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        target.commit("x")
    target.abandon()
    assert contents(tmp_path) == {"out/mine": b"mine"}


def test_a_linked_output_is_made_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/out")
    target = LocalTarget(tmp_path / "link")
    fill(target, {"x": b"x"})
    target.commit("x")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "disk") == {"out/x": b"x"}


def test_free_bytes_is_that_of_the_destination(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path / "out")
    assert target.free_bytes() == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    target.abandon()


def test_a_work_folder_in_which_nothing_can_be_made_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == "files":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(NoSpaceError):
        LocalTarget(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
