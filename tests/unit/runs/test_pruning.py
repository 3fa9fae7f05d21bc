"""`prune`: what goes, what stays whatever the rules say, and what that frees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import MissingFileError, RefusedError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.runs.local_run import LocalRun
from ckptkit.runs.marks import claim, hold
from ckptkit.runs.pruning import Pruned, prune_run
from ckptkit.runs.push_journal import WATCH_FOLDER, StepPush, open_journal
from ckptkit.runs.retention import Retention
from ckptkit.writer.commit import remove_steps
from tests.command_line import started
from tests.files import age
from tests.made_up_runs import save_step, save_stock_step


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name != ".ckptkit")


def reasons(pruned: Pruned) -> dict[int, tuple[str, str]]:
    return {one.step.step: (one.action, one.why) for one in pruned.steps}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six steps, the third with the lowest loss."""
    losses = {100: 0.9, 200: 0.8, 300: 0.1, 400: 0.7, 500: 0.6, 600: 0.5}
    for number, (step, loss) in enumerate(losses.items(), 1):
        save_step(tmp_path, step, metrics={"loss": loss}, save_number=number)
    return tmp_path


def test_a_step_stays_if_any_rule_keeps_it(run: Path) -> None:
    pruned = ckptkit.prune(run, keep_last=1, keep_every=400, keep_best="loss")
    assert reasons(pruned) == {
        100: ("remove", "no rule keeps it"),
        200: ("remove", "no rule keeps it"),
        300: ("keep", "the best loss"),
        400: ("keep", "every 400 steps"),
        500: ("remove", "no rule keeps it"),
        600: ("keep", "the newest complete step"),
    }
    assert names(run) == ["checkpoint-300", "checkpoint-400", "checkpoint-600"]


def test_the_largest_is_best_where_that_is_said(run: Path) -> None:
    ckptkit.prune(run, keep_best="loss", best_mode="max")
    assert names(run) == ["checkpoint-100", "checkpoint-600"]


def test_a_dry_run_says_the_same_and_changes_nothing(run: Path) -> None:
    before = names(run)
    planned = ckptkit.prune(run, keep_last=2, dry_run=True)
    assert names(run) == before
    done = ckptkit.prune(run, keep_last=2)
    assert planned.dry_run
    assert (planned.steps, planned.freed_bytes) == (done.steps, done.freed_bytes)
    assert done.freed_bytes == sum(step.size_bytes for step in done.removed) > 0


def test_without_a_rule_nothing_is_pruned(run: Path) -> None:
    with pytest.raises(UsageError):
        ckptkit.prune(run)
    assert len(names(run)) == 6


def test_a_metric_that_no_step_has_is_refused_with_those_there_are(run: Path) -> None:
    with pytest.raises(RefusedError, match="found are loss"):
        ckptkit.prune(run, keep_last=1, keep_best="accuracy")
    assert len(names(run)) == 6


def test_incomplete_steps_stay_and_do_not_count(run: Path) -> None:
    (run / "checkpoint-600" / MANIFEST_NAME).unlink()
    (run / "checkpoint-200" / MANIFEST_NAME).unlink()
    pruned = ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-200", "checkpoint-500", "checkpoint-600"]
    assert reasons(pruned)[500] == ("keep", "the newest complete step")
    assert reasons(pruned)[600][1].startswith("not complete")


def test_a_step_that_training_went_back_from_goes_first(run: Path) -> None:
    save_step(run, 450, save_number=7)
    pruned = ckptkit.prune(run, keep_last=2)
    assert names(run) == ["checkpoint-400", "checkpoint-450"]
    assert reasons(pruned)[600] == ("remove", "training went back from it")


def test_a_step_that_is_open_stays_and_goes_once_it_is_closed(run: Path) -> None:
    with (
        open_checkpoint(run / "checkpoint-100" / "pytorch_model_fsdp_0"),
        open_checkpoint(run / "checkpoint-200"),
    ):
        planned = ckptkit.prune(run, keep_last=1, dry_run=True)
        pruned = ckptkit.prune(run, keep_last=1)
        assert names(run) == ["checkpoint-100", "checkpoint-200", "checkpoint-600"]
    assert reasons(pruned)[100] == reasons(planned)[100] == ("keep", "it is being read")
    ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-600"]


def test_a_step_that_another_process_uses_stays_until_that_is_killed(run: Path) -> None:
    program = (
        "import sys, time; from ckptkit.conversion.source.open import open_checkpoint\n"
        "with open_checkpoint(sys.argv[1]):\n    print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(run / "checkpoint-300")]
    with started(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"held\n"
        ckptkit.prune(run, keep_last=1)
        assert names(run) == ["checkpoint-300", "checkpoint-600"]
        reader.kill()
    ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-600"]


def test_the_retention_of_training_leaves_a_step_that_is_being_read(run: Path) -> None:
    with open_checkpoint(run / "checkpoint-100"):
        removed, notes = remove_steps([run / "checkpoint-100", run / "checkpoint-200"])
    assert removed == [run / "checkpoint-200"]
    assert "being read" in notes[0]
    assert remove_steps([run / "checkpoint-100"])[0] == [run / "checkpoint-100"]


def test_who_comes_while_a_step_is_removed_is_told_so(run: Path) -> None:
    marker = run / "checkpoint-100" / MANIFEST_NAME
    taken = claim([marker])
    assert taken is not None
    with taken, pytest.raises(MissingFileError, match="removed"):
        hold([marker])
    hold([marker]).close()


def test_an_interrupt_while_files_are_claimed_leaves_none_locked(run: Path) -> None:
    marker = run / "checkpoint-100" / MANIFEST_NAME

    def paths() -> Iterator[Path]:
        yield marker
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:
        claim(paths())
    hold([marker]).close()  # while the traceback still refers to the locked file
    assert interrupt.value.__traceback__ is not None


def test_a_step_whose_push_has_begun_stays(run: Path) -> None:
    journal, _ = open_journal(run / WATCH_FOLDER, "org/name", "this run")
    journal.note(StepPush(200, "digest", "pushing", "org/name"))
    pruned = ckptkit.prune(run, keep_last=1)
    assert reasons(pruned)[200] == ("keep", "its push to org/name has begun")
    journal.note(StepPush(200, "digest", "pushed", "org/name"))
    ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-600"]


def test_the_best_of_a_trainer_stays(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save_stock_step(tmp_path, step, best="checkpoint-4")
    pruned = prune_run(tmp_path, Retention(keep_last=1))
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    assert reasons(pruned)[4] == ("keep", "the Trainer calls it the best")


@pytest.mark.parametrize("tracked", ["4", "0004\n", "5", "release", ""])
def test_the_step_that_a_tracker_names_stays(tracked: str, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save_stock_step(tmp_path, step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
    pruned = prune_run(tmp_path, Retention(keep_last=1))
    kept = ("keep", "training would go on from it")
    assert (reasons(pruned)[4] == kept) == ("4" in tracked)
    assert (tmp_path / "checkpoint-4").exists() == ("4" in tracked)
    assert not (tmp_path / "checkpoint-2").exists()


def test_steps_of_two_kinds_of_names_are_counted_apart(tmp_path: Path) -> None:
    for step in (2, 4):
        folder = save_stock_step(tmp_path, step)
        shutil.copytree(folder / "pytorch_model_fsdp_0", tmp_path / f"step_{step - 1}")
    ckptkit.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["checkpoint-4", "step_3"]


def test_a_whole_step_of_another_saver_in_a_run_of_ours_stays_while_it_may_be_the_newest(
    run: Path,
) -> None:
    save_stock_step(run, 50)  # with the newest files
    ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-50", "checkpoint-600"]
    age(run)
    save_step(run, 700, save_number=7)
    ckptkit.prune(run, keep_last=2, incomplete=True)
    assert names(run) == ["checkpoint-600", "checkpoint-700"]
    age(save_stock_step(run, 800))
    ckptkit.prune(run, keep_last=1, incomplete=True)
    assert names(run) == ["checkpoint-700", "checkpoint-800"]


def test_only_files_whose_last_name_goes_are_freed(run: Path) -> None:
    shard = next((run / "checkpoint-100").rglob("*.distcp"))
    for step in (200, 600):
        other = run / f"checkpoint-{step}" / shard.relative_to(run / "checkpoint-100")
        other.unlink()
        os.link(shard, other)
    size = shard.stat().st_size
    pruned = ckptkit.prune(run, keep_last=1)
    whole = sum(step.size_bytes for step in pruned.removed)
    assert pruned.freed_bytes == whole - 2 * size


def test_what_cannot_be_removed_is_told_and_the_others_go(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name == "checkpoint-200":
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    pruned = ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-200", "checkpoint-600"]
    assert [one.step.step for one in pruned.failed] == [200]
    assert "permission denied" in pruned.failed[0].why.lower()
    assert pruned.freed_bytes == sum(step.size_bytes for step in pruned.removed)


@pytest.mark.parametrize("when", ["claim", "rename"])
def test_a_step_that_is_saved_again_meanwhile_is_not_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    saves = iter([9])

    def save_again() -> None:
        for number in saves:
            shutil.rmtree(run / "checkpoint-100")
            save_step(run, 100, save_number=number)

    def then(real: Callable[..., Any]) -> Callable[..., Any]:
        def first(*given: Any) -> Any:
            if "checkpoint-100" in str(given):
                save_again()
            return real(*given)

        return first

    if when == "claim":
        monkeypatch.setattr(LocalRun, "claim", then(LocalRun.claim))
    else:
        monkeypatch.setattr(Path, "rename", then(Path.rename))
    pruned = ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-100", "checkpoint-600"]
    assert ckptkit.list_run(run).steps[0].save_number == 9
    assert "was replaced or changed" in pruned.failed[0].why


def test_a_file_that_came_to_a_step_since_it_was_listed_is_not_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalRun.remove

    def and_somebody_puts_a_file_there(self: LocalRun, step: str, files: Any) -> None:
        if step == "checkpoint-200":
            (run / step / "adapter.safetensors").write_bytes(b"new")
        real(self, step, files)

    monkeypatch.setattr(LocalRun, "remove", and_somebody_puts_a_file_there)
    pruned = ckptkit.prune(run, keep_last=1)
    assert names(run) == ["checkpoint-200", "checkpoint-600"]
    assert ckptkit.list_run(run).steps[0].complete
    assert "changed since it was listed" in pruned.failed[0].why


def test_nothing_more_is_removed_once_the_newest_is_gone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def and_somebody_removes_the_newest(self: Path, target: Path) -> Path:
        shutil.rmtree(run / "checkpoint-600", ignore_errors=True)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", and_somebody_removes_the_newest)
    pruned = ckptkit.prune(run, keep_last=1)
    assert [step.step for step in pruned.removed] == [100]
    assert [one.step.step for one in pruned.failed] == [200, 300, 400, 500]
