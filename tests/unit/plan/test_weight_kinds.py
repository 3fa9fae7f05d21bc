"""Names of PEFT's tensors, told from those that models of Transformers have themselves."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptkit.plan.weight_kinds import (
    METHODS,
    AdapterSign,
    explain_random_weights,
    find_adapter,
    looks_packed,
    own_adapters,
)

NAMES = Path(__file__).resolve().parents[3] / "fixtures" / "transformers_names.json.gz"
P = "base_model.model.model.layers.0.self_attn.q_proj"
# Words of PEFT's that classes of Transformers have among their own attributes.
SHARED_WORDS = {"prompt_encoder"}


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """How all families of Transformers name their tensors; see the generator."""
    found: dict[str, Any] = json.loads(gzip.decompress(NAMES.read_bytes()))
    return found


def test_no_name_of_any_family_is_taken_for_an_adapters(table: dict[str, Any]) -> None:
    assert table["classes"] > 1600
    assert "prompt_encoder.shared_embedding.positional_embedding" in table["tails"]
    assert [name for name in table["tails"] if find_adapter([name]) is not None] == []
    assert find_adapter(table["tails"]) is None


def test_no_tensor_of_any_family_is_taken_for_a_packed_weight(table: dict[str, Any]) -> None:
    held = [(name, (8, 8), "float32") for name in table["tails"]]
    held += [(name, (8, 1), "float32") for name in table["one_column"]]
    held += [(name, (8, 8), "uint8") for name in table["bytes"]]
    assert [one for one in held if looks_packed(*one)] == []
    assert not explain_random_weights(held)


@pytest.mark.slow
def test_no_class_has_a_word_of_pefts_that_is_not_told_apart() -> None:
    """Also in classes that cannot be built here, such as those that need timm."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    words = {segment for method in METHODS.values() for segment in method.segments}
    words |= {"base_model", "base_layer", "modules_to_save", "original_module", "prompt_encoder"}
    words |= {"prompt_embeddings", "absmax", "SCB", "quant_map", "token_adapter"}
    assigned = re.compile(rf"\bself\.({'|'.join(sorted(words))})\s*(?::[^=\n]+)?=(?!=|\s*\{{\}})")
    shared = {
        word
        for file in Path(found.origin).parent.glob("models/*/modeling_*.py")
        for word in assigned.findall(file.read_text())
    }
    assert shared <= SHARED_WORDS


@pytest.mark.parametrize(
    ("names", "sign"),
    [
        (["norm.weight", "q_proj.ia3_l.default"], ("q_proj.ia3_l.default", "IA3")),
        ([f"{P}.lora_A", f"{P}.lora_E"], (f"{P}.lora_E", "ADALORA")),
        ([f"{P}.base_layer.weight", f"{P}.hada_w1_a"], (f"{P}.hada_w1_a", "LOHA")),
        (["base_model.model.norm.weight"], ("base_model.model.norm.weight", "")),
        (["base_model.wte.weight"], ("base_model.wte.weight", "")),
        (["model.base_model.model.wte.weight", "a"], ("model.base_model.model.wte.weight", "")),
        (["prompt_embeddings"], ("prompt_embeddings", "")),
        (
            ["prompt_embeddings", "prefix_task_cols", "prefix_task_rows"],
            ("prefix_task_cols", "MULTITASK_PROMPT_TUNING"),
        ),
        (
            ["e.token_adapter.trainable_tokens_delta"],
            ("e.token_adapter.trainable_tokens_delta", ""),
        ),
        (
            ["e.trainable_tokens_delta.default"],
            ("e.trainable_tokens_delta.default", "TRAINABLE_TOKENS"),
        ),
    ],
)
def test_names_tell_the_method(names: Sequence[str], sign: tuple[str, str]) -> None:
    assert find_adapter(names) == AdapterSign(*sign)


@pytest.mark.parametrize(
    "names",
    [
        [],
        [
            "prompt_encoder.shared_embedding.positional_embedding",
            "prompt_encoder.no_mask_embed.weight",
        ],
        ["prompt_encoder.point_embed.weight", "prompt_encoder.mask_embed.conv1.weight"],
        ["model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.kv_b_proj.weight"],
        ["blocks.0.att.w_lora.lora.0.weight", "layers.0.Plora_A.weight"],
        ["timm_model.base_layer.0.weight", "base_layers.weight"],
        ["model.token_adapter.weight", "prompt_embeddings", "norm.weight"],
        ["roberta.layers.0.Wqkv.parametrizations.weight.0.lora_A"],
    ],
)
def test_names_that_models_have_themselves_are_no_adapters(names: Sequence[str]) -> None:
    assert find_adapter(names) is None


def test_adapters_that_a_configuration_declares_are_parts_of_the_model() -> None:
    """As in Phi-4-multimodal, whose layers are made with LoRA for speech and vision."""
    own = own_adapters({"speech_lora": {"r": 320}, "vision_lora": {"r": 256}, "q_lora": 8})
    assert own == {"speech", "vision"}
    layer = "model.layers.0.mlp.down_proj"
    inside = [f"{layer}.base_layer.weight", f"{layer}.lora_A.speech.weight"]
    assert find_adapter(inside, own) is None
    assert find_adapter(inside) is not None
    assert find_adapter([*inside, f"{layer}.lora_A.default.weight"], own) is not None
    assert find_adapter([*inside, "other.base_layer.weight"], own) is not None
    assert find_adapter([f"base_model.model.{name}" for name in inside], own) is not None


def test_what_it_is_reads_as_people_say_it() -> None:
    titles = [AdapterSign("w", method).title for method in ("IA3", "LORA", "")]
    assert titles == ["an IA3 adapter of PEFT", "an adapter of PEFT", "an adapter of PEFT"]
