"""Shared memory for staging: where it comes from, and what happens when there is too little."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.core.errors import NoSpaceError
from ckptkit.training.save import shared_memory
from ckptkit.training.save.shared_memory import MemoryPlaces, SharedBuffer

MIB = 1 << 20


def only(memory_folder: Path | None = None, disk_folder: Path | None = None) -> MemoryPlaces:
    return MemoryPlaces(anonymous=False, memory_folder=memory_folder, disk_folder=disk_folder)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder in memory with room for 4 MiB, like Docker's /dev/shm has for 64."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],  # noqa: S607
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S607


def reads_the_same(buffer: SharedBuffer) -> bool:
    """Tells whether somebody who has only the descriptor sees what is written."""
    buffer.memory[-5:] = b"hello"
    with mmap.mmap(buffer.descriptor, buffer.size_bytes, prot=mmap.PROT_READ) as other:
        return other[-5:] == b"hello"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_without_a_name_is_taken_first_and_is_there_at_once() -> None:
    buffer = SharedBuffer()
    before = resident_bytes()
    assert buffer.reserve(16 * MIB)
    assert resident_bytes() - before >= 16 * MIB
    assert (buffer.kind, buffer.note, buffer.size_bytes) == ("memfd", "", 16 * MIB)
    assert not os.get_inheritable(buffer.descriptor)
    assert reads_the_same(buffer)
    buffer.close()
    assert resident_bytes() - before < 8 * MIB
    buffer.close()


def test_pages_are_touched_one_by_one_where_the_kernel_cannot_do_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_POPULATE_WRITE", 9999)
    buffer = SharedBuffer()
    before = resident_bytes()
    buffer.reserve(16 * MIB)
    assert resident_bytes() - before >= 16 * MIB
    buffer.close()


def test_a_folder_in_memory_is_taken_where_nameless_memory_is_refused(tmp_path: Path) -> None:
    buffer = SharedBuffer(only(memory_folder=tmp_path))
    buffer.reserve(1)
    assert (buffer.kind, buffer.note) == ("shm", "")
    assert buffer.size_bytes == mmap.PAGESIZE
    assert reads_the_same(buffer)
    assert list(tmp_path.iterdir()) == []
    buffer.close()


def test_a_file_on_disk_is_taken_where_memory_is_too_small_and_that_is_said(
    small_memory: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    buffer = SharedBuffer(only(memory_folder=small_memory, disk_folder=disk))
    buffer.reserve(8 * MIB)
    assert buffer.kind == "file"
    assert buffer.note == (
        f"'{small_memory}' has 4 MB free, where 8 MB are needed:"
        f" staging in a file under '{disk}', slower"
    )
    assert reads_the_same(buffer)
    assert list(disk.iterdir()) == []
    buffer.close()


def test_a_file_on_disk_needs_no_folder_in_memory(tmp_path: Path) -> None:
    buffer = SharedBuffer(only(memory_folder=tmp_path / "absent", disk_folder=tmp_path))
    buffer.reserve(MIB)
    assert buffer.kind == "file"
    assert buffer.note.startswith(f"'{tmp_path}/absent' cannot be used (no such file or directory)")
    buffer.close()


def test_too_little_room_everywhere_is_an_error_and_no_signal(small_memory: Path) -> None:
    buffer = SharedBuffer(only(disk_folder=small_memory))
    with pytest.raises(NoSpaceError, match=r"has 4 MB free, where 8 MB are needed") as caught:
        buffer.reserve(8 * MIB)
    assert "staging_limit" in caught.value.hint
    assert (buffer.descriptor, buffer.size_bytes) == (-1, 0)
    assert buffer.reserve(2 * MIB)
    buffer.close()


def test_more_than_the_machine_has_is_refused_before_anything_is_taken() -> None:
    buffer = SharedBuffer()
    with pytest.raises(NoSpaceError, match="MB of memory are needed for staging, and") as caught:
        buffer.reserve(1 << 50)
    assert "staging_limit" in caught.value.hint
    buffer.close()


def test_growing_replaces_the_memory_and_its_descriptor() -> None:
    buffer = SharedBuffer()
    buffer.reserve(MIB)
    first = buffer.descriptor
    assert not buffer.reserve(MIB // 2)
    assert buffer.descriptor == first
    assert buffer.reserve(2 * MIB)
    assert buffer.descriptor != first
    assert buffer.size_bytes == 2 * MIB
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    assert reads_the_same(buffer)
    buffer.close()


def test_a_descriptor_is_never_used_for_other_memory() -> None:
    buffer = SharedBuffer()
    seen = []
    for size in range(1, 6):
        buffer.reserve(size * MIB)
        seen.append(buffer.descriptor)
    assert len(set(seen)) == 5
    buffer.close()


def test_memory_that_somebody_still_holds_is_given_back_all_the_same() -> None:
    buffer = SharedBuffer()
    before = resident_bytes()
    buffer.reserve(64 * MIB)
    held = memoryview(buffer.memory)[:4]
    buffer.reserve(65 * MIB)
    assert resident_bytes() - before < 80 * MIB
    buffer.close()
    assert resident_bytes() - before < 16 * MIB
    del held


def test_a_forked_child_does_not_get_the_memory() -> None:
    buffer = SharedBuffer()
    buffer.reserve(MIB)
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (number,) = [n for n, text in enumerate(mappings) if "memfd:ckptkit" in text]
    assert "dc" in mappings[number + 1].splitlines()[0].split()  # "do not copy on fork"
    buffer.close()
