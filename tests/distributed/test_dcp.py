"""`ckptkit.training.dcp` on real ranks, beside torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit

SCRIPT = Path(__file__).with_name("dcp_run.py")
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_files_and_values_are_those_of_torch_without_a_collective(
    kind: str, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, f"same:{kind}")


@pytest.mark.slow
def test_keys_of_stages_and_tensor_parallel_weights_are_written_once(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 4, tmp_path, "parallel", "same:hsdp")


@pytest.mark.slow
def test_other_meshes_load_it_as_torch_does(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "meshes")


@pytest.mark.slow
def test_what_only_torch_can_do_goes_to_torch_with_a_line(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "delegates")


@pytest.mark.slow
def test_states_that_change_names_twice_and_ranks_that_fail(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "faults", "folders")


@pytest.mark.slow
def test_nothing_grows_over_thirty_saves(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "leaks")


@pytest.mark.slow
def test_a_program_that_ends_without_waiting_has_its_save(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "dies_leaving", torchrun=True)
    assert ckptkit.verify(tmp_path / "dies_leaving" / "step-2").ok


@pytest.mark.slow
def test_a_kill_leaves_the_step_before_and_the_next_save_clears_up(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "dies_leaving:killed", torchrun=True, status=None)
    run = tmp_path / "dies_leaving_killed"
    assert ckptkit.verify(run / "step-1").ok
    assert sorted(path.name[:7] for path in run.iterdir()) == [".step-2", "step-1"]
    run_ranks(SCRIPT, 2, tmp_path, "dies_leaving:killed", torchrun=True)
    assert ckptkit.verify(run / "step-2").ok
    assert sorted(path.name for path in run.iterdir()) == ["step-1", "step-2"]
