"""How many rows a tokenizer needs, by what its file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.conversion.prepare import ConversionJob
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.vocabulary import count_tokens


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 6}}, "added_tokens": []}, 7),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}, "added_tokens": [{"id": 9}]}, 10),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}, 2),
        ({"model": {"vocab": {}}, "added_tokens": None}, 0),
        ({"model": {"vocab": {"a": "0"}}, "added_tokens": ["b", {"id": None}]}, 0),
        ({"model": "gpt2"}, 0),
    ],
)
def test_the_largest_number_of_a_token_tells_the_rows(
    tokenizer: dict[str, Any], tokens: int
) -> None:
    assert count_tokens(tokenizer) == tokens


@pytest.mark.parametrize(
    ("config", "is_named"),
    [
        ({"vocab_size": 2}, True),
        ({"vocab_size": 3}, False),
        ({"text_config": {"vocab_size": 2}}, True),
        ({"text_config": {"vocab_size": 4}}, False),
        ({"vocab_size": "2"}, False),
        ({}, False),
    ],
)
def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_named(
    config: dict[str, Any], is_named: bool, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ConversionJob(tmp_path, None, ConsolidateRequest()).plan_output() as planned:
        named = [note for note in planned.plan.notes if "tokens up to number 2" in note]
    assert bool(named) == is_named
