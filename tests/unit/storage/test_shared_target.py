"""An output that several processes fill at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.core.errors import ChecksumError, OutputError, OutputExistsError
from ckptkit.storage.local.disk import Disk, OpenFile
from ckptkit.storage.local.target import LocalTarget, SharedTarget, why_no_ranges
from ckptkit.storage.place_identity import find_filesystem_type, why_not_shared

NONCE = "0123456789abcdef"
NATIVE = Disk()
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


def test_the_current_directory_is_filled_and_stays_the_same(
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


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(OutputError, match="a file was found"):
        SharedTarget(tmp_path / "out", NONCE)


def test_an_output_that_was_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    (target,) = written(tmp_path / "out", range(1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").touch()
    with pytest.raises(OutputExistsError):
        target.commit("last", b"")
    target.abandon()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("ext4", True),
        ("lustre", True),
        ("", True),
        ("fuse.fuse-overlayfs", True),
        ("nfs4", False),
        ("cifs", False),
        ("fuse.s3fs", False),
    ],
)
def test_network_file_systems_with_caches_of_their_own_are_not_shared(
    kind: str, *, is_shared: bool
) -> None:
    assert (why_not_shared(kind) == "") == is_shared
    assert is_shared or kind in why_not_shared(kind)


def test_the_ranks_of_one_machine_share_the_cache_of_a_network_file_system() -> None:
    assert why_not_shared("nfs4", is_one_machine=True) == ""
    assert "fuse.s3fs" in why_not_shared("fuse.s3fs", is_one_machine=True)


def test_the_innermost_mount_tells_the_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "21 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        f"22 21 0:9 / {tmp_path} rw - tmpfs tmpfs rw\n"
        f"23 22 0:7 / {tmp_path}/a\\040b rw,relatime - nfs4 host:/x rw\n"
        f"24 22 0:7 / {tmp_path}/over rw - nfs4 host:/x rw\n"
        f"25 22 0:8 / {tmp_path}/over rw - xfs /dev/sdb rw\n"
    )
    found = {
        place: find_filesystem_type(tmp_path / place, mounts=mounts)
        for place in ("a b/c/not/there", "a", "over/x", "..")
    }
    assert found == {"a b/c/not/there": "nfs4", "a": "tmpfs", "over/x": "xfs", "..": "ext4"}
    assert not find_filesystem_type(tmp_path, mounts=tmp_path / "absent")


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
