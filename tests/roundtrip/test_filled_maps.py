"""`--fill-from-base` under a map: the source lacks tensors under its own names.

The base is the truth plus one, so that each element shows where it is from.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from tests.live_truth import FIXTURES
from tests.tensor_images import stored_in_dcp

Tensors = dict[str, torch.Tensor]
CASES = {
    "litgpt_llama": [
        "lm_head.weight",
        "transformer.wte.weight",
        "transformer.h.0.attn.qkv.weight",
        "transformer.h.1.mlp.fc_1.weight",
    ],
    "litgpt_qwen3_moe": ["transformer.h.0.mlp.experts.1.fc_1.weight", "transformer.ln_f.weight"],
    "torchtitan_family_llama": ["layers.0.attention.qkv_linear.wq.weight", "norm.weight"],
    "torchtitan_family_qwen3_moe": [
        "layers.1.moe.routed_experts.inner_experts.w1_EFD",
        "layers.0.moe.router.gate.weight",
    ],
    "megatron_model_qwen2_moe_tp2_ep2": [
        "embedding.word_embeddings.weight",
        "decoder.layers.self_attention.linear_qkv.bias",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "decoder.final_layernorm.weight",
    ],
}
PAIRS = [(case, name) for case, names in CASES.items() for name in names]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def weights_of(case: str) -> Tensors:
    single = FIXTURES / case / "checkpoint" / "lit_model.pth"
    if single.exists():
        found = torch.load(single)  # noqa: TID251
        return dict(found.get("model", found))
    return stored_in_dcp(next((FIXTURES / case).rglob(".metadata")).parent)


@pytest.mark.parametrize(("case", "absent"), PAIRS)
def test_what_the_source_lacks_is_that_of_the_base(case: str, absent: str, tmp_path: Path) -> None:
    """It was refused as a damaged checkpoint, whatever the option said."""
    weights = weights_of(case)
    removed = weights.pop(absent)
    torch.save(weights, tmp_path / "run.pt")
    base, truth = tmp_path / "base", load_file(FIXTURES / case / "truth.safetensors")
    base.mkdir()
    for file in [
        *(FIXTURES / case).glob("*.json"),
        *(FIXTURES / case / "checkpoint").glob("*.json"),
    ]:
        shutil.copy(file, base)
    save_file({n: t + 1 for n, t in truth.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ckptkit.CkptkitError):
        ckptkit.consolidate(tmp_path / "run.pt", tmp_path / "out", base=base)
    ckptkit.consolidate(tmp_path / "run.pt", tmp_path / "out", base=base, fill_from_base=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == truth.keys()
    filled = {name for name in truth if torch.equal(written[name], truth[name] + 1)}
    assert 0 < sum(truth[name].numel() for name in filled) <= removed.numel()
    assert all(torch.equal(written[n], truth[n]) for n in truth.keys() - filled)
