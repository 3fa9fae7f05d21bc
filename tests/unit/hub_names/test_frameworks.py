"""Names by which the models of other frameworks are recognised."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ckptkit.hub_names.known_models import FRAMEWORKS, recognise_framework

NAMES = Path(__file__).resolve().parents[3] / "fixtures" / "transformers_names.json.gz"
OF_THEIR_MODELS = {
    "decoder.layers.3.self_attention.linear_qkv.weight": "Megatron-Core",
    "layers.0.attention.qkv_linear.wq.weight": "torchtitan",
    "layers.12.attention.wk.bias": "torchtitan",
    "layers.0.attention.wkv_a.weight": "torchtitan",
    "layers.3.attn.wq.weight": "torchtitan",
    "model.layers.0.self_attn.q_proj.weight": "",
    "model.layers.0.attention.wqkv.weight": "",
}


@pytest.mark.parametrize("name", OF_THEIR_MODELS)
def test_a_framework_is_recognised_by_a_name(name: str) -> None:
    assert recognise_framework(["norm.weight", name]) == OF_THEIR_MODELS[name]


def test_no_model_of_transformers_is_taken_for_one_of_another_framework() -> None:
    """The table has the last four parts of all names; a pattern may ask for more before them."""
    tails = json.loads(gzip.decompress(NAMES.read_bytes()))["tails"]
    assert len(tails) > 8000
    for before in ("", "layers.", "decoder.layers.0.", "decoder.layers."):
        for name in tails:
            found = [f for f, pattern in FRAMEWORKS.items() if pattern.search(before + name)]
            assert not found, (before, name)
