"""The writer is killed before every call that changes a file; what is left must be sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.writer.process import LEFT_STATUS
from ckptkit.writer.sweep import leftovers, sweep
from tests.crash import writing as writing_module
from tests.files import wait_until

writing: Any = writing_module
# Every call that makes, changes, syncs, renames or removes something counts; the program dies
# before the n-th of them. `exchange` is one call of the C library.
PROGRAM = """
import os, signal
left = {step}
def deadly(call):
    def counted(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return counted
for name in ("open", "write", "pwrite", "fsync", "ftruncate", "posix_fallocate", "mkdir", "rename",
             "unlink", "rmdir"):
    setattr(os, name, deadly(getattr(os, name)))
from ckptkit.storage.local import disk
from ckptkit.writer import process as main
exchange = disk.Disk.exchange_folders if {exchanges} else lambda *_: False
disk.Disk.exchange_folders = deadly(exchange)
main.main()
"""


def program(step: int, *, exchanges: bool = True) -> str:
    return PROGRAM.format(step=step, exchanges=exchanges)


def attempt(save: Any, step: int, *, exchanges: bool, remove: tuple[str, ...] = ()) -> bool:
    """Saves with a writer that dies before its `step`-th call; says whether it got through."""
    with writing.Writer(program(step, exchanges=exchanges)) as writer:
        proofs = []
        for rank in range(2):
            memory, request = save.persist(rank, writing.usual_units(rank, 2, salt=1))
            try:
                writer.share(memory)
            except OSError:
                return False
            answer = writer.ask(request)
            if answer is None:
                return False
            assert isinstance(answer, writing.Written), answer
            proofs.append(answer.proof)
        answer = writer.ask(save.commit(proofs, remove=remove))
    assert answer is None or isinstance(answer, writing.StepCommitted), answer
    return answer is not None


def content(step: Path) -> bytes:
    return step.joinpath(writing.MODEL, "__0_0.distcp").read_bytes()


def whole(step: Path) -> bool:
    return step.is_dir() and ckptkit.verify(step).ok and (step / "ckptkit.json").is_file()


def experiment(run: Path, first: int, *, exchanges: bool) -> tuple[int, list[str]]:
    """Kills at every step from the first on; returns how many there were, and what was left."""
    seen: list[str] = []
    step = first
    model = run.with_name("model")
    older, save = writing.Save(run, "a-0", 2, 400), writing.Save(run, "a-2", 2)
    with writing.Writer() as writer:
        for made in (writing.Save(model, "a-0", 2, 400), writing.Save(model, "a-1", 2)):
            writing.save_whole(made, writer)
    while True:
        shutil.copytree(model, run)
        before = content(save.final)
        through = attempt(save, step, exchanges=exchanges, remove=(str(older.final),))
        seen.append(judge(run, before))
        sweep(run)
        assert leftovers(run) == ()
        assert whole(save.final)
        if step % 16 == 0 or through:
            with writing.Writer() as writer:
                writing.save_whole(writing.Save(run, "a-3", 2), writer)
            assert whole(save.final)
        shutil.rmtree(run)
        if through:
            return step, seen
        step += 1


def judge(run: Path, before: bytes) -> str:
    """Checks what a kill left behind, and says which step is there."""
    final, older = run / "checkpoint-500", run / "checkpoint-400"
    visible = [path for path in run.iterdir() if not path.name.startswith(".")]
    assert all(whole(path) for path in visible)  # nothing half made or half removed has its name
    if not final.is_dir():  # only between the two renames that stand for an exchange
        assert whole(older)
        return "neither"
    if content(final) == before:
        assert whole(older)  # the older step is there as long as the new one is not
        return "old"
    return "new" if older.is_dir() else "alone"


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_steps_only(
    memory_disk: Path, record_property: Callable[[str, object], None]
) -> None:
    steps, seen = experiment(memory_disk / "run", 1, exchanges=True)
    record_property("kills", steps - 1)
    assert steps > 50
    assert set(seen) == {"old", "new", "alone"}
    assert seen == sorted(seen, key=["old", "new", "alone"].index)


@pytest.mark.slow
def test_without_exchange_a_kill_is_mended_by_the_next_start(
    memory_disk: Path, record_property: Callable[[str, object], None]
) -> None:
    calls = count_calls(memory_disk / "count")
    steps, seen = experiment(memory_disk / "run", calls - 20, exchanges=False)
    record_property("kills", len(seen) - 1)
    assert steps > calls - 10
    assert {"old", "neither", "new", "alone"} == set(seen)


def count_calls(run: Path) -> int:
    """Returns a bit more than how many calls a save makes."""
    run.mkdir()
    low, high = 1, 256
    while high - low > 1:
        middle = (low + high) // 2
        save = writing.Save(run, f"a-{middle}", 2)
        if attempt(save, middle, exchanges=False):
            high = middle
        else:
            low = middle
        sweep(run)
    return high


@pytest.mark.parametrize("phase", ["persist", "commit"])
@pytest.mark.quick("commit")
def test_a_writer_leaves_when_its_trainer_is_gone(tmp_path: Path, phase: str) -> None:
    save = writing.Save(tmp_path)
    memory, request = save.persist(0, writing.usual_units(0, 1))
    slow = writing.Writer(program(-1).replace("left -= 1", "__import__('time').sleep(2)"))
    if phase == "commit":
        with writing.Writer() as writer:
            request = save.commit([writer.written(memory, request).proof])
    else:
        slow.share(memory)
    slow.channel.send(request)
    assert isinstance(slow.channel.receive(), writing.WriteProgress)
    slow.connection.close()
    wait_until(lambda: slow.process.poll() is not None, seconds=4.0)
    assert slow.process.returncode == LEFT_STATUS
    assert not save.final.exists()
