"""Weights that are not where FSDP1 keeps them, and buffers that it casts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("assigned_run.py")


KINDS = ("full_shard", "mixed_grad_op", "mixed_no_shard")  # the script has further ones


@pytest.mark.distributed
@pytest.mark.slow
def test_weights_that_were_set_and_buffers_that_were_cast_are_saved_and_resumed(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, *KINDS)
    for kind in KINDS:  # the last of what the script tries
        assert (tmp_path / kind / "buffers" / "checkpoint-3").is_dir()


@pytest.mark.distributed
@pytest.mark.slow
def test_weights_that_were_set_are_saved_and_resumed_on_a_grid_and_with_offloading(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    kinds = ("hybrid", "offload")
    run_ranks(SCRIPT, 4, tmp_path, *(f"{kind}:swaps,resumes" for kind in kinds))
    for kind in kinds:
        assert (tmp_path / kind / "resumes" / "checkpoint-1").is_dir()
