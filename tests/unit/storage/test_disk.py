"""The system calls, each also with its fallback forced."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptkit.core.arrays import HUGE_PAGE_BYTES, address_of, aligned_buffer
from ckptkit.storage.local.disk import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Disk,
    OpenFile,
    is_out_of_space,
    is_refused,
)
from tests.reflink import reflink_mount

NATIVE = Disk()
PORTABLE = Disk.portable()
BOTH = pytest.mark.parametrize("disk", [NATIVE, PORTABLE], ids=["native", "portable"])
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")


class Stuttering(OpenFile):
    """A file that moves three bytes a call at most, as the kernel may."""

    def _read_some(self, start: int, target: memoryview) -> int:
        return super()._read_some(start, target[:3])

    def _read_new(self, start: int, count: int) -> bytes:
        return super()._read_new(start, min(count, 3))

    def _write_some(self, start: int, data: memoryview) -> int:
        return super()._write_some(start, data[:3])


@BOTH
def test_partial_reads_and_writes_are_continued(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(20))
    file = Stuttering(path, os.O_WRONLY, disk)
    file.write_at(5, memoryview(b"0123456789"))
    file.close()
    assert path.read_bytes() == bytes(5) + b"0123456789" + bytes(5)
    file = Stuttering(path, os.O_RDONLY, disk)
    target = bytearray(100)
    assert file.read_at(5, memoryview(target)) == 15
    assert target[:15] == b"0123456789" + bytes(5)
    assert file.read_bytes(5, 10) == b"0123456789"
    assert file.read_bytes(12, 100) == b"789" + bytes(5)
    file.close()


@BOTH
def test_threads_that_share_a_file_do_not_disturb_each_other(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "x"
    disk.create_file(path, 80_000)
    file = disk.open_for_writing(path)

    def write(thread: int) -> None:
        for turn in range(100):
            file.write_at(thread * 10_000 + turn * 100, memoryview(bytes([thread]) * 100))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert path.read_bytes() == b"".join(bytes([i]) * 10_000 for i in range(8))


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_shared_blocks_are_those_that_two_files_have(kind: str, tmp_path: Path) -> None:
    with reflink_mount(kind, tmp_path) as place:
        sizes = [5 * BLOCK_BYTES + 7, 3000 * BLOCK_BYTES]
        for name, size in zip("xy", sizes, strict=True):
            (place / name).write_bytes(os.urandom(size))
        with ExitStack() as stack:
            x, y = (stack.enter_context(closing(NATIVE.open(place / n, os.O_RDWR))) for n in "xy")
            for file in (x, y):
                file.sync()
                assert list(file.shared_blocks()) == []
            # Two blocks of x; and, apart from each other, more than one request returns.
            y.share_blocks(x, BLOCK_BYTES, 2 * BLOCK_BYTES, 0)
            (mine,), (theirs,) = x.shared_blocks(), y.shared_blocks()
            assert theirs[1] - theirs[0] == 2 * BLOCK_BYTES
            if kind == "xfs":
                assert mine == theirs
            else:  # which keeps all of what was written at once as long as a part is used
                assert mine == (theirs[0] - BLOCK_BYTES, theirs[0] - BLOCK_BYTES + sizes[0])
            for at in range(10, 3000, 2):
                y.share_blocks(x, 3 * BLOCK_BYTES, BLOCK_BYTES, at * BLOCK_BYTES)
            assert len(list(y.shared_blocks())) == 1 + 1495
            # The end of a file is not a whole block.
            whole = stack.enter_context(closing(NATIVE.open(place / "z", os.O_RDWR | os.O_CREAT)))
            whole.truncate(sizes[0])
            whole.share_blocks(x, 0, 0, 0)
            assert sum(stop - start for start, stop in whole.shared_blocks()) == sizes[0]


@BOTH
@pytest.mark.parametrize("size_bytes", [0, 1, 12_345])
def test_a_new_file_has_its_size_and_is_never_an_old_one(
    tmp_path: Path, disk: Disk, size_bytes: int
) -> None:
    disk.create_file(tmp_path / "x", size_bytes)
    assert (tmp_path / "x").stat().st_size == size_bytes
    with pytest.raises(FileExistsError):
        disk.create_file(tmp_path / "x", size_bytes)


@ON_LINUX
def test_preallocation_reserves_the_blocks(tmp_path: Path) -> None:
    NATIVE.create_file(tmp_path / "x", 1 << 20)
    dataclasses.replace(NATIVE, preallocation=False).create_file(tmp_path / "y", 1 << 20)
    assert (tmp_path / "x").stat().st_blocks * 512 >= 1 << 20
    assert (tmp_path / "y").stat().st_blocks == 0


@BOTH
def test_more_than_is_free_is_refused_before_anything_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    # Told, not true: a real attempt would fill the disk.
    usage = SimpleNamespace(total=9000, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    disk.create_file(tmp_path / "fits", 1000)
    with pytest.raises(OSError, match="No space left") as caught:
        disk.create_file(tmp_path / "large", 1001)
    assert is_out_of_space(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


@ON_LINUX
def test_a_reservation_that_fails_half_way_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: OpenFile, _start: int, stop: int) -> None:
        file.truncate(stop // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(OpenFile, "preallocate", fail)
    with pytest.raises(OSError, match="No space left"):
        NATIVE.create_file(tmp_path / "x", 4096)
    assert list(tmp_path.iterdir()) == []


@ON_LINUX
def test_a_file_system_that_reserves_nothing_still_gets_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: OpenFile, start: int, stop: int) -> None:
        raise OSError(errno.EOPNOTSUPP, f"{file} does not reserve bytes {start} to {stop}")

    monkeypatch.setattr(OpenFile, "preallocate", refuse)
    NATIVE.create_file(tmp_path / "x", 4096)
    assert (tmp_path / "x").stat().st_size == 4096


@BOTH
def test_a_directory_is_not_opened_as_a_file(tmp_path: Path, disk: Disk) -> None:
    with pytest.raises(OSError, match="directory"):
        disk.open_for_reading(tmp_path)


@ON_LINUX
def test_a_link_is_not_followed_when_a_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"):
        NATIVE.open_for_reading(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        NATIVE.try_lock(tmp_path / "link")


def test_direct_io_is_off_where_it_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    assert PORTABLE.open_direct(tmp_path / "x") is None


@ON_LINUX
def test_direct_io_is_off_where_the_file_system_refuses_it() -> None:
    assert NATIVE.open_direct(Path("/proc/self/comm")) is None


@BOTH
def test_a_directory_is_synced_or_left_alone(tmp_path: Path, disk: Disk) -> None:
    disk.sync_directory(tmp_path)
    if disk.directory_sync:
        with pytest.raises(FileNotFoundError):
            disk.sync_directory(tmp_path / "none")


@ON_LINUX
def test_two_directories_change_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in_{name}").touch()
    assert NATIVE.exchange_folders(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "in_b").exists()
    assert (tmp_path / "b" / "in_a").exists()
    with pytest.raises(FileNotFoundError):
        NATIVE.exchange_folders(tmp_path / "a", tmp_path / "none")
    assert not PORTABLE.exchange_folders(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "in_b").exists()


@pytest.mark.skipif(not NATIVE.locks, reason="this platform has no such locks")
def test_a_lock_is_held_until_closed_or_until_the_process_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    is_alone, first = NATIVE.try_lock(path)
    assert is_alone
    assert first is not None
    assert NATIVE.try_lock(path) == (False, None)
    first.close()
    code = (
        "import os, sys; from pathlib import Path; from ckptkit.storage.local.disk import *\n"
        f"assert Disk().try_lock(Path({str(path)!r}))[0]\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=False, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    _, second = NATIVE.try_lock(path)
    assert second is not None
    second.close()


@pytest.mark.skipif(not NATIVE.locks, reason="this platform has no such locks")
def test_a_lock_on_a_removed_file_is_worth_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"

    class Unlucky(OpenFile):
        def lock(self, *, shared: bool = False) -> bool:
            path.unlink()
            return super().lock(shared=shared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.storage.local.disk.OpenFile", Unlucky)
        assert NATIVE.try_lock(path) == (False, None)


def test_without_locks_no_other_process_has_one(tmp_path: Path) -> None:
    class Refusing(OpenFile):
        def lock(self, *, shared: bool = False) -> bool:  # noqa: ARG002
            raise OSError(errno.ENOLCK, "no locks available")

    assert PORTABLE.try_lock(tmp_path / ".lock") == (True, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.storage.local.disk.OpenFile", Refusing)
        assert NATIVE.try_lock(tmp_path / ".lock") == (True, None)


def test_buffers_are_aligned_zeroed_and_writable() -> None:
    buffer = aligned_buffer(3 * BLOCK_BYTES)
    assert address_of(buffer) % PAGE_BYTES == 0
    assert bytes(buffer) == bytes(3 * BLOCK_BYTES)
    assert address_of(buffer[100:]) == address_of(buffer) + 100
    buffer[5] = 7
    assert address_of(buffer.toreadonly()) == address_of(buffer)


def test_refusals_and_full_disks_are_told_apart() -> None:
    assert is_refused(OSError(errno.EINVAL, ""))
    assert is_out_of_space(OSError(errno.EDQUOT, ""))
    assert not is_refused(OSError(errno.ENOSPC, ""))
    assert not is_out_of_space(OSError(errno.EIO, ""))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages here")
def test_large_buffers_begin_at_a_huge_page_and_have_the_size_asked_for() -> None:
    buffer = aligned_buffer(HUGE_PAGE_BYTES + 1)
    assert address_of(buffer) % HUGE_PAGE_BYTES == 0
    assert len(buffer) == HUGE_PAGE_BYTES + 1
