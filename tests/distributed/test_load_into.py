"""Checkpoints of all formats loaded into live models that are sharded over several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("load_run.py")


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_format_fills_tensors_that_are_cut_in_any_way_without_a_collective(
    ranks: int, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, ranks, tmp_path, "fixtures")


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_wrapper_is_filled_from_shards_and_from_what_was_made_of_them(
    ranks: int, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, ranks, tmp_path, "wrappers", "back:fsdp1_flat", "back:fsdp1_orig")


@pytest.mark.parametrize(
    ("kind", "ranks"), [("llama", 2), ("qwen3_moe", 4), ("mixtral", 2), ("gpt2", 2)]
)
def test_a_model_is_filled_as_from_pretrained_would(
    kind: str, ranks: int, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, ranks, tmp_path, f"pretrained:{kind}")
