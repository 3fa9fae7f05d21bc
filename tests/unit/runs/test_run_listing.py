"""`list_run`: the steps of a run as whoever saved them left them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, NotACheckpointError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.runs import usage
from ckptkit.runs.listing import RunListing
from ckptkit.runs.marks import take_run_lock
from ckptkit.runs.push_journal import StepPush, open_journal
from ckptkit.runs.steps import RunStep
from tests.made_up_runs import save_step, save_stock_step


def by_name(listing: RunListing) -> dict[str, RunStep]:
    return {step.name: step for step in listing.steps}


def test_steps_come_in_order_with_size_metrics_and_who_saved_them(tmp_path: Path) -> None:
    save_step(tmp_path, 1000, metrics={"loss": 0.5}, save_number=2)
    save_step(tmp_path, 9, layout="dcp")
    listing = ckptkit.list_run(tmp_path)
    assert [step.step for step in listing.steps] == [9, 1000]
    newest = listing.steps[1]
    assert newest.complete
    assert (newest.metrics, newest.save_number, newest.writer) == ({"loss": 0.5}, 2, "ckptkit")
    files = [path for path in (tmp_path / "checkpoint-1000").rglob("*") if path.is_file()]
    assert newest.size_bytes == sum(path.stat().st_size for path in files)
    assert newest.modified == max(path.stat().st_mtime for path in files)


def test_an_unfinished_step_tells_what_it_lacks(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
    (tmp_path / "checkpoint-1" / MANIFEST_NAME).unlink()
    shard = next((tmp_path / "checkpoint-2").rglob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    next((tmp_path / "checkpoint-3").rglob("*.distcp")).unlink()
    found = by_name(ckptkit.list_run(tmp_path))
    assert "written last" in found["checkpoint-1"].problem
    assert f"{shard.name}" in found["checkpoint-2"].problem
    assert "is missing" in found["checkpoint-3"].problem
    assert found["checkpoint-4"].complete


def test_steps_of_the_stock_trainer_are_listed_with_what_their_evaluation_found(
    tmp_path: Path,
) -> None:
    save_stock_step(tmp_path, 2, eval_loss=0.75, loss=1.0)
    save_stock_step(tmp_path, 4, eval_loss=0.5, best="checkpoint-2")
    (save_stock_step(tmp_path, 6) / "trainer_state.json").unlink()
    listing = ckptkit.list_run(tmp_path)
    found = by_name(listing)
    assert found["checkpoint-2"].metrics == {"eval_loss": 0.75}
    assert found["checkpoint-2"].writer == "Transformers Trainer"
    assert "trainer_state.json" in found["checkpoint-6"].problem
    assert listing.best == {"checkpoint-2"}


@pytest.mark.parametrize(
    ("file", "framework"),
    [("checkpoint-is-incomplete.txt", "the Trainer"), (".incomplete", "nemo-automodel")],
)
def test_a_step_that_its_framework_marks_as_unfinished_is_not_complete(
    file: str, framework: str, tmp_path: Path
) -> None:
    save_stock_step(tmp_path, 2)
    (save_stock_step(tmp_path, 4) / file).touch()
    found = by_name(ckptkit.list_run(tmp_path))
    assert found["checkpoint-2"].complete
    assert found["checkpoint-4"].problem == f"{framework} has not finished it"


def test_files_that_steps_share_are_counted_once_in_the_sum(tmp_path: Path) -> None:
    first, second = save_step(tmp_path, 1), save_step(tmp_path, 2)
    shard = next(first.rglob("*.distcp"))
    other = second / shard.relative_to(first)
    other.unlink()
    os.link(shard, other)
    listing = ckptkit.list_run(tmp_path)
    alone = [step.size_bytes for step in listing.steps]
    assert alone[0] == alone[1]
    assert listing.size_bytes == sum(alone) - shard.stat().st_size


def test_a_job_that_holds_the_run_is_seen(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    assert ckptkit.list_run(tmp_path).live is False
    lock = take_run_lock(tmp_path)
    assert lock is not None
    assert ckptkit.list_run(tmp_path).live is True
    lock.close()


def test_what_a_watch_has_pushed_is_told_with_the_step(tmp_path: Path) -> None:
    save_step(tmp_path / "run", 1)
    save_step(tmp_path / "run", 2)
    journal, _ = open_journal(tmp_path / "state", "org/name", "this run")
    journal.note(StepPush(1, "d1", "pushed", "org/name", commit="c1", tag="step-1"))
    journal.note(StepPush(2, "d2", "pushing", "org/name"))
    listing = ckptkit.list_run(tmp_path / "run", state=tmp_path / "state")
    pushed = [step["pushed"] for step in listing.to_json(now=0)["steps"]]
    assert [one["tag"] for one in pushed[0]] == ["step-1"]
    assert pushed[1] == []
    assert not any(step.pushes for step in ckptkit.list_run(tmp_path / "run").steps)


def test_a_link_is_named_and_not_followed(tmp_path: Path) -> None:
    save_step(tmp_path / "run", 1)
    save_step(tmp_path / "elsewhere", 2)
    (tmp_path / "run" / "checkpoint-2").symlink_to(tmp_path / "elsewhere" / "checkpoint-2")
    listing = ckptkit.list_run(tmp_path / "run")
    assert [step.step for step in listing.steps] == [1]
    assert "checkpoint-2" in listing.notes[0]


def test_a_node_s_own_copy_is_no_complete_step(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    document = json.loads((folder / MANIFEST_NAME).read_bytes())
    document["source"]["node_ranks"] = [0, 1]
    document.pop("checksum", None)
    (folder / MANIFEST_NAME).write_text(json.dumps(document))
    (step,) = ckptkit.list_run(tmp_path).steps
    assert "0, 1" in step.problem


def test_a_step_that_is_removed_while_files_are_listed_has_none(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    listed = usage._list_local(tmp_path)
    first = next(listed)
    (gone,) = {"checkpoint-1", "checkpoint-2"} - {first.path.split("/")[0]}
    shutil.rmtree(tmp_path / gone)
    assert {file.path.split("/")[0] for file in listed} <= {first.path.split("/")[0]}


def test_where_no_step_lies_the_error_tells_what_does(tmp_path: Path) -> None:
    save_step(tmp_path / "one/deeper", 1)
    assert len(ckptkit.list_run(tmp_path).steps) == 1
    save_step(tmp_path / "other", 1)
    with pytest.raises(AmbiguousSourceError, match="holds 2 runs: one/deeper, other"):
        ckptkit.list_run(tmp_path)
    with pytest.raises(NotACheckpointError) as of_step:
        ckptkit.list_run(tmp_path / "one/deeper/checkpoint-1")
    assert "directory above" in of_step.value.hint
    with pytest.raises(NotACheckpointError):
        ckptkit.list_run(tmp_path / "nothing")


def test_hidden_folders_and_others_are_no_steps(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / ".checkpoint-2.ckptkit-0123456789abcdef")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "final")
    assert [step.name for step in ckptkit.list_run(tmp_path).steps] == ["checkpoint-1"]
