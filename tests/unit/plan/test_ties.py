"""Which names a configuration ties, without Transformers at hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.index import Fqn, Shape
from ckptkit.plan.ties import (
    choose_ties_to_drop,
    find_absent_tied_names,
    find_tie_candidates,
    find_tie_conflicts,
    untie_config,
)

F32, BF16 = dtype_named("float32"), dtype_named("bfloat16")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": True,
}
T5: dict[str, Any] = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
T5_NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)


def specs(*names: str) -> dict[Fqn, tuple[DType, Shape]]:
    return {Fqn(name): (F32, (8, 4)) for name in names}


def pairs(config: dict[str, Any] | None, *names: str) -> dict[str, str]:
    return {str(t): str(s) for t, s in find_tie_candidates(config, specs(*names)).items()}


def test_a_head_that_is_declared_tied_is_a_candidate() -> None:
    assert pairs(LLAMA, HEAD, EMBEDDING) == {HEAD: EMBEDDING}


@pytest.mark.parametrize("names", [(HEAD,), (EMBEDDING,), ("model.norm.weight",), ()])
def test_one_name_alone_is_tied_to_nothing(names: tuple[str, ...]) -> None:
    assert pairs(LLAMA, *names) == {}


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        LLAMA | {"tie_word_embeddings": False},
        LLAMA | {"tie_word_embeddings": None},
        LLAMA | {"tie_word_embeddings": "true"},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "nobody-knows"},
    ],
)
def test_nothing_is_tied_that_is_not_declared(config: dict[str, Any] | None) -> None:
    assert pairs(config, HEAD, EMBEDDING) == {}


def test_an_absent_flag_means_what_the_class_defaults_to() -> None:
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    expected = {HEAD: "transformer.wte.weight"}
    assert pairs(gpt2, HEAD, "transformer.wte.weight") == expected
    assert pairs(gpt2 | {"tie_word_embeddings": False}, HEAD, "transformer.wte.weight") == {}


def test_a_class_that_comes_with_its_model_has_no_known_default() -> None:
    own_code = {"model_type": "gpt2", "auto_map": {"AutoModel": "modeling.Mine"}}
    names = (HEAD, "transformer.wte.weight")
    assert pairs(own_code, *names) == {}
    assert pairs(own_code | {"tie_word_embeddings": True}, *names) == {names[0]: names[1]}


def test_a_vision_model_is_tied_by_the_flag_of_its_text_config() -> None:
    llava = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "tie_word_embeddings": True},
    }
    source = "model.language_model.embed_tokens.weight"
    assert pairs(llava, HEAD, source) == {HEAD: source}
    assert pairs(untie_config(llava), HEAD, source) == {}


def test_a_text_config_has_the_default_of_its_own_model_type() -> None:
    llava = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "gemma"},
    }
    source = "model.language_model.embed_tokens.weight"
    assert pairs(llava, HEAD, source) == {HEAD: source}
    assert untie_config(llava)["text_config"]["tie_word_embeddings"] is False


def test_a_nested_model_is_tied_only_as_the_type_that_the_table_knows() -> None:
    def blip(text_type: str) -> dict[str, Any]:
        return {
            "model_type": "blip-2",
            "architectures": ["Blip2ForConditionalGeneration"],
            "text_config": {"model_type": text_type, "tie_word_embeddings": True},
        }

    target, source = (
        "language_model.lm_head.weight",
        "language_model.model.decoder.embed_tokens.weight",
    )
    assert pairs(blip("opt"), target, source) == {target: source}
    assert pairs(blip("bart"), target, source) == {}


def test_all_names_of_an_encoder_decoder_stand_for_the_shared_one() -> None:
    assert pairs(T5, *T5_NAMES) == dict.fromkeys(T5_NAMES[1:], "shared.weight")


def test_a_bert_head_is_tied_to_the_embedding_under_whatever_its_base_is_called() -> None:
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    head = "cls.predictions.decoder.weight"
    source = "bert.embeddings.word_embeddings.weight"
    assert pairs(bert, head, source, f"x.{source}") == {head: source}
    assert pairs(bert, head, source, f"other{source}") == {}, "two could be meant"


def test_a_class_that_ties_nothing_keeps_its_head_whatever_the_flag_says() -> None:
    config = {
        "model_type": "qwen2_audio",
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "tie_word_embeddings": True,
    }
    assert pairs(config, HEAD, "model.language_model.embed_tokens.weight") == {}


@pytest.mark.parametrize("prefix", ["pretrained_model.", "base_model.model.", "module."])
def test_names_that_no_model_would_tie_again_are_kept(prefix: str) -> None:
    assert pairs(LLAMA, prefix + HEAD, prefix + EMBEDDING) == {}


@pytest.mark.parametrize("other", [(BF16, (8, 4)), (F32, (9, 4)), (F32, (32,))])
def test_an_unlike_pair_is_a_conflict_and_no_candidate(other: tuple[DType, Shape]) -> None:
    names = {Fqn(HEAD): other, Fqn(EMBEDDING): (F32, (8, 4))}
    assert find_tie_candidates(LLAMA, names) == {}
    assert find_tie_conflicts(LLAMA, names) == {HEAD: EMBEDDING}


def test_once_the_flag_is_set_false_every_name_has_to_be_written() -> None:
    bart = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    same = {Fqn("model.encoder.embed_tokens.weight"): Fqn("model.shared.weight")}
    assert choose_ties_to_drop(bart, same, ()) == same
    assert choose_ties_to_drop(bart, same, {Fqn(HEAD)}) == {}


def test_a_model_type_that_is_always_tied_drops_the_names_that_agree() -> None:
    same = {Fqn("encoder.embed_tokens.weight"): Fqn("shared.weight")}
    assert choose_ties_to_drop(T5, same, {Fqn(HEAD)}) == same


def test_untying_reaches_nested_configs_and_leaves_its_argument_alone() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 8},
        "vision_config": {"model_type": "siglip_vision_model", "layers": [1, 2]},
        "decoder": {"tie_word_embeddings": True, "tie_embedding": True},
    }
    before = deepcopy(config)
    assert untie_config(config) == {
        "model_type": "gemma3",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 8,
            "tie_word_embeddings": False,
        },
        "vision_config": {"model_type": "siglip_vision_model", "layers": [1, 2]},
        "decoder": {"tie_word_embeddings": False, "tie_embedding": False},
    }
    assert config == before


@pytest.mark.parametrize("model_type", ["t5", "switch_transformers"])
def test_a_flag_that_changes_what_the_model_computes_is_left_alone(model_type: str) -> None:
    config = {"model_type": model_type, "tie_word_embeddings": True}
    assert untie_config(config) == config


def test_a_very_deep_config_is_no_danger() -> None:
    config: dict[str, Any] = {"tie_word_embeddings": True}
    for _ in range(5_000):
        config = {"text_config": config}
    assert untie_config(config)["tie_word_embeddings"] is False


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["model_type", "architectures", "tie_word_embeddings", "text_config", "auto_map", "decoder"]
)
TYPES = st.sampled_from(["llava", "vibevoice", "t5", "bert", "BertForMaskedLM", True])


@given(st.dictionaries(KEYS, ANY_JSON | TYPES | TYPES.map(lambda value: [value])))
def test_any_json_for_a_config_gives_an_answer(config: dict[str, Any]) -> None:
    names = specs(*T5_NAMES, EMBEDDING)
    found = find_tie_candidates(config, names)
    assert found.keys() | set(found.values()) <= names.keys()
    assert not found.keys() & set(found.values()), "a source that is a target would be dropped too"
    assert set(untie_config(config)) <= config.keys() | {"tie_word_embeddings"}


def test_names_that_training_has_besides_are_found_for_models_with_a_head() -> None:
    embedding = Fqn("model.embed_tokens.weight")
    llama = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    assert find_absent_tied_names(llama, {embedding}) == {"lm_head.weight": embedding}
    assert find_absent_tied_names(llama | {"tie_word_embeddings": False}, {embedding}) == {}
    assert find_absent_tied_names(llama | {"architectures": ["LlamaModel"]}, {embedding}) == {}
    assert find_absent_tied_names(llama, {embedding, Fqn("lm_head.weight")}) == {}
    assert find_absent_tied_names(None, {embedding}) == {}


@pytest.mark.parametrize(
    ("fields", "is_tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, True),  # as older versions wrote it
        ({"tie_codebooks_embeddings": False}, False),
        ({"tie_codebooks_embeddings": False, "tie_word_embeddings": True}, False),
    ],
)
def test_a_flag_of_another_name_decides_alone(fields: dict[str, Any], is_tied: bool) -> None:
    config = {"model_type": "csm", "architectures": ["CsmForConditionalGeneration"]} | fields
    names = (
        "backbone_model.embed_tokens.embed_audio_tokens.weight",
        "depth_decoder.model.embed_tokens.weight",
    )
    assert pairs(config, *names) == ({names[0]: names[1]} if is_tied else {})
    assert pairs(untie_config(config), *names) == {}
