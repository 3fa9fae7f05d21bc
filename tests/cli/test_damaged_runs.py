"""A run whose newest step is damaged, or was not finished, is never passed over in silence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.command_line import run_command

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
OURS = FIXTURES / "peft_checkpointer" / "checkpoint" / "checkpoint-2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns a run in which a file of the newest of two steps is cut short."""
    for step in (1, 2):
        shutil.copytree(STEP, tmp_path / "run" / f"checkpoint-{step}")
    file = min(tmp_path.glob("run/checkpoint-2/pytorch_model_fsdp_0/*.distcp"))
    os.truncate(file, file.stat().st_size - 100)
    return tmp_path / "run"


@pytest.mark.parametrize("words", [["verify"], ["stats"], ["diff", STEP]])
def test_a_damaged_newest_step_is_named_by_every_command_that_reads(
    words: list[object], run: Path
) -> None:
    name, *others = words
    done = run_command(name, run, *others)
    assert "warning: checkpoint-2 was passed over" in done.stderr
    assert "is cut short" in done.stderr


def test_a_run_with_a_damaged_newest_step_is_not_verified(run: Path) -> None:
    done = run_command("verify", run, "--json")
    assert done.returncode == 6
    (problem,) = json.loads(done.stdout)["problems"]
    assert (problem["code"], problem["where"]) == ("damaged-step", "checkpoint-2")
    assert problem["message"].endswith("checkpoint-1 was verified in its place")
    assert run_command("verify", run / "checkpoint-1").returncode == 0


def test_a_step_whose_save_was_not_finished_is_named_and_no_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(OURS, tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-2" / "ckptkit.json").unlink()
    done = run_command("verify", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    assert "checkpoint-2 was passed over" in done.stderr
    assert "the save was not finished" in done.stderr


def test_consolidating_a_step_that_was_not_finished_says_so(tmp_path: Path) -> None:
    shutil.copytree(OURS, tmp_path / "checkpoint-2")
    arguments = ("consolidate", tmp_path / "checkpoint-2", tmp_path / "out", "--names", "live")
    assert "not finished" not in run_command(*arguments, "--dry-run").stderr
    (tmp_path / "checkpoint-2" / "ckptkit.json").unlink()
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "warning: ckptkit.json is not there, and it is written last" in done.stderr
    assert "the save was not finished" in done.stderr
