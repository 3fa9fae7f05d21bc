"""Which tensors are an adapter's, what each is for, and what is missing or too much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from ckptkit.core.errors import AdapterError, CannotPlanError, FormatError, UnsupportedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.lora.accounting import ModuleRow, account, note_old_alphas
from ckptkit.lora.config import Adapter, LoraSettings
from ckptkit.lora.dialects import (
    DEFAULT,
    build_table,
    rename_plainly,
    select_adapter_tensors,
    sort_entries,
)
from ckptkit.lora.inference import infer_config
from tests.adapter_tensors import make_entry

P = "base_model.model."
Q, V = "layers.0.q_proj", "layers.0.v_proj"
Entries = dict[Fqn, TensorEntry]


def named(shapes: Mapping[str, Shape]) -> Entries:
    return {Fqn(name): make_entry(name, shape) for name, shape in shapes.items()}


def factors(module: str, *, rank: int = 2, out: int = 6, inner: int = 4) -> dict[str, Shape]:
    return {
        f"{P}{module}.lora_A.weight": (rank, inner),
        f"{P}{module}.lora_B.weight": (out, rank),
    }


def rows_of(
    shapes: Mapping[str, Shape],
    options: Mapping[str, Any],
    base: Mapping[str, Shape] | None = None,
    *,
    is_own_record: bool = False,
) -> tuple[ModuleRow, ...]:
    settings = LoraSettings.parse({"peft_type": "LORA", "r": 2, **options})
    adapter = Adapter("default", settings, named(shapes))
    return account(adapter, named(base or {}), is_own_record=is_own_record)


# Names


@pytest.mark.parametrize(
    ("live", "plain"),
    [
        (f"{P}{Q}.base_layer.weight", f"{Q}.weight"),
        (f"{P}m.experts.base_layer.base_layer.gate_up_proj", "m.experts.gate_up_proj"),
        (f"{P}embed_tokens.token_adapter.base_layer.weight", "embed_tokens.weight"),
        (f"{P}score.original_module.weight", "score.weight"),
        (f"module.{P}norm._orig_mod.weight", "norm.weight"),
        (f"{P}{Q}.base_layer.weight.absmax", f"{Q}.weight.absmax"),
    ],
)
def test_a_frozen_base_gets_the_names_that_it_has_without_peft(live: str, plain: str) -> None:
    assert list(rename_plainly(sort_entries([make_entry(live, (1,))]).rest)) == [plain]


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "module.", "model.", "state_dict.model.", "_forward_module.", "_orig_mod."),
        *("module._fsdp_wrapped_module.", "language_model."),
    ],
)
def test_whatever_stands_before_the_names_of_peft_is_cut_off(prefix: str) -> None:
    live = make_entry(f"{prefix}{P}{Q}.lora_A.default.weight", (2, 4))
    assert list(select_adapter_tensors(sort_entries([live]), DEFAULT, None)) == [
        f"{P}{Q}.lora_A.weight"
    ]


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "module"])
def test_wrappers_are_cut_out_wherever_they_stand(wrapper: str) -> None:
    live = make_entry(
        f"{P}{wrapper}.layers.0.{wrapper}.q_proj.lora_B.default.{wrapper}.weight", (4, 2)
    )
    assert list(select_adapter_tensors(sort_entries([live]), DEFAULT, None)) == [
        f"{P}{Q}.lora_B.weight"
    ]


def test_a_model_may_have_modules_of_that_name_itself() -> None:
    live = make_entry(f"{P}module.q_proj.lora_A.default.weight", (2, 4))
    assert sort_entries([live]).cut_module
    kept = sort_entries([live], keep_module=True)
    assert list(kept.live["default"]) == [f"{P}module.q_proj.lora_A.weight"]
    assert not kept.cut_module


def test_an_adapter_may_be_called_as_a_wrapper_is() -> None:
    names = ("lora_A.module.weight", "lora_magnitude_vector.module.weight")
    found = sort_entries([make_entry(f"module.{P}{Q}.{name}", (2, 4)) for name in names])
    assert list(found.live["module"]) == [f"{P}{Q}.lora_A.weight", f"{P}{Q}.lora_magnitude_vector"]
    assert not found.stripped


def test_an_adapter_within_what_another_one_trained_as_a_whole_is_refused() -> None:
    inside = make_entry(f"{P}mlp.modules_to_save.default.up_proj.lora_A.second.weight", (2, 4))
    with pytest.raises(UnsupportedError, match="inside of a module that another one trained"):
        sort_entries([inside])
    named_so = make_entry(f"{P}mlp.modules_to_save.modules_to_save.up_proj.weight", (4, 4))
    assert list(sort_entries([named_so]).live) == ["modules_to_save"]


def test_a_module_of_the_base_may_be_called_as_a_method_names_its_own() -> None:
    frozen = {f"{P}{Q}.base_layer.weight": (6, 4), f"{P}lora_proj.weight": (4, 4)}
    shapes = {f"{P}{Q}.lora_A.default.weight": (2, 4), **frozen}
    assert list(rename_plainly(sort_entries(named(shapes).values()).rest)) == [
        f"{Q}.weight",
        "lora_proj.weight",
    ]


def test_both_spellings_of_a_magnitude_are_read() -> None:
    for ending in ("default", "default.weight"):
        live = make_entry(f"{P}{Q}.lora_magnitude_vector.{ending}", (6,))
        assert list(select_adapter_tensors(sort_entries([live]), DEFAULT, None)) == [
            f"{P}{Q}.lora_magnitude_vector"
        ]
    for ending in ("", ".weight"):
        stripped = make_entry(f"{P}{Q}.lora_magnitude_vector{ending}", (6,))
        assert list(select_adapter_tensors(sort_entries([stripped]), DEFAULT, None)) == [
            f"{P}{Q}.lora_magnitude_vector"
        ]


def test_one_adapter_leaves_the_others_alone() -> None:
    entries = [
        make_entry(f"{P}{Q}.lora_A.{name}.weight", (rank, 4)) for name, rank in (("a", 2), ("b", 3))
    ]
    assert select_adapter_tensors(sort_entries(entries), "b", None)[
        Fqn(f"{P}{Q}.lora_A.weight")
    ].shape == (
        3,
        4,
    )
    assert rename_plainly(sort_entries(entries).rest) == {}


def test_names_that_become_one_are_refused() -> None:
    entries = [make_entry(f"{P}{w}{Q}.lora_A.default.weight", (2, 4)) for w in ("", "_orig_mod.")]
    with pytest.raises(FormatError, match="are both the tensor"):
        sort_entries(entries)


@pytest.mark.parametrize("part", ["ia3_l", "hada_w1_a", "lokr_w1", "oft_R", "vera_lambda_b"])
def test_tensors_of_other_methods_are_refused_by_name(part: str) -> None:
    with pytest.raises(UnsupportedError, match=part.split("_", maxsplit=1)[0]):
        sort_entries([make_entry(f"{P}{Q}.{part}.default", (1, 4))])


def test_variants_of_lora_with_tensors_of_their_own_are_refused_by_name() -> None:
    shapes = {f"{P}{Q}.lora_A.default.weight": (2, 4), f"{P}{Q}.lora_diag.default": (2,)}
    with pytest.raises(UnsupportedError, match="lora_diag"):
        sort_entries(named(shapes).values())


# What belongs together


def test_every_tensor_of_an_adapter_is_in_exactly_one_row() -> None:
    shapes = {
        **factors(Q),
        **factors("layers.1.q_proj", rank=5),
        f"{P}{Q}.lora_magnitude_vector": (6,),
        f"{P}layers.1.q_proj.lora_magnitude_vector": (6,),
        f"{P}wte.lora_embedding_A": (2, 32),
        f"{P}wte.lora_embedding_B": (4, 2),
        f"{P}wte.lora_magnitude_vector": (4,),
        f"{P}conv.lora_A.weight": (2, 3, 3, 3),
        f"{P}conv.lora_B.weight": (8, 2, 1, 1),
        f"{P}conv.lora_magnitude_vector": (1, 8, 1, 1),
        f"{P}score.weight": (3, 4),
        f"{P}score.bias": (3,),
        f"{P}embed_tokens.token_adapter.trainable_tokens_delta": (2, 4),
    }
    options = {
        "use_dora": True,
        "target_modules": ["q_proj", "wte", "conv"],
        "rank_pattern": {"layers.1.q_proj": 5},
        "modules_to_save": ["classifier", "score"],
        "trainable_token_indices": [1, 2],
    }
    rows = rows_of(shapes, options)
    used = [name for row in rows for name in row.names]
    assert sorted(used) == sorted(shapes)
    kinds = {row.module: (row.kind, row.rank, row.shape) for row in rows}
    assert kinds[Q] == ("linear", 2, (6, 4))
    assert kinds["layers.1.q_proj"] == ("linear", 5, (6, 4))
    assert kinds["wte"] == ("embedding", 2, (32, 4))
    assert kinds["conv"] == ("convolution", 2, (8, 3, 3, 3))
    assert kinds["score.weight"] == ("whole", None, (3, 4))
    assert kinds["embed_tokens"] == ("tokens", None, (2, 4))


def test_what_was_trained_upon_is_told_from_what_was_trained() -> None:
    shapes: dict[str, Shape] = {
        **factors("lm_head", out=9),
        f"{P}lm_head.base_layer.weight": (9, 4),
        f"{P}embed_tokens.weight": (9, 4),
        f"{P}embed_tokens.original_module.weight": (9, 4),
    }
    rows = rows_of(shapes, {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]})
    assert [(row.module, row.kind) for row in rows[1:]] == [
        ("lm_head.weight", "frozen"),
        ("embed_tokens.weight", "whole"),
        ("embed_tokens.weight", "frozen"),
    ]


def test_patterns_that_peft_sorted_are_named_where_ranks_do_not_fit() -> None:
    options = {"target_modules": ["q_proj"], "rank_pattern": {"layers.0.q_proj": 5, "q_proj": 2}}
    with pytest.raises(AdapterError, match="against rank 5") as caught:
        rows_of(factors(Q), options)
    assert "2 patterns of 'rank_pattern' fit this module, and PEFT sorts" in caught.value.hint
    with pytest.raises(AdapterError, match="against rank 5") as caught:
        rows_of(factors(Q, rank=3), options)
    assert "sorts" not in caught.value.hint


OF_ONE_KEY = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*q_proj": 7}, "lora_alpha": 5}


@pytest.mark.parametrize(
    ("options", "rank", "found"),
    [
        (OF_ONE_KEY, 2, ["7, and gave it 5"]),
        ({**OF_ONE_KEY, "peft_version": "0.21.0"}, 2, []),
        ({**OF_ONE_KEY, "alpha_pattern": {"q_proj": 7}}, 2, []),
        ({**OF_ONE_KEY, "rank_pattern": {"v_proj": 2}}, 2, []),
        ({**OF_ONE_KEY, "rank_pattern": {"layers.0.q_proj": 3, "q_proj": 2}}, 3, []),
    ],
)
def test_an_alpha_that_older_versions_read_otherwise_is_told(
    options: dict[str, Any], rank: int, found: list[str]
) -> None:
    settings = LoraSettings.parse({"r": 2, "target_modules": ["q_proj"], **options})
    adapter = Adapter("default", settings, named(factors(Q, rank=rank)))
    notes = list(note_old_alphas(settings, account(adapter, {})))
    assert len(notes) == len(found)
    assert all(text in note for text, note in zip(found, notes, strict=True))


Q_PROJ = {"target_modules": ["q_proj"]}
BOTH = {"target_modules": ["q_proj", "v_proj"]}
NOT_NAMED = "neither 'target_modules'"
TOKENS = f"{P}embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        # shapes that do not fit
        ({f"{P}{V}.lora_magnitude_vector": (6,)}, {}, "without LoRA's factor A"),
        ({f"{P}{V}.lora_A.weight": (2, 4)}, BOTH, "without LoRA's factor B"),
        ({f"{P}{V}.lora_B.weight": (6, 2)}, BOTH, "without LoRA's factor A"),
        ({f"{P}{Q}.lora_B.weight": (6, 3)}, {}, "rows of A have to be as many as the columns of B"),
        (
            {f"{P}{Q}.lora_A.weight": (8,), f"{P}{Q}.lora_B.weight": (12,)},
            *({}, "found with a B"),
        ),
        ({f"{P}{Q}.lora_A.weight": (2, 0)}, {}, "found with a B"),
        ({f"{P}{Q}.lora_magnitude_vector": (5,)}, {}, "a magnitude of shape"),
        ({f"{P}{Q}.lora_B.bias": (5,)}, {}, "a bias of shape"),
        # what the configuration says otherwise
        ({f"{P}{Q}.lora_magnitude_vector": (6,)}, {}, "has not 'use_dora'"),
        ({f"{P}{Q}.lora_B.bias": (6,)}, {}, "has not 'lora_bias'"),
        ({}, {"r": 16}, "against rank 16"),
        ({}, {"use_dora": True}, "the configuration has 'use_dora'"),
        ({}, {"lora_bias": True}, "the configuration has 'lora_bias'"),
        # what it names in vain
        ({}, {"target_modules": ["q_proj", "k_proj"]}, "'target_modules'"),
        ({}, {"target_modules": r".*\.k_proj"}, NOT_NAMED),
        ({}, {"modules_to_save": ["norm"]}, "'modules_to_save'"),
        ({}, {"target_parameters": ["experts.up"]}, "target_parameters"),
        ({}, {"trainable_token_indices": [1]}, "trainable_token_indices"),
        # and what it does not name
        (factors("mlp.up"), {}, NOT_NAMED),
        (
            factors(V),
            *({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}, NOT_NAMED),
        ),
        (factors("layers.1.q_proj"), {"layers_to_transform": [0]}, NOT_NAMED),
        ({f"{P}norm.weight": (4,)}, {}, "'modules_to_save'"),
        ({f"{P}norm.bias": (4,)}, {}, "'modules_to_save'"),
        (
            {TOKENS: (3, 4)},
            *({"trainable_token_indices": [1, 2]}, "found 3 trained rows, expected 2"),
        ),
    ],
)
def test_tensors_and_a_configuration_that_disagree_are_refused(
    more: dict[str, Shape], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=re.escape(message)):
        rows_of({**factors(Q), **more}, Q_PROJ | options)


def test_a_base_with_a_targeted_weight_that_was_not_adapted_is_refused() -> None:
    base = {f"{Q}.weight": (6, 4), "layers.1.q_proj.weight": (6, 4)}
    with pytest.raises(AdapterError, match=r"layers\.1\.q_proj"):
        rows_of(factors(Q), {"target_modules": ["q_proj"]}, base)


def test_rows_of_tied_embeddings_are_there_once() -> None:
    shapes: dict[str, Shape] = {TOKENS: (2, 4)}
    rows = {"embed_tokens": [3, 1], "lm_head": [3, 1]}
    assert len(rows_of(shapes, {"trainable_token_indices": rows})) == 1
    with pytest.raises(AdapterError, match=r"'trainable_token_indices' .* names 'lm_head'"):
        rows_of(shapes, {"trainable_token_indices": {**rows, "lm_head": [1, 3]}})


def test_what_the_model_never_had_is_no_fault_of_the_runs_own_record() -> None:
    options = {"target_modules": ["q_proj", "query_key_value"]}
    base = {f"{Q}.weight": (6, 4)}
    assert len(rows_of(factors(Q), options, base, is_own_record=True)) == 1
    with pytest.raises(AdapterError, match="query_key_value"):
        rows_of(factors(Q), options, base)
    with pytest.raises(AdapterError, match="k_proj"):
        rows_of(
            factors(Q),
            {"target_modules": ["q_proj", "k_proj"]},
            {**base, "layers.0.k_proj.weight": (6, 4)},
            is_own_record=True,
        )


def test_factors_for_a_weight_of_another_shape_are_refused() -> None:
    options = {"target_modules": ["q_proj"]}
    with pytest.raises(AdapterError, match=r"of shape \[6, 4\], expected \[8, 4\]"):
        rows_of(factors(Q), options, {f"{Q}.weight": (8, 4)})
    assert rows_of(factors(Q), options, {f"{Q}.weight": (4, 6)})
    assert rows_of(factors(Q), options, {f"{Q}.weight": (6, 1)})  # packed to 4 bits


def test_factors_of_experts_find_their_parameters_by_shape_and_rank() -> None:
    shapes = {
        f"{P}mlp.experts.base_layer.lora_A.weight": (6, 8),
        f"{P}mlp.experts.base_layer.lora_B.weight": (10, 6),
        f"{P}mlp.experts.lora_A.weight": (12, 5),
        f"{P}mlp.experts.lora_B.weight": (8, 12),
    }
    options = {
        "target_modules": None,
        "target_parameters": ["experts.down", "experts.gate_up"],
        "rank_pattern": {"down": 4},
        "alpha_pattern": {"down": 2},
    }
    base = {"mlp.experts.gate_up": (3, 10, 8), "mlp.experts.down": (3, 8, 5)}
    rows = {row.module: row for row in rows_of(shapes, options, base)}
    assert (rows["mlp.experts.gate_up"].rank, rows["mlp.experts.gate_up"].scaling) == (2, 4.0)
    assert (rows["mlp.experts.down"].rank, rows["mlp.experts.down"].scaling) == (4, 0.5)
    assert rows["mlp.experts.down"].shape == (3, 8, 5)
    document = inferred(shapes, base, **KNOWN)
    assert document["target_parameters"] == ["down", "gate_up"]
    assert (document["r"], document["rank_pattern"]) in [(2, {"down": 4}), (4, {"gate_up": 2})]
    with pytest.raises(CannotPlanError, match="do not show for which"):
        inferred(shapes, **KNOWN)


# Configurations made from tensors

KNOWN: Mapping[str, Any] = {"lora_alpha": 4, "use_rslora": False}


def inferred(
    shapes: Mapping[str, Shape], base: Mapping[str, Shape] | None = None, **given: Any
) -> Mapping[str, Any]:
    return infer_config(build_table(named(shapes)), named(base or {}), given, where="here")[0]


def test_one_name_stands_for_all_modules_that_end_in_it_where_the_base_shows_them() -> None:
    shapes = {**factors(Q), **factors("layers.1.q_proj"), **factors(V)}
    base = {
        f"layers.{layer}.{module}.weight": (6, 4)
        for layer in range(2)
        for module in ("q_proj", "v_proj")
    }
    assert inferred(shapes, base, **KNOWN)["target_modules"] == [V, "q_proj"]
    assert inferred(shapes, **KNOWN)["target_modules"] == [Q, V, "layers.1.q_proj"]


def test_the_usual_rank_is_r_and_others_are_patterns() -> None:
    shapes = {**factors(Q), **factors("layers.1.q_proj"), **factors(V, rank=7)}
    document = inferred(shapes, **KNOWN)
    assert (document["r"], document["rank_pattern"]) == (2, {"v_proj": 7})


def test_only_what_is_in_use_is_written_of_newer_options() -> None:
    document = inferred(factors(Q), **KNOWN)
    assert not document.keys() & {"use_rslora", "use_dora", "lora_bias", "target_parameters"}
    shapes = {**factors(Q), f"{P}{Q}.lora_magnitude_vector": (6,)}
    document = inferred(shapes, lora_alpha=4, use_rslora=True)
    assert (document["use_dora"], document["use_rslora"]) == (True, True)


def test_biases_tell_which_of_them_were_trained() -> None:
    own = {**factors(Q), f"{P}{Q}.base_layer.bias": (6,)}
    assert inferred(own, **KNOWN)["bias"] == "lora_only"
    assert inferred({**own, f"{P}norm.bias": (4,)}, **KNOWN)["bias"] == "all"
    whole = {**factors(Q), f"{P}score.weight": (3, 4), f"{P}score.bias": (3,)}
    document = inferred(whole, **KNOWN)
    assert (document["bias"], document["modules_to_save"]) == ("none", ["score"])


@pytest.mark.parametrize(
    ("shapes", "base", "missing"),
    [
        (factors(Q), {}, "lora_alpha, use_rslora"),
        (
            {f"{P}wte.token_adapter.trainable_tokens_delta": (2, 4)},
            {},
            "trainable_token_indices",
        ),
        (factors("h.0.c_proj", out=4), {"h.0.c_proj.weight": (4, 4)}, "fan_in_fan_out"),
        (factors("h.0.c_attn"), {}, "lora_alpha, use_rslora, fan_in_fan_out"),
    ],
)
def test_what_tensors_do_not_tell_is_asked_for_by_name(
    shapes: dict[str, Shape], base: dict[str, Shape], missing: str
) -> None:
    with pytest.raises(CannotPlanError, match=re.escape(missing)) as caught:
        inferred(shapes, base)
    assert "--adapter-config" in caught.value.hint


def test_the_shape_of_the_base_tells_how_it_is_stored() -> None:
    shapes = factors("h.0.c_attn")
    document = inferred(shapes, {"h.0.c_attn.weight": (4, 6)}, **KNOWN)
    assert document["fan_in_fan_out"] is True
    document = inferred(shapes, {"h.0.c_attn.weight": (6, 4)}, **KNOWN)
    assert document["fan_in_fan_out"] is False
