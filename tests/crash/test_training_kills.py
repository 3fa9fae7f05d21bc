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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.training_kills_run import do_case, warm_up
from tests.fork_host import ForkHost

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2", "-m")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    # Else restarted ranks may find the addresses that the ones before left in torchrun's store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
LIMIT_SECONDS = 600
Run = Callable[[str], dict[str, Any]]
Record = Callable[[str, object], None]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def host() -> Iterator[ForkHost]:
    with ForkHost(prepare=warm_up, **SETTINGS) as host:
        yield host


@pytest.fixture
def run(host: ForkHost, memory_disk: Path) -> Run:
    def run_case(case: str) -> dict[str, Any]:
        folder = memory_disk / case
        folder.mkdir()
        found: dict[str, Any] = host.call(do_case, str(folder), case)
        return found

    return run_case


def test_training_goes_on_when_writers_are_killed_at_any_phase_of_a_save(
    run: Run, record_property: Record
) -> None:
    found = run("writers")
    record_property("kills", sum(len(case["seen"]) for case in found.values()))
    assert len(found["writer"]["seen"]) > 15
    assert set(found["writer"]["seen"]) == set(found["both"]["seen"]) == {0}
    assert found["writer"]["left"] == 0
    # Before the rename there is the step before, and from then on the new one.
    assert len(found["committer"]["seen"]) > 20
    assert found["committer"]["seen"] == sorted(found["committer"]["seen"])
    assert set(found["committer"]["seen"]) == {0, 1}
    assert set(found["discard"]["seen"]) == {0}


def test_ranks_that_lose_one_of_them_are_told_and_start_again(
    run: Run, record_property: Record
) -> None:
    points = run("ranks")["points"]
    record_property("kills", points)
    assert points >= 18


def test_a_run_that_is_killed_as_a_whole_again_and_again_goes_on(
    run: Run, record_property: Record
) -> None:
    points = run("all")["points"]
    record_property("kills", points)
    assert points >= 20


def test_what_is_durable_on_the_nodes_when_all_is_killed_is_drained_anew(
    run: Run, record_property: Record
) -> None:
    points = run("nodes")["points"]
    record_property("kills", points)
    assert points == 13


def test_a_signal_in_the_middle_of_a_save_is_heeded_after_it(
    run: Run, record_property: Record
) -> None:
    points = run("signals")["points"]
    record_property("kills", points)
    assert points == 4


def test_torchrun_restarts_what_lost_a_rank_in_a_save(
    tmp_path: Path, record_property: Record
) -> None:
    """Run by torchrun, which is what restarts the ranks."""
    done = subprocess.run(
        [sys.executable, "-m", *TORCHRUN, do_case.__module__, str(tmp_path), "restarts"],
        cwd=ROOT,
        env=os.environ | SETTINGS,
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-12_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("kills", found["restarts"])
    assert found["restarts"] == 2
    assert 4 <= found["last"] == found["steps"]
