"""Texts of a model that get into the card of a push: no markup, no metadata, no code of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ckptkit.core.manifest import Manifest
from ckptkit.hub.contents import ModelFacts, base_model_of, scrub_card, write_card

HOSTILE = (
    "x` | |\n\n# Owned\n<script>alert(1)</script>",
    "{{ 7 * 7 }}{% import os %}",
    "---\nlicense: mit\ntags: [evil]\n---",
    "a\nbase_model: evil/model",
    "![x](https://evil.example/track.png)",
    "[click](javascript:alert(1))",
    "\u202etxt.exe",
    "${jndi:ldap://evil}",
    "`rm -rf /`",
)


def card_of(config: Mapping[str, Any], adapter: Mapping[str, Any] | None, source: Any) -> str:
    manifest = Manifest("model", source, {}, {}, {})
    base = base_model_of(config, adapter, None)
    return write_card(ModelFacts("model", base, adapter, config, manifest))


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "key", ["dtype", "torch_dtype", "architectures", "model_type", "_name_or_path"]
)
def test_a_configuration_puts_nothing_into_a_card(key: str, text: str) -> None:
    value: Any = [text + "ForCausalLM"] if key == "architectures" else text
    card = card_of({key: value}, None, {})
    assert text not in card
    assert "evil" not in card
    assert "alert" not in card
    assert card.count("---\n") == 2


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("key", ["peft_type", "r", "lora_alpha", "base_model_name_or_path"])
def test_an_adapter_puts_nothing_into_a_card(key: str, text: str) -> None:
    card = card_of({}, {key: text}, {})
    assert text not in card
    assert "evil" not in card
    assert "alert" not in card


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("key", ["format", "world_size", "step"])
def test_a_manifest_puts_nothing_into_a_card(key: str, text: str) -> None:
    card = card_of({}, None, {key: text})
    assert text not in card
    assert "evil" not in card


def test_what_is_true_is_still_said() -> None:
    config = {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    card = card_of(config, {"peft_type": "LORA", "r": 8, "lora_alpha": 16.5}, {"format": "dcp"})
    for said in ("`bfloat16`", "text-generation", "`LORA`", "`8`", "`16.5`", "`dcp`"):
        assert said in card


@pytest.mark.parametrize("count", [1, 20_000])
def test_a_card_of_the_author_is_scrubbed_in_linear_time(count: int) -> None:
    text = "---\n" + "base_model:\n- /home/me/x\n" * count + "---\n# A\n"
    assert "/home/me" not in scrub_card(text)
    assert scrub_card("---\n" + "-" * 200_000) == "---\n" + "-" * 200_000
