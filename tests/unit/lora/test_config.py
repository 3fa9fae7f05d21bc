"""What a PEFT configuration says, whatever version wrote it; no PEFT is needed to read it."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.lora.config import LoraSettings
from ckptkit.lora.inference import find_shortest_names

OLDEST = {  # as PEFT 0.2 wrote it
    "base_model_name_or_path": "base",
    "bias": "none",
    "enable_lora": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "merge_weights": False,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 16,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


def parsed(**options: Any) -> LoraSettings:
    return LoraSettings.parse({"peft_type": "LORA", **options}, where="adapter_config.json")


def test_the_oldest_configuration_has_the_defaults_of_what_came_later() -> None:
    settings = LoraSettings.parse(OLDEST)
    assert (settings.r, settings.lora_alpha, settings.scaling("m.q_proj")) == (16, 32, 2.0)
    assert settings.target_modules == ("q_proj", "v_proj")
    assert not (settings.use_rslora)
    assert not (settings.use_dora)
    assert not (settings.lora_bias)
    assert (settings.rank_pattern, settings.alpha_pattern) == ({}, {})
    assert (settings.peft_version, settings.revision) == (None, None)
    assert settings.document is OLDEST


def test_the_first_pattern_that_fits_a_path_or_its_end_decides() -> None:
    settings = parsed(
        r=8,
        lora_alpha=16,
        rank_pattern={r"layers\.0\.q_proj": 2, "q_proj": 4, ".*_proj": 32},
        alpha_pattern={"k_proj": 1.5},
    )
    assert settings.rank("base_model.model.model.layers.0.q_proj") == 2
    assert settings.rank("model.layers.1.q_proj") == 4
    assert settings.rank("model.layers.1.v_proj") == 32
    assert settings.rank("model.layers.1.my_q_proj.x") == 8
    assert settings.scaling("model.layers.1.k_proj") == 1.5 / 32
    assert settings.scaling("model.norm") == 2.0


def test_rslora_divides_by_the_root_of_the_rank_that_a_pattern_gives() -> None:
    settings = parsed(r=8, lora_alpha=6, use_rslora=True, rank_pattern={"q_proj": 9})
    assert settings.scaling("q_proj") == 2.0


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, {}),
        ([], {}),
        ([5, 1], {"": (5, 1)}),
        ({"embed_tokens": [2], "lm_head": [3, 4]}, {"embed_tokens": (2,), "lm_head": (3, 4)}),
    ],
)
def test_trained_rows_belong_to_the_embedding_that_is_named(given: Any, meant: Any) -> None:
    assert parsed(trainable_token_indices=given).trainable_token_indices == meant


@pytest.mark.parametrize(
    ("start", "changes"),
    [(True, False), (False, False), (None, False), ("gaussian", False), ("eva", False)]
    + [(name, True) for name in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")],
)
def test_starts_that_write_into_the_base_are_told(start: Any, changes: bool) -> None:
    assert parsed(init_lora_weights=start).changes_base is changes


@pytest.mark.parametrize("method", ["IA3", "LOHA", "LOKR", "OFT", "BOFT", "PROMPT_TUNING", "VERA"])
def test_methods_that_are_not_modelled_are_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"PEFT's method '{method}'"):
        parsed(peft_type=method)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layer_replication", [[0, 2], [1, 3]]),
        ("megatron_config", {"a": 1}),
        ("arrow_config", {"top_k": 2}),
        ("alora_invocation_tokens", [1, 2]),
        ("kasa_config", {"beta": 1.0}),
        ("use_bdlora", {"nblocks": 2}),
        ("use_qalora", True),
        ("monteclora_config", {"num_samples": 2}),
        ("an_option_of_next_year", "on"),
    ],
)
def test_options_that_change_numbers_and_are_not_modelled_are_refused_by_name(
    option: str, value: Any
) -> None:
    with pytest.raises(UnsupportedError, match=option):
        parsed(**{option: value})


@pytest.mark.parametrize("nothing", [None, False, "", [], {}, 0])
def test_unknown_options_that_hold_nothing_are_passed_over(nothing: Any) -> None:
    assert parsed(an_option_of_next_year=nothing).r == 8


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("r", value) for value in (0, -1, "8", 1.5, True, None)),
        *(("lora_alpha", value) for value in ("x", None, True, float("nan"), float("inf"))),
        *(("rank_pattern", value) for value in ([1], {"q": 0}, {"q": 2.5}, {"(": 2})),
        *(("alpha_pattern", value) for value in ("q", {"q": "a"}, {"*": 2})),
        *(("target_modules", value) for value in (3, [1], "(", {"q_proj": 1})),
        *(("modules_to_save", value) for value in (3, ["("], ["(?i)q"])),
        *(("target_parameters", value) for value in ("experts.up", [3])),
        *(("trainable_token_indices", value) for value in ("1,2", [-1], {"e": "x"}, [True])),
        *(("layers_to_transform", value) for value in ("0", [0.5])),
        *(("bias", value) for value in ("some", None, 1)),
        *(("use_dora", value) for value in ("yes", 1)),
        *(("revision", value) for value in (1, ["main"])),
        ("init_lora_weights", 3),
    ],
)
def test_values_of_another_type_are_refused(option: str, value: Any) -> None:
    with pytest.raises(FormatError, match=option):
        parsed(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bias", "a" * 70_000),
        ("init_lora_weights", ["a" * 70_000]),
        ("peft_type", "a" * 70_000),
        ("a" * 70_000, "x"),
    ],
)
def test_a_long_value_makes_no_long_error(option: str, value: Any) -> None:
    with pytest.raises((FormatError, UnsupportedError)) as raised:
        parsed(**{option: value})
    assert "aaa" in str(raised.value)
    assert len(f"{raised.value} {raised.value.hint}") < 1_000


def test_names_of_targets_are_those_of_no_container_and_no_numbers() -> None:
    """PEFT compares them with all modules, also those that own no tensor."""
    targets = ["blocks.0.to_q", "blocks.0.to_out.0"]
    assert find_shortest_names(targets, targets) == ["blocks.0.to_out.0", "to_q"]
    inside = ["blocks.0.attention.query", "blocks.1.query.weight"]
    assert find_shortest_names(inside[:1], inside) == inside[:1]
