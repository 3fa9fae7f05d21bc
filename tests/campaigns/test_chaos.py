"""A seeded sample of the chaos campaign, and a check that its faults happen where they are to."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.campaigns.chaos import commands, stores, writers
from tests.campaigns.chaos.scenes import ACTS, Scene, play, some_calls
from tests.campaigns.chaos.system_calls import (
    IO_ERROR,
    KILL,
    NO_SPACE,
    TERM,
    Fault,
    arm,
    calls_of,
    is_possible,
)
from tests.object_store import ObjectStore

SEED = "of CI"
pytestmark = pytest.mark.skipif(not is_possible(), reason="needs Linux 5.14 on x86-64")


def work(folder: Path) -> None:
    (folder / "a").mkdir()
    with (folder / "a/b").open("w") as file:
        file.write("text")
        file.flush()
        os.fsync(file.fileno())
    (folder / "a/b").rename(folder / "c")
    shutil.rmtree(folder / "a")


@pytest.mark.parametrize(
    ("act", "call", "status", "left"),
    [
        pytest.param(KILL, 0, 0, ["c"], marks=pytest.mark.slow),
        (KILL, 3, -9, ["a", "a/b"]),
        pytest.param(TERM, 2, -15, ["a"], marks=pytest.mark.slow),
        pytest.param(NO_SPACE, 3, 1, ["a", "a/b"], marks=pytest.mark.slow),
        (IO_ERROR, 5, 1, ["a", "a/b"]),
        pytest.param(IO_ERROR, 6, 1, ["a", "c"], marks=pytest.mark.slow),
    ],
)
def test_a_fault_happens_before_the_call_that_was_chosen(
    tmp_path: Path, act: str, call: int, status: int, left: list[str]
) -> None:
    folder, log = tmp_path / "folder", tmp_path / "calls"
    folder.mkdir()
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            arm(Fault(act, call, str(folder), str(log)))
            work(folder)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    # The kernel may still do the call before the process takes note of the signal.
    assert found in ((left, [*left, "a/b"]) if act == TERM else (left,))
    kinds = [reached.kind for reached in calls_of(log)]
    whole = ["mkdir", "open", "write", "sync", "rename", "remove"]
    if act == NO_SPACE:  # what is buffered is written again when the file is closed
        assert kinds[:3] == whole[:3]
    elif call:
        assert kinds == whole[:call]
    else:
        assert kinds == whole


def survives(scene: Scene, folder: Path, most: int) -> None:
    played = play(scene, folder, some_calls(SEED, most))
    assert played.losses == []
    assert set(played.faults) == set(ACTS)
    assert played.verified >= sum(played.faults.values())


@pytest.mark.parametrize(
    ("scene", "most"),
    [
        pytest.param(writers.Saving, 1, id="save"),
        pytest.param(writers.Saving, 2, id="save, more of it", marks=pytest.mark.slow),
        pytest.param(writers.Keeping, 1, id="keep", marks=pytest.mark.slow),
        pytest.param(writers.Draining, 2, id="drain", marks=pytest.mark.slow),
    ],
)
def test_faults_in_the_processes_of_a_save_lose_no_step(
    scene: Callable[[Path], Scene], most: int, memory_disk: Path
) -> None:
    stage = memory_disk / "stage"
    stage.mkdir()
    survives(scene(memory_disk / "of the scene"), stage, most)


@pytest.fixture(scope="module")
def host() -> Iterator[commands.CommandHost]:
    with commands.command_host() as host:
        yield host


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, id="consolidate", marks=pytest.mark.slow),
        pytest.param(-2, id="prune", marks=pytest.mark.slow),
        pytest.param(-1, id="delete the source", marks=pytest.mark.slow),
    ],
)
def test_faults_in_commands_leave_whole_outputs(
    number: int, host: commands.CommandHost, memory_disk: Path
) -> None:
    stage = memory_disk / "stage"
    stage.mkdir()
    survives(commands.commands(host)[number], stage, 1)


@pytest.mark.slow
def test_faults_in_uploads_leave_whole_steps(
    host: commands.CommandHost, memory_disk: Path, object_store: ObjectStore
) -> None:
    stage = memory_disk / "stage"
    stage.mkdir()
    bucket = object_store.bucket("chaos")
    survives(stores.Uploading(host, bucket, memory_disk / "nodes"), stage, 1)
    bucket.clear()


@pytest.mark.slow
def test_the_kills_that_tests_make_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = importlib.import_module("tests.campaigns.chaos.__main__")
    monkeypatch.setattr(campaign, "KILL_TESTS", ("tests/crash/test_hub_push_crash.py",))
    found = campaign.Campaign(seed=1, most=1, only="")
    found.tests()
    assert found.losses == []
    ((name, kills, failures),) = found.tables[0].rows
    assert (name, failures) == ("test_hub_push_crash", 0)
    assert kills > 1
