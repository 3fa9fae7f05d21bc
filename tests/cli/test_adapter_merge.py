"""`ckptkit adapter merge` as a shell sees it: what it writes, shows, and refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.command_line import Result, run_command

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASE = FIXTURES / "peft_fsdp2"
BASE = CASE / "base"
TWO = FIXTURES / "peft_checkpointer"
QLORA = FIXTURES / "peft_qlora_fsdp2"
PREFIX = "base_model.model.model.layers.0.self_attn"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
FLAGS, NONE = ("--adapter", "--with"), ("=0.5", "")
Arrays = dict[str, NDArray[Any]]
Config = dict[str, Any]


def _adapter(
    folder: Path, change: Callable[[Arrays, Config], None] = lambda _tensors, _config: None
) -> Path:
    """Writes a PEFT folder, with whatever a test does to it."""
    tensors = load_file(CASE / "adapter_truth.safetensors")
    config = json.loads((CASE / "adapter_config.json").read_text())
    change(tensors, config)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _base(folder: Path, change: Mapping[str, Any] | None = None, *, widen: int = 0) -> Path:
    """Copies the base, with changes to its configuration or to the width of its layers."""
    shutil.copytree(BASE, folder)
    config = json.loads((BASE / "config.json").read_text()) | dict(change or {})
    (folder / "config.json").write_text(json.dumps(config))
    if widen:
        tensors = load_file(BASE / "model.safetensors")
        tensors[Q_PROJ] = np.zeros((16 + widen, 16), np.float32)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(*words: object, status: int = 0) -> Result:
    done = run_command("adapter", "merge", *words)
    assert done.returncode == status, done.stderr
    return done


def refusal(*words: object, status: int = 4) -> str:
    return " ".join(run(*words, status=status).stderr.split())


def test_an_adapter_and_its_base_become_a_model(tmp_path: Path) -> None:
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    found = json.loads(run(adapter, out, "--base", BASE, "--json").stdout)
    expected = load_file(CASE / "merged_truth.safetensors")
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == expected.keys() - {"lm_head.weight"}
    for name, array in merged.items():
        np.testing.assert_array_equal(array, expected[name])
    assert found["kind"] == "model"
    assert {layer["rank"] for layer in found["layers"]} == {2, 3, 4}
    assert {layer["base"] for layer in found["layers"]} == {"kept"}
    source = json.loads((out / "ckptkit.json").read_text())["source"]
    assert source["adapters"][0]["digest"]
    assert source["base"]["path"] == str(BASE)
    assert run_command("verify", out).returncode == run_command("inspect", out).returncode == 0


def test_the_tokenizer_is_that_of_the_run_and_the_rest_that_of_the_base(tmp_path: Path) -> None:
    adapter, base, out = _adapter(tmp_path / "adapter"), _base(tmp_path / "base"), tmp_path / "out"
    for folder in (adapter, base):
        (folder / "tokenizer.json").write_text(json.dumps({"of": folder.name}))
    for name in ("generation_config.json", "added_tokens.json"):  # the latter of another tokenizer
        (base / name).write_text(json.dumps({"of": "base"}))
    run(adapter, out, "--max-shard-size", "4KB", "--base", base)
    found = {
        name: json.loads((out / name).read_text())["of"]
        for name in ("tokenizer.json", "generation_config.json")
    }
    assert found == {"tokenizer.json": "adapter", "generation_config.json": "base"}
    assert not (out / "added_tokens.json").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index) == [n for f in sorted(set(index.values())) for n in load_file(out / f)]
    assert run_command("verify", out).returncode == 0


def test_a_checkpoint_that_describes_itself_needs_no_option(tmp_path: Path) -> None:
    source, out = FIXTURES / "peft_trl_fsdp2_ckptkit", tmp_path / "out"
    run(source / "checkpoint", out)
    merged = load_file(out / "model.safetensors")
    for name, array in load_file(source / "merged_truth.safetensors").items():
        if name in merged:
            np.testing.assert_array_equal(merged[name], array)
    assert (out / "config.json").is_file()


def test_a_dry_run_and_a_report_show_each_layer(tmp_path: Path) -> None:
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    words = (adapter, out, "--base", BASE, "--report")
    assert Q_PROJ in run(*words, "--dry-run").stdout
    assert not out.exists()
    page = run(*words).stdout
    assert Q_PROJ in page
    assert "%" in page


def test_adapters_of_one_checkpoint_are_merged_in_the_order_given(tmp_path: Path) -> None:
    source, out = TWO / "checkpoint", tmp_path / "out"
    assert "'second'" in refusal(source, out)
    run(source, out, "--adapter", "default", "--adapter", "second=1.0")
    merged = load_file(out / "model.safetensors")
    for name, array in load_file(TWO / "merged_all_truth.safetensors").items():
        np.testing.assert_array_equal(merged[name], array)


@pytest.mark.parametrize(
    ("chosen", "status", "said"),
    [
        (["--adapter", "second", "--adapter", "second=0.5"], 2, "a weight of 2"),
        (["--adapter", "second", "--with", "SAME"], 4, "with --adapter"),
        (["--adapter", "second", "--with", "OTHER"], 4, "adapter extract"),
    ],
)
def test_one_adapter_named_twice_or_not_at_all_is_refused(
    chosen: list[str], status: int, said: str, tmp_path: Path
) -> None:
    source = TWO / "checkpoint"
    places = {"SAME": source, "OTHER": shutil.copytree(source, tmp_path / "other")}
    words = [places.get(word, word) for word in chosen]
    assert said in refusal(source, tmp_path / "out", *words, status=status)


def test_another_adapter_is_merged_with_its_weight(tmp_path: Path) -> None:
    first, second = _adapter(tmp_path / "first"), _adapter(tmp_path / "second=1")
    run(first, tmp_path / "out", "--base", BASE, "--with", f"{second}=-1")
    merged, base = (load_file(p / "model.safetensors") for p in (tmp_path / "out", BASE))
    for name, array in merged.items():
        np.testing.assert_allclose(array, base[name], atol=1e-6)


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        *(("--adapter", f"default={weight}", "") for weight in ("nan", "0", "many")),
        *((flag, text, f"{flag}: {text!r} names no adapter") for flag in FLAGS for text in NONE),
    ],
)
def test_a_weight_that_is_none_or_of_nothing_is_wrong_usage(
    option: str, text: str, said: str, tmp_path: Path
) -> None:
    adapter = _adapter(tmp_path / "adapter")
    assert said in refusal(adapter, tmp_path / "out", "--base", BASE, option, text, status=2)


def _with_a_target_too_few(_tensors: Arrays, config: Config) -> None:
    config["target_modules"] = [name for name in config["target_modules"] if "q_proj" not in name]


def _with_a_product_too_large(tensors: Arrays, _config: Config) -> None:
    for part in ("lora_A", "lora_B"):
        tensors[f"{PREFIX}.q_proj.{part}.weight"][1, 1] = 3e38


def _with_a_scaling_too_large(_tensors: Arrays, config: Config) -> None:
    config |= {"lora_alpha": 1e308, "alpha_pattern": {}}


def _of_a_layer_that_the_base_lacks(tensors: Arrays, config: Config) -> None:
    for part in ("lora_A", "lora_B"):
        name = f"{PREFIX}.q_proj.{part}.weight"
        tensors[name.replace("layers.0", "layers.7")] = tensors[name]
    config["target_modules"].append("model.layers.7.self_attn.q_proj")
    config["rank_pattern"] = {"q_proj": 2, "layers.0.mlp.up_proj": 3}


def _started_in_the_base(_tensors: Arrays, config: Config) -> None:
    config["init_lora_weights"] = "pissa_niter_4"


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (_with_a_target_too_few, 3, "q_proj"),
        (_with_a_product_too_large, 4, "does not fit float32"),
        (_with_a_scaling_too_large, 4, "does not fit float32"),
        (_of_a_layer_that_the_base_lacks, 4, "layers.7"),
        (_started_in_the_base, 4, "pissa_niter_4"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    change: Callable[[Arrays, Config], None], status: int, said: str, tmp_path: Path
) -> None:
    adapter, out = _adapter(tmp_path / "adapter", change), tmp_path / "out"
    assert said in refusal(adapter, out, "--base", BASE, status=status)
    assert not out.exists()


def _quantized(method: str) -> Callable[[Path], Path]:
    return lambda folder: _base(folder, {"quantization_config": {"quant_method": method}})


@pytest.mark.parametrize(
    ("make_base", "words", "status", "said"),
    [
        (lambda folder: _base(folder, widen=2), [], 4, "[18, 16]"),
        (lambda folder: _base(folder, widen=2), ["--allow-other-base"], 4, "[18, 16]"),
        *((_quantized(method), [], 3, method) for method in ("gptq", "awq", "fp8")),
        (lambda _: CASE / "checkpoint", [], 4, "contains an adapter"),
        (None, [], 4, "--base"),
        (lambda _: "someone/model", [], 7, "--base someone/model"),
        (lambda _: "someone/model", [], 7, "hf download"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(
    make_base: Callable[[Path], object] | None,
    words: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where no Hub answers
    base = [] if make_base is None else ["--base", make_base(tmp_path / "base")]
    adapter = _adapter(tmp_path / "adapter")
    assert said in refusal(adapter, tmp_path / "out", *base, *words, status=status)


def test_a_base_of_another_commit_is_refused_unless_allowed(tmp_path: Path) -> None:
    def recorded(_tensors: Arrays, config: Config) -> None:
        config |= {"base_model_name_or_path": "some/model", "revision": "a" * 40}

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("b" * 40)
    shutil.copytree(BASE, snapshot)
    words = (_adapter(tmp_path / "adapter", recorded), tmp_path / "out", "--base", snapshot)
    assert "b" * 40 in refusal(*words)
    assert "another base" in run(*words, "--allow-other-base").stderr


def test_a_base_that_differs_from_the_recorded_folder_is_refused(tmp_path: Path) -> None:
    def recorded(_tensors: Arrays, config: Config) -> None:
        config["base_model_name_or_path"] = str(_base(tmp_path / "recorded"))

    base = shutil.copytree(BASE, tmp_path / "b")
    words = (_adapter(tmp_path / "adapter", recorded), tmp_path / "out", "--base", base)
    assert "proves" not in run(*words).stderr
    tensors = load_file(BASE / "model.safetensors")
    save_file(tensors | {Q_PROJ: -tensors[Q_PROJ]}, base / "model.safetensors")
    assert Q_PROJ in refusal(*words, "--overwrite")
    shutil.rmtree(tmp_path / "recorded")
    assert "proves" in run(*words, "--overwrite").stderr


def test_a_base_with_other_weights_than_those_saved_is_refused(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    source = ("--adapter-config", CASE / "adapter_config.json", "--base")
    words = (CASE / "checkpoint", tmp_path / "out", *source)
    assert "model.norm.weight" in refusal(*words, base)
    run(*words, base, "--allow-other-base")
    run(*words, BASE, "--overwrite")


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    assert "holds nothing that PEFT trained" in refusal(BASE, tmp_path / "out")


def test_two_adapters_that_replace_one_module_are_refused(tmp_path: Path) -> None:
    def with_norm(tensors: Arrays, config: Config) -> None:
        tensors["base_model.model.model.norm.weight"] = np.ones(16, np.float32)
        config["modules_to_save"] = ["model.norm"]

    first, second = (_adapter(tmp_path / name, with_norm) for name in ("first", "second"))
    words = (first, tmp_path / "out", "--base", BASE, "--with", second)
    assert "model.norm.weight" in refusal(*words)


def test_what_was_quantized_is_unpacked_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--adapter-config", QLORA / "adapter_config.json", "--base", QLORA / "base")
    for words, base in (((), "dequantized"), (("--qlora-base", "original"), "original")):
        done = run(QLORA / "checkpoint", out, *given, "--json", "--overwrite", *words)
        assert {layer["base"] for layer in json.loads(done.stdout)["layers"]} == {base}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    names = json.loads((out / "ckptkit.json").read_text())["tensors"]
    assert not [name for name in names if "absmax" in name or "quant" in name]
