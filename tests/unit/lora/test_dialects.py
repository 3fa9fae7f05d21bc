"""Names of adapter tensors, as PEFT's files have them."""

from __future__ import annotations

import pytest

from ckptkit.lora.dialects import AdapterNames

M = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("live", "in_file"),
    [
        (f"{M}.lora_A.default.weight", f"{M}.lora_A.weight"),
        (f"{M}.lora_B.default.bias", f"{M}.lora_B.bias"),
        (f"{M}.lora_magnitude_vector.default.weight", f"{M}.lora_magnitude_vector"),
        (f"{M}.lora_embedding_A.default", f"{M}.lora_embedding_A"),
        ("base_model.model.score.modules_to_save.default.weight", "base_model.model.score.weight"),
        (
            "base_model.model.e.token_adapter.trainable_tokens_delta.default",
            "base_model.model.e.token_adapter.trainable_tokens_delta",
        ),
        (f"{M}.ia3_l.default", f"{M}.ia3_l"),
    ],
)
def test_files_leave_out_the_adapter(live: str, in_file: str) -> None:
    assert AdapterNames().file_name(live) == in_file


@pytest.mark.parametrize(
    "live",
    [
        f"{M}.base_layer.weight",
        f"{M}.base_layer.bias",
        f"{M}.lora_A.other.weight",
        "base_model.model.score.original_module.weight",
        "base_model.model.heads.default.weight",
        "base_model.model.model.embed_tokens.base_layer.weight",
    ],
)
def test_what_is_not_the_adapters_has_no_name_in_its_files(live: str) -> None:
    assert AdapterNames().file_name(live) is None


def test_biases_belong_to_it_where_they_were_trained_with_it() -> None:
    assert AdapterNames(bias="all").file_name("base_model.model.norm.bias")
    assert AdapterNames(bias="lora_only").file_name(f"{M}.base_layer.bias")
    assert AdapterNames(bias="lora_only").file_name("base_model.model.norm.bias") is None


def test_embeddings_that_belong_to_it_lie_in_its_files_whole() -> None:
    module = "base_model.model.model.embed_tokens.base_layer"
    names = AdapterNames(embeddings=(module,))
    assert names.file_name(f"{module}.weight") == f"{module}.weight"
    assert names.file_name("base_model.model.lm_head.base_layer.weight") is None
