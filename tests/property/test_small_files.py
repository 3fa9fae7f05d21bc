"""Small files beside weights may hold any JSON: what is made of them is a result, or our error."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ckptkit.consumers.folder_truth import TELLING, TOKENIZER, parse_texts, tell_truth
from ckptkit.consumers.tokenizer_files import (
    OLD_FILES,
    TokenizerChange,
    compare_tokenizers,
    read_old_files,
)
from ckptkit.core.errors import CkptkitError
from tests.property.examples import examples
from tests.sampled import sampled

KEYS = (
    *("model", "type", "vocab", "merges", "added_tokens", "content", "id", "special", "lstrip"),
    *("post_processor", "processors", "single", "SpecialToken", "Sequence", "cls", "sep", "name"),
    *("eos_token", "pad_token", "tokenizer_class", "model_max_length", "padding_side"),
    *("chat_template", "template", "eos_token_id", "text_config", "decoder", "use_cache"),
    *("model_type", "architectures", "num_nextn_predict_layers", "num_hidden_layers"),
)
TEMPLATE = "{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}"
SCALARS = (None, True, -1, 3, 1.5, "", "<|im_end|>", "default", "llama", TEMPLATE)
TOKENS: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    "added_tokens": [{"content": "<|im_end|>", "id": 1, "special": True}],
    "post_processor": {"type": "Sequence", "processors": [{"single": [{"Sequence": {}}]}]},
}
SETTINGS: dict[str, Any] = {
    "eos_token": "<|im_end|>",
    "tokenizer_class": "LlamaTokenizer",
    "model_max_length": 9,
    "chat_template": [{"name": "default", "template": TEMPLATE}],
}
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": 1,
    "text_config": {"eos_token_id": [1], "use_cache": False},
}


def draw(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(4 if depth < 3 else 2)
    if kind < 2:
        return rng.choice(SCALARS)
    if kind == 2:
        return [draw(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): draw(rng, depth + 1) for _ in range(rng.randrange(4))}


def change(rng: random.Random, document: Any) -> Any:
    """Returns a document with another value at one place, or a new one."""
    if isinstance(document, dict) and document:
        key = rng.choice([*document, rng.choice(KEYS)])
        there = document.get(key)
        return document | {key: change(rng, there) if rng.random() < 0.7 else draw(rng)}
    if isinstance(document, list) and document:
        return [change(rng, document[0]), *document[1:]]
    return draw(rng)


def folder(rng: random.Random) -> dict[str, bytes]:
    documents: dict[str, Any] = {name: {} for name in TELLING}
    documents |= {TOKENIZER: TOKENS, "tokenizer_config.json": SETTINGS, "config.json": MODEL}
    for _ in range(rng.randrange(4)):
        name = rng.choice(list(documents))
        documents[name] = change(rng, documents[name])
    return {name: json.dumps(document).encode() for name, document in documents.items()}


@pytest.mark.parametrize("seed", sampled(range(4), [0]))
def test_any_json_is_compared_or_refused(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  repeated by its seed
    for _ in range(examples(5000)):
        try:
            ours, theirs = parse_texts(folder(rng)), parse_texts(folder(rng))
        except CkptkitError:
            continue
        assert isinstance(compare_tokenizers(ours, theirs), (TokenizerChange, str))
        for found in (theirs, None):
            assert all(tell_truth(ours, found, ["norm.weight"]).changed.values())


@pytest.mark.parametrize("seed", range(2))
def test_old_files_of_a_tokenizer_may_hold_any_bytes(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  repeated by its seed
    step = parse_texts({TOKENIZER: json.dumps(TOKENS).encode()})
    for _ in range(examples(5000)):
        files = {name: json.dumps(draw(rng)).encode() for name in OLD_FILES}
        files["tokenizer.model"] = rng.randbytes(rng.randrange(60))
        found = read_old_files(files)
        if found is not None:
            base = parse_texts({TOKENIZER: json.dumps(found).encode()})
            assert isinstance(compare_tokenizers(step, base), (TokenizerChange, str))
