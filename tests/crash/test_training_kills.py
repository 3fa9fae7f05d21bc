"""Ranks and writers are killed and signalled at every phase of a save, in real training.

After each: who was left went on or ended within a bounded time, with an error that says what
happened; only whole steps were visible; the next start swept the rest, and resumed bit-exactly.
The script checks that on every rank, and fails if anything is otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.crash.training_kills_run"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2", "-m")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    # Else restarted ranks may find the addresses that the ones before left in torchrun's store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
LIMIT_SECONDS = 240

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """A folder where syncing costs nothing, so that hundreds of saves can be tried."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def run(folder: Path, case: str, *launcher: str) -> dict[str, Any]:
    """Runs a case of the script; returns what rank 0, or what forks the ranks, has to tell."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, MODULE, str(folder), case],
        cwd=ROOT,
        env=os.environ | SETTINGS,
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-12_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_training_goes_on_when_writers_are_killed_at_any_phase_of_a_save(memory_disk: Path) -> None:
    found = run(memory_disk, "writers")
    assert len(found["writer"]["seen"]) > 15
    assert set(found["writer"]["seen"]) == set(found["both"]["seen"]) == {0}
    assert found["writer"]["left"] == 0
    # Before the rename there is the step before, and from then on the new one.
    assert len(found["committer"]["seen"]) > 20
    assert found["committer"]["seen"] == sorted(found["committer"]["seen"])
    assert set(found["committer"]["seen"]) == {0, 1}
    assert set(found["discard"]["seen"]) == {0}


def test_ranks_that_lose_one_of_them_are_told_and_start_again(memory_disk: Path) -> None:
    assert run(memory_disk, "ranks")["points"] >= 18


def test_a_run_that_is_killed_as_a_whole_again_and_again_goes_on(memory_disk: Path) -> None:
    assert run(memory_disk, "all")["points"] >= 20


def test_what_is_durable_on_the_nodes_when_all_is_killed_is_drained_anew(memory_disk: Path) -> None:
    assert run(memory_disk, "nodes")["points"] == 13


def test_a_signal_in_the_middle_of_a_save_is_heeded_after_it(memory_disk: Path) -> None:
    assert run(memory_disk, "signals")["points"] == 4


def test_torchrun_restarts_what_lost_a_rank_in_a_save(tmp_path: Path) -> None:
    found = run(tmp_path, "restarts", *TORCHRUN)
    assert found["restarts"] == 2
    assert 4 <= found["last"] == found["steps"]
