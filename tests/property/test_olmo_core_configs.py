"""Configurations of OLMo-core that say anything anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.olmo_core import make_config, read_settings

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TEXTS = {
    name: (FIXTURES / name / "checkpoint/step1/config.json").read_text(encoding="utf-8")
    for name in ("olmo_core_olmo3", "olmo_core_olmoe")
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def list_places(document: Any) -> list[tuple[Any, str]]:
    here = [(document, key) for key in document] if isinstance(document, dict) else []
    return here + [place for table, key in here for place in list_places(table[key])]


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_any_value_in_any_place_makes_a_whole_configuration_or_none(
    name: str, data: st.DataObject
) -> None:
    document = json.loads(TEXTS[name])
    usual = make_config(document)
    assert usual is not None
    places = list_places(document)
    for at in data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=3)):
        table, key = places[at]
        table[key] = data.draw(VALUES)
    made = make_config(document)
    assert made is None or usual.keys() - made.keys() <= {"sliding_window", "layer_types"}
    assert all(isinstance(value, int) for value in read_settings(document).values())
