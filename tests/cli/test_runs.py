"""`ckptkit ls` and `ckptkit prune` as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME
from tests.command_line import run_command as run
from tests.made_up_runs import save_step
from tests.object_store import ObjectStore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def training(tmp_path: Path) -> Path:
    for step in (100, 200, 300):
        save_step(tmp_path / "run", step, metrics={"loss": 1 / step}, save_number=step)
    (tmp_path / "run" / "checkpoint-300" / MANIFEST_NAME).unlink()
    return tmp_path / "run"


def test_ls_shows_a_line_for_each_step_and_why_one_is_not_complete(training: Path) -> None:
    result = run("ls", training)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == [f"{training},", "no", "job", "is", "writing", "to", "it"]
    assert rows[2][:2] == ["checkpoint-100", "complete"]
    assert rows[2][-2:] == ["loss", "0.01"]
    assert rows[4][:2] == ["checkpoint-300", "incomplete"]
    assert "checkpoint-300 is not complete: 'ckptkit.json' is not there" in result.stdout
    assert "3 steps, 2 complete" in result.stdout
    document = json.loads(run("ls", training, "--json").stdout)
    assert [step["complete"] for step in document["steps"]] == [True, True, False]
    assert document["steps"][0]["metrics"] == {"loss": 0.01}
    assert document["steps"][0]["age_seconds"] < 3600


def test_a_run_one_folder_down_is_listed_by_python_as_by_the_command(training: Path) -> None:
    above = ckptkit.list_run(training.parent)
    assert above.location == str(training)
    shown = json.loads(run("ls", training.parent, "--json").stdout)
    assert [step.name for step in above.steps] == [step["name"] for step in shown["steps"]]


def test_prune_shows_the_same_table_in_a_dry_run_and_tells_what_it_freed(training: Path) -> None:
    with ckptkit.open(training / "checkpoint-100"):
        kept = run("prune", training, "--keep-last", "1", "--dry-run")
    assert "checkpoint-100  stays" in kept.stdout
    assert "it is being read" in kept.stdout
    planned = run("prune", training, "--keep-last", "1", "--dry-run", "--json")
    report = json.loads(planned.stdout)
    assert (report["removed"], report["dry_run"]) == ([100], True)
    done = run("prune", training, "--keep-last", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "checkpoint-100  removed" in done.stdout
    assert "1 step removed, 154 KB freed" in done.stdout
    assert not (training / "checkpoint-100").exists()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--keep-every", "many"], 2),
        (["--keep-best", "accuracy"], 4),
    ],
)
def test_a_rule_that_is_none_removes_nothing(training: Path, words: list[str], status: int) -> None:
    result = run("prune", training, *words)
    assert (result.returncode, result.stdout) == (status, "")
    assert len(list(training.iterdir())) == 3


def test_a_run_at_a_url_takes_options_and_shows_none_of_them(
    training: Path, object_store: ObjectStore
) -> None:
    bucket = object_store.bucket("runs-of-the-shell")
    url = bucket.put_tree(training, "run")
    pruned = run("prune", url, "--keep-last", "1", *object_store.arguments())
    assert pruned.returncode == 0
    assert "checkpoint-200  stays" in pruned.stdout
    assert not bucket.keys("run/checkpoint-100/")
    assert object_store.options["secret"] not in pruned.stdout + pruned.stderr
