"""`ckptkit adapter extract` as a shell sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.command_line import Result, run_command

P = "base_model.model.model.layers.0.self_attn."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def run(*arguments: str | Path) -> Result:
    return run_command("adapter", *arguments, COLUMNS="200")


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {"lora_A": (2, 8), "lora_B": (6, 2)}
    return {
        f"{P}{module}.{factor}.weight": rng.standard_normal(shape).astype(np.float32)
        for module in ("q_proj", "v_proj")
        for factor, shape in shapes.items()
    }


def saved(folder: Path, held: Mapping[str, Any], config: Mapping[str, Any] | None) -> Path:
    folder.mkdir(parents=True)
    save_file(dict(held), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path / "checkpoint-5", tensors(), CONFIG)


def test_an_adapter_is_written_with_its_configuration_and_a_table(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run("extract", source, out, "--report")
    assert result.returncode == 0, result.stderr
    assert {path.name for path in out.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "ckptkit.json"),
    }
    written = load_file(out / "adapter_model.safetensors")
    assert all(np.array_equal(written[name], one) for name, one in tensors().items())
    config = json.loads((out / "adapter_config.json").read_text())
    assert config == {**CONFIG, "inference_mode": True}
    assert json.loads((out / "ckptkit.json").read_text())["kind"] == "adapter"
    factors = tensors()
    change = factors[f"{P}q_proj.lora_B.weight"] @ factors[f"{P}q_proj.lora_A.weight"]
    row = next(line for line in result.stdout.splitlines() if ".q_proj " in line).split()
    assert row[:7] == ["model.layers.0.self_attn.q_proj", "linear", "2", "2", "6", "x", "8"]
    assert float(row[7]) == pytest.approx(2 * np.linalg.norm(change), rel=1e-3)
    assert "peft.PeftModel.from_pretrained(model, " in result.stdout


def test_json_has_the_layers_and_nothing_else_goes_to_stdout(source: Path, tmp_path: Path) -> None:
    result = run("extract", source, tmp_path / "out", "--json", "--quiet")
    document = json.loads(result.stdout)
    assert (document["adapter"], document["tensors"]) == ("default", 4)
    assert [layer["module"][-6:] for layer in document["layers"]] == ["q_proj", "v_proj"]
    assert document["layers"][0]["scaling"] == 2.0
    assert document["config"].endswith("adapter_config.json")
    assert not result.stderr


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    result = run("extract", source, tmp_path / "out", "--dry-run", "--report")
    assert result.returncode == 0, result.stderr
    assert "nothing was written" in result.stdout
    assert "model.layers.0.self_attn.v_proj" in result.stdout
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_with_the_options_that_give_it(tmp_path: Path) -> None:
    source = saved(tmp_path / "bare", tensors(), None)
    result = run("extract", source, tmp_path / "out")
    assert result.returncode == 4
    assert "do not show lora_alpha, use_rslora" in result.stderr
    assert "--lora-alpha N, --use-rslora or --no-use-rslora" in result.stderr
    assert not (tmp_path / "out").exists()
    result = run("extract", source, tmp_path / "out", "--lora-alpha", "3", "--use-rslora")
    assert result.returncode == 0, result.stderr
    assert "was inferred from the tensors" in result.stderr
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"], config["r"]) == (3, True, 2)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--lora-alpha", "much"], 2, "'much' is not a number"),
        (["--lora-alpha", "-8"], 2, "would invert the trained change"),
        (["--lora-alpha", "0"], 2, "or remove it"),
        (["--token-indices", "1;2"], 2, "is not a list of tokens"),
        (["--lora-alpha", "8"], 4, "lora_alpha 8 was given against 4"),
        (["--adapter", "poet"], 0, ""),
        (["--adapter-config", "nowhere.json"], 3, "no such file"),
        (["--bogus"], 2, "No such option"),
    ],
)
def test_options_that_make_no_sense_are_told(
    options: list[str], status: int, message: str, source: Path, tmp_path: Path
) -> None:
    result = run("extract", source, tmp_path / "out", *options)
    assert result.returncode == status, result.stderr
    assert message in result.stderr
    assert (tmp_path / "out").exists() == (status == 0)
