"""`inspect` of several checkpoints, or of a run without a whole step, lists what there is."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, NotACheckpointError
from ckptkit_cli.main import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
_FSDP2 = FIXTURES / "accelerate_fsdp2_tied_with_config/checkpoint"
_MODEL = FIXTURES / "hf_tied/checkpoint"
_INDEX = "pytorch_model_fsdp_0/.metadata"
Capture = pytest.CaptureFixture[str]


def _make_run(run: Path, *, whole: tuple[int, ...] = (), cut: tuple[int, ...] = ()) -> Path:
    """Writes steps; those that are cut were stopped before the index was written."""
    for step in (*whole, *cut):
        shutil.copytree(_FSDP2, run / f"checkpoint_{step}")
    for step in cut:
        (run / f"checkpoint_{step}" / _INDEX).unlink()
    return run


def _listed(capfd: Capture, *words: object) -> list[dict[str, Any]]:
    assert main(["inspect", *map(str, words), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["tensors"] == []
    found: list[dict[str, Any]] = document["checkpoints"]
    lacking = {one["select"]: one["problem"] for one in found if one["problem"]}
    assert {p["where"]: p["message"] for p in document["problems"]} == lacking
    for one in found:
        if not one["problem"]:
            assert main(["inspect", str(words[0]), "--select", one["select"], "--json"]) == 0
            chosen = json.loads(capfd.readouterr().out)
            assert chosen["tensors"]
            assert (chosen["checkpoints"], chosen["problems"]) == ([], [])
    return found


def _page(capfd: Capture, *words: object) -> str:
    """Returns the page; the command that it proposes has been run."""
    assert main(["inspect", *map(str, words)]) == 0
    page = capfd.readouterr().out
    for line in page.splitlines():
        if line.startswith("  ckptkit "):
            assert main(shlex.split(line)[1:]) == 0
            capfd.readouterr()
    return page


def test_a_run_without_a_whole_step_is_listed_with_what_each_step_lacks(
    tmp_path: Path, capfd: Capture
) -> None:
    run = _make_run(tmp_path / "run", cut=(5, 10))
    found = _listed(capfd, run)
    assert [(one["select"], one["step"]) for one in found] == [
        ("checkpoint_10", 10),
        ("checkpoint_5", 5),
    ]
    assert all("no '.metadata'" in one["problem"] for one in found)
    page = _page(capfd, run)
    assert "2 checkpoints" in page
    assert "none of them is whole" in page
    with pytest.raises(NotACheckpointError, match="none of 2 steps is complete") as caught:
        ckptkit.consolidate(run, tmp_path / "out")
    assert caught.value.hint == f"see `ckptkit inspect {run}`"


def test_the_only_step_of_a_run_is_listed_if_its_save_did_not_finish(
    tmp_path: Path, capfd: Capture
) -> None:
    run = _make_run(tmp_path / "run", cut=(5,))
    assert [one["select"] for one in _listed(capfd, run)] == ["checkpoint_5"]
    assert "not whole" in _page(capfd, run)


def test_a_final_model_beside_steps_that_are_not_whole_is_listed_and_proposed(
    tmp_path: Path, capfd: Capture
) -> None:
    run = _make_run(tmp_path / "run", cut=(5, 10))
    shutil.copytree(_MODEL, run, dirs_exist_ok=True)
    found = _listed(capfd, run)
    assert [one["select"] for one in found] == ["checkpoint_10", "checkpoint_5", "."]
    assert f"ckptkit inspect {run} --select ." in _page(capfd, run)


@pytest.mark.parametrize("name", ["best", "last", "latest"])
@pytest.mark.quick("best")
def test_a_checkpoint_without_a_number_beside_steps_is_listed_with_them(
    name: str, tmp_path: Path, capfd: Capture
) -> None:
    run = _make_run(tmp_path / "run", whole=(5, 10), cut=(15,))
    shutil.copytree(_FSDP2, run / name)
    found = {one["select"]: bool(one["problem"]) for one in _listed(capfd, run)}
    steps = {"checkpoint_15": True, "checkpoint_10": False, "checkpoint_5": False}
    model = next(label for label in found if label.startswith(name))
    assert found == {**steps, model: False}
    page = _page(capfd, run)
    assert f"ckptkit inspect {run} --select checkpoint_10" in page
    assert f"holds several checkpoints: '{model}', 'checkpoint_10'" in page
    with pytest.raises(AmbiguousSourceError):
        ckptkit.inspect(run)


def test_several_runs_are_listed_step_by_step(tmp_path: Path, capfd: Capture) -> None:
    for name in ("a", "b"):
        _make_run(tmp_path / name, whole=(5, 10))
    found = [one["select"] for one in _listed(capfd, tmp_path)]
    assert found == [f"{run}/checkpoint_{step}" for run in "ab" for step in (10, 5)]
    _page(capfd, tmp_path)


def test_a_selected_run_without_a_whole_step_is_listed(tmp_path: Path, capfd: Capture) -> None:
    _make_run(tmp_path / "a", cut=(5, 10))
    _make_run(tmp_path / "b", whole=(5,))
    found = [one["select"] for one in _listed(capfd, tmp_path, "--select", "a")]
    assert found == ["a/checkpoint_10", "a/checkpoint_5"]


def test_steps_that_are_files_are_listed(tmp_path: Path, capfd: Capture) -> None:
    run = shutil.copytree(FIXTURES / "lightning_trainer_ddp/checkpoint", tmp_path / "run")
    for file in run.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    found = _listed(capfd, run)
    assert {one["select"] for one in found} == {file.name for file in run.iterdir()}
    assert all(one["problem"] for one in found)


def test_a_step_that_is_one_damaged_checkpoint_stays_an_error(
    tmp_path: Path, capfd: Capture
) -> None:
    run = _make_run(tmp_path / "run", cut=(5, 10))
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(_MODEL, tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:50])
    only = tmp_path / "only/checkpoint-5"
    shutil.copytree(broken, only)
    for words in (
        [run / "checkpoint_5"],
        [run, "--select", "checkpoint_5"],
        [run, "--select", "checkpoint_7"],
        [broken],
        [weights],
        [only.parent],
        [tmp_path / "empty"],
        [tmp_path / "nowhere"],
        [run, "--html", tmp_path / "page.html"],
    ):
        assert main(["inspect", *map(str, words)]) in {3, 4}, words
        assert "error[" in capfd.readouterr().err


def test_a_refusal_of_many_checkpoints_names_the_command_that_lists_them(
    tmp_path: Path, capfd: Capture
) -> None:
    for number in range(12):
        _make_run(tmp_path / "all" / f"of {number:03}", whole=(5,))
    assert main(["consolidate", str(tmp_path / "all"), str(tmp_path / "out")]) != 0
    told = capfd.readouterr().err
    (command,) = told.split("`")[1::2]
    assert command == shlex.join(["ckptkit", "inspect", str(tmp_path / "all")])
    assert main(shlex.split(command)[1:]) == 0
    page = capfd.readouterr().out
    assert all(f"of {number:03}/checkpoint_5" in page for number in range(12))
