"""Weights that are not where FSDP1 keeps them, and buffers that it casts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("assigned_run.py")


KINDS = ("full_shard", "mixed_grad_op", "mixed_no_shard")  # the script has further ones
CASES = ("swaps", "resumes", "low", "replaces", "buffers")


@pytest.mark.distributed
@pytest.mark.slow
def test_weights_that_were_set_and_buffers_that_were_cast_are_saved_and_resumed(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, *(f"{case}:{kind}" for kind in KINDS for case in CASES))
    for kind in KINDS:
        assert (tmp_path / f"buffers_{kind}" / "buffers" / "checkpoint-3").is_dir()


@pytest.mark.distributed
@pytest.mark.slow
def test_weights_that_were_set_are_saved_and_resumed_on_a_grid_and_with_offloading(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    kinds = ("hybrid", "offload")
    run_ranks(SCRIPT, 4, tmp_path, *(f"{case}:{kind}" for kind in kinds for case in CASES[:2]))
    for kind in kinds:
        assert (tmp_path / f"resumes_{kind}" / "resumes" / "checkpoint-1").is_dir()
