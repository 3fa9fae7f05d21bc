"""Megatron-Core loads what `--to megatron` writes, at parallel sizes of its own choice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SCRIPT = Path(__file__).with_name("megatron_run.py")
CASES = {
    "megatron_model_llama_tp2_pp2": ({"tp": 2}, {"pp": 2}),
    "megatron_model_qwen2_moe_tp2_ep2": ({"ep": 2}, {"pp": 2}, {"tp": 2}),
    "megatron_model_deepseek_v3_pp2_ep2": ({"tp": 2}, {"ep": 2}),
    "megatron_model_gpt_oss_ep2": ({"tp": 2}, {"ep": 2}),
    "megatron_model_gemma3": ({"tp": 2}, {"pp": 2}),
}
WHOLE = {"tp": 1, "pp": 1, "ep": 1}


def hub_folder(case: str, place: Path) -> Path:
    place.mkdir()
    shutil.copy(FIXTURES / case / "truth.safetensors", place / "model.safetensors")
    shutil.copy(FIXTURES / case / "config.json", place)
    return place


@pytest.mark.distributed
@pytest.mark.slow
def test_megatron_core_loads_what_is_written_for_it(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    loads: list[dict[str, Any]] = []
    for case, sizes in CASES.items():
        model = hub_folder(case, tmp_path / case)
        out = tmp_path / f"{case}-megatron"
        ckptkit.convert(model, out, to="megatron")
        assert ckptkit.verify(out).ok
        assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
        for number, size in enumerate(sizes):
            loaded = tmp_path / f"{case}-{number}.safetensors"
            one = {"case": case, "source": str(out / "release"), "out": str(loaded)}
            loads.append(one | WHOLE | size)
    run_ranks(SCRIPT, 2, json.dumps(loads))
    for one in loads:
        truth = load_file(tmp_path / one["case"] / "model.safetensors")
        actual = load_file(one["out"])
        assert actual.keys() == truth.keys(), one
        assert all(torch.equal(actual[name], truth[name]) for name in truth), one
