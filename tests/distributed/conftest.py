"""Starting scripts on several ranks, as torchrun does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_SECONDS = 240
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
RunRanks = Callable[..., subprocess.CompletedProcess[str]]


def _run_ranks(
    script: Path,
    processes: int,
    *arguments: object,
    status: int | None = 0,
    limit_seconds: float = LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", str(script), *map(str, arguments)]
    done = subprocess.run(
        command,
        env=os.environ | SETTINGS,
        timeout=limit_seconds,
        capture_output=True,
        text=True,
        check=False,
    )
    if status is not None:
        assert done.returncode == status, done.stdout[-4_000:] + done.stderr[-8_000:]
    return done


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """Runs a script on several ranks over the loopback, and checks how it ended.

    The function takes the script, the number of processes and the script's arguments; `status`
    is the expected exit status, None for any.
    """
    return _run_ranks
