"""Whether a base is the one that was trained on, and what a merge makes of its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.core.index import Fqn
from ckptkit.lora.changes import (
    adapt_head,
    drop_quantization,
    find_model_types,
    find_vocabulary_sizes,
    has_vocabulary,
    resize_vocabulary,
)
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.quantized import (
    BaseIdentity,
    compare_bases,
    identify_base,
    parse_recorded_base,
)

ONE, TWO = "a" * 40, "b" * 40
CACHE = f"/home/me/.cache/huggingface/hub/models--org--name/snapshots/{ONE}"


def settings(**config: Any) -> LoraSettings:
    return LoraSettings.parse({"target_modules": ["q"], **config})


def test_a_path_of_the_cache_tells_repository_and_commit() -> None:
    assert identify_base(CACHE, None) == BaseIdentity(CACHE, ONE, "org/name")
    expected = parse_recorded_base(settings(base_model_name_or_path=CACHE))
    assert (expected.name, expected.commit) == ("org/name", ONE)


def test_a_branch_is_no_commit() -> None:
    assert (
        parse_recorded_base(settings(base_model_name_or_path="org/name", revision="main")).commit
        == ""
    )


def test_a_configuration_may_tell_its_commit() -> None:
    assert identify_base("/models/x", {"_commit_hash": TWO}).commit == TWO
    assert identify_base("/models/x", {"_commit_hash": "none"}).commit == ""


@pytest.mark.parametrize(
    ("expected", "found", "verdict"),
    [
        (BaseIdentity("org/name", ONE), BaseIdentity("x", TWO, "org/name"), "contradicted"),
        (BaseIdentity("org/name", ONE), BaseIdentity("x", ONE, "org/name"), "silent"),
        (BaseIdentity("org/name"), BaseIdentity("x", repository="org/other"), "contradicted"),
        (BaseIdentity("org/name"), BaseIdentity("x", repository="org/name"), "noted"),
        (BaseIdentity("/mnt/model"), BaseIdentity("/data/model"), "noted"),
        (BaseIdentity("/mnt/model"), BaseIdentity("/mnt/model"), "silent"),
        (BaseIdentity(), BaseIdentity("/data/model"), "noted"),
    ],
)
def test_commits_and_repositories_prove_and_names_are_noted(
    expected: BaseIdentity, found: BaseIdentity, verdict: str
) -> None:
    contradictions, note = compare_bases(expected, found)
    assert (bool(contradictions), bool(note)) == (verdict == "contradicted", verdict == "noted")


def test_the_vocabulary_is_changed_wherever_it_was_the_old_one() -> None:
    config = {"vocab_size": 40, "text_config": {"vocab_size": 40}, "audio": {"vocab_size": 7}}
    assert resize_vocabulary(config, 40, 43) == {
        "vocab_size": 43,
        "text_config": {"vocab_size": 43},
        "audio": {"vocab_size": 7},
    }


@pytest.mark.parametrize("name", ["gpt_neox.embed_in.weight", "lm_head.weight", "shared.weight"])
def test_tensors_with_a_row_for_each_token_are_known_by_name(name: str) -> None:
    assert has_vocabulary(name)
    assert not has_vocabulary(f"lm_head.dense.{name.rpartition('.')[2]}")


def test_every_number_of_tokens_is_found() -> None:
    config = {"vocab_size": 40, "text_config": {"vocab_size": 41}, "audio": {"vocab_size": None}}
    assert find_vocabulary_sizes(config) == {40, 41}


@pytest.mark.parametrize(
    ("old", "task", "new"),
    [
        ("LlamaForCausalLM", "SEQ_CLS", "LlamaForSequenceClassification"),
        ("BertForMaskedLM", "TOKEN_CLS", "BertForTokenClassification"),
        ("GPT2LMHeadModel", "SEQ_CLS", "GPT2ForSequenceClassification"),
        ("BertModel", "QUESTION_ANS", "BertForQuestionAnswering"),
        ("LlamaForCausalLM", "CAUSAL_LM", "LlamaForCausalLM"),
        ("LlamaForSequenceClassification", "SEQ_CLS", "LlamaForSequenceClassification"),
    ],
)
def test_a_head_of_its_own_makes_another_class(old: str, task: str, new: str) -> None:
    config, told = adapt_head({"architectures": [old]}, task, {})
    assert config["architectures"] == [new]
    assert bool(told) == (old != new)


def test_another_number_of_labels_is_written_and_said() -> None:
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    changed, told = adapt_head(config, "SEQ_CLS", {Fqn("score.weight"): (3, 8)})
    assert changed["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert len(told) == 1
    assert adapt_head(config, "SEQ_CLS", {Fqn("score.weight"): (2, 8)})[0] == config


def test_quantization_is_gone_at_every_depth() -> None:
    config = {
        "quantization_config": {"bits": 4},
        "text_config": {"quantization_config": {}, "n": 1},
    }
    assert drop_quantization(config) == {"text_config": {"n": 1}}


def test_types_are_those_of_transformers_only() -> None:
    nested = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    assert find_model_types(nested) == {"llava", "llama"}
    assert not find_model_types(nested | {"auto_map": {"AutoModel": "modeling.Own"}})
    assert not find_model_types(None)
