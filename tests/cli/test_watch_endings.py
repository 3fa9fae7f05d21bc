"""`ckptkit watch --once` does what it was asked for, or says by its status that it did not."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckptkit.hub.watch.watch import WatchRequest
from ckptkit_cli.main import main
from tests.hub_models import write_model
from tests.hub_server import HubServer
from tests.made_up_runs import save_step, save_stock_step

FIXTURES = Path(__file__).parents[2] / "fixtures"
ADAPTER = FIXTURES / "peft_trl_fsdp2_ckptkit/checkpoint/checkpoint-2"
REPO = "org/run"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def command(run: Path, *words: str) -> list[str]:
    return ["watch", str(run), "--push", REPO, "--once", "--interval", "0.1", *words]


def test_steps_of_others_are_waited_for_until_they_are_settled(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_stock_step(tmp_path, 2)
    save_stock_step(tmp_path, 4)
    assert main(command(tmp_path, "--weights-only")) == 0
    assert sorted(own_hub.repo(REPO).tags) == ["step-2", "step-4"]
    said = capfd.readouterr()
    assert "checkpoint-2, checkpoint-4: written less than a minute ago" in said.err
    save_stock_step(tmp_path, 6)
    assert main(command(tmp_path, "--weights-only", "--json")) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    waiting = [event for event in events if event["event"] == "waiting"]
    assert [event["steps"] for event in waiting] == [["checkpoint-6"]]
    assert "step-6" in own_hub.repo(REPO).tags


def test_a_step_that_goes_on_changing_is_no_success(
    own_hub: HubServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def hurried(**given: Any) -> WatchRequest:
        return WatchRequest(**given, settle_seconds=0.5)

    monkeypatch.setattr("ckptkit.hub.watch.watch.WatchRequest", hurried)
    step, ended = save_stock_step(tmp_path, 2), threading.Event()

    def write() -> None:
        while not ended.wait(0.01):
            (step / "rng_state_0.pth").write_bytes(os.urandom(99))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert main(command(tmp_path)) == 4
    finally:
        ended.set()
        writer.join()
    assert "still changing" in capfd.readouterr().err
    assert not own_hub.has(REPO)


def test_the_run_below_is_taken_and_of_several_none(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ADAPTER, tmp_path / "runs/a/checkpoint-2")
    assert main(command(tmp_path)) == 0
    assert list(own_hub.repo(REPO).tags) == ["step-2"]
    assert f"using the run {tmp_path}/runs/a" in capfd.readouterr().out
    assert main(["ls", str(tmp_path), "--json"]) == 0
    said = capfd.readouterr()
    assert [step["name"] for step in json.loads(said.out)["steps"]] == ["checkpoint-2"]
    assert "using the run" in said.err
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    capfd.readouterr()
    assert main(command(tmp_path / "runs/a/checkpoint-2")) == 3
    assert "is a step, where a run was expected" in capfd.readouterr().err
    shutil.copytree(ADAPTER, tmp_path / "runs/b/checkpoint-2")
    for words in (
        command(tmp_path),
        ["ls", str(tmp_path)],
        ["prune", str(tmp_path), "--keep-last=1"],
    ):
        assert main(words) == 4
        assert "holds 2 runs: runs/a, runs/b" in capfd.readouterr().err
    assert (tmp_path / "runs/a/checkpoint-2").is_dir()


@pytest.mark.parametrize("ending", ["--once", "--until-eof"])
@pytest.mark.parametrize(
    ("there", "named", "said"),
    [
        ("", "", "it holds no step of a run"),
        ("runs/a/b/c/d/checkpoint-2", "", "checkpoint-N folders: {}/runs/a/b/c/d"),
        ("checkpoint-2", "logs", "checkpoint-N folders: {}"),
        ("checkpoint-2", "checkpoint-2/logs", "checkpoint-N folders: {}"),
        ("best/model", "", "below it are best"),
        ("checkpoint-2/model_0", "", "it holds no checkpoint of a known format"),
    ],
)
def test_a_folder_without_a_complete_step_is_no_success_and_says_what_lies_there(
    own_hub: HubServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    there: str,
    named: str,
    said: str,
) -> None:
    run = tmp_path / "run"
    for folder in (there, named):
        (run / folder).mkdir(parents=True, exist_ok=True)
    if there:
        (run / there / "events.out").write_text("no checkpoint")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    words = ["watch", str(run / named), "--push", REPO, ending, "--interval", "0.1"]
    assert main(words) == 3
    printed = capfd.readouterr()
    assert said.format(run) in printed.err
    assert "nothing left to do" not in printed.out
    assert not own_hub.has(REPO)


def test_a_model_that_is_no_step_is_not_pushed_and_named(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "final")
    assert main(command(tmp_path)) == 3
    assert "checkpoints whose names have no step: final" in capfd.readouterr().err
    assert main(command(tmp_path / "final")) == 3
    assert "it is itself a checkpoint or a model" in capfd.readouterr().err
    links = tmp_path / "links"
    links.mkdir()
    (links / "checkpoint-7").symlink_to(tmp_path / "final")
    assert main(command(links)) == 3
    assert "checkpoint-7: links, which are not followed" in capfd.readouterr().err
    assert not own_hub.has(REPO)


def test_of_a_run_whose_steps_were_pushed_and_removed_nothing_is_left(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ADAPTER, tmp_path / "checkpoint-2")
    assert main(command(tmp_path)) == 0
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert main(command(tmp_path)) == 0
    assert "nothing left to do" in capfd.readouterr().out
    assert len(own_hub.repo(REPO).commits) == 1


@pytest.mark.parametrize("option", ["--best", "--keep-best"])
def test_a_metric_that_no_step_has_is_refused_before_anything_is_pushed(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    save_step(tmp_path, 1, metrics={"loss": 1.0, "accuracy": 0.5})
    assert main(command(tmp_path, "--weights-only", option, "eval_loss")) == 4
    error = capfd.readouterr().err
    assert f"{option} eval_loss" in error
    assert "found are accuracy, loss" in error
    assert not own_hub.has(REPO)
    assert main(command(tmp_path, "--weights-only", option, "loss")) == 0


def test_a_model_without_a_configuration_is_no_model(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1)
    assert main(command(tmp_path)) == 4
    said = capfd.readouterr().out
    assert "has a config.json" in said
    assert "--base" in said
    assert not own_hub.has(REPO)
    assert main(command(tmp_path, "--weights-only")) == 0


@pytest.mark.usefixtures("own_hub")
def test_offline_it_ends_soon_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    shutil.copytree(ADAPTER, tmp_path / "checkpoint-2")
    began = time.monotonic()
    assert main(command(tmp_path)) == 7
    assert time.monotonic() - began < 20
    assert "was not reached" in capfd.readouterr().err
    model = write_model(tmp_path / "model")
    began = time.monotonic()
    assert main(["push", str(model), REPO, "--dry-run"]) == 7
    assert time.monotonic() - began < 10
    assert len(capfd.readouterr().err.splitlines()) <= 4


def test_a_name_without_an_owner_needs_a_login(
    own_hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(write_model(tmp_path / "model")), "mymodel"]) == 2
    error = capfd.readouterr().err
    assert "'mymodel' names no owner" in error
    assert "pass OWNER/mymodel, or log in with `hf auth login`" in error
    assert not own_hub.log
