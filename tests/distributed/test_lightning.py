"""Lightning's Fabric and Trainer with the strategies of ckptkit, beside its own ones."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("lightning_run.py")
CHECKS = (
    "fabric_reads_what_ours_wrote",
    "fabric_of_ours_reads_what_stock_wrote",
    "fabric_replaces_what_stock_wrote_as_stock_does",
    "a_resumed_fabric_job_draws_the_same_numbers",
    "the_trainer_goes_on_where_it_was",
    "the_trainer_of_ours_reads_what_stock_wrote",
    "a_failed_save_costs_no_checkpoint",
    "weights_that_a_hook_has_changed_are_saved_by_lightning",
)


@pytest.mark.distributed
@pytest.mark.slow
def test_fabric_and_the_trainer_save_without_stopping_and_read_each_others_checkpoints(
    run_ranks: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_ranks(SCRIPT, 2, tmp_path, *CHECKS)
    passed = [line for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == [f"passed {check}" for check in CHECKS]
