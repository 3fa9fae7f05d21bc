"""A run whose newest step is damaged, or was not finished, is never passed over in silence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptkit
from ckptkit.runs.find_run import find_run
from ckptkit.runs.usage import measure_runs
from tests.command_line import run_command
from tests.other_user import as_nobody, needs_root, open_folder

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


# Folders that another user may not enter


@pytest.fixture
def theirs() -> Iterator[Path]:
    """Yields a run of two steps in a folder that another user may read."""
    with open_folder() as folder:
        ckptkit.inspect(STEP)  # another user cannot import what root has installed
        for step in (1, 2):
            shutil.copytree(STEP, folder / "run" / f"checkpoint-{step}")
        yield folder / "run"


def try_as_nobody(act: Callable[[], object]) -> list[str]:
    """Returns the code, the message and the hint of what another user gets; empty for success."""

    def attempt() -> list[str]:
        try:
            act()
        except ckptkit.CkptkitError as error:
            return [error.code, str(error), error.hint]
        return []

    answer: list[str] = as_nobody(attempt)
    return answer


@needs_root
@pytest.mark.parametrize("mode", [0, 0o444])
@pytest.mark.parametrize("closed", ["checkpoint-2", "checkpoint-2/pytorch_model_fsdp_0"])
@pytest.mark.parametrize(
    "act",
    [
        ckptkit.inspect,
        ckptkit.verify,
        lambda run: ckptkit.consolidate(run, run.parent / "out", names="live"),
        ckptkit.list_run,
        lambda run: ckptkit.prune(run, keep_last=1, dry_run=True),
    ],
)
@pytest.mark.quick(
    "<lambda>0-checkpoint-2-0",
    "verify-checkpoint-2/pytorch_model_fsdp_0-292",
    "list_run-checkpoint-2-292",
)
def test_a_newest_step_that_may_not_be_entered_is_no_reason_to_take_an_older_one(
    act: Callable[[Path], object], closed: str, mode: int, theirs: Path
) -> None:
    (theirs / closed).chmod(mode)
    code, said, hint = try_as_nobody(lambda: act(theirs))
    assert code in {"access-denied", "unreadable-input"}
    assert f"{closed}: " in said
    assert "permission denied" in said
    assert "see who may enter it" in hint
    assert not (theirs.parent / "out").exists()


@needs_root
@pytest.mark.slow
def test_a_step_that_is_named_is_read_beside_one_that_may_not_be_entered(theirs: Path) -> None:
    (theirs / "checkpoint-2").chmod(0)
    assert try_as_nobody(lambda: ckptkit.inspect(theirs / "checkpoint-1")) == []
    assert try_as_nobody(lambda: ckptkit.inspect(theirs, select="checkpoint-1")) == []
    (theirs / "latest_checkpointed_iteration.txt").write_text("1")
    assert try_as_nobody(lambda: ckptkit.inspect(theirs)) == []
    (theirs / "latest_checkpointed_iteration.txt").write_text("2")
    assert "checkpoint-2" in try_as_nobody(lambda: ckptkit.inspect(theirs))[1]


@needs_root
@pytest.mark.parametrize("name", ["lost+found", "of-one-user", "1000", ".ckptkit"])
@pytest.mark.quick("lost+found")
def test_folders_that_are_no_steps_may_be_closed(name: str, theirs: Path) -> None:
    folder = theirs.parent / name
    folder.mkdir(mode=0o700)

    def inspect() -> list[str]:
        return list(ckptkit.inspect(theirs.parent).notes)

    notes = "; ".join(as_nobody(inspect))
    assert "checkpoint-2 is used" in notes
    assert (name in notes) == (name in {"of-one-user", "1000"})


@needs_root
def test_a_part_of_a_checkpoint_that_may_not_be_entered_is_refused(theirs: Path) -> None:
    model = theirs.parent / "model"
    shutil.copytree(theirs / "checkpoint-1" / "pytorch_model_fsdp_0", model / "actor")
    shutil.copytree(model / "actor", model / "critic")
    (model / "actor").chmod(0)
    code, said, _ = try_as_nobody(lambda: ckptkit.inspect(model))
    assert (code, "model/actor: cannot be read" in said) == ("access-denied", True)
    assert try_as_nobody(lambda: ckptkit.inspect(model, select="critic")) == []
    (model / "critic").chmod(0)
    assert "may not be entered: actor, critic" in try_as_nobody(lambda: ckptkit.inspect(model))[1]


@needs_root
def test_the_run_of_a_step_that_may_not_be_entered_counts_as_a_run(theirs: Path) -> None:
    shutil.copytree(theirs, theirs.parent / "other")
    shutil.rmtree(theirs.parent / "other" / "checkpoint-2")
    (theirs.parent / "other" / "checkpoint-1").chmod(0)
    assert "other/checkpoint-1: cannot" in try_as_nobody(lambda: ckptkit.inspect(theirs.parent))[1]
    assert "holds 2 runs: other, run" in try_as_nobody(lambda: find_run(theirs.parent))[1]


@needs_root
@pytest.mark.parametrize("mode", [0, 0o444])
def test_the_space_of_a_run_names_the_folder_that_may_not_be_entered(
    mode: int, theirs: Path
) -> None:
    (theirs / "checkpoint-2").chmod(mode)
    _, said, hint = try_as_nobody(lambda: measure_runs(theirs))
    assert said == f"{theirs}/checkpoint-2: cannot be listed: permission denied"
    assert "see who may enter it" in hint
