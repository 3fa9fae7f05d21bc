"""Numbers that JSON cannot hold, in `config.json`: read and written as Transformers does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.core.errors import FormatError
from ckptkit.core.model_configs import model_config_to_json, parse_model_config
from ckptkit.hub.contents import scrub_content
from tests.property.examples import examples

transformers = pytest.importorskip("transformers", minversion="5")
torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

WHERE = "config.json"
floats = st.floats(allow_nan=False)
tagged = st.sampled_from(["Infinity", "-Infinity", "NaN", "infinity", ""]).map(
    lambda text: {"__float__": text}
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text() | tagged,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
configs = st.dictionaries(st.text(), values)


@settings(max_examples=examples(200))
@given(configs)
def test_a_configuration_is_read_and_written_as_transformers_does(config: dict[str, Any]) -> None:
    data = json.dumps(config).encode()
    theirs = transformers.PretrainedConfig._decode_special_floats(json.loads(data))
    ours = parse_model_config(data, where=WHERE) if isinstance(theirs, dict) else theirs
    assert repr(ours) == repr(theirs)
    if isinstance(theirs, dict):
        expected = transformers.PretrainedConfig._encode_special_floats(theirs)
        assert json.loads(model_config_to_json(ours), parse_constant=pytest.fail) == expected


@pytest.mark.parametrize(
    ("text", "number"), [("Infinity", math.inf), ("-Infinity", -math.inf), ("1e999", math.inf)]
)
def test_a_number_that_stands_bare_is_written_with_its_tag(text: str, number: float) -> None:
    config = parse_model_config(b'{"a": [0.0, {"b": %s}]}' % text.encode(), where=WHERE)
    assert config == {"a": [0.0, {"b": number}]}
    tag = "Infinity" if number > 0 else "-Infinity"
    assert json.loads(model_config_to_json(config)) == {"a": [0.0, {"b": {"__float__": tag}}]}


def test_no_number_at_all_has_a_tag_too() -> None:
    config = parse_model_config(b'{"a": NaN, "b": {"__float__": "NaN"}}', where=WHERE)
    assert all(math.isnan(value) for value in config.values())
    assert model_config_to_json(config).count(b'"__float__": "NaN"') == 2


def test_a_configuration_of_transformers_4_is_written_as_that_can_read_it() -> None:
    data = b'{"transformers_version": "4.57.1", "time_step_limit": [0.0, Infinity]}'
    written = model_config_to_json(parse_model_config(data, where=WHERE))
    assert json.loads(written) == {
        "transformers_version": "4.57.1",
        "time_step_limit": [0.0, math.inf],
    }


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{",
        b"Infinity",
        b'{"__float__": "Infinity"}',
        b"\xff",
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"[" * 100_000,
    ],
)
def test_what_is_no_configuration_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_model_config(data, where=WHERE)


@pytest.mark.parametrize(
    "value",
    [
        {"__float__": "Inf"},
        {"__float__": 1},
        {"__float__": None},
        {"__float__": "Infinity", "more": 1},
        {"__float__": {"__float__": "x"}},
    ],
)
def test_what_only_looks_like_a_tag_stays(value: dict[str, Any]) -> None:
    data = json.dumps({"a": value}).encode()
    config = parse_model_config(data, where=WHERE)
    assert config == {"a": value}
    assert json.loads(model_config_to_json(config)) == {"a": value}


def test_a_published_configuration_keeps_its_tags() -> None:
    document = {"_name_or_path": "/home/a", "limit": [0.0, {"__float__": "Infinity"}]}
    data = json.dumps(document).encode()
    written = scrub_content("config.json", data, None)
    assert json.loads(written) == document | {"_name_or_path": ""}
    bare = b'{"_name_or_path": "/home/a", "limit": Infinity}'
    written = scrub_content("config.json", bare, None)
    assert json.loads(written) == {"_name_or_path": "", "limit": {"__float__": "Infinity"}}


MAMBA = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4}
MAMBA |= {"head_dim": 8, "state_size": 8, "n_groups": 2}


@pytest.mark.parametrize("form", ["tagged", "bare"])
@pytest.mark.filterwarnings("ignore:.*process group.*", "ignore:.*single process.*")
def test_a_model_with_an_infinite_number_comes_out_as_it_was(form: str, tmp_path: Path) -> None:
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA))
    model.save_pretrained(tmp_path / "reference")
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "source", no_dist=True)
    model.config.save_pretrained(tmp_path / "source")
    own = tmp_path / "source" / "config.json"
    if form == "bare":
        own.write_text(
            own.read_text().replace('{\n      "__float__": "Infinity"\n    }', "Infinity")
        )
    assert ("__float__" in own.read_text()) == (form == "tagged")
    ckptkit.consolidate(tmp_path / "source", tmp_path / "out")
    reference = json.loads((tmp_path / "reference" / "config.json").read_bytes())
    assert json.loads((tmp_path / "out" / "config.json").read_bytes()) == reference
    loaded = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path / "out")
    assert tuple(loaded.config.time_step_limit) == (0.0, math.inf)
