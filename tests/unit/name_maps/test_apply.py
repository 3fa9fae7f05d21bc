"""What a name map makes of tensors, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError
from ckptkit.core.index import Fqn
from ckptkit.name_maps.apply import MappedNames, apply_map
from ckptkit.name_maps.language import NameMap, invert, load_own_map, parse_map
from ckptkit.name_maps.shipped import list_map_names
from tests.property.tiles import positions

FLOAT = dtype_named("float32")
HEAD = 'name = "own"\nsource = "A"\ntarget = "B"\n'
SIZES = '[sizes]\nlayer = "layers"\nheads = "heads"\nexpert = "experts"\nhalf = "width / 2"\n'
CONFIG = {"layers": 2, "further": 1, "heads": 3, "experts": 2, "width": 4, "inner": {"rows": 5}}
Arrays = Mapping[str, NDArray[Any]]


def made(rules: str) -> NameMap:
    return parse_map(HEAD + SIZES + rules, where="own.toml")


def rule(source: str, target: str, more: str = "") -> str:
    return f"[[rule]]\nfrom = {source}\nto = {target}\n{more}\n"


def apply(name_map: NameMap, arrays: Arrays) -> MappedNames:
    specs = {Fqn(name): (FLOAT, array.shape) for name, array in arrays.items()}
    return apply_map(name_map, CONFIG, specs, where="run")


def build(names: MappedNames, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Returns the tensors that the boxes of `names` describe."""
    results = {}
    for name, tensor in names.tensors.items():
        out = np.full(tensor.shape, 0 if tensor.has_padding else np.nan, np.float32)
        for source, tile in tensor.pieces:
            flat = np.ascontiguousarray(arrays[source]).ravel()
            for there, here in zip(*positions(tile), strict=True):
                out[there] = flat[here]
        added, factor, divisor = map(np.float32, names.changed.get(name, (0, 1, 1)))
        results[str(name)] = out * factor / divisor + added
    return results


def numbered(*shape: int) -> NDArray[Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


X = numbered(12, 4)
GROUPED = X.reshape(3, 4, 4)
MOVES: Mapping[str, tuple[str, Arrays, Arrays]] = {
    "a rename with a number": (
        rule('"a.{layer}.w"', '"b.{layer}.v"'),
        {"a.0.w": X, "a.1.w": -X},
        {"b.0.v": X, "b.1.v": -X},
    ),
    "stacked layers": (
        rule('"a.{layer?}.w"', '"b.{layer}.v"'),
        {"a.w": np.stack([X, -X])},
        {"b.0.v": X, "b.1.v": -X},
    ),
    "stacked layers and experts": (
        rule('"a.{layer?}.w"', '"b.{layer}.{expert}.v"'),
        {"a.w": numbered(2, 2, 5)},
        {f"b.{i}.{j}.v": numbered(2, 2, 5)[i, j] for i in range(2) for j in range(2)},
    ),
    "experts become one tensor": (
        rule('"a.{layer}.{expert}.w"', '"b.{layer}.v"', "steps = [{ transpose = [1, 0] }]"),
        {f"a.{i}.{j}.w": numbered(2, 2, 5, 3)[i, j] for i in range(2) for j in range(2)},
        {f"b.{i}.v": numbered(2, 2, 5, 3)[i].transpose(0, 2, 1) for i in range(2)},
    ),
    "experts below one another": (
        rule(
            '"a.{layer}"', '"b.{layer}.{half}"', 'steps = [{ transpose = [1, 0] }]\njoined = "half"'
        ),
        {"a.0": X, "a.1": -X},
        {
            f"b.{i}.{j}": sign * X[6 * j : 6 * j + 6].T
            for i, sign in ((0, 1), (1, -1))
            for j in (0, 1)
        },
    ),
    "a split": (
        rule('"a"', '["b", "c"]', "steps = [{ split = [5, 7] }]"),
        {"a": X},
        {"b": X[:5], "c": X[5:]},
    ),
    "a split of columns": (
        rule('"a"', '["b", "c"]', "steps = [{ split = [1, 3], axis = 1 }]"),
        {"a": X},
        {"b": X[:, :1], "c": X[:, 1:]},
    ),
    "groups": (
        rule('"a"', '["b", "c"]', 'steps = [{ split = [3, 1], groups = "heads" }]'),
        {"a": X},
        {"b": GROUPED[:, :3].reshape(9, 4), "c": GROUPED[:, 3:].reshape(3, 4)},
    ),
    "rotary halves": (
        rule(
            '"a"',
            '"b"',
            'steps = [{ reorder = "(head half n) -> (head n half)", head = "heads", half = 2 }]',
        ),
        {"a": X},
        {"b": X.reshape(3, 2, 2, 4).transpose(0, 2, 1, 3).reshape(12, 4)},
    ),
    "rotary neighbours of some tensors": (
        rule(
            '"a"',
            '["b", "c"]',
            "steps = [{ split = [8, 4] }, { reorder ="
            ' "(head n half) -> (head half n)", n = 2, half = 2, only = [0] }]',
        ),
        {"a": X},
        {"b": X[:8].reshape(2, 2, 2, 4).transpose(0, 2, 1, 3).reshape(8, 4), "c": X[8:]},
    ),
    "an axis becomes two": (
        rule('"a"', '"b"', 'steps = [{ unflatten = [3, "width"], axis = 0 }]'),
        {"a": X},
        {"b": X.reshape(3, 4, 4)},
    ),
    "two axes become one": (
        rule('"a"', '"b"', 'steps = [{ flatten = ["width", 2], axis = 1 }]'),
        {"a": numbered(3, 4, 2, 5)},
        {"b": numbered(3, 8, 5)},
    ),
    "a size of an inner configuration": (
        rule('"a"', '["b", "c"]', 'steps = [{ split = ["inner.rows", 7] }]'),
        {"a": X},
        {"b": X[:5], "c": X[5:]},
    ),
    "padding is cut": (
        rule('"a"', '"b"', "steps = [{ rows = 10 }]"),
        {"a": X},
        {"b": X[:10]},
    ),
    "padding is cut and added": (
        rule('"a"', '"b"', "steps = [{ rows = 12, multiple = 8 }]"),
        {"a": np.pad(X, ((0, 4), (0, 0)))},
        {"b": X},
    ),
    "padding is added": (
        rule('"a"', '"b"', "steps = [{ pad = 5, rows = 4, axis = 1 }]"),
        {"a": X},
        {"b": np.pad(X, ((0, 0), (0, 1)))},
    ),
    "a constant": (rule('"a"', '"b"', "steps = [{ add = 1 }]"), {"a": X}, {"b": X + 1}),
    "alternatives": (rule('"a.(x|y)"', '"b"'), {"a.y": X}, {"b": X}),
}


BELOW = "experts below one another"


@pytest.mark.parametrize("what", MOVES)
def test_a_rule_moves_elements(what: str) -> None:
    rules, before, after = MOVES[what]
    result = build(apply(made(rules), before), before)
    assert result.keys() == after.keys()
    for name, array in after.items():
        np.testing.assert_array_equal(result[name], array)


@pytest.mark.parametrize("what", [w for w in MOVES if w not in ("padding is cut", BELOW)])
def test_the_inverse_of_a_rule_restores_the_source(what: str) -> None:
    rules, before, after = MOVES[what]
    result = build(apply(invert(made(rules)), after), after)
    # Stacked tensors come back apart, and the first of the alternatives is written.
    expected = {
        "stacked layers": {"a.0.w": X, "a.1.w": -X},
        "stacked layers and experts": {f"a.{i}.w": numbered(2, 2, 5)[i] for i in range(2)},
        "alternatives": {"a.x": X},
    }.get(what, before)
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(result[name], array)


ONE = rule('"a.{layer}.w"', '"b.{layer}.v"')
WRONG: Mapping[str, tuple[str, Arrays, str, str]] = {
    "a tensor without a rule": (
        *(ONE, {"a.0.w": X, "a.1.w": X, "a.1.w2": X}, "cannot-plan"),
        "no rule of map 'own' takes tensor 'a.1.w2'; the nearest is own.toml, rule 1",
    ),
    "two rules that take a tensor": (
        *(ONE + rule('"a.0.w"', '"c"'), {"a.0.w": X, "a.1.w": X}, "cannot-plan"),
        "'a.0.w' is taken by own.toml, rule 1 .* and own.toml, rule 2",
    ),
    "two rules that make a tensor": (
        *(rule('"a"', '"c"') + rule('"b"', '"c"'), {"a": X, "b": X}, "cannot-plan"),
        "'c' is made by own.toml, rule 1 and by own.toml, rule 2",
    ),
    "a rule that never matches": (
        *(ONE + rule('"z"', '"c"'), {"a.0.w": X, "a.1.w": X}, "cannot-plan"),
        "has no tensor for own.toml, rule 2: 'z'",
    ),
    "a missing layer": (
        ONE,
        {"a.0.w": X},
        "incomplete-checkpoint",
        "layer 1 is missing; .* 0 to 1",
    ),
    "a layer too many": (
        *(ONE, {f"a.{i}.w": X for i in range(3)}, "bad-format"),
        "layer 2 is one too many; expected 0 to 1",
    ),
    "a layer twice": (
        *(rule('"(a|b).{layer}.w"', '"b.{layer}.v"'), {"a.0.w": X, "b.0.w": X}, "bad-format"),
        "layer 0 comes from 'a.0.w' and from 'b.0.w'",
    ),
    "a missing expert": (
        rule('"a.{layer}.{expert}.w"', '"b.{layer}.{expert}.v"'),
        {"a.0.0.w": X, "a.0.1.w": X, "a.1.0.w": X},
        "incomplete-checkpoint",
        "expert 1 of layer 1 is missing",
    ),
    "a part that is missing": (
        *(rule('["a", "b"]', '"c"', "steps = [{ concat = [12, 12] }]"), {"a": X}),
        *("incomplete-checkpoint", "has no 'b', which belongs to 'a'"),
    ),
    "sizes that do not fit": (
        *(rule('"a"', '["b", "c"]', 'steps = [{ split = ["heads", 5] }]'), {"a": X}, "bad-format"),
        r"tensor 'a'.*has shape \[12, 4\]; expected 8 along axis 0: 1 x \(3 \+ 5\)",
    ),
    "stacked layers that the configuration does not have": (
        *(rule('"a.{layer?}.w"', '"b.{layer}.v"'), {"a.w": numbered(3, 2)}, "bad-format"),
        r"shape \[3, 2\]; expected 2 along the axis of 'layer'",
    ),
    "rows that are not those of all": (
        *(rule('"a"', '"b.{half}"', 'joined = "half"'), {"a": numbered(3, 2)}, "bad-format"),
        r"shape \[3, 2\]; expected 2 along the axis of 'half'",
    ),
    "sizes that do not divide": (
        *(rule('"a"', '["b", "c"]', 'steps = [{ split = ["width / heads", 5] }]'), {"a": X}),
        *("refused", "4 and 3 do not divide"),
    ),
    "a configuration of another family": (
        *(rule('"a"', '["b", "c"]', 'steps = [{ split = ["kv_rank", 5] }]'), {"a": X}, "refused"),
        "needs 'kv_rank', which the configuration does not have",
    ),
    "an axis that has other parts": (
        *(rule('"a"', '"b"', "steps = [{ unflatten = [5, 2] }]"), {"a": X}, "bad-format"),
        r"has shape \[12, 4\]; axis 0 does not consist of 5 x 2",
    ),
    "axes that have other sizes": (
        *(rule('"a"', '"b"', "steps = [{ flatten = [12, 5] }]"), {"a": X}, "bad-format"),
        r"has shape \[12, 4\]; expected \[12, 5\] from axis 0 on",
    ),
    "a size that an inner configuration does not have": (
        *(rule('"a"', '["b", "c"]', 'steps = [{ split = ["inner.depth", 5] }]'), {"a": X}),
        *("refused", "needs 'inner.depth', which the configuration does not have"),
    ),
    "too few rows": (
        *(rule('"a"', '"b"', "steps = [{ rows = 13 }]"), {"a": X}, "bad-format"),
        "expected at least 13 along axis 0",
    ),
    "rows of another vocabulary": (
        *(rule('"a"', '"b"', "steps = [{ rows = 32000 }]"), {"a": numbered(64000, 1)}),
        *("bad-format", "64,000 rows against 32,000 in the configuration"),
    ),
    "a position that no tensor has": (
        *(rule('"a"', '"b"', "steps = [{ add = 1, only = [1] }]"), {"a": X}, "bad-option"),
        "'only' has 1, and 1 tensors come from the step before it",
    ),
    "a part of less than nothing": (
        *(rule('"a"', '["b", "c"]', 'steps = [{ split = ["heads + 17", "heads - 11"] }]'),),
        *({"a": X}, "refused", "'heads - 11' is -8; expected at least 1"),
    ),
    "groups and parts of less than nothing": (
        *(rule('"a"', '["b", "c"]', 'steps = [{ split = ["0 - 6", "0 - 6"], groups = "0 - 1" }]'),),
        *({"a": X}, "refused", "'0 - 6' is -6; expected at least 1"),
    ),
    "factors of less than nothing": (
        *(
            rule(
                '"a"', '"b"', 'steps = [{ reorder = "(x y) -> (y x)", x = "0 - 3", y = "0 - 4" }]'
            ),
        ),
        *({"a": X}, "refused", "'0 - 3' is -3; expected at least 1"),
    ),
    "parts of other widths": (
        *(rule('["a", "b"]', '"c"', "steps = [{ concat = [12, 3] }]"),),
        *({"a": X, "b": numbered(3, 5)}, "bad-format", r"shape \[3, 5\]; expected \[3, 4\]"),
    ),
    "parts of other dimensions": (
        *(rule('["a", "b"]', '"c"', "steps = [{ concat = [12, 3] }]"),),
        *({"a": X, "b": numbered(3)}, "bad-format", r"shape \[3\]; expected \[3, 4\]"),
    ),
    "nothing that is kept": (
        *('[[rule]]\nfrom = "a.*"\ndrop = "no use"\n', {"a.w": X}, "cannot-plan"),
        "no rule of the map makes a tensor: all are left out",
    ),
    "more tensors than names": (
        *(rule('"a"', '"b"', "steps = [{ split = [5, 7] }]"), {"a": X}, "bad-option"),
        "makes 2 tensors for 1 names",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_add_up_is_refused(what: str) -> None:
    rules, arrays, code, message = WRONG[what]
    with pytest.raises(CkptkitError, match=message) as caught:
        apply(made(rules), arrays)
    assert caught.value.code == code


def test_the_inverse_leaves_out_what_lies_below_one_another() -> None:
    assert not invert(made(MOVES[BELOW][0])).rules


NUMBERS: Mapping[str, tuple[str, Arrays]] = {
    "every other layer, along an axis and by names": (
        rule('"x"', '"b.{layer}"', "axis = 1\nnumbers = { layer = [0, 2] }")
        + rule('"y.{layer}"', '"b.{layer}"', "numbers = { layer = [1, 2] }"),
        {"x": X[:, :1], "y.0": X[:, 1]},
    ),
    "their place among some, and the rest after a size": (
        rule('"x.{turn}"', '"b.{layer}"', 'axis = 1\nnumbers = { layer = ["turn", 6] }')
        + rule('"y.{layer}"', '"b.{layer}"', 'numbers = { layer = ["3 // 2", 1] }'),
        {"x.0": X[:, :1], "y.0": X[:, 1]},
    ),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_a_rule_may_have_some_numbers_only(what: str) -> None:
    rules, before = NUMBERS[what]
    result = build(apply(made(rules), before), before)
    assert result.keys() == {"b.0", "b.1"}
    for number in range(2):
        np.testing.assert_array_equal(result[f"b.{number}"], X[:, number])
    assert not invert(made(rules)).rules


def test_layers_that_the_rules_with_some_numbers_lack_or_have_too_often_are_refused() -> None:
    rules = NUMBERS["every other layer, along an axis and by names"][0]
    for arrays, message in (
        ({"x": X[:, :1]}, "has no tensor for"),
        ({"x": X[:, :2], "y.0": X[:, 1]}, "layer 2 is one too many"),
        ({"x": X[:, :1], "y.1": X[:, 1]}, "layer 1 is missing"),
    ):
        with pytest.raises(CkptkitError, match=message):
            apply(made(rules), arrays)


def test_a_root_is_divided_by_exactly_and_multiplied_with_on_the_way_back() -> None:
    root, near = np.float32(3**0.5), np.float32(1.734375)  # of bfloat16
    for more, divisor in (("", root), (', rounded = "bfloat16"', near)):
        name_map = made(rule('"x"', '"y"', f'steps = [{{ over_root = "heads"{more} }}]'))
        np.testing.assert_array_equal(build(apply(name_map, {"x": X}), {"x": X})["y"], X / divisor)
        back = build(apply(invert(name_map), {"y": X}), {"y": X})["x"]
        np.testing.assert_array_equal(back, X * divisor)


def test_a_number_of_layers_that_no_model_has_is_refused_at_once() -> None:
    specs = {Fqn("a.0.w"): (FLOAT, (3,))}
    with pytest.raises(CkptkitError, match=r"layer 1, 2, 3 \.\.\. is missing"):
        apply_map(made(ONE), {**CONFIG, "layers": 10**12}, specs, where="run")


def test_a_size_may_be_a_number() -> None:
    name_map = parse_map(f"{HEAD}[sizes]\nlayer = 2\n{ONE}", where="own.toml")
    assert set(apply(name_map, {"a.0.w": X, "a.1.w": X}).tensors) == {"b.0.v", "b.1.v"}


def test_a_constant_is_added_to_floats_only() -> None:
    own = made(rule('"a"', '"b"', "steps = [{ add = 1 }]"))
    with pytest.raises(CkptkitError, match="'a' is int64; a constant is added to floats only"):
        apply_map(own, CONFIG, {Fqn("a"): (dtype_named("int64"), (3,))}, where="run")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            rule('"a"', '"b"', "steps = [{ add = 1 }, { pad = 8, rows = 12 }]"),
            "rule 1, step 2: fills with zeros",
        ),
        *(
            (
                rule(
                    '["a", "b"]',
                    '"c"',
                    f"steps = [{{ add = 1, only = [{i}] }}, {{ concat = [12, 12] }}]",
                ),
                "rule 1, step 2: joins tensors",
            )
            for i in (0, 1)
        ),
    ],
)
def test_a_constant_that_some_elements_alone_would_get_is_refused(rules: str, message: str) -> None:
    arrays = {name: X for name in "ab" if f'"{name}"' in rules.partition("to =")[0]}
    with pytest.raises(CkptkitError, match=message):
        apply(made(rules), arrays)


def test_the_inverse_writes_zeros_for_what_is_left_out() -> None:
    left_out = (
        'from = "a.{layer}.bias"\ndrop = "not part of it"\n'
        'zeros = { shape = ["experts", 2], beside = "a.{layer}.w" }\n'
    )
    own = made(f"{ONE}[[rule]]\n{left_out}")
    assert not apply(own, {"a.0.w": X, "a.1.w": X, "a.0.bias": X, "a.1.bias": X}).zeros
    (target,) = (rule.targets[0] for rule in own.rules if not rule.drop)
    names = {target.render({"layer": layer}): X for layer in range(2)}
    assert apply(invert(own), names).zeros == {"a.0.bias": (2, 2), "a.1.bias": (2, 2)}


def test_tensors_of_any_rest_of_a_name_are_dropped() -> None:
    own = made(ONE + '[[rule]]\nfrom = "mtp.*"\ndrop = "not part of it"\n')
    names = apply(own, {"a.0.w": X, "a.1.w": X, "mtp.layers.0.x": X, "mtp.y": X})
    assert names.dropped == {"mtp.layers.0.x": "not part of it", "mtp.y": "not part of it"}


HALVES = (
    '[halves]\nlayer = { "*" = "a.{layer}.attention.*", "-" = "a.{layer}.mlp.*" }\n'
    + rule('"a.{layer}.attention.w"', '"b.{layer}.attention"')
    + rule('"a.{layer}.mlp.w"', '"b.{layer}.mlp"')
)
WHOLE = {f"a.{i}.{half}.w": X * i for i in range(2) for half in ("attention", "mlp")}


def in_halves(pattern: str) -> dict[str, NDArray[Any]]:
    named = {"*": "attention", "-": "mlp"}
    return {f"a.{i}.{named[s]}.w": X + i for i, s in enumerate(pattern) if s in named}


def test_halves_of_layers_that_have_numbers_of_their_own_become_layers() -> None:
    found = build(apply(made(HALVES), in_halves("*-*-")), in_halves("*-*-"))
    names = ("b.0.attention", "b.0.mlp", "b.1.attention", "b.1.mlp")
    assert {name: array[0, 0] for name, array in found.items()} == dict(
        zip(names, range(4), strict=True)
    )
    of_whole = build(apply(made(HALVES), WHOLE), WHOLE)
    assert [of_whole[name][0, 1] for name in names] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*--*", r"pattern '\*--\*': 2 is '-', expected '\*'"),
        ("-*-*", r"0 is '-', expected '\*'"),
        ("**", r"1 is '\*', expected '-'"),
        ("*-*", r"3 is missing or of another kind, expected '-'"),
        ("*- -", r"2 is missing or of another kind, expected '\*'"),
        ("*-*-*-", r"layer 2 is one too many"),
        ("*-", r"layer 1 is missing"),
    ],
)
def test_halves_that_make_no_whole_layers_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(CkptkitError, match=message):
        apply(made(HALVES), in_halves(pattern))


@pytest.mark.parametrize(
    ("lost", "layers"),
    [((), [0, 0, 1, 1]), ((1, 2), [0, 1]), ((0, 3), [0, 1])],
)
def test_halves_of_some_modules_are_joined_where_both_show_their_turn(
    lost: tuple[int, ...], layers: list[int]
) -> None:
    arrays = {n: a for n, a in in_halves("*-*-").items() if int(n.split(".")[1]) not in lost}
    specs = {Fqn(name): (FLOAT, array.shape) for name, array in arrays.items()}
    names = apply_map(made(HALVES), CONFIG, specs, where="run", extent="layers")
    assert sorted(int(name.split(".")[1]) for name in names.tensors) == layers


def test_modules_of_one_half_keep_their_numbers() -> None:
    specs = {Fqn(f"a.{i}.attention.w"): (FLOAT, X.shape) for i in range(2)}
    names = apply_map(made(HALVES), CONFIG, specs, where="run", extent="modules")
    assert set(names.tensors) == {"b.0.attention", "b.1.attention"}
    moved = {Fqn(f"a.{2 * i}.attention.w"): (FLOAT, X.shape) for i in range(2)}
    with pytest.raises(CkptkitError, match=r"layer 1 is missing|layer 2 is one too many"):
        apply_map(made(HALVES), CONFIG, moved, where="run", extent="modules")


FURTHER = (
    '[further.more]\nafter = "layer"\ncount = "further"\n'
    'rules = { "a.{layer}." = "more.{more}.block.", "b.{layer}." = "b.{more}." }\n'
    + rule('"a.{layer}.w"', '"b.{layer}.v"')
    + rule('"more.{more}.norm"', '"b.{more}.norm"')
    + rule('"more.0.first"', '"first"', 'optional = "more"')
)
MORE = {"more.0.norm": X + 2, "more.0.block.w": X + 3, "more.0.first": X}


def test_further_layers_go_on_from_the_last_one_and_may_be_absent() -> None:
    of_model = {"a.0.w": X, "a.1.w": X + 1}
    own = made(FURTHER)
    found = build(apply(own, of_model | MORE), of_model | MORE)
    assert set(found) == {"b.0.v", "b.1.v", "b.2.norm", "b.2.v", "first"}
    assert [found[name][0, 0] for name in ("b.1.v", "b.2.norm", "b.2.v")] == [1, 2, 3]
    assert set(build(apply(own, of_model), of_model)) == {"b.0.v", "b.1.v"}
    back = build(apply(invert(own), found), found)
    assert back.keys() == (of_model | MORE).keys()
    assert all((back[name] == array).all() for name, array in (of_model | MORE).items())


@pytest.mark.parametrize("lost", MORE)
def test_a_further_layer_without_a_tensor_is_refused(lost: str) -> None:
    arrays = {"a.0.w": X, "a.1.w": X, **MORE}
    del arrays[lost]
    with pytest.raises(CkptkitError, match=r"has no tensor for own.toml, rule"):
        apply(made(FURTHER), arrays)


@pytest.mark.parametrize("count", [0, 2])
def test_another_count_of_further_layers_than_the_configuration_has_is_refused(count: int) -> None:
    arrays = {"a.0.w": X, "a.1.w": X, **MORE}
    specs = {Fqn(name): (FLOAT, array.shape) for name, array in arrays.items()}
    message = f"has 1 more layers, and further is {count} in the configuration"
    with pytest.raises(CkptkitError, match=message):
        apply_map(made(FURTHER), CONFIG | {"further": count}, specs, where="run")


TYPOS = {
    "numbers without a distance": (
        rule('"a.{layer}"', '"b.{layer}"', "numbers = { layer = [1] }"),
        "'numbers' is",
    ),
    "numbers of no capture": (
        rule('"a.{layer}"', '"b.{layer}"', "numbers = { other = [1, 2] }"),
        "'partial' is other",
    ),
    "halves that are a list": (f"[halves]\nlayer = [1]\n{ONE}", "'halves' is"),
    "a half that is a number": (f"[halves]\nlayer = {{ a = 1, b = 2 }}\n{ONE}", "'layer' is"),
    "three halves": (
        '[halves]\nlayer = { a = "{layer}.a", b = "{layer}.b", c = "{layer}.c" }\n' + ONE,
        "expected two names with {layer}",
    ),
    "halves of another capture": (
        '[halves]\nlayer = { a = "{other}.a", b = "{layer}.b" }\n' + ONE,
        "expected two names with {layer}",
    ),
    "further layers without a table": (f"[further]\nmtp = 1\n{ONE}", "'further' is"),
    "further layers with a list": (
        f"[further.mtp]\nrules = [1]\n{ONE}",
        "'rules' is",
    ),
    "further layers with another key": (
        f'[further.mtp]\nrule = {{ "a" = "b" }}\n{ONE}',
        "has the key 'rule'",
    ),
    "no TOML": ("[[rule", "is not TOML"),
    "no rules": ("", r"has no \[\[rule\]\]"),
    "a key that is unknown": ('[[rule]]\nfrm = "a"', "has the key 'frm'.*did you mean 'from'"),
    "neither target nor reason": ('[[rule]]\nfrom = "a"', "needs 'from', and either 'to'"),
    "a name with a space": (rule('"a b"', '"c"'), "has ' ' at character 2"),
    "a capture twice": (rule('"a.{l}.{l}"', '"c.{l}"'), "the capture 'l' twice"),
    "an optional capture at the end": (rule('"a.{l?}"', '"c.{l}"'), "has no dot after"),
    "captures that differ": (rule('["a.{l}", "b"]', '"c.{l}"'), "not have the same captures"),
    "a step that is unknown": (rule('"a"', '"b"', "steps = [{ spilt = [1] }]"), "is no step"),
    "a step with a key too many": (
        *(rule('"a"', '"b"', "steps = [{ rows = 3, axes = 1 }]"),),
        "is not a step 'rows'",
    ),
    "zeros of what is kept": (
        rule('"a.{layer}"', '"b.{layer}"', 'zeros = { shape = [2], beside = "a.{layer}" }'),
        "'zeros' is",
    ),
    "zeros without a shape": (
        '[[rule]]\nfrom = "a.{layer}"\ndrop = "x"\nzeros = { beside = "b.{layer}" }\n',
        "'zeros' is",
    ),
    "zeros beside tensors of other numbers": (
        '[[rule]]\nfrom = "a.{layer}"\ndrop = "x"\nzeros = { shape = [2], beside = "b" }\n',
        "do not have the same captures",
    ),
    "any rest in a name that is kept": (rule('"a.*"', '"b"'), r"a name with '\*'"),
    "any text within a name": (rule('"a*b"', '"c"'), r"has '\*' at character 2"),
    "a constant that is no number": (
        *(rule('"a"', '"b"', "steps = [{ add = nan }]"),),
        "is not a step 'add'",
    ),
    "a constant that no float32 is": (
        *(rule('"a"', '"b"', "steps = [{ add = 1e40 }]"),),
        "is not a step 'add'",
    ),
    "a constant of hundreds of digits": (
        *(rule('"a"', '"b"', f"steps = [{{ add = {10**400} }}]"),),
        "is not a step 'add'",
    ),
    "a name twice in a rule": (
        rule('"a"', '["b", "(b|c)"]', "steps = [{ split = [6, 6] }]"),
        "makes 'b' twice",
    ),
    "an option that is a text": (rule('"a"', '"b"', 'optional = "yes"'), "'optional' true or"),
    "a capture that the rule does not have": (
        *(rule('"a.{layer}"', '"b.{layer}"', 'partial = "layr"'),),
        "'partial' is layr; captures of the rule are layer",
    ),
    "a capture of both sides below one another": (
        rule('"a.{layer}"', '"b.{layer}.{half}"', 'joined = "layer"'),
        "'joined' is layer, expected the capture that only 'to' has",
    ),
    "positions of a split": (
        *(rule('"a"', '["b", "c"]', "steps = [{ split = [1, 2], only = [0] }]"),),
        "is not a step 'split'",
    ),
    "no positions": (
        *(rule('"a"', '"b"', "steps = [{ add = 1, only = [] }]"),),
        "is not a step 'add'",
    ),
    "a condition that is a text": (
        '[when]\nrope = "no"\n' + rule('"a"', '"b"'),
        "'when' is .*expected a table of truth values",
    ),
    "an order that loses a factor": (
        rule('"a"', '"b"', 'steps = [{ reorder = "(x y) -> (x)", x = 2 }]'),
        "is not a step 'reorder'",
    ),
}


@pytest.mark.parametrize("what", TYPOS)
def test_a_typo_in_a_map_is_refused(what: str) -> None:
    rules, message = TYPOS[what]
    with pytest.raises(CkptkitError, match=f"(?s){message}") as caught:
        made(rules)
    assert "own.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ('a = "b"\nb = "a"', "'a' is computed from itself: a -> b -> a"),
        ('a = "len(x)"', "is not an expression of sizes"),
        ('a = "2 ** 9"', "has an operator other than"),
        ('a = "2 // 0"', "do not divide"),
        ('a = "__import__"', "needs '__import__'"),
        (f'a = "{"9 * " * 60}9"', "is not an expression of sizes"),
        ('a = "99999999 * 99999999"', "too large"),
    ],
)
def test_a_size_that_cannot_be_computed_is_refused(sizes: str, message: str) -> None:
    steps = 'steps = [{ rows = "a" }]'
    text = f"{HEAD}[sizes]\n{sizes}\n" + rule('"a"', '"b"', steps)
    with pytest.raises(CkptkitError, match=message):
        apply(parse_map(text, where="own.toml"), {"a": X})


@pytest.mark.parametrize("name", list_map_names())
def test_every_map_that_comes_along_can_be_read_and_inverted(name: str) -> None:
    own = load_own_map(name)
    assert own.name == name
    inverse = invert(own)
    kept = [rule for rule in own.rules if rule.zeros or (rule.has_inverse and not rule.drop)]
    assert len(inverse.rules) == len(kept)


def test_of_a_part_of_a_model_whole_tensors_are_made_alone() -> None:
    """What another model completes may lack tensors; a stack of some of its experts is wrong."""
    name_map = made(
        rule('"a.{layer}.w"', '"b.{layer}.v"')
        + rule('"e.{layer}.{expert}.w"', '"f.{layer}.v"')
        + rule('["q.{layer}", "k.{layer}"]', '"qk.{layer}"', "steps = [{ concat = [12, 12] }]")
    )
    whole = {f"e.1.{i}.w": X for i in range(2)}

    def of_part(arrays: Arrays) -> MappedNames:
        specs = {Fqn(name): (FLOAT, array.shape) for name, array in arrays.items()}
        return apply_map(name_map, CONFIG, specs, where="run", extent="part")

    assert set(of_part({"a.1.w": X}).tensors) == {"b.1.v"}
    assert set(of_part(whole).tensors) == {"f.1.v"}
    with pytest.raises(CkptkitError, match="expert 1 of layer 1 is missing"):
        of_part({"e.1.0.w": X})
    with pytest.raises(CkptkitError, match=r"has no 'k\.\{layer\}'"):
        of_part({"q.0": X})
    with pytest.raises(CkptkitError, match="no rule of map 'own' takes tensor 'other'"):
        of_part({"a.1.w": X, "other": X})
