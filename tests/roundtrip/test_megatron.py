"""Checkpoints of real Megatron-Core models beside the weights of all ranks, laid out by hand.

`fixtures/generators/megatron_models.py` made them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import ChecksumError, CkptkitError, OutputExistsError
from tests.command_line import run_command
from tests.live_truth import refuse
from tests.tensor_images import same

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
LLAMA = FIXTURES / "megatron_model_llama_tp2_pp2"


def own_map(path: Path, constant: float) -> Path:
    path.write_text(
        'name = "own"\nextends = "megatron-llama"\nmodel_types = ["llama"]\n\n'
        '[[rule]]\nfrom = "decoder.final_layernorm.weight"\nto = "model.norm.weight"\n'
        f"steps = [{{ add = {constant} }}]\n"
    )
    return path


def test_a_map_of_ones_own_replaces_rules_of_another(tmp_path: Path) -> None:
    own, out = own_map(tmp_path / "own.toml", 0.5), tmp_path / "out"
    ckptkit.consolidate(LLAMA / "checkpoint", out, base=LLAMA, map=own)
    truth = load_file(LLAMA / "truth.safetensors")
    norm = truth["model.norm.weight"]
    truth["model.norm.weight"] = (norm.float() + 0.5).to(norm.dtype)
    assert same(out / "model.safetensors", truth)


def test_a_parameter_that_no_rule_makes_is_named_with_the_nearest_rule(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "own"\nextends = "megatron-llama"\nmodel_types = ["llama"]\n\n[[rule]]\n'
        'from = "decoder.layers.{layer?}.self_attention.linear_proj.weight"\ndrop = "no reason"\n'
    )
    message = (
        r"2 parameters would be missing.*o_proj.weight.*the rule nearest to"
        r" 'model.layers.0.self_attn.o_proj.weight' is map megatron-attention, rule 5,"
        r" which makes 'model.layers.\{layer\}.self_attn.v_proj.weight'"
    )
    refuse(message, LLAMA / "checkpoint", tmp_path / "out", base=LLAMA, map=own)


def put_arguments(step: Path, **fields: Any) -> None:
    """Puts arguments into `common.pt`, as Megatron-LM stores them."""
    args = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **fields}
    torch.save({"iteration": 7, "args": argparse.Namespace(**args)}, step / "common.pt")


ARGUMENTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "other groups": (
        {"group_query_attention": True, "num_query_groups": 4, "kv_channels": 8},
        "num_key_value_heads is 4 in the checkpoint's own settings, 2 in the configuration",
    ),
    "no groups": (
        {"group_query_attention": False, "num_query_groups": 1},
        "num_key_value_heads is 4 in",
    ),
    "wider heads": ({"kv_channels": 16}, "head_dim is 16 in the .* settings, 8 in"),
    "neighbours that are turned": (
        {"rotary_interleaved": True},
        "map 'megatron-llama' is for rotary_interleaved = False, and the checkpoint says True",
    ),
    "norms around zero": (
        {"apply_layernorm_1p": True},
        "is for layernorm_zero_centered_gamma = False, and the checkpoint says True",
    ),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_that_contradict_the_configuration_or_the_map_are_refused(
    what: str, tmp_path: Path
) -> None:
    fields, message = ARGUMENTS[what]
    shutil.copytree(LLAMA / "checkpoint", tmp_path / "run")
    step = tmp_path / "run" / "iter_0000007"
    put_arguments(step, **fields)
    refuse(message, tmp_path / "run", tmp_path / "out", base=LLAMA)
    (step / "common.pt").unlink()  # Megatron-Bridge has them in a text
    lines = "".join(f"  {key}: {str(value).lower()}\n" for key, value in fields.items())
    name, text = "apply_layernorm_1p", "layernorm_zero_centered_gamma"
    lines = lines.replace("num_query_groups: 1\n", "num_query_groups: null\n").replace(name, text)
    (step / "run_config.yaml").write_text(f"model:\n{lines}train:\n  iters: 9\n")
    if what == "no groups":  # the text has no number of groups then
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=LLAMA)
        return
    refuse(message, tmp_path / "run", tmp_path / "out", base=LLAMA)


def test_arguments_that_agree_are_of_no_matter(tmp_path: Path) -> None:
    shutil.copytree(LLAMA / "checkpoint", tmp_path / "run")
    step = tmp_path / "run" / "iter_0000007"
    agreeing = {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 8}
    put_arguments(step, rotary_interleaved=False, apply_layernorm_1p=False, **agreeing)
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=LLAMA)
    assert same(tmp_path / "out" / "model.safetensors", LLAMA / "truth.safetensors")


def write_integrity(step: Path) -> None:
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(step.iterdir())
    }
    (step / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))


def test_files_of_another_step_are_refused_where_the_save_recorded_their_digests(
    tmp_path: Path,
) -> None:
    shutil.copytree(LLAMA / "checkpoint", tmp_path / "run")
    step = tmp_path / "run" / "iter_0000007"
    write_integrity(step)
    ckptkit.consolidate(tmp_path / "run", tmp_path / "whole", base=LLAMA)
    files = [step / f"__{rank}_1.distcp" for rank in (1, 3)]
    first, second = (file.read_bytes() for file in files)
    assert len(first) == len(second)  # so that nothing else can see it
    files[0].write_bytes(second)
    with pytest.raises(ChecksumError, match=r"__1_1.distcp: has SHA-256.*integrity.json"):
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=LLAMA)
    with pytest.raises(ChecksumError):
        ckptkit.convert(tmp_path / "run", tmp_path / "out", to="dcp", base=LLAMA)
    assert not (tmp_path / "out").exists()
    result = run_command("consolidate", tmp_path / "run", tmp_path / "out", "--base", LLAMA)
    assert result.returncode == 3
    assert "checksum-mismatch" in result.stderr


def test_a_stage_of_another_size_is_refused(tmp_path: Path) -> None:
    shutil.copytree(LLAMA / "checkpoint", tmp_path / "run")
    step = tmp_path / "run" / "iter_0000007"
    shutil.copy(step / "__0_0.distcp", step / "__2_0.distcp")
    refuse(r"__2_0.distcp", tmp_path / "run", tmp_path / "out", base=LLAMA)


@pytest.mark.parametrize("parent", ["own", "own.toml", "megatron-lama", "", 7])
def test_a_map_that_extends_itself_or_none_is_refused(parent: object, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(f'name = "own"\nextends = {json.dumps(parent)}\n')
    with pytest.raises(CkptkitError, match=f"extends {parent!r}, which is no map"):
        ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", base=LLAMA, map=own)
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
    assert same(tmp_path / "out" / "model.safetensors", truth)
