"""Pipeline stages and experts: saved by every rank for itself, one model for whoever resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptkit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("stages_run.py")
CASES = ("pipeline", "interleaved", "experts", "experts_again", "experts_ddp", "plain")


@pytest.fixture(scope="module")
def saved(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved, each case under its name in a run, and resumed from."""
    folder: Path = tmp_path_factory.mktemp("stages")
    done = run_ranks(SCRIPT, 4, folder, "here", *CASES, "marked")
    cut_otherwise = ["pipeline", "plain", "plain"]
    assert done.stdout.count("RESUMED") == 4 * len([*CASES, *cut_otherwise, "marked"])
    refusals = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(refusals) == 4
    assert all("holds another part of" in line for line in refusals)
    return folder


def test_stages_and_experts_resume_bit_for_bit_on_plain_fsdp_and_with_stock_tools(
    run_ranks: Callable[..., Any], saved: Path
) -> None:
    output = run_ranks(SCRIPT, 2, saved, "elsewhere", *CASES).stdout
    assert output.count("RESUMED") == 2 * len(CASES)
    assert output.count("STOCK") == 2


def test_what_stages_and_experts_saved_or_exported_is_one_model(
    saved: Path, tmp_path: Path
) -> None:
    for name in CASES:
        is_one_model(saved, name, tmp_path / name)


def is_one_model(saved: Path, name: str, out: Path) -> None:
    ckptkit.consolidate(saved / "run" / name, out)
    weights = out / "model.safetensors"
    assert weights.read_bytes() == (saved / f"export_{name}" / weights.name).read_bytes()
    found = load_file(weights)
    live = {
        key.removeprefix("model."): tensor
        for rank in (0, 2)
        for key, tensor in load_file(saved / f"{name}_{rank}.safetensors").items()
        if key.startswith("model.")
    }
    assert found.keys() == live.keys()
    assert all(np.array_equal(found[key], live[key]) for key in live)
