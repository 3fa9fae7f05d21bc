"""Which state dict a tensor belongs to, and what its own name is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.errors import FormatError
from ckptkit.core.index import KeyPath
from ckptkit.formats.trees import classify

STEPS = st.sampled_from(
    ["model", "optim", "state", "module", "ema", "a", "b.weight", "_orig_mod.c.bias", "rng", "0"]
) | st.integers(0, 3)
PATHS = st.lists(STEPS, min_size=1, max_size=4).map(tuple)


def kinds(*paths: KeyPath) -> list[tuple[str, str, str]]:
    return [(m.tree, m.part, m.name) for m in classify(paths, where="x")]


def only(path: KeyPath, *others: KeyPath) -> tuple[str, str, str]:
    return kinds(path, *others)[0]


@pytest.mark.parametrize(
    ("path", "tree", "part", "name"),
    [
        (("model", "up.weight"), "model", "model", "up.weight"),
        (("state", "model", "up.weight"), "state.model", "model", "up.weight"),
        (("models", 1, "up.weight"), "models.1", "model", "up.weight"),
        (("model_state_dict", "up.weight"), "model_state_dict", "model", "up.weight"),
        (
            ("optim", "state", "up.weight", "exp_avg"),
            "optim",
            "optimizer",
            "state.up.weight.exp_avg",
        ),
        (("optimizer_0", "state", 0, "step"), "optimizer_0", "optimizer", "state.0.step"),
        (("ema", "up.weight"), "ema", "model", "up.weight"),
        (("rng_state", "cuda"), "rng_state", "other", "cuda"),
        (("lr_scheduler", "last"), "lr_scheduler", "other", "last"),
        (("up.weight",), "", "model", "up.weight"),
        (("model.up.weight",), "", "model", "model.up.weight"),
        (("anything",), "", "model", "anything"),
        (("generator", "up.weight"), "generator", "model", "up.weight"),
        (("netG", "up.weight"), "netG", "model", "up.weight"),
        (("model_ema", "cls_token"), "model_ema", "model", "cls_token"),
        (("state_dict_ema", "x"), "state_dict_ema", "model", "x"),
        (("ema", "state_dict", "x"), "ema.state_dict", "model", "x"),
        (("model", "encoder", "x"), "model", "model", "encoder.x"),
        (("optimizer_states", 1, "state", 0, "x"), "optimizer_states.1", "optimizer", "state.0.x"),
        (("g_optimizer", "state", 0, "x"), "g_optimizer", "optimizer", "state.0.x"),
        (("lr_scheduler_state_dict", "x"), "lr_scheduler_state_dict", "other", "x"),
        (("scaler_state_dict", "scale"), "scaler_state_dict", "other", "scale"),
        (("callbacks", "EMA", "decay.weight"), "callbacks", "other", "EMA.decay.weight"),
    ],
)
def test_a_path_tells_tree_part_and_name(path: KeyPath, tree: str, part: str, name: str) -> None:
    assert only(path) == (tree, part, name)


@pytest.mark.parametrize(
    "wrapped",
    [
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w.weight",
        "_orig_mod.layers.0.w.weight",
        "layers.0._checkpoint_wrapped_module.w.weight",
        "module.layers.0.w.weight",
        "module._orig_mod.layers.0.w.weight",
        "_orig_mod.module.layers.0.w.weight",
        "module.module.layers.0.w.weight",
        "module.module._orig_mod.layers.0._checkpoint_wrapped_module.w.weight",
        "_forward_module.layers.0.w.weight",
    ],
)
def test_wrapper_segments_are_cut_out_of_model_names(wrapped: str) -> None:
    assert only(("model", wrapped))[2] == "layers.0.w.weight"


def test_what_has_groups_of_parameters_is_an_optimizer_whatever_it_is_called() -> None:
    paths: list[KeyPath] = [("net", "a.weight"), ("adam", "state.a.weight.exp_avg")]
    groups: list[KeyPath] = [("adam", "param_groups.a.weight.lr")]
    found = classify(paths, where="x", values=groups)
    assert [one.part for one in found] == ["model", "optimizer"]
    (alone,) = classify([("state", 0, "exp_avg")], where="x", values=[("param_groups", 0, "lr")])
    assert (alone.tree, alone.part, alone.name) == ("", "optimizer", "state.0.exp_avg")


@pytest.mark.parametrize("has_groups", [True, False])
def test_a_model_kept_beside_its_own_optimizer_is_apart_from_it(has_groups: bool) -> None:
    paths: list[KeyPath] = [
        ("student", "model", "a.weight"),
        ("student", "optimizer", "state", 0, "exp_avg"),
        ("teacher", "model", "a.weight"),
    ]
    groups: list[KeyPath] = [("student", "optimizer", "param_groups", 0, "lr")] * has_groups
    found = [(m.tree, m.part, m.name) for m in classify(paths, where="x", values=groups)]
    assert found == [
        ("student.model", "model", "a.weight"),
        ("student.optimizer", "optimizer", "state.0.exp_avg"),
        ("teacher", "model", "model.a.weight"),
    ]


def test_the_count_of_an_averaged_model_is_no_weight_of_it() -> None:
    found = kinds(("ema", "module.a.weight"), ("ema", "n_averaged"))
    assert found == [("ema", "model", "a.weight"), ("ema", "other", "n_averaged")]
    assert kinds(("model", "a.weight"), ("model", "n_averaged"))[1][1] == "model"


def test_names_of_nothing_but_wrappers_take_no_time() -> None:
    (found,) = kinds(("model", "module." * 100_000 + "w"))
    assert found[2].endswith("module.w")


def test_module_is_a_wrapper_only_where_every_name_begins_with_it() -> None:
    found = kinds(("model", "module.a.weight"), ("model", "b.weight"))
    assert [name for _, _, name in found] == ["module.a.weight", "b.weight"]


def test_wrapper_segments_stay_in_optimizer_names() -> None:
    assert only(("optim", "module.a.weight"))[2] == "module.a.weight"


def test_containers_without_parameters_are_other_beside_a_model() -> None:
    found = kinds(("model", "a.weight"), ("counters", "tokens"))
    assert [part for _, part, _ in found] == ["model", "other"]


def test_extra_state_is_never_a_tensor_of_the_model() -> None:
    found = kinds(("model", "a._extra_state"), ("model", "a.weight"))
    assert [part for _, part, _ in found] == ["other", "model"]


def test_names_that_collide_without_their_wrappers_are_refused() -> None:
    with pytest.raises(FormatError, match=r"both named 'a\.weight'") as caught:
        classify([("model", "a.weight"), ("model", "_orig_mod.a.weight")], where="x")
    assert caught.value.hint


@settings(max_examples=150)
@given(st.lists(PATHS, max_size=8, unique=True))
def test_every_path_gets_one_place_and_no_models_name_is_given_twice(paths: list[KeyPath]) -> None:
    try:
        found = classify(paths, where="x")
    except FormatError:
        return
    assert len(found) == len(paths)
    assert all(one.name for one in found)
    models = [(one.tree, one.name) for one in found if one.part == "model"]
    assert len(set(models)) == len(models)
    assert classify(paths, where="y") == found
    if paths:
        assert "model" in {one.part for one in found} or all(_tells(path) for path in paths)


def _tells(path: KeyPath) -> bool:
    """Whether a path names an optimizer or something that is no model."""
    return any(str(step) in {"optim", "rng"} for step in path[:-1])
