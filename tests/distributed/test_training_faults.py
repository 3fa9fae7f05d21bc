"""What goes wrong on one rank of a real training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.runs.marks import take_run_lock

SCRIPT = Path(__file__).with_name("training_faults_run.py")
FAILED_SAVES = {"full": 2, "hung": 2, "absent": 1, "late": 1, "memory": 2}  # on rank 1


@pytest.mark.distributed
@pytest.mark.slow
def test_a_fault_on_one_rank_is_told_on_all_and_the_next_save_works(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    lock = take_run_lock(tmp_path / "occupied/run")
    assert lock is not None
    done = run_ranks(SCRIPT, 2, tmp_path, *FAILED_SAVES, "twice", "occupied", "unusable")
    lock.close()
    for case, count in FAILED_SAVES.items():
        for rank in range(2):
            expected = count + (case == "absent" and rank == 0)
            lines = done.stdout.count(f"{case}, rank {rank}: step")
            assert lines == expected, done.stdout
