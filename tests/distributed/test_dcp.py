"""`ckptkit.training.dcp` on real ranks, beside torch's own functions."""

from __future__ import annotations

import os
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
def test_bytes_that_changed_are_found_where_torch_loads_them(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "damage")


@pytest.mark.slow
def test_what_only_torch_can_do_goes_to_torch_with_a_line(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "delegates")


@pytest.mark.slow
def test_states_that_change_names_twice_and_ranks_that_fail(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "faults", "others_change", "folders")


@pytest.mark.slow
def test_nothing_grows_over_thirty_saves(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "leaks")


@pytest.mark.slow
def test_a_program_that_ends_without_waiting_has_its_save(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "forked", "dies_leaving", torchrun=True)
    assert ckptkit.verify(tmp_path / "dies_leaving" / "step-2").ok


@pytest.mark.slow
def test_a_kill_leaves_the_step_before_and_the_next_save_clears_up(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "dies_leaving:killed", torchrun=True, status=None)
    run = tmp_path / "dies_leaving_killed"
    assert ckptkit.verify(run / "step-1").ok
    left, _ = sorted(run.iterdir())
    # Where a search for `step-(\d+)` with an index in it finds nothing, as in torchtitan.
    assert left.name.startswith(".step-2.")
    assert {path.name for path in left.iterdir()} <= {"files"}
    (elsewhere := run / ".step-9.ckptkit-0123abcd-9").mkdir()  # under a name that does not return
    os.utime(elsewhere, (0, 0))
    run_ranks(SCRIPT, 2, tmp_path, "dies_leaving:killed", torchrun=True)
    assert ckptkit.verify(run / "step-2").ok
    assert sorted(path.name for path in run.iterdir()) == ["step-1", "step-2"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["on", "wait", "off"])
def test_a_loop_that_calls_the_functions_of_torch_saves_through_ckptkit(
    choice: str, run_ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_RUN", choice)
    script = SCRIPT.with_name("dcp_script.py")
    hurry = ["--hurry"] if choice == "on" else []
    done = run_ranks("-m", 2, "ckptkit.run", script, tmp_path / "run", *hurry, status=None)
    assert done.returncode == 0, done.stderr[-4_000:]
    steps = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert steps == [f"step-{step}" for step in range(1, 7)]
    ours = [step for step in steps if (tmp_path / "run" / step / "ckptkit.json").exists()]
    assert ours == ([] if choice == "off" else steps)
    assert all(ckptkit.verify(tmp_path / "run" / step).ok for step in steps)
    lines = done.stderr.count("sharded saves of torch.distributed.checkpoint 2.")
    assert lines == (0 if choice == "off" else 1)
