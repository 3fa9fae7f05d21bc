"""Tied embeddings: which changes leave two names one tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import ChunkTable, Fqn, Key, Shape, TensorEntry
from ckptkit.lora.changes import (
    AdapterSource,
    Change,
    LowRankChange,
    Replacement,
    TokenRowsChange,
    find_equalities,
    find_tied_pairs,
    share_changes,
)

EMBEDDING, HEAD = Fqn("model.embed_tokens.weight"), Fqn("lm_head.weight")
CONFIG = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
SOURCE = AdapterSource(0, "adapter0", "adapter")


def at(position: int) -> AdapterSource:
    return AdapterSource(position, f"adapter{position}", "adapter")


def entry(name: str, shape: Shape) -> TensorEntry:
    row = np.zeros(1, np.int64)
    chunks = ChunkTable(np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64), row)
    dtype = dtype_named("float32")
    return TensorEntry(Key(name), (name,), Fqn(name), "", "model", dtype, shape, chunks)


def low_rank(weight: Fqn, form: Any, down: Shape, up: Shape, **more: Any) -> LowRankChange:
    factors = {"down": entry(f"{weight}.A", down), "up": entry(f"{weight}.B", up)}
    fixed = {"magnitude": None, "rank": 2, "scaling": 2.0}
    return LowRankChange(SOURCE, weight, weight, form, **(factors | fixed | more))


def rows(weight: Fqn, *indices: int) -> TokenRowsChange:
    return TokenRowsChange(
        SOURCE, weight, weight, entry(f"{weight}.rows", (len(indices), 4)), indices
    )


def whole(weight: Fqn, tensor: TensorEntry, *, frozen: bool = False) -> Replacement:
    return Replacement(SOURCE, weight, weight, tensor, frozen)


@pytest.mark.parametrize("is_present", [True, False])
def test_a_declared_tie_is_found_whether_or_not_both_names_are_there(is_present: bool) -> None:
    names = [EMBEDDING, HEAD] if is_present else [EMBEDDING]
    (pair,) = find_tied_pairs(CONFIG, dict.fromkeys(names, (dtype_named("float32"), (8, 4))))
    assert (pair.target, pair.source, pair.is_present) == (HEAD, EMBEDDING, is_present)


def test_trained_tokens_are_shared_with_the_head() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    trained = rows(EMBEDDING, 1, 2)
    shared = share_changes({EMBEDDING: [trained]}, pairs, ())
    assert shared[HEAD] == [replace(trained, weight=HEAD)]
    assert find_equalities(shared[HEAD], shared[EMBEDDING]) == []


@pytest.mark.parametrize("rows_position", [0, 1, 2])
def test_trained_tokens_are_beneath_the_loras_of_the_head(rows_position: int) -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    update = replace(low_rank(HEAD, "linear", (2, 4), (8, 2)), source=at(1))
    trained = replace(rows(EMBEDDING, 1, 2), source=at(rows_position))
    shared = share_changes({HEAD: [update], EMBEDDING: [trained]}, pairs, {1})
    assert shared[HEAD] == [replace(trained, weight=HEAD), update]
    assert shared[EMBEDDING] == [trained]


def test_a_head_with_tokens_or_a_weight_of_its_own_gets_no_others_of_its_adapter() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    for own in (rows(HEAD, 3), whole(HEAD, entry("own", (8, 4)))):
        changes: dict[Fqn, list[Change]] = {HEAD: [own], EMBEDDING: [rows(EMBEDDING, 1)]}
        assert share_changes(changes, pairs, ())[HEAD] == [own]


def test_what_another_adapter_makes_of_a_tied_head_is_not_lost() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    tensor = entry("whole", (8, 4))
    down, up = (2, 4), (8, 2)
    tied_lora = low_rank(EMBEDDING, "embedding", (2, 8), (4, 2))
    refused: list[tuple[Change, Change, str]] = [
        (rows(EMBEDDING, 1), whole(HEAD, tensor), "replaced"),
        (rows(EMBEDDING, 1), rows(HEAD, 1), "two adapters train the row 1"),
        (
            rows(EMBEDDING, 1),
            low_rank(HEAD, "linear", down, up, magnitude=entry("m", (8,))),
            "DoRA",
        ),
        (whole(EMBEDDING, tensor), low_rank(HEAD, "linear", down, up), "replaced"),
        (tied_lora, rows(HEAD, 1), "PEFT does not define their sum"),
    ]
    for embedding, head, reason in refused:
        changes = {EMBEDDING: [embedding], HEAD: [replace(head, source=at(1))]}
        with pytest.raises(RefusedError, match=reason):
            share_changes(changes, pairs, {0})


def test_tokens_of_the_head_alone_are_not_shared_with_the_embedding() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    shared = share_changes({HEAD: [rows(HEAD, 1)]}, pairs, ())
    assert EMBEDDING not in shared
    assert find_equalities(shared[HEAD], shared.get(EMBEDDING, ())) is None


def test_a_lora_is_shared_only_by_those_who_asked_for_it() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    update = low_rank(EMBEDDING, "embedding", (2, 8), (4, 2))
    assert HEAD not in share_changes({EMBEDDING: [update]}, pairs, ())
    shared = share_changes({EMBEDDING: [update]}, pairs, {0})
    assert find_equalities(shared[HEAD], shared[EMBEDDING]) == []


def test_a_frozen_weight_beneath_is_nothing_trained() -> None:
    pairs = find_tied_pairs(CONFIG, {EMBEDDING: (dtype_named("float32"), (8, 4))})
    below = {
        name: whole(name, entry(f"{name}.base", (9, 4)), frozen=True) for name in (EMBEDDING, HEAD)
    }
    changes: dict[Fqn, list[Change]] = {
        EMBEDDING: [below[EMBEDDING], rows(EMBEDDING, 1)],
        HEAD: [below[HEAD]],
    }
    shared = share_changes(changes, pairs, ())
    assert len(shared[HEAD]) == 2
    needed = find_equalities(shared[HEAD], shared[EMBEDDING])
    assert needed is not None
    assert len(needed) == 1


def test_a_head_with_the_transposed_factors_of_its_embedding_is_compared() -> None:
    embedding = low_rank(EMBEDDING, "embedding", (2, 8), (4, 2))
    head = low_rank(HEAD, "linear", (2, 4), (8, 2))
    needed = find_equalities([head], [embedding])
    assert needed is not None
    assert [one.is_transposed for one in needed] == [True, True]


@pytest.mark.parametrize(
    "other",
    [
        low_rank(HEAD, "linear", (2, 4), (8, 2), scaling=1.0),
        low_rank(HEAD, "linear", (3, 4), (8, 3), rank=3),
        low_rank(HEAD, "linear", (2, 4), (8, 2), magnitude=entry("m", (8,))),
        rows(HEAD, 1, 2),
    ],
)
def test_changes_that_differ_whatever_their_bytes_are_break_the_tie(other: Any) -> None:
    assert find_equalities([other], [low_rank(EMBEDDING, "embedding", (2, 8), (4, 2))]) is None


def test_whole_tensors_are_compared_unless_their_shapes_differ() -> None:
    first, second = (whole(name, entry(name, (9, 4))) for name in (HEAD, EMBEDDING))
    assert len(find_equalities([first], [second]) or ()) == 1
    assert find_equalities([first], [whole(EMBEDDING, entry("e", (8, 4)))]) is None
