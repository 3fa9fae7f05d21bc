"""Which changes leave two tied names one tensor, and what a merge makes of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.lora.changes import (
    AdapterSource,
    Change,
    LowRankChange,
    Replacement,
    TokenRowsChange,
    adapt_head,
    drop_quantization,
    find_model_types,
    find_tied_pairs,
    find_vocabulary_sizes,
    has_vocabulary,
    resize_vocabulary,
    share_changes,
)
from tests.adapter_tensors import FLOAT, make_entry

EMBEDDING, HEAD = Fqn("model.embed_tokens.weight"), Fqn("lm_head.weight")
CONFIG = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
SOURCE = AdapterSource(0, "adapter0", "adapter")


def at(position: int) -> AdapterSource:
    return AdapterSource(position, f"adapter{position}", "adapter")


def low_rank(weight: Fqn, form: Any, down: Shape, up: Shape, **more: Any) -> LowRankChange:
    factors = {"down": make_entry(f"{weight}.A", down), "up": make_entry(f"{weight}.B", up)}
    fixed = {"magnitude": None, "rank": 2, "scaling": 2.0}
    return LowRankChange(SOURCE, weight, weight, form, **(factors | fixed | more))


def rows(weight: Fqn, *indices: int) -> TokenRowsChange:
    return TokenRowsChange(
        SOURCE, weight, weight, make_entry(f"{weight}.rows", (len(indices), 4)), indices
    )


def whole(weight: Fqn, tensor: TensorEntry, *, frozen: bool = False) -> Replacement:
    return Replacement(SOURCE, weight, weight, tensor, frozen)


@pytest.mark.parametrize("is_present", [True, False])
def test_a_declared_tie_is_found_whether_or_not_both_names_are_there(is_present: bool) -> None:
    names = [EMBEDDING, HEAD] if is_present else [EMBEDDING]
    (pair,) = find_tied_pairs(CONFIG, dict.fromkeys(names, (FLOAT, (8, 4))))
    assert (pair.target, pair.source, pair.is_present) == (HEAD, EMBEDDING, is_present)


def test_a_head_with_tokens_or_a_weight_of_its_own_gets_no_others_of_its_adapter() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (FLOAT, (8, 4))})
    for own in (rows(HEAD, 3), whole(HEAD, make_entry("own", (8, 4)))):
        changes: dict[Fqn, list[Change]] = {HEAD: [own], EMBEDDING: [rows(EMBEDDING, 1)]}
        assert share_changes(changes, pairs, ())[HEAD] == [own]


def test_what_another_adapter_makes_of_a_tied_head_is_not_lost() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (FLOAT, (8, 4))})
    tensor = make_entry("whole", (8, 4))
    down, up = (2, 4), (8, 2)
    tied_lora = low_rank(EMBEDDING, "embedding", (2, 8), (4, 2))
    refused: list[tuple[Change, Change, str]] = [
        (rows(EMBEDDING, 1), whole(HEAD, tensor), "replaced"),
        (rows(EMBEDDING, 1), rows(HEAD, 1), "two adapters train the row 1"),
        (
            rows(EMBEDDING, 1),
            low_rank(HEAD, "linear", down, up, magnitude=make_entry("m", (8,))),
            "DoRA",
        ),
        (whole(EMBEDDING, tensor), low_rank(HEAD, "linear", down, up), "replaced"),
        (tied_lora, rows(HEAD, 1), "PEFT does not define their sum"),
    ]
    for embedding, head, reason in refused:
        changes = {EMBEDDING: [embedding], HEAD: [replace(head, source=at(1))]}
        with pytest.raises(RefusedError, match=reason):
            share_changes(changes, pairs, {0})


def test_a_frozen_weight_beneath_is_nothing_trained() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (FLOAT, (8, 4))})
    below = {
        name: whole(name, make_entry(f"{name}.base", (9, 4)), frozen=True)
        for name in (EMBEDDING, HEAD)
    }
    changes: dict[Fqn, list[Change]] = {
        EMBEDDING: [below[EMBEDDING], rows(EMBEDDING, 1)],
        HEAD: [below[HEAD]],
    }
    shared = share_changes(changes, pairs, ())
    assert [type(change) for change in shared[HEAD]] == [Replacement, TokenRowsChange]


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
