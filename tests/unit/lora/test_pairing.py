"""What an adapter changes, told by its names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ckptkit.adapters.base_model import find_prefixes, list_modules
from ckptkit.core.errors import AdapterError, CkptkitError, RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.lora.changes import (
    AdapterSource,
    BiasChange,
    Change,
    LowRankChange,
    Replacement,
    TokenRowsChange,
    check_used_once,
    choose_norms,
    combine_changes,
)
from ckptkit.lora.config import PEFT_PREFIX, Adapter, LoraSettings
from ckptkit.lora.pairing import Renaming, find_changes, find_text_model
from tests.adapter_tensors import make_entry

SOURCE = AdapterSource(0, "adapter0", "adapter")


def adapter(shapes: Mapping[str, Shape], **config: Any) -> Adapter:
    settings = LoraSettings.parse({"r": 2, "lora_alpha": 4, **config})
    tensors = {Fqn(f"{PEFT_PREFIX}{n}"): make_entry(n, shape) for n, shape in shapes.items()}
    return Adapter("default", settings, tensors)


def lora(module: str, out: int, inside: int, rank: int = 2) -> dict[str, Shape]:
    return {f"{module}.lora_A.weight": (rank, inside), f"{module}.lora_B.weight": (out, rank)}


def paired(
    given: Adapter, base: Mapping[str, Shape], *types: str, weight: float = 1.0
) -> list[Change]:
    shapes = {Fqn(name): shape for name, shape in base.items()}
    changes = find_changes(given, shapes, SOURCE, model_types=frozenset(types), weight=weight)
    check_used_once(given.tensors, changes, where="adapter")
    return changes


def only(changes: list[Change]) -> Any:
    assert len(changes) == 1
    return changes[0]


@pytest.mark.parametrize(
    ("types", "flag", "form"),
    [
        (("gpt2",), False, "transposed"),  # PEFT sets the flag by the last module that it wraps
        (("llama",), True, "linear"),
        ((), True, "transposed"),
        ((), False, "linear"),
    ],
)
def test_square_weights_lie_as_the_class_of_the_model_stores_them(
    types: tuple[str, ...], flag: bool, form: str
) -> None:
    given = adapter(lora("h.c_proj", 8, 8), target_modules=["c_proj"], fan_in_fan_out=flag)
    assert only(paired(given, {"h.c_proj.weight": (8, 8)}, *types)).form == form


def test_a_weight_that_is_not_square_tells_how_it_lies() -> None:
    given = adapter(lora("h.c_attn", 6, 8), target_modules=["c_attn"])
    assert only(paired(given, {"h.c_attn.weight": (8, 6)}, "llama")).form == "transposed"


def test_an_embedding_is_updated_upon_the_weight_that_lies_with_it() -> None:
    shapes: dict[str, Shape] = {
        "emb.lora_embedding_A": (2, 12),
        "emb.lora_embedding_B": (4, 2),
        "emb.base_layer.weight": (12, 4),
    }
    changes = paired(adapter(shapes, target_modules=["emb"]), {"emb.weight": (10, 4)})
    assert isinstance(changes[0], Replacement)
    assert changes[0].frozen
    assert isinstance(changes[1], LowRankChange)
    assert changes[1].form == "embedding"


def test_a_bias_of_the_factors_shifts_the_bias_of_the_base() -> None:
    shapes = lora("q", 6, 8) | {"q.lora_B.bias": (6,)}
    given = adapter(shapes, target_modules=["q"], lora_bias=True)
    changes = paired(given, {"q.weight": (6, 8), "q.bias": (6,)})
    assert isinstance(changes[1], BiasChange)
    assert changes[1].weight == "q.bias"
    with pytest.raises(RefusedError, match="and none in the base"):
        paired(given, {"q.weight": (6, 8)})


def test_trained_rows_go_where_the_configuration_says() -> None:
    name = "emb.token_adapter.trainable_tokens_delta"
    given = adapter({name: (2, 4)}, target_modules=[], trainable_token_indices={"emb": [7, 3]})
    change: TokenRowsChange = only(paired(given, {"emb.weight": (8, 4)}))
    assert change.indices == (7, 3)
    with pytest.raises(RefusedError, match=r"row 7 of module .* has 7 rows"):
        paired(given, {"emb.weight": (7, 4)})
    with pytest.raises(RefusedError, match="no weight for"):
        paired(given, {"other.weight": (8, 4)})


class TestExperts:
    BASE: Mapping[str, Shape] = {
        "moe.experts.gate_up_proj": (3, 10, 4),
        "moe.experts.down_proj": (3, 4, 5),
    }
    TARGETS = ("experts.gate_up_proj", "experts.down_proj")

    def _given(self, **config: Any) -> Adapter:
        inner = lora("moe.experts.base_layer", 10, 4, rank=6)
        return adapter(
            inner | lora("moe.experts", 4, 5, rank=6),
            target_modules=[],
            target_parameters=list(self.TARGETS),
            **config,
        )

    def test_nested_factors_go_to_the_parameters_that_they_fit(self) -> None:
        changes = paired(self._given(), self.BASE)
        found = {c.weight: (c.form, c.rank) for c in changes if isinstance(c, LowRankChange)}
        assert found == {
            "moe.experts.gate_up_proj": ("experts", 2),
            "moe.experts.down_proj": ("experts", 2),
        }

    def test_patterns_name_the_parameter(self) -> None:
        given = adapter(
            lora("moe.experts", 4, 5, rank=9),
            target_modules=[],
            target_parameters=["down_proj"],
            rank_pattern={".*down_proj": 3},
        )
        assert only(paired(given, {"moe.experts.down_proj": (3, 4, 5)})).rank == 3

    @pytest.mark.parametrize(
        ("version", "types", "form"),
        [
            ("0.21.2", (), "experts"),
            ("0.21.2", ("gpt_oss",), "experts_transposed"),
            ("0.18.1", (), "experts_transposed"),
            (None, (), "experts_transposed"),
        ],
    )
    def test_square_ones_lie_as_the_version_and_the_class_say(
        self, version: str | None, types: tuple[str, ...], form: str
    ) -> None:
        given = adapter(
            lora("e", 4, 4, rank=6),
            target_modules=[],
            target_parameters=["e.w"],
            peft_version=version,
        )
        assert only(paired(given, {"e.w": (3, 4, 4)}, *types)).form == form

    def test_one_parameter_too_few_is_refused(self) -> None:
        given = adapter(
            lora("moe.experts.base_layer", 10, 4, 6) | lora("moe.experts", 4, 5, 6),
            target_modules=[],
            target_parameters=["experts.down_proj"],
        )
        with pytest.raises(RefusedError, match="targets 1"):
            paired(given, self.BASE)


def test_convolutions_are_told_from_grouped_ones() -> None:
    shapes: dict[str, Shape] = {"c.lora_A.weight": (2, 4, 3, 3), "c.lora_B.weight": (8, 2, 1, 1)}
    given = adapter(shapes, target_modules=["c"])
    assert only(paired(given, {"c.weight": (8, 4, 3, 3)})).form == "conv"
    with pytest.raises(RefusedError, match="2 groups"):
        paired(given, {"c.weight": (8, 2, 3, 3)})
    with pytest.raises(RefusedError, match="do not fit"):
        paired(given, {"c.weight": (8, 4, 5, 5)})


def test_whole_modules_may_be_new_but_nothing_else_may() -> None:
    shapes: dict[str, Shape] = {"score.weight": (3, 8)} | lora("q", 6, 8)
    base: dict[str, Shape] = {"q.weight": (6, 8)}
    given = adapter(shapes, target_modules=["q"], modules_to_save=["score"])
    assert not [c for c in paired(given, base) if isinstance(c, Replacement) and c.frozen]
    with pytest.raises(RefusedError, match="neither in the base"):
        paired(adapter(shapes, target_modules=["q"]), base)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"q.weight": (6, 9)}, "do not fit"),
        ({"other.weight": (6, 8)}, "no weight for 1 modules"),
        ({"q.weight": (6, 8, 1, 1)}, "do not fit"),
    ],
)
def test_what_does_not_fit_the_base_is_refused(base: Mapping[str, Shape], said: str) -> None:
    with pytest.raises(CkptkitError, match=said) as refusal:
        paired(adapter(lora("q", 6, 8), target_modules=["q"]), base)
    assert refusal.value.exit_status == 4
    assert refusal.value.hint


def test_a_rank_that_is_not_the_configured_one_would_scale_wrongly() -> None:
    with pytest.raises(RefusedError, match="rank 4, expected 2"):
        paired(adapter(lora("q", 6, 8, rank=4), target_modules=["q"]), {"q.weight": (6, 8)})


def test_a_magnitude_needs_dora_in_the_configuration() -> None:
    shapes = lora("q", 6, 8) | {"q.lora_magnitude_vector": (6,)}
    with pytest.raises(RefusedError, match="'use_dora': false"):
        paired(adapter(shapes, target_modules=["q"]), {"q.weight": (6, 8)})
    given = adapter(shapes, target_modules=["q"], use_dora=True)
    assert only(paired(given, {"q.weight": (6, 8)})).magnitude is not None


class TestNames:
    def test_a_prefix_of_the_head_is_put_before_a_headless_base(self) -> None:
        names = [Fqn("h.0.c_attn.weight"), Fqn("wte.weight")]
        modules = ["lm_head", "transformer.h.0.c_attn"]
        for order in (modules, modules[::-1]):
            assert find_prefixes(order, names) == ("transformer.", "")

    def test_a_headless_adapter_is_put_under_the_prefix_of_its_base(self) -> None:
        names = [Fqn("model.layers.0.q.weight"), Fqn("lm_head.weight")]
        assert find_prefixes(["layers.0.q"], names) == ("", "model.")
        renaming = Renaming("", "model.")
        shapes = {str(n): s for n, s in renaming.to_adapter(dict.fromkeys(names, (6, 8))).items()}
        given = adapter(lora("layers.0.q", 6, 8), target_modules=["layers.0.q"])
        assert list_modules(given) == (["layers.0.q"], [])
        change = only(paired(given, shapes))
        assert renaming.to_base(change.weight) == "model.layers.0.q.weight"

    def test_an_adapter_of_the_text_model_finds_it_beside_a_tower_of_the_same_layers(self) -> None:
        tower = "model.vision_tower.encoder"
        owners = {
            *("lm_head", "model.language_model.embed_tokens", f"{tower}.embed"),
            *(f"model.language_model.layers.{n}.self_attn.q_proj" for n in range(2)),
            *(f"{tower}.layers.{n}.self_attn.q_proj" for n in range(4)),
        }
        modules = ["lm_head", *(f"model.layers.{n}.self_attn.q_proj" for n in range(2))]
        config: Mapping[str, Any] = {"text_config": {}}
        found = find_text_model(modules, owners, config)
        assert found == Renaming("model.", "model.language_model.")
        assert found.to_base("lm_head.weight") == "lm_head.weight"
        assert find_text_model(modules, owners, {}) is None
        assert find_text_model([*modules, "model.layers.9.q"], owners, config) is None
        twice = {owner.replace("language_model", "other") for owner in owners} | owners
        assert find_text_model(modules, twice, config) is None

    def test_names_that_agree_or_have_nothing_in_common_get_none(self) -> None:
        assert find_prefixes(["a.q"], [Fqn("a.q.weight")]) == ("", "")
        assert find_prefixes(["a.q"], [Fqn("b.k.weight")]) == ("", "")


class TestSeveral:
    def _changes(self, position: int, shapes: Mapping[str, Shape], **config: Any) -> list[Change]:
        base = {Fqn("q.weight"): (6, 8), Fqn("emb.weight"): (12, 4)}
        source = AdapterSource(position, f"adapter{position}", f"adapter{position}")
        return find_changes(adapter(shapes, **config), base, source)

    def test_updates_of_one_weight_follow_in_order(self) -> None:
        both = [self._changes(n, lora("q", 6, 8), target_modules=["q"]) for n in (0, 1)]
        combined = combine_changes(both, [1, 1])
        assert [change.source.position for change in combined[Fqn("q.weight")]] == [0, 1]

    def test_one_module_replaced_twice_is_refused(self) -> None:
        both = [self._changes(n, {"q.weight": (6, 8)}, modules_to_save=["q"]) for n in (0, 1)]
        with pytest.raises(RefusedError, match="one of them would be lost"):
            combine_changes(both, [1, 1])

    def test_a_bias_is_replaced_and_then_shifted_by_the_same_adapter_alone(self) -> None:
        shapes = lora("q", 6, 8) | {"q.lora_B.bias": (6,), "q.base_layer.bias": (6,)}
        base = {Fqn("q.weight"): (6, 8), Fqn("q.bias"): (6,)}
        given = adapter(shapes, target_modules=["q"], bias="all", lora_bias=True)
        both = [
            find_changes(given, base, AdapterSource(n, f"adapter{n}", f"adapter{n}"))
            for n in (0, 1)
        ]
        found = combine_changes(both[:1], [1])[Fqn("q.bias")]
        assert [type(change) for change in found] == [Replacement, BiasChange]
        shift: list[Change] = [change for change in both[1] if isinstance(change, BiasChange)]
        for adapters in ([both[0], shift], [shift, both[0]]):
            with pytest.raises(RefusedError, match="one of them would be lost"):
                combine_changes(adapters, [1, 1])

    def test_a_weight_does_not_apply_to_what_is_replaced(self) -> None:
        changes = self._changes(0, {"q.weight": (6, 8)}, modules_to_save=["q"])
        with pytest.raises(RefusedError, match=r"weight of 0\.5"):
            combine_changes([changes], [0.5])

    def test_one_token_trained_twice_is_refused(self) -> None:
        name = "emb.token_adapter.trainable_tokens_delta"
        both = [
            self._changes(n, {name: (2, 4)}, trainable_token_indices=[5, 6 + n]) for n in (0, 1)
        ]
        with pytest.raises(RefusedError, match="the row 5"):
            combine_changes(both, [1, 1])

    @pytest.mark.parametrize(
        ("versions", "norm"),
        [
            (("0.21.0", "0.22.1"), "base"),
            (("0.20.0", "0.21.0"), "running"),
            ((None, None), "running"),
        ],
    )
    def test_norms_of_dora_are_those_of_the_version_that_wrote_it(
        self, versions: tuple[str | None, ...], norm: str
    ) -> None:
        shapes = lora("q", 6, 8) | {"q.lora_magnitude_vector": (6,)}
        both = [self._changes(n, shapes, target_modules=["q"], use_dora=True) for n in (0, 1)]
        choice, note = choose_norms(versions, combine_changes(both, [1, 1]))
        assert choice == norm
        assert str(versions[0] or "no version") in note


def test_a_tensor_that_no_layer_uses_is_an_error() -> None:
    given = adapter(lora("q", 6, 8), target_modules=["q"])
    changes = paired(given, {"q.weight": (6, 8)})
    with pytest.raises(AdapterError, match="0 layers, expected 1"):
        check_used_once(
            {**given.tensors, Fqn("more"): make_entry("more", (1,))}, changes, where="a"
        )
    with pytest.raises(AdapterError, match="2 layers, expected 1"):
        check_used_once(given.tensors, [*changes, *changes], where="a")
