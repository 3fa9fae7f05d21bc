"""A TRL run of two ranks watched as merged models, and read with its final model in it."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

import ckptkit
from ckptkit_cli.main import main
from tests.hub_models import running_hub
from tests.hub_server import TOKEN, HubServer, git_blob_id

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
HERE = Path(__file__).parent
SCRIPT = HERE / "merged_watch_run.py"
KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
REPO = "org/merged"
Ranks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=KINDS)
def folder(
    request: pytest.FixtureRequest, run_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE.parents[1]))
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("HF_HUB_OFFLINE", "1")
        folder = tmp_path_factory.mktemp("trl")
        run_ranks(SCRIPT, 2, folder, request.param)
        yield folder


@pytest.fixture(scope="module")
def merged(folder: Path) -> dict[int, dict[str, bytes]]:
    """The files that `adapter merge` writes of each step."""
    found = {}
    for step in (2, 4):
        out = folder / f"merged-{step}"
        words = [str(folder / f"run/checkpoint-{step}"), str(out), "--base", str(folder / "base")]
        assert main(["adapter", "merge", *words]) == 0
        found[step] = _files(out)
    assert found[2]["model.safetensors"] != found[4]["model.safetensors"]
    return found


def _files(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return {
        name: data
        for name, data in files.items()
        if name not in {"ckptkit.json", "README.md", ".gitattributes"}
    }


@pytest.mark.parametrize("every", ["1", "5"])
def test_versions_are_the_merged_model_of_each_step(
    folder: Path, merged: dict[int, dict[str, bytes]], tmp_path: Path, every: str
) -> None:
    into = tmp_path / "versions"
    words = ["--into", str(into), "--as", "merged", "--base", str(folder / "base"), "--once"]
    words += ["--state", str(tmp_path / "state"), "--delta", every]
    assert main(["watch", str(folder / "run"), *words]) == 0
    assert _files(into / "weight_v000001") == merged[2]
    second = into / "weight_v000002"
    if every != "1":
        ckptkit.apply_delta(into / "weight_v000001", second, tmp_path / "applied")
        second = tmp_path / "applied"
    assert _files(second)["model.safetensors"] == merged[4]["model.safetensors"]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_each_step_is_a_commit_with_its_merged_model(
    folder: Path,
    merged: dict[int, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_hub(xet=False) as hub:
        _use(hub, monkeypatch)
        words = ["--push", REPO, "--as", "merged", "--base", str(folder / "base"), "--once"]
        words += ["--state", str(tmp_path / "state")]
        assert main(["watch", str(folder / "run"), *words]) == 0
        for step, files in merged.items():
            pushed = hub.repo(REPO).files(f"step-{step}")
            for name, data in files.items():
                assert pushed[name].oid in {git_blob_id(data), hashlib.sha256(data).hexdigest()}
            assert [name for name in pushed if name.startswith("adapter")] == []


def _use(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def test_what_watch_proposes_for_a_step_of_peft_works(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["watch", str(folder / "run"), "--once", "--state", str(tmp_path / "state")]
    words += ["--into", str(tmp_path / "versions")]
    assert main([*words, "--as", "model", "--json"]) == 4
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    hints = [event["error"]["hint"] for event in events if event["event"] == "failed"]
    assert len(hints) == 2
    assert all("pass --as merged" in hint and "--base MODEL" in hint for hint in hints)
    assert not any(".ckptkit" in hint or str(tmp_path) in hint for hint in hints)
    assert main([*words, "--as", "merged", "--base", str(folder / "base")]) == 0


def test_commands_take_the_newest_step_of_a_run_with_its_final_model(
    folder: Path, merged: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    run, base = str(folder / "run"), str(folder / "base")
    found = ckptkit.inspect(run)
    assert found.step == 4
    assert found.steps == ("checkpoint-2", "checkpoint-4")
    assert list(found.finals) == ["."]
    assert ckptkit.verify(run).ok
    assert main(["adapter", "extract", run, str(tmp_path / "adapter")]) == 0
    assert main(["adapter", "merge", run, str(tmp_path / "merged"), "--base", base]) == 0
    assert _files(tmp_path / "merged") == merged[4]
    final = tmp_path / "final"
    assert main(["adapter", "merge", run, str(final), "--base", base, "--select", "."]) == 0
    ours = load_file(final / "model.safetensors")
    newest = load_file(tmp_path / "merged/model.safetensors")
    assert ours.keys() == newest.keys()
    assert all(ours[name].equal(newest[name]) for name in ours)  # nothing was trained in between
