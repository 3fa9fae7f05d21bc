"""Name maps, arbitrary and nearly right: our own errors, or tensors without a lost element."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError
from ckptkit.core.index import Fqn
from ckptkit.name_maps.apply import apply_map
from ckptkit.name_maps.language import invert, parse_map

FLOAT = dtype_named("float32")
NAMES = (
    "a",
    "a.{l}",
    "a.{l?}.w",
    "a.{l}.{e}",
    "b.{l}.(x|y)",
    "b.{e}",
    "c",
    "c.*",
    "{",
    "a.{l}.{l}",
)
SIZES = ("n", "n / 2", "n - 4", "k", "0 - 1", "2 ** 3", "x", "(", "4", "1", "n * n * n * n")
SIZE = st.sampled_from(SIZES) | st.integers(-2, 6)
ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
PARTS = st.lists(SIZE, max_size=3)
STEP = st.one_of(
    st.fixed_dictionaries({"split": PARTS}, optional={"axis": st.integers(-1, 3), "groups": SIZE}),
    st.fixed_dictionaries({"concat": PARTS}, optional={"axis": st.integers(-1, 3), "groups": SIZE}),
    st.fixed_dictionaries(
        {"reorder": st.sampled_from(["(p q) -> (q p)", "(p q r) -> (r q p)", "(p) -> (q)"])},
        optional={"p": SIZE, "q": SIZE, "only": st.lists(st.integers(-1, 3), max_size=2)},
    ),
    st.fixed_dictionaries({"transpose": st.permutations([0, 1]) | st.lists(ODD, max_size=3)}),
    st.fixed_dictionaries({"rows": SIZE}, optional={"multiple": SIZE, "axis": st.integers(-1, 2)}),
    st.fixed_dictionaries({"add": st.floats() | st.integers()}),
    st.dictionaries(st.sampled_from(["split", "rows", "add", "only"]), ODD),
)
NAME = st.sampled_from(NAMES) | st.lists(st.sampled_from(NAMES), max_size=3)
RULE = st.fixed_dictionaries(
    {"from": NAME},
    optional={
        "to": NAME,
        "steps": st.lists(STEP, max_size=2),
        "optional": st.booleans() | ODD,
        "partial": st.sampled_from(["l", "e", "z"]),
        "drop": st.just("no use") | ODD,
        "inverse": st.booleans() | st.just("all"),
    },
)
SHAPE = st.lists(st.integers(0, 4), max_size=3).map(tuple)
HELD = st.dictionaries(
    st.sampled_from(["a", "a.0", "a.1", "a.w", "a.1.w", "a.0.1", "b.0.x", "b.1.y", "c", "c.9"]),
    SHAPE,
    max_size=4,
)
CONFIG = st.fixed_dictionaries({"n": st.integers(-1, 8) | ODD, "k": st.just(2) | ODD})


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return '"null"' if value is None else json.dumps(value)


@given(st.lists(RULE, max_size=3), st.dictionaries(st.sampled_from("lens"), SIZE), HELD, CONFIG)
@example(
    [{"from": "a", "to": ["b", "d"], "steps": [{"split": ["6", "0 - 2"]}]}], {}, {"a": (4,)}, {}
)
def test_any_map_is_refused_or_keeps_every_element(
    rules: list[dict[str, Any]],
    sizes: dict[str, Any],
    held: dict[str, tuple[int, ...]],
    config: dict[str, Any],
) -> None:
    text = f'name = "m"\nsource = "A"\ntarget = "B"\nrule = {toml(rules)}\nsizes = {toml(sizes)}\n'
    specs = {Fqn(name): (FLOAT, shape) for name, shape in held.items()}
    try:
        name_map = parse_map(text, where="m.toml")
        invert(name_map)
        names = apply_map(name_map, config, specs, where="run")
    except CkptkitError:
        return
    for tensor in names.tensors.values():
        pieces = sum(tile.elements for _, tile in tensor.pieces)
        assert pieces == math.prod(tensor.shape)
    taken = {source for tensor in names.tensors.values() for source in tensor.sources}
    empty = {name for name, shape in held.items() if 0 in shape}
    assert {*map(str, taken), *map(str, names.dropped), *empty} >= held.keys()


@given(st.text(max_size=60))
def test_any_text_is_refused_or_is_a_map(text: str) -> None:
    try:
        parse_map(text, where="m.toml")
    except CkptkitError:
        return
