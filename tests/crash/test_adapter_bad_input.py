"""Adapters and bases as a careless or hostile user hands them over: refused, and nothing left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, InputError, RefusedError

GENERATIONS = Path(__file__).resolve().parents[2] / "fixtures" / "peft_generations"
ADAPTER = GENERATIONS / "peft_0_21" / "lora" / "adapter_0"
BASE = GENERATIONS / "bases" / "llama"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
Arrays = dict[str, NDArray[Any]]
Change = Callable[[Arrays], None]


def with_config(folder: Path, **changes: Any) -> Path:
    shutil.copytree(ADAPTER, folder)
    document = json.loads((ADAPTER / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(document))
    return folder


def with_tensors(folder: Path, change: Change) -> Path:
    shutil.copytree(ADAPTER, folder)
    tensors = load_file(ADAPTER / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def refused_twice(adapter: Path, match: str, kind: type[CkptkitError] = InputError) -> None:
    """Neither extraction nor merge takes it, and neither leaves anything behind."""
    out = adapter.with_name("out")
    with pytest.raises(kind, match=match):
        ckptkit.extract_adapter(adapter, out)
    with pytest.raises(kind, match=match):
        ckptkit.merge_adapter(adapter, out, base=BASE)
    assert [path.name for path in adapter.parent.iterdir()] == [adapter.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "'r' is '0'"),
        ({"r": -2}, "'r' is '-2'"),
        ({"r": 10**30}, "'r' is '1000000000000000000000000000000' against"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' is 'nan'"),
        ({"lora_alpha": 10**400}, "'lora_alpha' is"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"peft_type": "Ünïcode"}, "method 'Ünïcode'"),
        ({"target_modules": ["nowhere"]}, "neither 'target_modules' nor"),
    ],
)
def test_a_configuration_that_no_adapter_has_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused_twice(with_config(tmp_path / "adapter", **changes), message)


def test_a_release_of_5000_digits_is_no_release(tmp_path: Path) -> None:
    adapter = with_config(tmp_path / "adapter", peft_version="0." + "9" * 5000)
    ckptkit.merge_adapter(adapter, tmp_path / "out", base=BASE)


def test_weights_that_are_a_pipe_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    adapter = with_config(tmp_path / "adapter")
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    refused_twice(adapter, "named pipe")


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_])
def test_factors_that_are_no_floats_are_refused(dtype: Any, tmp_path: Path) -> None:
    def change(tensors: Arrays) -> None:
        name = f"{PREFIX}.lora_A.weight"
        tensors[name] = tensors[name].astype(dtype)

    refused_twice(with_tensors(tmp_path / "adapter", change), "expected a float type")


def test_integers_do_not_replace_floats(tmp_path: Path) -> None:
    def change(tensors: Arrays) -> None:
        tensors["base_model.model.lm_head.weight"] = np.ones((24, 16), np.int32)

    adapter = with_tensors(tmp_path / "adapter", change)
    with pytest.raises(RefusedError, match="replaces elements of float32 by elements of int32"):
        ckptkit.merge_adapter(adapter, tmp_path / "out", base=BASE)
    assert not (tmp_path / "out").exists()


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    def change(tensors: Arrays) -> None:
        for name in list(tensors):
            tensors[name.replace("q_proj", "../../q_проекция\n")] = tensors.pop(name)

    refused_twice(with_tensors(tmp_path / "adapter", change), "neither 'target_modules' nor")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 1047), st.integers(0, 7)), min_size=1, max_size=3))
@pytest.mark.slow
def test_flipped_bits_of_a_header_never_end_in_a_bug(
    flips: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Some flips make another valid adapter; whatever else comes out is one of our errors."""
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    for folder in (adapter, out):
        shutil.rmtree(folder, ignore_errors=True)
    data = bytearray((ADAPTER / WEIGHTS).read_bytes())
    for byte, bit in flips:
        data[byte] ^= 1 << bit
    with_config(adapter)
    (adapter / WEIGHTS).write_bytes(data)
    try:
        ckptkit.merge_adapter(adapter, out, base=BASE)
    except CkptkitError:
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
