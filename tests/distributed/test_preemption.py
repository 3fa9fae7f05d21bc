"""Requests to save, over the store of a real torchrun."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("preemption_run.py")
RANKS = 4


@pytest.mark.distributed
@pytest.mark.slow
def test_a_request_a_command_and_a_signal_save_the_same_steps_on_all_ranks(
    run_ranks: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_ranks(SCRIPT, RANKS, tmp_path)
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(report == reports[0] for report in reports)
    assert len(reports[0]["saved"]) == 3
    assert reports[0]["stopped"] == reports[0]["saved"][2:]
    assert not (tmp_path / ".ckptkit" / "save-now").exists()
    assert "the request to save was dropped: rank 3 did not answer within 1 s" in done.stderr
