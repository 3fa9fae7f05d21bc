"""Names that `ties` leaves out are those that Transformers leaves out, and restores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.index import Fqn, Shape
from ckptkit.plan.ties import find_tie_candidates, untie_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA_LIKE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
BART_LIKE = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 24,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
TEXT = LLAMA_LIKE | {"model_type": "llama", "tie_word_embeddings": True}
QWEN_TEXT = LLAMA_LIKE | {
    "model_type": "qwen2_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
QWEN_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 8}


@dataclass(frozen=True)
class Case:
    """A model class, its small configuration, and the number of names that are left out."""

    model: str
    config: str
    dropped: int
    options: dict[str, Any] = field(default_factory=dict)
    same_names: bool = True  # whether files hold the live names


CASES = [
    Case("LlamaForCausalLM", "LlamaConfig", 1, LLAMA_LIKE | {"tie_word_embeddings": True}),
    Case("LlamaForCausalLM", "LlamaConfig", 0, LLAMA_LIKE),
    Case(
        "LlamaForSequenceClassification",
        "LlamaConfig",
        0,
        LLAMA_LIKE | {"tie_word_embeddings": True, "pad_token_id": 0},
    ),
    Case("Qwen2ForCausalLM", "Qwen2Config", 1, LLAMA_LIKE | {"tie_word_embeddings": True}),
    Case("GemmaForCausalLM", "GemmaConfig", 1, LLAMA_LIKE | {"pad_token_id": 0}),
    Case(
        "MixtralForCausalLM",
        "MixtralConfig",
        1,
        LLAMA_LIKE | {"num_local_experts": 2, "tie_word_embeddings": True},
        same_names=False,
    ),
    Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        1,
        {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24},
    ),
    Case(
        "OPTForCausalLM",
        "OPTConfig",
        1,
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "ffn_dim": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 24,
        },
    ),
    Case(
        "BloomForCausalLM",
        "BloomConfig",
        1,
        {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2},
    ),
    Case(
        "FalconForCausalLM",
        "FalconConfig",
        1,
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    Case(
        "BertForMaskedLM",
        "BertConfig",
        2,
        {key: LLAMA_LIKE[key] for key in list(LLAMA_LIKE)[:5]},
    ),
    Case("BartForConditionalGeneration", "BartConfig", 3, BART_LIKE),
    Case("BartModel", "BartConfig", 2, BART_LIKE),
    Case(
        "T5ForConditionalGeneration",
        "T5Config",
        3,
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    ),
    Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        1,
        {
            "text_config": TEXT,
            "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 8},
            "image_token_index": 39,
        },
        same_names=False,
    ),
    Case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        1,
        {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION, "tie_word_embeddings": True},
        same_names=False,
    ),
]
TIED_CASES = [case for case in CASES if case.dropped]


def by_name(case: Case) -> str:
    return f"{case.model}-{case.dropped}"


def build(case: Case) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, case.model)(getattr(transformers, case.config)(**case.options))


def specs(state: dict[str, Any]) -> dict[Fqn, tuple[DType, Shape]]:
    return {
        Fqn(name): (dtype_named(str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in state.items()
    }


def saved_config(model: Any, folder: Path) -> dict[str, Any]:
    """Returns the `config.json` that `save_pretrained` writes, which leaves defaults out."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def live_state(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def reloaded(model: Any, folder: Path, state: dict[str, Any], config: dict[str, Any]) -> Any:
    """Writes a folder as ckptkit would, and returns the model that Transformers makes of it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors_torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded


def assert_equal_states(loaded: Any, expected: dict[str, Any]) -> None:
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", CASES, ids=by_name)
@pytest.mark.quick(
    "BartModel-2",
    "BertForMaskedLM-2",
    "LlamaForCausalLM-1",
    "LlamaForSequenceClassification-0",
    "LlavaForConditionalGeneration-1",
)
def test_what_is_left_out_is_restored_by_from_pretrained(case: Case, tmp_path: Path) -> None:
    model = build(case)
    state = live_state(model)
    config = saved_config(model, tmp_path)
    ties = find_tie_candidates(config, specs(state))
    assert len(ties) == case.dropped
    assert all(torch.equal(state[target], state[source]) for target, source in ties.items())
    kept = {name: tensor for name, tensor in state.items() if name not in ties}
    assert_equal_states(reloaded(model, tmp_path / "out", kept, config), state)


@pytest.mark.parametrize("case", CASES, ids=by_name)
@pytest.mark.quick(
    "BartModel-2", "BertForMaskedLM-2", "LlamaForCausalLM-1", "LlamaForSequenceClassification-0"
)
def test_what_is_kept_is_what_save_pretrained_keeps(case: Case, tmp_path: Path) -> None:
    model = build(case)
    names = specs(model.state_dict())
    ties = find_tie_candidates(saved_config(model, tmp_path), names)
    model.save_pretrained(tmp_path, save_original_format=case.same_names)
    written = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert written.keys() == names.keys() - ties.keys()


@pytest.mark.parametrize(
    "change",
    [lambda config: config, lambda config: config | {"tie_word_embeddings": True}],
    ids=["as-saved", "flag-written"],
)
@pytest.mark.parametrize("case", TIED_CASES, ids=by_name)
@pytest.mark.quick(
    "BartModel-2-as-saved",
    "BertForMaskedLM-2-flag-written",
    "GPT2LMHeadModel-1-as-saved",
    "LlamaForCausalLM-1-flag-written",
    "LlavaForConditionalGeneration-1-as-saved",
    "T5ForConditionalGeneration-3-flag-written",
)
def test_weights_that_differ_stay_apart_under_the_untied_config(
    case: Case, change: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    model = build(case)
    state = live_state(model)
    config = change(saved_config(model, tmp_path))
    ties = find_tie_candidates(config, specs(state))
    assert ties
    for target in ties:
        state[target] += 1
    apart = reloaded(model, tmp_path / "out", state, untie_config(config))
    assert_equal_states(apart, state)
    assert not find_tie_candidates(untie_config(config), specs(state)) or case.config == "T5Config"
