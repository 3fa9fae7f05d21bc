"""What classes leave out of the files of a model."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.consumers.class_facts import find_left_out

_GLM = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
_OWN = {"model_type": "of_someone"}


@pytest.mark.parametrize(
    ("config", "name", "is_left_out"),
    [
        (_OWN, "mtp.layers.0.mlp.weight", True),
        (_OWN, "model.mtp_layers.0.mlp.weight", True),
        (_OWN, "model.layers.2.mlp.weight", False),  # nothing counts layers
        (_OWN | {"num_hidden_layers": 2}, "model.layers.2.mlp.weight", True),
        (_OWN | {"num_hidden_layers": 2}, "model.layers.1.mlp.weight", False),
        (_OWN | {"text_config": {"num_hidden_layers": 2}}, "model.language_model.layers.2.w", True),
        (_OWN | {"text_config": {"num_hidden_layers": 2}}, "model.visual.blocks.2.w", False),
        ({"architectures": ["T5ForConditionalGeneration"], "num_layers": 2},
         "decoder.block.2.layer.0.w", False),
        (_GLM | {"num_hidden_layers": 46}, "model.layers.46.mlp.gate.weight", True),
        (_GLM | {"num_hidden_layers": 92}, "model.layers.46.mlp.gate.weight", False),
        (_GLM | {"num_hidden_layers": 92}, "model.layers.92.mlp.gate.weight", True),
        (_OWN | {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
         "model.layers.2.self_attn.k_proj.weight", True),
        (_OWN | {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
         "model.layers.2.self_attn.q_proj.weight", False),
        ({"architectures": ["GPTNeoXModel"], "model_type": "gpt_neox"},
         "layers.0.attention.masked_bias", True),
    ],
)  # fmt: skip
def test_counts_and_classes_say_what_is_left_out(
    config: dict[str, Any], name: str, *, is_left_out: bool
) -> None:
    assert find_left_out([name], config) == ({name} if is_left_out else set())
