"""How many rows a tokenizer needs, by what its file says."""

from __future__ import annotations

from typing import Any

import pytest

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
