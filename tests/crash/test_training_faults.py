"""What can go wrong under a Checkpointer: one clear error, and the next save works."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    NoSpaceError,
    OutputError,
    RefusedError,
    SaveError,
    UsageError,
    WriterError,
)
from ckptkit.storage.local.disk import Disk, OpenFile
from ckptkit.training import Checkpointer, checkpointer
from ckptkit.training.resume import resume as resuming
from ckptkit.training.save import saver as saves
from ckptkit.training.save.staging import MemoryPlaces, SharedBuffer
from ckptkit.writer import persist as images
from ckptkit.writer.messages import ByteCounter, Image
from tests.crash import troubles
from tests.files import mounted, remount, wait_until
from tests.ranks import RunRanks


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    with ExitStack() as stack:
        yield lambda name, *arguments: stack.enter_context(
            mounted(tmp_path / name, *arguments, name)
        )


@pytest.fixture
def log() -> Iterator[Any]:
    with troubles.listening() as heard:
        yield heard


@pytest.fixture
def trouble(tmp_path: Path) -> Iterator[Any]:
    found = troubles.Trouble(tmp_path / "trouble")
    with found.writers():
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def fresh(seed: int = 1, width: int = 500) -> dict[str, Any]:
    state: dict[str, Any] = troubles.state_of(troubles.network(seed, width), seed)
    return state


class Drill:
    """Saves step 1, has step 2 fail, resumes from step 1, saves step 3, and resumes from that."""

    def __init__(self, checkpointer: Checkpointer, run: Path) -> None:
        self.checkpointer = checkpointer
        self.run = run
        self.state = fresh()
        self.truth = troubles.saved(checkpointer, 1, self.state)

    def fails(self, kind: type[CkptkitError], text: str) -> CkptkitError:
        troubles.train(self.state)
        began = time.monotonic()
        handle = self.checkpointer.save(2, self.state)
        assert time.monotonic() - began < 2
        troubles.train(self.state)
        error: CkptkitError = troubles.fails(handle, kind, text)
        return error

    def recovers(self, *, resumes: bool = True) -> None:
        if resumes:
            troubles.resumes(self.checkpointer, 1, self.truth, fresh(2))
        truth = troubles.saved(self.checkpointer, 3, self.state)
        troubles.resumes(self.checkpointer, 3, truth, fresh(3))
        assert ckptkit.verify(self.run / "checkpoint-3").ok
        assert troubles.working_folders(self.run) == []
        assert not (self.run / "checkpoint-2").exists()


def test_a_disk_that_fills_up_in_the_middle(run: Path, trouble: Any, log: Any) -> None:
    with Checkpointer(run) as saver:
        drill = Drill(saver, run)
        with trouble.of("full"):
            error = drill.fails(NoSpaceError, r"rank 0: .*__0_0\.distcp: the disk .* is full")
            assert "keep_last" in error.hint
        assert troubles.working_folders(run) == []
        drill.recovers()
    (line,) = log.lines(logging.ERROR)
    assert line.startswith("step 2 was not saved: rank 0: ")
    assert error.hint in line


@pytest.mark.slow
def test_a_disk_that_is_full(mount: Callable[..., Path], log: Any) -> None:
    run = mount("small", "-t", "tmpfs", "-o", "size=3m")
    with Checkpointer(run) as saver:
        drill = Drill(saver, run)
        filler = run / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(run).free))
        drill.fails(NoSpaceError, "is full")
        troubles.resumes(saver, 1, drill.truth, fresh(2))  # after which all is looked at anew
        drill.fails(NoSpaceError, "is full")
        filler.unlink()
        drill.recovers()
    assert len(log.lines(logging.ERROR)) == 2


@pytest.mark.parametrize("tiers", [1, 2])
def test_a_writer_that_dies_between_two_waves_of_a_save(
    run: Path, log: Any, monkeypatch: pytest.MonkeyPatch, tiers: int
) -> None:
    node = run.parent / "node" if tiers == 2 else None
    with Checkpointer(run, staging_limit="1MiB", local=node) as saver:
        state = fresh(width=4_000)
        truth = troubles.saved(saver, 1, state)
        writer, persist, dead = saver._slots[0]._writer, saves.SaveSlot._persist, list[int]()

        def persist_and_die(*arguments: Any) -> None:
            persist(*arguments)
            if not dead:
                assert writer._process is not None
                dead.append(writer._process.pid)
                writer._process.kill()
                writer._process.wait()

        with monkeypatch.context() as patch:
            patch.setattr(saves.SaveSlot, "_persist", persist_and_die)
            handle = saver.save(2, state)
            troubles.fails(handle, WriterError, "ended in the middle of the save")
        with pytest.raises(WriterError):
            handle.local_result()
        troubles.resumes(saver, 1, truth, fresh(2, width=4_000))
        truth = troubles.saved(saver, 3, state)
        troubles.resumes(saver, 3, truth, fresh(3, width=4_000))
    assert len(log.lines(logging.ERROR)) == 1


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Puts a read-only view of a folder in its place; files that are open stay as they are."""
    with mounted(folder, "--bind", str(folder)):
        remount(folder, "-o", "remount,ro,bind")
        yield


def test_a_directory_that_turns_read_only(run: Path, log: Any) -> None:
    with Checkpointer(run) as saver:
        drill = Drill(saver, run)
        with read_only(run):
            drill.fails(OutputError, "Read-only")
            troubles.resumes(saver, 1, drill.truth, fresh(2))
            drill.fails(OutputError, "Read-only")
        drill.recovers()
        with read_only(run):
            saver.close()
            with pytest.raises(OutputError, match="Read-only") as caught:
                Checkpointer(run)
            assert caught.value.hint
    assert len(log.lines(logging.ERROR)) == 2


@pytest.mark.slow
def test_a_writer_that_hangs(run: Path, log: Any) -> None:
    with Checkpointer(run, stall_seconds=2.0) as saver:
        drill = Drill(saver, run)
        processes = [saver._slots[0]._writer, saver._process]
        for process, name in zip(processes, ("rank 0: writer", "committer of rank 0"), strict=True):
            pid = process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            error = drill.fails(WriterError, f"{name}: gave no sign of life for 2 s")
            assert "next save" in error.hint
            assert process.pid != pid
        drill.recovers()
    assert len(log.lines(logging.ERROR)) == 2


@pytest.mark.slow
def test_storage_that_hangs_under_a_writer_that_lives(run: Path, trouble: Any) -> None:
    with Checkpointer(run, timeout_seconds=3.0) as saver:
        drill = Drill(saver, run)
        with trouble.of("stuck"):
            drill.fails(WriterError, "rank 0: writer: gave no further byte in 3 s")
        drill.recovers()


@pytest.mark.slow
def test_a_slow_disk_is_waited_for_while_steps_go_on(run: Path, trouble: Any, log: Any) -> None:
    with Checkpointer(run, stall_seconds=2.0, timeout_seconds=3.0) as saver:
        state = fresh()
        troubles.train(state)
        truth = troubles.facts(state)
        with trouble.of("slow"):
            began = time.monotonic()
            handle = saver.save(1, state)
            blocked = time.monotonic() - began
            for _ in range(20):
                troubles.train(state)
            assert not handle.done()
            handle.result(troubles.LIMIT_SECONDS)
            assert time.monotonic() - began > 3.0 > blocked
        troubles.resumes(saver, 1, truth, fresh(2))
    assert log.lines(logging.WARNING) == log.lines(logging.ERROR) == []


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.quick("True")
def test_a_folder_in_memory_that_is_too_small(
    mount: Callable[..., Path],
    run: Path,
    log: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    prepared: bool,
) -> None:
    small = mount("shm", "-t", "tmpfs", "-o", "size=64k")
    places = MemoryPlaces(anonymous=False, memory_folder=small)
    monkeypatch.setattr(saves, "SharedBuffer", partial(SharedBuffer, places))
    with Checkpointer(run) as saver:
        state = fresh()
        if prepared:
            saver.prepare(state)
        truth = troubles.saved(saver, 1, state)
        troubles.saved(saver, 1, state)
        truth = troubles.saved(saver, 1, state)
        troubles.resumes(saver, 1, truth, fresh(2))
    (line,) = log.lines(logging.WARNING)
    assert f"'{small}' has 0 MB free" in line
    assert "staging in a file" in line


def test_memory_that_is_not_there(
    mount: Callable[..., Path], run: Path, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = mount("shm", "-t", "tmpfs", "-o", "size=2m")
    places = MemoryPlaces(anonymous=False, memory_folder=small, disk_folder=small)
    monkeypatch.setattr(saves, "SharedBuffer", partial(SharedBuffer, places))
    state = fresh(1, 10_000)
    troubles.train(state)
    with Checkpointer(run) as saver:
        with pytest.raises(NoSpaceError, match="has 2 MB free, where 6 MB are needed") as caught:
            saver.prepare(state)
        assert "staging_limit" in caught.value.hint
        for _ in range(2):
            error = troubles.fails(saver.save(1, state), NoSpaceError, "MB are needed")
            assert "staging_limit" in error.hint
        troubles.train(state)
    with Checkpointer(run, staging_limit="1MiB") as saver:
        saver.prepare(state)
        truth = troubles.saved(saver, 2, state)
        troubles.resumes(saver, 2, truth, fresh(2, 10_000))
    assert len(log.lines(logging.ERROR)) == 2


@pytest.mark.parametrize("kind", ["bare", "buffered", "ramfs"])
@pytest.mark.quick("ramfs")
def test_direct_io_and_whatever_else_is_refused(
    kind: str, mount: Callable[..., Path], tmp_path: Path, log: Any
) -> None:
    run = mount("ram", "-t", "ramfs") if kind == "ramfs" else tmp_path / "run"
    trouble = troubles.Trouble(tmp_path / "trouble")
    with trouble.writers(bare=kind == "bare"), Checkpointer(run) as saver:
        state = fresh()
        with trouble.of(kind if kind == "buffered" else ""):
            troubles.saved(saver, 1, state)
            truth = troubles.saved(saver, 1, state)  # replaces the other one
        troubles.resumes(saver, 1, truth, fresh(2))
    assert all("direct I/O was refused" in line for line in log.lines(logging.WARNING))
    assert log.lines(logging.WARNING)
    assert ckptkit.verify(run / "checkpoint-1").ok


def test_large_files_in_the_page_cache_are_made_durable_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "STRIDE_BYTES", 4096)
    monkeypatch.setattr(images, "_SYNC_BYTES", 8192)
    tally, seen = ByteCounter(), []
    monkeypatch.setattr(OpenFile, "sync", lambda _: seen.append(tally.done_bytes))
    image = Image("x", 0, 20_480, ())
    with images.ImageWriter(dataclasses.replace(Disk(), direct_io=False), tally) as writer:
        writer.write(tmp_path / "x", image, memoryview(bytearray(image.size_bytes)))
    assert seen == [4096, 12_288, 20_480]  # before the last write is counted, and at the end


def test_locks_that_are_refused(run: Path, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Checkpointer(run) as saver:
        troubles.resumes(saver, 1, troubles.saved(saver, 1, fresh()), fresh(2))
    (line,) = log.lines(logging.WARNING)
    assert "has no locks" in line


def test_what_could_not_be_opened_can_be_opened_again(run: Path) -> None:
    with pytest.raises(UsageError, match="SIGNONE"):
        Checkpointer(run, signals=("SIGNONE",))
    Checkpointer(run).close()


@pytest.mark.slow
def test_the_same_step_saved_again_while_somebody_reads_the_old_one(run: Path) -> None:
    with Checkpointer(run, max_in_flight=2) as saver:
        state = fresh()
        troubles.saved(saver, 1, state)
        shard = run / "checkpoint-1/pytorch_model_fsdp_0/__0_0.distcp"
        before = shard.read_bytes()
        with shard.open("rb") as reader:
            for _ in range(3):
                saver.save(1, state)
                troubles.train(state)
            truth = troubles.facts(state)
            saver.save(1, state)
            troubles.resumes(saver, 1, truth, fresh(2))
            assert reader.read() == before
        assert shard.read_bytes() != before
        assert troubles.working_folders(run) == []


def test_a_save_while_another_thread_resumes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    real = resuming.resume

    def slowly(*arguments: Any, **options: Any) -> int | None:
        inside.set()
        assert leave.wait(troubles.LIMIT_SECONDS)
        return real(*arguments, **options)

    monkeypatch.setattr(checkpointer, "resume", slowly)
    with Checkpointer(run) as saver:
        state, other = fresh(), fresh(2)
        troubles.train(state)
        truth = troubles.facts(state)
        handle = saver.save(1, state)
        thread = threading.Thread(target=saver.resume, args=(other,))
        thread.start()
        assert inside.wait(troubles.LIMIT_SECONDS)
        assert handle.done()  # the save before it was waited for
        with pytest.raises(SaveError, match="another thread is saving or resuming") as caught:
            saver.save(2, state)
        assert "one thread" in caught.value.hint
        leave.set()
        thread.join()
        assert troubles.facts(other) == truth
        truth = troubles.saved(saver, 2, state)
        troubles.resumes(saver, 2, truth, fresh(3))


OTHER_JOB = """
import os, time
from tests.crash import troubles
trouble = troubles.Trouble(troubles.Path({file!r}))
state = troubles.state_of(troubles.network(1), 1)
with trouble.writers():
    saver = troubles.Checkpointer({run!r})
    troubles.saved(saver, 1, state)
    with trouble.of("stuck"):
        saver.save(2, state)
        pid_file = troubles.Path({pid_file!r})
        pid_file.write_text(str(os.getpid()))
        pid_file.rename(pid_file.with_suffix(""))
        time.sleep(600)
"""


def test_two_jobs_in_one_directory(
    run: Path, tmp_path: Path, log: Any, run_ranks: RunRanks
) -> None:
    script, pid_file = tmp_path / "job.py", tmp_path / "under_way"
    places = {"run": run, "file": tmp_path / "trouble"}
    places["pid_file"] = pid_file.with_suffix(".new")
    script.write_text(OTHER_JOB.format(**{name: str(place) for name, place in places.items()}))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_ranks, script, 1, status=1, limit_seconds=60)
        wait_until(lambda: pid_file.exists() or job.done())
        assert pid_file.exists(), job.result()
        process = int(pid_file.read_text())
        try:
            began = time.monotonic()
            with pytest.raises(
                RefusedError, match=f"another job .* process {process} on"
            ) as caught:
                Checkpointer(run)
            assert time.monotonic() - began < 5
            assert "directory of its own" in caught.value.hint
            assert troubles.working_folders(run)  # that of the other job is left alone
        finally:
            os.kill(process, signal.SIGKILL)
    with Checkpointer(run) as saver:
        assert troubles.working_folders(run) == []
        state = fresh()
        assert saver.resume(state) == 1
        truth = troubles.saved(saver, 2, state)
        troubles.resumes(saver, 2, truth, fresh(3))
    assert any("left by an interrupted save" in line for line in log.lines(logging.INFO))
