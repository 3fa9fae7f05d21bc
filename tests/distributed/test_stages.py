"""Pipeline stages and experts: saved by every rank for itself, one model for whoever resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptkit

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("stages_run.py")
CASES = ("pipeline", "interleaved", "experts", "experts_again", "plain")


@pytest.fixture(scope="module")
def saved(run_ranks: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved, each case in a run of its own, and resumed from."""
    folder = tmp_path_factory.mktemp("stages")
    done = run_ranks(SCRIPT, 4, folder, "here")
    assert done.stdout.count("RESUMED") == 4 * (len(CASES) + 3)  # type: ignore[attr-defined]
    return folder


def test_stages_and_experts_resume_bit_for_bit_on_plain_fsdp_and_with_stock_tools(
    run_ranks: Callable[..., object], saved: Path
) -> None:
    output = run_ranks(SCRIPT, 2, saved, "elsewhere").stdout  # type: ignore[attr-defined]
    assert output.count("RESUMED") == 2 * len(CASES)
    assert output.count("STOCK") == 2


@pytest.mark.parametrize("name", CASES)
def test_what_stages_and_experts_saved_is_consolidated_into_one_model(
    saved: Path, tmp_path: Path, name: str
) -> None:
    ckptkit.consolidate(saved / name, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    live = {
        key.removeprefix("model."): tensor
        for rank in (0, 2)
        for key, tensor in load_file(saved / f"{name}_{rank}.safetensors").items()
        if key.startswith("model.")
    }
    assert found.keys() == live.keys()
    assert all(np.array_equal(found[key], live[key]) for key in live)
