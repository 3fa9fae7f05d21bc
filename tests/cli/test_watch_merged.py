"""`ckptkit watch --as merged` of steps that hold their base, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ckptkit_cli.main import main
from tests.cli.test_watch import add

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    add(run, 1)
    return run


def _watch(run: Path, *words: str) -> int:
    into = run.with_name("versions")
    return main(["watch", str(run), "--into", str(into), "--once", *words])


@pytest.mark.parametrize(
    "options", [[], ["--dtype", "bfloat16", "--match-peft", "--max-shard-size", "4KB"]]
)
def test_a_step_that_holds_its_base_is_merged_as_by_adapter_merge(
    run: Path, tmp_path: Path, options: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert _watch(run, "--as", "merged", *options) == 0
    out, version = tmp_path / "merged", tmp_path / "versions/weight_v000001"
    assert main(["adapter", "merge", str(run / "checkpoint-1"), str(out), *options]) == 0
    weights = sorted(path.name for path in out.glob("*.safetensors"))
    for name in (*weights, "config.json"):
        assert (version / name).read_bytes() == (out / name).read_bytes()
    truth = load_file(FIXTURES / "peft_trl_fsdp2_ckptkit/merged_truth.safetensors")
    assert {name for file in weights for name in load_file(version / file)} == truth.keys()
    assert (len(weights) > 1) is bool(options)
    # In a directory it is the same, and is known again without the journal.
    for state in ("one", "two"):
        words = ["--as", "merged", "--once", "--state", str(tmp_path / state), *options]
        assert main(["watch", str(run), "--to-dir", str(tmp_path / "models"), *words]) == 0
    assert "was pushed before, as checkpoint-1" in capfd.readouterr().out
    for name in (*weights, "config.json"):
        assert (tmp_path / "models/checkpoint-1" / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ["--as", "merged", "--strip-prefix", "x."],
        ["--as", "merged", "--config", "x"],
        ["--as", "model", "--match-peft"],
        ["--qlora-base", "original"],
        ["--as", "model", "--adapter", "default"],
    ],
)
def test_options_of_other_outputs_are_refused(words: list[str], run: Path) -> None:
    assert _watch(run, *words) == 2
    assert not run.with_name("versions").exists()


def test_a_step_without_an_adapter_is_given_up_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "peft_trl_fsdp2_ckptkit/base", run / "checkpoint-1")
    assert _watch(run, "--as", "merged", "--json") == 4
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    failed = next(event for event in events if event["event"] == "failed")
    assert failed["step"] == 1
    assert "adapter" in failed["error"]["message"]
