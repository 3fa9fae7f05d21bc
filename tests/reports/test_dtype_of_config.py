"""The dtype that config.json states is one in which Transformers builds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptkit
from tests.reports.folders import save

SIZES = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 16, "num_hidden_layers": 1}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# Of code that Transformers registers with torch when it dequantizes.
pytestmark = pytest.mark.filterwarnings("ignore:.*is an Enum subclass")


def write_base(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2, dtype="bfloat16")
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | more))
    return dict(model.state_dict())


def stated_in(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["dtype"])


@pytest.mark.slow
def test_packed_weights_keep_the_dtype_that_they_are_computed_in(tmp_path: Path) -> None:
    state = write_base(tmp_path / "base", quantization_config=FP8)
    packed = {name: t.to(torch.float8_e4m3fn) for name, t in state.items() if "proj" in name}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in packed}
    source = save({**state, **packed, **scales}, tmp_path / "step")
    ckptkit.consolidate(source, tmp_path / "out", base=tmp_path / "base")
    assert stated_in(tmp_path / "out") == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = model.state_dict()
    for name in state:
        assert torch.equal(found[name], packed.get(name, state[name]).to(torch.bfloat16)), name


def test_weights_of_8_bits_without_scales_are_loaded_in_the_dtype_of_the_base(
    tmp_path: Path,
) -> None:
    state = write_base(tmp_path / "base")
    stored = {n: t.to(torch.float8_e4m3fn) if "proj" in n else t for n, t in state.items()}
    out = tmp_path / "out"
    ckptkit.consolidate(save(stored, tmp_path / "step"), out, base=tmp_path / "base")
    assert stated_in(out) == "bfloat16"
    found = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
