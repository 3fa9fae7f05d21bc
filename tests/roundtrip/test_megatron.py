"""Checkpoints of real Megatron-Core models beside the weights of all ranks, laid out by hand.

`fixtures/generators/megatron_core.py` made them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, OutputExistsError
from tests.command_line import run_command

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = sorted(path.parent.name for path in FIXTURES.glob("megatron_model_*/config.json"))
LLAMA = FIXTURES / "megatron_model_llama_tp2_pp2"


def equal(out: Path, truth: dict[str, torch.Tensor]) -> bool:
    got = load_file(out / "model.safetensors")
    return got.keys() == truth.keys() and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        for name, tensor in truth.items()
    )


def own_map(path: Path, constant: float) -> Path:
    path.write_text(
        'name = "own"\nextends = "megatron-llama"\nmodel_types = ["llama"]\n\n'
        '[[rule]]\nfrom = "decoder.final_layernorm.weight"\nto = "model.norm.weight"\n'
        f"steps = [{{ add = {constant} }}]\n"
    )
    return path


@pytest.mark.parametrize("model", MODELS)
def test_a_model_becomes_that_of_transformers(model: str, tmp_path: Path) -> None:
    case, out = FIXTURES / model, tmp_path / "out"
    manifest = ckptkit.consolidate(case / "checkpoint", out, base=case)
    assert equal(out, load_file(case / "truth.safetensors"))
    assert any(name.startswith("map megatron-") for name in manifest.versions)
    ckptkit.verify(out)


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_what_was_written(model: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    case, out = FIXTURES / model, tmp_path / "out"
    ckptkit.consolidate(case / "checkpoint", out, base=case)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_slices_write_the_same_model(tmp_path: Path) -> None:
    whole, sliced = tmp_path / "whole", tmp_path / "sliced"
    options = ["--base", LLAMA, "--max-shard-size", "20KB"]
    assert run_command("consolidate", LLAMA / "checkpoint", whole, *options).returncode == 0
    for number in range(3):
        part = ["--slice", f"{number}/3"]
        result = run_command("consolidate", LLAMA / "checkpoint", sliced, *options, *part)
        assert result.returncode == 0, result.stderr
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        assert (sliced / name).read_bytes() == (whole / name).read_bytes()


def test_a_map_of_ones_own_replaces_rules_of_another(tmp_path: Path) -> None:
    own, out = own_map(tmp_path / "own.toml", 0.5), tmp_path / "out"
    ckptkit.consolidate(LLAMA / "checkpoint", out, base=LLAMA, map=own)
    truth = load_file(LLAMA / "truth.safetensors")
    norm = truth["model.norm.weight"]
    truth["model.norm.weight"] = (norm.float() + 0.5).to(norm.dtype)
    assert equal(out, truth)


REFUSED: Mapping[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "no configuration": (None, {}, "no configuration has them"),
    "a family without a map": (
        {"model_type": "bloom"},
        {},
        "no map has names of Megatron-Core for the model type 'bloom'",
    ),
    "a map of another family": (
        {},
        {"map": "megatron-deepseek"},
        "no rule of map 'megatron-deepseek'",
    ),
    "a map that is not there": ({}, {"map": "megatron-lama"}, "is neither a file nor a map"),
    "further layers": ({"num_hidden_layers": 7}, {}, "expected 7 along the axis of 'layer'"),
    "other heads": ({"num_attention_heads": 8}, {}, "linear_qkv.* along axis 0"),
    "a larger vocabulary": ({"vocab_size": 999}, {}, "expected at least 999 along axis 0"),
    "a wider MLP": ({"intermediate_size": 64}, {}, "linear_fc1.*expected 128 along axis 0"),
    "names that are kept": ({}, {"map": "megatron-llama", "names": "live"}, "--names live"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    config, options, message = REFUSED[what]
    base = None
    if config is not None:
        base = tmp_path / "base"
        base.mkdir()
        stored = json.loads((LLAMA / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(stored | config))
    with pytest.raises(CkptkitError, match=message):
        ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", base=base, **options)
    assert not (tmp_path / "out").exists()


def test_a_changed_map_is_another_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = own_map(tmp_path / "own.toml", 0.5)
    ckptkit.consolidate(LLAMA / "checkpoint", out, base=LLAMA, map=own)
    ckptkit.consolidate(LLAMA / "checkpoint", out, base=LLAMA, map=own, if_exists="verify")
    own_map(own, 0.75)
    with pytest.raises(OutputExistsError):
        ckptkit.consolidate(LLAMA / "checkpoint", out, base=LLAMA, map=own, if_exists="verify")


def test_a_checkpoint_for_training_has_both_names_of_a_tied_weight(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptkit.convert(LLAMA / "checkpoint", out, to="dcp", base=LLAMA)
    with ckptkit.open(out) as checkpoint:
        names = set(checkpoint)
    assert names == {*load_file(LLAMA / "truth.safetensors"), "lm_head.weight"}


def test_names_are_kept_where_no_map_is_wanted(tmp_path: Path) -> None:
    ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", map="none")
    assert "decoder.final_layernorm.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_tied_head_that_is_stored_too_is_written_once(tmp_path: Path) -> None:
    truth = load_file(LLAMA / "truth.safetensors")
    case = tmp_path / "case"
    case.mkdir()
    ckptkit.consolidate(LLAMA / "checkpoint", case / "live", map="none")
    held = load_file(case / "live" / "model.safetensors")
    held["output_layer.weight"] = held["embedding.word_embeddings.weight"].clone()
    save_file(held, case / "model.safetensors")
    shutil.rmtree(case / "live")
    config = json.loads((LLAMA / "config.json").read_text())
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    ckptkit.consolidate(case / "model.safetensors", tmp_path / "out", base=base)
    truth.pop("lm_head.weight", None)
    assert equal(tmp_path / "out", truth)
