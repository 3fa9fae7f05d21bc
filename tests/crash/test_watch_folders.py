"""A watch that makes a folder of each step makes each once, whole, however often it is killed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.runs.usage import measure_runs
from ckptkit.training import Checkpointer
from tests.command_line import run_command
from tests.crash.forked_commands import ForkedCommands
from tests.crash.test_watch_versions import add_step
from tests.files import contents
from tests.reflink import reflink_mount
from tests.small_deltas import model_bytes

PEFT = Path(__file__).parents[2] / "fixtures/peft_checkpointer/checkpoint/checkpoint-2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2):
        add_step(run, step)
    return run


def watch(run: Path, to_dir: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """Runs a watch to its end; returns its events."""
    words = ["watch", run, "--to-dir", to_dir, "--once", "--weights-only", "--json", *options]
    done = run_command(*words)
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def steps_of(events: list[dict[str, Any]], name: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == name]


def check(to_dir: Path, run: Path, tmp: Path, steps: list[int]) -> None:
    """Compares every folder with what `consolidate` makes of its step."""
    assert {path.name for path in to_dir.iterdir()} == {f"checkpoint-{n}" for n in steps}
    for folder in to_dir.iterdir():
        assert ckptkit.verify(folder).ok
        if (run / folder.name).exists():
            shutil.rmtree(tmp / "expected", ignore_errors=True)
            ckptkit.consolidate(run / folder.name, tmp / "expected")
            assert model_bytes(folder) == model_bytes(tmp / "expected")


def test_each_step_gets_the_folder_that_consolidate_makes(run: Path, tmp_path: Path) -> None:
    models = tmp_path / "models" / "run"
    events = watch(run, models)
    assert steps_of(events, "pushed") == [1, 2]
    told = next(event for event in events if event["event"] == "pushed")
    assert (told["tag"], told["url"]) == ("checkpoint-1", f"{models}/checkpoint-1")
    check(models, run, tmp_path, [1, 2])
    add_step(run, 3)
    assert steps_of(watch(run, models), "pushed") == [3]
    check(models, run, tmp_path, [1, 2, 3])
    assert "run@checkpoint-3" in run_command("ls", run).stdout


def test_what_is_there_is_not_made_again(run: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    ckptkit.consolidate(run / "checkpoint-1", models / "checkpoint-1")
    before = {path: path.stat().st_mtime_ns for path in models.rglob("*")}
    for state in ("one", "two"):
        events = watch(run, models, "--state", str(tmp_path / state))
        made = {one["step"]: one["resumed"] for one in events if one["event"] == "pushed"}
        assert made == {1: True, 2: state == "two"}
        assert {path: path.stat().st_mtime_ns for path in before} == before


def test_folders_stay_when_steps_are_pruned(run: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    add_step(run, 3)
    watch(run, models, "--keep-last", "1")
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    check(models, run, tmp_path, [1, 2, 3])
    assert watch(run, models)[-1]["event"] == "stopped"
    # As for steps, `prune` removes them where that is wanted.
    assert run_command("prune", models, "--keep-last", 2).returncode == 0
    check(models, run, tmp_path, [2, 3])


def test_a_step_that_was_saved_again_replaces_its_folder(run: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    watch(run, models)
    before = contents(models)
    shutil.rmtree(run / "checkpoint-2")
    add_step(run, 2, rows=50)
    assert steps_of(watch(run, models), "pushed") == [2]
    check(models, run, tmp_path, [1, 2])
    assert contents(models) != before


def test_what_is_not_of_this_run_is_left_alone(run: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "checkpoint-1").mkdir(parents=True)
    (models / "checkpoint-1" / "notes.txt").write_text("mine")
    other = tmp_path / "other"
    other.mkdir()
    add_step(other, 2, rows=50)
    watch(other, models)
    before = contents(models)
    events = watch(run, models, status=5)
    assert steps_of(events, "failed") == [1, 2]
    hints = [event["error"]["hint"] for event in events if event["event"] == "failed"]
    assert {*hints} == {"it is not of this run: move it away, or pass another --to-dir"}
    assert contents(models) == before
    (models / "checkpoint-1").rename(tmp_path / "moved")
    assert steps_of(watch(run, models, status=5), "pushed") == [1]
    watch(run, tmp_path / "another")
    check(tmp_path / "another", run, tmp_path, [1, 2])


@pytest.mark.parametrize("below", [".", "models", "checkpoint-1/models"])
def test_a_directory_in_the_run_is_refused(run: Path, tmp_path: Path, below: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    events = watch(run, run / below, status=4)
    assert "where models would be taken for checkpoints" in events[-1]["error"]["message"]
    assert sorted(tmp_path.rglob("*")) == before


def test_of_a_step_of_peft_it_is_the_adapter(tmp_path: Path) -> None:
    run, models = tmp_path / "run", tmp_path / "models"
    shutil.copytree(PEFT, run / "checkpoint-2")
    events = watch(run, models, "--adapter", "default")
    assert steps_of(events, "pushed") == [2]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= contents(
        models / "checkpoint-2"
    ).keys()
    published = json.loads((models / "checkpoint-2" / MANIFEST_NAME).read_bytes())["source"]
    assert published["published"]["step"] == 2


def test_a_disk_that_fills_up_is_tried_again_and_leaves_nothing(run: Path, tiny_disk: Path) -> None:
    (tiny_disk / "ballast").write_bytes(bytes(2 << 20))
    events = watch(run, tiny_disk / "models", status=4)
    assert [event["error"]["code"] for event in events if event["event"] == "retrying"] == [
        "no-space"
    ]
    assert events[-1]["error"]["code"] == "no-space"
    assert [path.name for path in tiny_disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_where_files_share_blocks_a_folder_takes_no_room(kind: str, tmp_path: Path) -> None:
    with reflink_mount(kind, tmp_path) as place:
        with Checkpointer(place / "run") as checkpointer:
            layers = (torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))
            checkpointer.save(1, {"model": torch.nn.Sequential(*layers)}).result()
        watch(place / "run", place / "models", "--state", str(tmp_path / "state"))
        usage = measure_runs(place)
        one, other = usage.runs
        size = 16 << 20
        assert min(one.size_bytes, other.size_bytes) > size
        assert usage.taken_bytes < size + (1 << 20)
        assert max(run.steps[0].freed_bytes for run in (one, other)) < 1 << 20
        check(place / "models", place / "run", tmp_path, [1])


@pytest.mark.slow
def test_kills_at_every_write_leave_whole_folders_alone(
    forks: ForkedCommands, tmp_path: Path
) -> None:
    run, models = tmp_path / "all" / "run", tmp_path / "all" / "models"
    run.mkdir(parents=True)
    arguments = ["watch", str(run), "--to-dir", str(models), "--once", "--weights-only"]
    kills = steps = 0
    for die_at in range(2, 60, 3):
        steps += 1
        add_step(run, steps)
        status = forks.start(arguments, tmp_path / "log", die_at=die_at).wait()
        assert status in {0, -signal.SIGKILL}, (tmp_path / "log").read_text()
        kills += bool(status)
        for folder in models.glob("checkpoint-*"):  # what is visible is whole
            assert ckptkit.verify(folder).ok
    assert forks.start(arguments, tmp_path / "log").wait() == 0, (tmp_path / "log").read_text()
    assert kills > 10
    check(models, run, tmp_path, [*range(1, steps + 1)])
