"""`ckptkit push` and `ckptkit pull` as a shell sees them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptkit_cli.main import main
from tests.command_line import run_command
from tests.hub_models import consolidated
from tests.hub_server import TOKEN, HubServer

ROOT = Path(__file__).parents[2]
XET = True
SHARDED = ROOT / "fixtures/fsdp2_plain/checkpoint"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return consolidated(tmp_path_factory.mktemp("model"))


def test_the_environment_names_hub_and_token_and_the_token_is_nowhere(
    hub: HubServer, model: Path
) -> None:
    hub.fail("POST .*/commit/", ["lost", 429], {"Retry-After": "0"})
    pushed = run_command("push", model, "me/model", "--tag", "step-30", "--json", **hub.environment)
    assert pushed.returncode == 0, pushed.stderr
    document = json.loads(pushed.stdout)
    assert document["tag"] == "step-30"
    assert hub.repo("me/model").tags == {"step-30": document["commit"]}
    assert TOKEN not in pushed.stdout + pushed.stderr
    assert all(TOKEN not in seen.path for seen in hub.log)


def test_pages_for_people_say_what_went_what_stayed_and_what_was_proven(
    own_hub: HubServer, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "notes.txt").write_text("x")
    own_hub.put("me/model", {"pytorch_model.bin": b"old"})
    assert main(["push", str(model), "me/model", "--dry-run"]) == 0
    page = capfd.readouterr().out
    assert "would upload" in page
    assert "pytorch_model.bin" in page
    assert "notes.txt: not a" in page
    assert main(["push", str(model), "me/model", "--message", "Hello"]) == 0
    assert own_hub.repo("me/model").head().message == "Hello"
    assert "the Hub's hashes are those of the files here" in capfd.readouterr().out
    assert main(["push", str(model), "me/model", "--quiet"]) == 0
    assert capfd.readouterr().out == ""
    assert main(["pull", "me/model", str(tmp_path / "back")]) == 0
    assert "4 tensors against the digests" in capfd.readouterr().out
    assert main(["verify", str(tmp_path / "back")]) == 0
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert main(["diff", str(model), str(tmp_path / "dcp")]) == 0


def test_a_repository_that_is_made_is_told(
    own_hub: HubServer, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(model), "me/new", "--dry-run"]) == 0
    assert "would make   the repository, private" in capfd.readouterr().out
    assert not own_hub.has("me/new")
    assert main(["push", str(model), "me/new", "--public", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["new_repository"] == "public"
    assert not own_hub.repo("me/new").private
    assert main(["push", str(model), "me/new"]) == 0
    assert "the repository, " not in capfd.readouterr().out


def test_hints_name_the_command_that_was_meant(
    own_hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "me/model@step-5", str(tmp_path / "out")]) == 2
    assert "me/model --revision step-5" in capfd.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(SHARDED, run / "checkpoint-2")
    assert main(["push", str(run), "me/model"]) == 4
    assert f"ckptkit consolidate {run} OUT" in capfd.readouterr().err
    assert not own_hub.has("me/model")


def test_each_failure_has_its_exit_status(
    own_hub: HubServer,
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_hub.put("me/model")
    folder = str(model)
    assert main(["push", folder, "no id", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "bad-option"
    assert main(["push", str(tmp_path / "absent"), "me/model"]) == 3
    assert main(["push", folder, "me/model", "--private"]) == 4
    assert main(["push", folder, "other/model"]) == 7
    assert main(["pull", "me/model", folder]) == 5
    assert main(["pull", "me/none", str(tmp_path / "none")]) == 7
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["push", folder, "me/model"]) == 7
    told = "".join(capfd.readouterr())
    assert TOKEN not in told
    assert "offline mode is on" in told
