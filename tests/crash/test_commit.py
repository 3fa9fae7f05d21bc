"""A process is killed before every step of staging and committing; what is left must be sound.

An experiment forks children, and kills each of them just before its n-th system call that changes
something, until one gets through. A process without threads does them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

from ckptkit.core.errors import OutputExistsError
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.target import LocalTarget
from ckptkit.storage.local.workdir import is_free
from tests.files import contents, mounted, tmpfs
from tests.fork_host import ForkHost

KINDS = {
    "native": Disk(),
    "no_exchange": dataclasses.replace(Disk(), exchange=False),
    "portable": Disk.portable(),
}
OLD = {"old.bin": b"old" * 100, "manifest.json": b"old manifest"}
NEW = {"model.bin": b"new" * 50_000, "folder/vocabulary": b"words", "manifest.json": b"manifest"}
SYSTEM = frozenset({"posix", "fcntl"})
ONLY_LOOKS = frozenset({"fspath", "stat", "lstat", "fstat", "scandir", "listdir", "readlink"})

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the experiment forks")


def stage_and_commit(out: Path, disk: Disk, *, overwrite: bool) -> None:
    target = LocalTarget(out, overwrite=overwrite, disk=disk)
    try:
        for path, data in NEW.items():
            target.create(path, len(data))
            target.write(path, 0, memoryview(data))
        target.commit("manifest.json")
    finally:
        target.abandon()


def visible(out: Path) -> dict[str, bytes]:
    return {path: data for path, data in contents(out).items() if not path.startswith(".")}


def changes_something(call: object) -> bool:
    if getattr(call, "__qualname__", "") in {"FileIO.write", "FileIO.close"}:
        return True
    name = getattr(call, "__name__", "")
    return getattr(call, "__module__", "") in SYSTEM and name not in ONLY_LOOKS


def kill_before(step: int) -> None:
    """Arranges that this process dies just before its `step`-th relevant call."""
    count = 0
    lock = threading.Lock()

    def watch(_: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "c_call" and changes_something(argument):
            with lock:
                count += 1
                if count == step:
                    os.kill(os.getpid(), 9)

    threading.setprofile(watch)
    sys.setprofile(watch)


def survives(step: int, out: Path, kind: str, scene: str) -> bool:
    """Says whether a child that is to be killed before `step` was through earlier."""
    child = os.fork()
    if not child:
        status = 1
        try:
            if scene == "here":
                os.chdir(out)
            kill_before(step)
            stage_and_commit(out, KINDS[kind], overwrite=scene == "overwrite")
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(ended)
    if code not in {0, -9}:
        raise RuntimeError(f"step {step} ended with {code}")
    return code == 0


def experiment(scene: str, folder: str, kind: str) -> dict[str, int]:
    """Kills at every step, checks what is left, and runs once more; returns what was seen."""
    seen = {"absent": 0, "old": 0, "partial": 0, "new": 0}
    out = Path(folder) / "parent" / "out"
    step, through = 0, False
    while not through:
        step += 1
        prepare(scene, out)
        through = survives(step, out, kind, scene)
        state = judge(visible(out) if out.exists() else {})
        seen[state] += 1
        run_again(scene, out, kind, state)
    return seen | {"steps": step}


def prepare(scene: str, out: Path) -> None:
    if scene == "inside":
        for path in out.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    shutil.rmtree(out.parent, ignore_errors=True)
    if scene != "fresh":
        out.mkdir(parents=True)
    if scene == "overwrite":
        for name, data in OLD.items():
            (out / name).write_bytes(data)


def judge(found: dict[str, bytes]) -> str:
    if not found:
        return "absent"
    if found == OLD:
        return "old"
    return "new" if found == NEW else "partial"


def run_again(scene: str, out: Path, kind: str, state: str) -> None:
    disk = KINDS[kind]
    if state == "partial" and disk.locks and not is_free(out, disk):
        raise AssertionError("half an output was not taken back")
    restored = judge_after_sweep(out, disk) if scene == "overwrite" else state
    if scene == "overwrite" and disk.locks and restored not in {"old", "new"}:
        raise AssertionError(f"the previous output was lost, {restored} is left")
    try:
        stage_and_commit(out, disk, overwrite=scene == "overwrite")
    except OutputExistsError:
        if state != "new":
            raise
    if visible(out) != NEW:
        raise AssertionError(f"the second run left {sorted(visible(out))}")
    if disk.locks:
        left = {path.name for path in (*out.parent.iterdir(), *out.iterdir())}
        if any(name.startswith(".") for name in left):
            raise AssertionError(f"leftovers were not removed: {sorted(left)}")


def judge_after_sweep(out: Path, disk: Disk) -> str:
    """Opens the place once more, which undoes what a kill left half done."""
    LocalTarget(out, overwrite=True, disk=disk).abandon()
    return judge(visible(out) if out.exists() else {})


Record = Callable[[str, object], None]
Run = Callable[[str, str], dict[str, int]]


@pytest.fixture(scope="module")
def host() -> Iterator[ForkHost]:
    with ForkHost(__name__) as host:
        yield host


@pytest.fixture
def run(host: ForkHost, tmp_path: Path, record_property: Record) -> Run:
    """Kills at every step of a scene in the folder of the test; returns what was seen."""

    def run(scene: str, kind: str) -> dict[str, int]:
        seen: dict[str, int] = host.call(experiment, scene, str(tmp_path), kind)
        record_property("kills", seen["steps"] - 1)
        return seen

    return run


@pytest.mark.parametrize(
    "kind", ["native", pytest.param("no_exchange", marks=pytest.mark.slow), "portable"]
)
def test_a_kill_leaves_no_output_or_a_whole_one(kind: str, run: Run) -> None:
    seen = run("fresh", kind)
    assert seen["partial"] == seen["old"] == 0
    assert seen["absent"] > 30
    assert seen["new"] > 1


def test_a_kill_while_overwriting_leaves_the_old_output_or_the_new(run: Run) -> None:
    seen = run("overwrite", "native")
    assert seen["partial"] == seen["absent"] == 0
    assert seen["old"] > 30
    assert seen["new"] > 1


@pytest.mark.parametrize("kind", [pytest.param("no_exchange", marks=pytest.mark.slow), "portable"])
def test_a_kill_while_overwriting_in_two_steps_never_leaves_a_mixture(kind: str, run: Run) -> None:
    seen = run("overwrite", kind)
    assert seen["partial"] == 0
    assert 1 <= seen["absent"] < 10  # between the two renames
    assert seen["old"] > 30
    assert seen["new"] > 1


@pytest.mark.slow
def test_a_kill_while_a_mount_point_is_filled_is_undone_by_the_next_run(
    tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "parent" / "out"
    with mounted(out, *tmpfs("8m")):
        seen = run("inside", "native")
    assert 1 <= seen["partial"] < 40  # visible, but without its manifest, and swept away later
    assert seen["absent"] > 30
    assert seen["new"] > 1


def test_a_kill_while_the_current_directory_is_filled_is_undone_by_the_next_run(run: Run) -> None:
    seen = run("here", "native")
    assert 1 <= seen["partial"] < 40  # visible, but without its manifest, and swept away later
    assert seen["absent"] > 30
    assert seen["new"] > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("native", "no_exchange")
def test_of_two_processes_that_commit_at_once_exactly_one_wins(
    tmp_path: Path, kind: str, host: ForkHost
) -> None:
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        assert sorted(host.call(race, str(folder), kind)) == ["exists", "won"]
        assert contents(folder) == {f"out/{name}": data for name, data in NEW.items()}


def race(folder: str, kind: str) -> list[str]:
    """Has two children stage everything, and then commit at once; returns what became of them."""
    (ready, staged), (word, go), (said, tell) = (os.pipe() for _ in range(3))
    racers = []
    for _ in range(2):
        racers.append(os.fork())
        if not racers[-1]:
            try:
                tell_outcome(Path(folder), kind, staged, word, tell)
            finally:
                os._exit(1)
    for descriptor in (staged, word, tell):
        os.close(descriptor)
    for _ in racers:
        assert os.read(ready, 1) == b"r"
    os.write(go, b"gg")
    statuses = [os.waitstatus_to_exitcode(os.waitpid(racer, 0)[1]) for racer in racers]
    assert statuses == [0, 0]
    outcomes = os.read(said, 100).decode().split()
    for descriptor in (ready, go, said):
        os.close(descriptor)
    return outcomes


def tell_outcome(folder: Path, kind: str, staged: int, word: int, tell: int) -> NoReturn:
    """Stages everything, waits for the word, and commits."""
    target = LocalTarget(folder / "out", disk=KINDS[kind])
    for path, data in NEW.items():
        target.create(path, len(data))
        target.write(path, 0, memoryview(data))
    os.write(staged, b"r")
    os.read(word, 1)
    try:
        target.commit("manifest.json")
    except OutputExistsError:
        target.abandon()
        os.write(tell, b"exists ")
    else:
        os.write(tell, b"won ")
    os._exit(0)
