"""torch's own reader finds in Megatron's checkpoints what the live ranks held."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from tests.tensor_images import stored_in_dcp

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
FAMILIES = {
    "megatron_model_deepseek_v3_pp2_ep2": "deepseek_v3",
    "megatron_model_gemma3": "gemma3",
    "megatron_model_gpt_oss_ep2": "gpt_oss",
    "megatron_model_llama_tp2_pp2": "llama_tied",
    "megatron_model_qwen2_moe_tp2_ep2": "qwen2_moe",
    "megatron_model_qwen2_tp2": "qwen2",
}
LIVE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def generator_of_layouts() -> ModuleType:
    path = FIXTURES / "generators/megatron_families.py"
    spec = importlib.util.spec_from_file_location("megatron_families", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def one_for_each_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        _, layers, rest = name.partition("decoder.layers.")
        number, _, inner = rest.partition(".")
        if not layers:
            found[name] = tensor
        elif number.isdigit():
            found[f"{layers}{number}.{LIVE.get(inner, inner)}"] = tensor
        else:
            live = LIVE.get(rest, rest)
            found |= {f"{layers}{i}.{live}": part for i, part in enumerate(tensor)}
    return found


def one_for_each_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        front, experts, rest = name.partition("mlp.experts.experts.")
        if experts:
            live = f"{front}mlp.experts.local_experts"
            found |= {f"{live}.{i}.{rest}": part for i, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FAMILIES)
def test_the_stored_tensors_laid_out_are_the_live_ranks_weights(case: str) -> None:
    folder = FIXTURES / case
    config = json.loads((folder / "config.json").read_text("utf-8"))
    whole = one_for_each_expert(
        one_for_each_layer(stored_in_dcp(folder / "checkpoint/iter_0000007"))
    )

    found = generator_of_layouts().laid_out(FAMILIES[case], whole, config["vocab_size"])

    truth = load_file(folder / "truth.safetensors")
    assert found.keys() == truth.keys()
    different = [name for name in truth if not torch.equal(found[name], truth[name])]
    assert not different


def test_every_megatron_fixture_has_a_family() -> None:
    assert {path.name for path in FIXTURES.glob("megatron_model_*")} == set(FAMILIES)
