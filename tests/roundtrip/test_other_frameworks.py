"""Checkpoints of frameworks whose names a map converts, beside what they are in Transformers.

`fixtures/generators/` has what made them: megatron_models.py, nanotron_models.py, meta_llama.py,
torchtitan_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from tests.command_line import run_command
from tests.live_truth import FIXTURES, base_with, is_truth, refuse

KINDS = ("megatron_*", "nanotron_*", "meta_llama_*", "torchtitan_family_*")
CASES = sorted(
    path.parent.name
    for kind in KINDS
    for path in FIXTURES.glob(f"{kind}/config.json")
    if path.parent.name != "nanotron_0_2_tp2"  # whose map has to be named
    # Transformers does not load the layers for further tokens: test_megatron_newest.py
    and not path.parent.name.startswith(("megatron_mtp_", "megatron_hybrid_deepseek"))
)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(
    "megatron_fsdp_llama_tp2",
    "megatron_model_gpt_oss_ep2",
    "megatron_ranks_llama_tp2_pp2",
    "meta_llama_2",
    "nanotron_llama_tp2_pp2",
    "torchtitan_family_llama",
)
def test_a_model_becomes_that_of_transformers_which_loads_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    case, out = FIXTURES / name, tmp_path / "out"
    manifest = ckptkit.consolidate(case / "checkpoint", out, base=case)
    assert is_truth(out, case)
    assert any(version.startswith("map ") for version in manifest.versions)
    ckptkit.verify(out)
    sees_images = json.loads((case / "config.json").read_text()).get("vision_config")
    kind = "AutoModelForImageTextToText" if sees_images else "AutoModelForCausalLM"
    _, report = getattr(transformers, kind).from_pretrained(out, output_loading_info=True)
    assert not any(report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))


@pytest.mark.parametrize("name", ["megatron_model_llama_tp2_pp2", "torchtitan_family_qwen3_moe"])
def test_slices_write_the_same_model(name: str, tmp_path: Path) -> None:
    case, whole, sliced = FIXTURES / name, tmp_path / "whole", tmp_path / "sliced"
    options = ["--base", case, "--max-shard-size", "8KB"]
    assert run_command("consolidate", case / "checkpoint", whole, *options).returncode == 0
    for number in range(3):
        part = ["--slice", f"{number}/3"]
        result = run_command("consolidate", case / "checkpoint", sliced, *options, *part)
        assert result.returncode == 0, result.stderr
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        assert (sliced / file).read_bytes() == (whole / file).read_bytes()


MEGATRON, MOE = "megatron_model_llama_tp2_pp2", "torchtitan_family_qwen3_moe"
NANOTRON, TURNED = "nanotron_llama_tp2_pp2", "nanotron_llama_interleaved"
TWICE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": None}
HALF = "num_attention_heads is 4 in the checkpoint's own settings, 8 in the configuration"
META_TWICE = r"num_attention_heads is \d in the checkpoint's own"
LIVE = {"map": "megatron-llama", "names": "live"}
OTHER_TITAN, OTHER_PAIRS = {"map": "torchtitan-qwen3"}, {"map": "nanotron-llama-interleaved"}
# By what is wrong: the case, what its configuration has instead, options, and the message.
REFUSED: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a family without a map": (
        *(MEGATRON, {"model_type": "bloom"}, {}),
        "no map has names of Megatron-Core for the model type 'bloom'",
    ),
    "a map of another family": (
        *(MEGATRON, {}, {"map": "megatron-deepseek"}, "no rule of map 'megatron-deepseek'"),
    ),
    "a map that is not there": (
        *(MEGATRON, {}, {"map": "megatron-lama"}, "is neither a file nor a map"),
    ),
    "further layers": (
        *(MEGATRON, {"num_hidden_layers": 7}, {}, "num_hidden_layers is 2 in.*, 7 in"),
    ),
    "more heads of half the size": (MEGATRON, TWICE, {}, HALF),
    "other groups": (MEGATRON, {"num_key_value_heads": 1}, {}, "linear_qkv.* along axis 0"),
    "a larger vocabulary": (
        *(MEGATRON, {"vocab_size": 999}, {}, "expected at least 999 along axis 0"),
    ),
    "a wider MLP": (
        *(MEGATRON, {"intermediate_size": 64}, {}, "linear_fc1.*expected 128 along axis 0"),
    ),
    "names that are kept": (MEGATRON, {}, LIVE, "--names live"),
    "more heads of half the size, nanotron": (NANOTRON, TWICE, {}, HALF),
    "further layers, nanotron": (
        *(NANOTRON, {"num_hidden_layers": 7}, {}, "num_hidden_layers is 3 in.*, 7 in"),
    ),
    "a wider MLP, nanotron": (
        *(NANOTRON, {"intermediate_size": 20}, {}, "gate_up_proj.*expected 40 along axis 0"),
    ),
    "a larger vocabulary, nanotron": (
        *(NANOTRON, {"vocab_size": 99}, {}, "expected at least 99 along axis 0"),
    ),
    "a family without a map, nanotron": (
        *(NANOTRON, {"model_type": "bloom"}, {}, "no map.*'bloom'"),
    ),
    "further experts, nanotron": (
        *("nanotron_qwen2_moe", {"num_experts": 8}, {}, "expected 8 along the axis of 'expert'"),
    ),
    "a map for the other rotary pairs": (
        *(NANOTRON, {}, OTHER_PAIRS),
        "is for rope_interleaved = True, and the checkpoint says False",
    ),
    "a map that takes rotary pairs apart": (
        *(TURNED, {}, {"map": "nanotron-llama"}),
        "is for rope_interleaved = False, and the checkpoint says True",
    ),
    "a family that torchtitan does not have": (
        *(MOE, {"model_type": "bloom"}, {}, "for the model type .bloom."),
    ),
    "a map of another family, torchtitan": (
        *(MOE, {}, OTHER_TITAN, "no rule of map .* takes tensor"),
    ),
    "further experts": (MOE, {"num_experts": 5}, {}, "expected 5 along the axis of 'expert'"),
    "fewer experts": (MOE, {"num_experts": 3}, {}, "expected 3 along the axis of 'expert'"),
    "further layers, torchtitan": (MOE, {"num_hidden_layers": 3}, {}, "layer 2 is missing"),
    "fewer layers": (MOE, {"num_hidden_layers": 1}, {}, "layer 1 is one too many"),
    "wider experts": (*(MOE, {"moe_intermediate_size": 24}, {}, "other shapes than the model"),),
    "more heads of half the size, meta": ("meta_llama_2", TWICE, {}, META_TWICE),
    "more heads of half the size, one file": ("meta_llama_3_one_file", TWICE, {}, META_TWICE),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_configuration_or_a_map_that_does_not_fit_is_refused(what: str, tmp_path: Path) -> None:
    name, config, options, message = REFUSED[what]
    case = FIXTURES / name
    base = base_with(tmp_path / "base", case, **config)
    refuse(message, case / "checkpoint", tmp_path / "out", base=base, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MEGATRON, "no configuration has them"),
        ("meta_llama_3", r"names of torchtitan .* no configuration"),
        ("torchtitan_family_llama", r"names of torchtitan .* no configuration"),
    ],
)
def test_without_a_configuration_it_is_refused(name: str, message: str, tmp_path: Path) -> None:
    refuse(message, FIXTURES / name / "checkpoint", tmp_path / "out")
