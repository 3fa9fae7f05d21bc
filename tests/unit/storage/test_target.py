"""Outputs on disk, of one process and of several: direct I/O, owners, mounts, full disks, notes."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.errors import (
    ChecksumError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
)
from ckptkit.storage.local import target as staged_files
from ckptkit.storage.local.disk import Disk, OpenFile
from ckptkit.storage.local.target import LocalTarget, SharedTarget, WorkNotes, why_no_ranges
from ckptkit.storage.place_identity import PlaceRelation, find_overlap
from tests.files import contents, mounted, open_below, remount, tmpfs

NATIVE = Disk()
PORTABLE = Disk.portable()
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a property of Linux")
AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away"
)
NOT_ROOT = pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere"
)


def fill(target: LocalTarget, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target.create(path, len(data))
        target.write(path, 0, memoryview(data))


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


TMPFS = tmpfs("1m")


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
            remount(parent, "-o", "remount,ro")
            target = LocalTarget(out)
            fill(target, {"x": b"x"})
            target.commit("x")
            assert contents(out) == {"x": b"x"}
            with pytest.raises(OutputError, match="read-only file system"):
                LocalTarget(parent / "other")


NONCE = "0123456789abcdef"
SIZE = 300_000
each_platform = pytest.mark.parametrize("disk", [NATIVE, Disk.portable()])


def written(out: Path, numbers: range, disk: Disk = NATIVE) -> list[SharedTarget]:
    """Enters an output that many times, each part with its own range of one file."""
    targets = [SharedTarget(out, NONCE, disk=disk) for _ in numbers]
    for number in reversed(numbers):
        target = targets[number]
        target.create("f", SIZE * len(numbers))
        target.write("f", SIZE * number, memoryview(bytes([number]) * SIZE))
        target.finish(f"part-{number}")
    return targets


@each_platform
def test_parts_of_several_processes_become_one_file(tmp_path: Path, disk: Disk) -> None:
    targets = written(tmp_path / "a/out", range(3), disk)
    assert targets[0].absent([f"part-{i}" for i in range(4)]) == ["part-3"]
    targets[1].commit("last", b"done")
    for target in targets:
        target.leave()
    out = tmp_path / "a/out"
    assert (out / "f").read_bytes() == b"".join(bytes([i]) * SIZE for i in range(3))
    assert (out / "last").read_bytes() == b"done"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_what_one_process_gave_up_no_other_one_commits(tmp_path: Path) -> None:
    first, second = written(tmp_path / "out", range(2))
    first.abandon()
    with pytest.raises(OutputError, match="cannot be written"):
        second.commit("last", b"")
    second.abandon()
    assert not list(tmp_path.iterdir())


def test_a_committed_output_cannot_be_given_up(tmp_path: Path) -> None:
    first, second = written(tmp_path / "out", range(2))
    first.commit("last", b"")
    second.abandon()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["f", "last"]


def test_nobody_sweeps_a_folder_that_one_process_still_uses(tmp_path: Path) -> None:
    first, second = written(tmp_path / "out", range(2))
    first.leave()
    other = LocalTarget(tmp_path / "out")
    other.abandon()
    second.commit("last", b"")
    assert (tmp_path / "out" / "f").stat().st_size == 2 * SIZE


def test_a_folder_that_all_have_left_is_swept_away_by_the_next(tmp_path: Path) -> None:
    for target in written(tmp_path / "out", range(2)):
        target.leave()
    third = SharedTarget(tmp_path / "out", NONCE[::-1])
    third.sweep()
    assert len(list(tmp_path.iterdir())) == 1
    third.abandon()


def test_what_is_there_already_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").touch()
    with pytest.raises(OutputExistsError):
        SharedTarget(out, NONCE)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "kept"]
    target = SharedTarget(out, NONCE, overwrite=True)
    target.finish("a")
    target.commit("last", b"")
    assert [path.name for path in out.iterdir()] == ["last"]


def test_several_processes_fill_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    first, second = written(out, range(2))
    second.leave()
    first.commit("last", b"")
    assert sorted(os.listdir()) == ["f", "last"]  # noqa: PTH208  of where the process is
    assert list(tmp_path.iterdir()) == [out]


def test_parts_that_one_process_puts_in_their_place_become_one_file(tmp_path: Path) -> None:
    first, second = written(tmp_path / "out", range(2))
    handed = second.part_file("part-1")
    handed.create("f", 6)
    handed.write_runs("f", [1, 5], memoryview(b"abcd"))
    handed.write_runs("g", [0], memoryview(b"xyz"))
    handed.finish()
    assert handed.free_bytes() > 0
    first.unite({"f": 2 * SIZE, "g": 3}, {"part-1": handed.rows})
    first.commit("last", b"")
    second.leave()
    assert (tmp_path / "out/f").read_bytes()[:8] == b"\0ab\0\0cd\0"
    assert (tmp_path / "out/g").read_bytes() == b"xyz"
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_parts_that_are_not_found_as_they_were_written_are_refused(tmp_path: Path) -> None:
    (target,) = written(tmp_path / "out", range(1))
    handed = target.part_file("part-1")
    handed.write_runs("f", [0], memoryview(b"abcd"))
    handed.close()
    name, starts, size, expected = handed.rows[0]
    for row in ((name, starts, size, expected ^ 1), (name, starts, size + 1, expected)):
        with pytest.raises(ChecksumError, match="from byte 0 on"):
            target.unite({"f": SIZE}, {"part-1": [row]})
    target.abandon()


def test_a_full_directory_that_cannot_be_renamed_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.local.target._is_fixed", lambda _: True)
    (tmp_path / "kept").touch()
    with pytest.raises(OutputError, match="cannot be renamed"):
        SharedTarget(tmp_path, NONCE, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_missing_parents_go_again_when_all_have_given_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for target in written(tmp_path / "a/b/c/out", range(2)):
        target.abandon()
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_an_output_that_was_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    (target,) = written(tmp_path / "out", range(1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").touch()
    with pytest.raises(OutputExistsError):
        target.commit("last", b"")
    target.abandon()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_two_processes_may_try_the_storage_at_the_same_time(tmp_path: Path) -> None:
    class Meeting(Disk):
        def open_for_writing(self, path: Path) -> OpenFile:
            assert why_no_ranges(tmp_path, tmp_path, NATIVE) == ""
            return NATIVE.open_for_writing(path)

    assert why_no_ranges(tmp_path, tmp_path, Meeting()) == ""


def test_storage_that_takes_no_ranges_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_no_ranges(tmp_path, tmp_path, NATIVE) == ""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    for refused in ("write_at", "truncate"):
        with monkeypatch.context() as patch:
            patch.setattr(f"ckptkit.storage.local.disk.OpenFile.{refused}", refuse)
            assert "operation not supported" in why_no_ranges(tmp_path, tmp_path, NATIVE)
    assert not list(tmp_path.iterdir())


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


def test_a_folder_that_is_mounted_twice_is_one_place(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    with mounted(tmp_path / "mounted here", "--bind", str(tmp_path / "runs")) as twice:
        assert find_overlap(twice, tmp_path / "runs") is PlaceRelation.SAME
        assert find_overlap(twice / "a" / "new", run) is PlaceRelation.INSIDE
        assert find_overlap(run, twice) is PlaceRelation.INSIDE
        assert find_overlap(twice, run) is PlaceRelation.AROUND
        assert find_overlap(twice, tmp_path / "other") is PlaceRelation.NONE
