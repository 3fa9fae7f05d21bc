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

from ckptkit_cli.main import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASE = FIXTURES / "peft_fsdp2"
BASE = CASE / "base"
TWO = FIXTURES / "peft_checkpointer"
QLORA = FIXTURES / "peft_qlora_fsdp2"
PREFIX = "base_model.model.model.layers.0.self_attn"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
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


def _base(folder: Path, *, change: Mapping[str, Any] | None = None, widen: int = 0) -> Path:
    """Copies the base, with changes to its configuration or to the width of its layers."""
    shutil.copytree(BASE, folder)
    config = json.loads((BASE / "config.json").read_text()) | dict(change or {})
    (folder / "config.json").write_text(json.dumps(config))
    if widen:
        tensors = load_file(BASE / "model.safetensors")
        tensors[Q_PROJ] = np.zeros((16 + widen, 16), np.float32)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _names_in(folder: Path) -> list[str]:
    return list(json.loads((folder / "ckptkit.json").read_text())["tensors"])


def _merge(adapter: Path, out: Path, *options: str, base: Path | str = BASE) -> int:
    return main(["adapter", "merge", str(adapter), str(out), "--base", str(base), *options])


def _document(capfd: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capfd.readouterr().out)


def _refusal(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


def test_an_adapter_and_its_base_become_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    assert _merge(adapter, out, "--json") == 0
    found = _document(capfd)
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
    assert main(["verify", str(out)]) == 0
    assert main(["inspect", str(out)]) == 0


def test_the_tokenizer_is_that_of_the_run_and_the_rest_that_of_the_base(tmp_path: Path) -> None:
    adapter, base, out = _adapter(tmp_path / "adapter"), _base(tmp_path / "base"), tmp_path / "out"
    for folder in (adapter, base):
        (folder / "tokenizer.json").write_text(json.dumps({"of": folder.name}))
    for name in ("generation_config.json", "added_tokens.json"):  # the latter of another tokenizer
        (base / name).write_text(json.dumps({"of": "base"}))
    assert _merge(adapter, out, "--max-shard-size", "4KB", base=base) == 0
    found = {
        name: json.loads((out / name).read_text())["of"]
        for name in ("tokenizer.json", "generation_config.json")
    }
    assert found == {"tokenizer.json": "adapter", "generation_config.json": "base"}
    assert not (out / "added_tokens.json").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index) == [n for f in sorted(set(index.values())) for n in load_file(out / f)]
    assert main(["verify", str(out)]) == 0


def test_a_checkpoint_that_describes_itself_needs_no_option(tmp_path: Path) -> None:
    source, out = FIXTURES / "peft_trl_fsdp2_ckptkit", tmp_path / "out"
    assert main(["adapter", "merge", str(source / "checkpoint"), str(out)]) == 0
    merged = load_file(out / "model.safetensors")
    for name, array in load_file(source / "merged_truth.safetensors").items():
        if name in merged:
            np.testing.assert_array_equal(merged[name], array)
    assert (out / "config.json").is_file()


def test_a_dry_run_and_a_report_show_each_layer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    assert _merge(adapter, out, "--report", "--dry-run") == 0
    assert not out.exists()
    assert Q_PROJ in capfd.readouterr().out
    assert _merge(adapter, out, "--report") == 0
    page = capfd.readouterr().out
    assert Q_PROJ in page
    assert "%" in page


def test_adapters_of_one_checkpoint_are_merged_in_the_order_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = TWO / "checkpoint", tmp_path / "out"
    assert main(["adapter", "merge", str(source), str(out)]) == 4
    assert "'second'" in _refusal(capfd)
    chosen = ["--adapter", "default", "--adapter", "second=1.0"]
    assert main(["adapter", "merge", str(source), str(out), *chosen]) == 0
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
    chosen: list[str], status: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = str(TWO / "checkpoint")
    shutil.copytree(source, tmp_path / "other")
    places = {"SAME": source, "OTHER": str(tmp_path / "other")}
    words = [places.get(word, word) for word in chosen]
    assert main(["adapter", "merge", source, str(tmp_path / "out"), *words]) == status
    assert said in " ".join(_refusal(capfd).split())


def test_another_adapter_is_merged_with_its_weight(tmp_path: Path) -> None:
    first, second = _adapter(tmp_path / "first"), _adapter(tmp_path / "second=1")
    assert _merge(first, tmp_path / "out", "--with", f"{second}=-1") == 0
    merged, base = (load_file(p / "model.safetensors") for p in (tmp_path / "out", BASE))
    for name, array in merged.items():
        np.testing.assert_allclose(array, base[name], atol=1e-6)


@pytest.mark.parametrize("weight", ["nan", "0", "many"])
def test_a_weight_that_is_none_is_wrong_usage(tmp_path: Path, weight: str) -> None:
    adapter = _adapter(tmp_path / "adapter")
    assert _merge(adapter, tmp_path / "out", "--adapter", f"default={weight}") == 2


@pytest.mark.parametrize("option", ["--adapter", "--with"])
@pytest.mark.parametrize("text", ["=0.5", ""])
def test_a_weight_of_nothing_is_told_with_its_option(
    option: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = _adapter(tmp_path / "adapter")
    assert _merge(adapter, tmp_path / "out", option, text) == 2
    assert f"{option}: {text!r} names no adapter" in capfd.readouterr().err


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
    change: Callable[[Arrays, Config], None],
    status: int,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    adapter, out = _adapter(tmp_path / "adapter", change), tmp_path / "out"
    assert _merge(adapter, out) == status
    assert said in " ".join(_refusal(capfd).split())
    assert not out.exists()


def test_shapes_that_do_not_fit_the_base_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter, base = _adapter(tmp_path / "adapter"), _base(tmp_path / "wide", widen=2)
    for further in ([], ["--allow-other-base"]):
        assert _merge(adapter, tmp_path / "out", *further, base=base) == 4
        assert "[18, 16]" in _refusal(capfd)


def test_a_base_of_another_commit_is_refused_unless_allowed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def recorded(_tensors: Arrays, config: Config) -> None:
        config |= {"base_model_name_or_path": "some/model", "revision": "a" * 40}

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("b" * 40)
    shutil.copytree(BASE, snapshot)
    adapter, out = _adapter(tmp_path / "adapter", recorded), tmp_path / "out"
    assert _merge(adapter, out, base=snapshot) == 4
    assert "b" * 40 in _refusal(capfd)
    assert _merge(adapter, out, "--allow-other-base", base=snapshot) == 0
    assert "another base" in _refusal(capfd)


def test_a_base_that_differs_from_the_recorded_folder_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def recorded(_tensors: Arrays, config: Config) -> None:
        config["base_model_name_or_path"] = str(_base(tmp_path / "recorded"))

    adapter, out, base = _adapter(tmp_path / "adapter", recorded), tmp_path / "out", tmp_path / "b"
    shutil.copytree(BASE, base)
    assert _merge(adapter, out, base=base) == 0
    assert "proves" not in _refusal(capfd)
    tensors = load_file(BASE / "model.safetensors")
    save_file(tensors | {Q_PROJ: -tensors[Q_PROJ]}, base / "model.safetensors")
    assert _merge(adapter, out, "--overwrite", base=base) == 4
    assert Q_PROJ in _refusal(capfd)
    shutil.rmtree(tmp_path / "recorded")
    assert _merge(adapter, out, "--overwrite", base=base) == 0
    assert "proves" in _refusal(capfd)


def test_a_base_with_other_weights_than_those_saved_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = _base(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    source = ["--adapter-config", str(CASE / "adapter_config.json"), "--base"]
    arguments = ["adapter", "merge", str(CASE / "checkpoint"), str(tmp_path / "out"), *source]
    assert main([*arguments, str(base)]) == 4
    assert "model.norm.weight" in _refusal(capfd)
    assert main([*arguments, str(base), "--allow-other-base"]) == 0
    assert main([*arguments, str(BASE), "--overwrite"]) == 0


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_a_base_in_a_quantization_that_is_not_modelled_is_named(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = _base(tmp_path / "base", change={"quantization_config": {"quant_method": method}})
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    assert _merge(adapter, out, base=base) == 3
    assert method in _refusal(capfd)


def test_a_base_with_an_adapter_in_it_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    base = str(CASE / "checkpoint")
    assert _merge(adapter, out, base=base) == 4
    assert "contains an adapter" in _refusal(capfd)


def test_an_adapter_alone_needs_a_base(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapter = _adapter(tmp_path / "adapter")
    assert main(["adapter", "merge", str(adapter), str(tmp_path / "out")]) == 4
    assert "--base" in _refusal(capfd)


def test_a_base_that_is_no_folder_here_is_named_with_its_option(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where no Hub answers
    adapter, out = _adapter(tmp_path / "adapter"), tmp_path / "out"
    assert main(["adapter", "merge", str(adapter), str(out), "--base", "someone/model"]) == 7
    refusal = _refusal(capfd)
    assert "--base someone/model" in refusal
    assert "hf download" in refusal


def test_a_model_without_an_adapter_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapter", "merge", str(BASE), str(tmp_path / "out")]) in {3, 4}
    assert "adapter" in _refusal(capfd)


def test_two_adapters_that_replace_one_module_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def with_norm(tensors: Arrays, config: Config) -> None:
        tensors["base_model.model.model.norm.weight"] = np.ones(16, np.float32)
        config["modules_to_save"] = ["model.norm"]

    first, second = (_adapter(tmp_path / name, with_norm) for name in ("first", "second"))
    assert _merge(first, tmp_path / "out", "--with", str(second)) == 4
    assert "model.norm.weight" in _refusal(capfd)


def test_what_was_quantized_is_unpacked_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["adapter", "merge", str(QLORA / "checkpoint"), str(out), "--json"]
    given = ["--adapter-config", str(QLORA / "adapter_config.json"), "--base", str(QLORA / "base")]
    assert main([*arguments, *given]) == 0
    layers = _document(capfd)["layers"]
    assert {layer["base"] for layer in layers} == {"dequantized"}
    assert main([*arguments, *given, "--qlora-base", "original", "--overwrite"]) == 0
    assert {layer["base"] for layer in _document(capfd)["layers"]} == {"original"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not [name for name in _names_in(out) if "absmax" in name or "quant" in name]
