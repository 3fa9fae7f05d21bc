"""Saves and resumes of real training over several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit

SCRIPT = Path(__file__).with_name("saving_run.py")
BY_TWO = ("fsdp2", "fsdp1_flat", "fsdp1_orig", "ddp")


@pytest.fixture(scope="module")
def saved_by_two(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("two")
    run_ranks(SCRIPT, 2, folder, *(f"save:{kind}" for kind in BY_TWO))
    return folder


def same_as_live(run: Path, truth: Path, out: Path) -> None:
    assert ckptkit.verify(run).ok
    ckptkit.consolidate(run, out, select="pytorch_model_fsdp_0")
    written = load_file(out / "model.safetensors")
    live = {k.removeprefix("model."): v for k, v in load_file(truth).items() if k[0] == "m"}
    assert written.keys() == live.keys()
    for name, tensor in live.items():
        assert torch.equal(written[name], tensor), name


@pytest.mark.distributed
@pytest.mark.parametrize("kind", BY_TWO)
@pytest.mark.quick("fsdp2", "fsdp1_flat")
def test_a_save_without_any_collective_consolidates_to_the_live_model(
    kind: str, saved_by_two: Path, tmp_path: Path
) -> None:
    case = saved_by_two / f"save_{kind}"
    same_as_live(case / "run", case / "truth.safetensors", tmp_path / "out")


@pytest.mark.distributed
@pytest.mark.slow
def test_saves_in_parts_kept_skipped_and_mistaken_are_what_all_ranks_take_them_for(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "waves", "retention", "skipping", "mistakes")


@pytest.mark.distributed
@pytest.mark.slow
def test_a_save_calls_nothing_that_another_rank_would_have_to_call_alike(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    kinds = ("silent", "gathering", "undeclared", "extra")
    run_ranks(SCRIPT, 2, tmp_path, *(f"talkative:{kind}" for kind in kinds))


@pytest.mark.distributed
@pytest.mark.slow
def test_a_save_returns_while_another_rank_is_stopped_for_a_minute(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "stopped:0", "stopped:1")
    for rank in "01":
        assert ckptkit.verify(tmp_path / f"stopped_{rank}" / "run").ok


@pytest.mark.distributed
@pytest.mark.slow
def test_a_save_on_a_grid_of_ranks_consolidates_to_the_live_model(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 4, tmp_path, "save:hsdp")
    case = tmp_path / "save_hsdp"
    same_as_live(case / "run", case / "truth.safetensors", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_name_different_places_hear_of_it_at_once(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(Path(__file__).with_name("naming_run.py"), 2, tmp_path)
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
