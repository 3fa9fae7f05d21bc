"""Starting scripts on several ranks, as torchrun does, or with torchrun itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fork_host import ForkHost
from tests.rank_host import IMPORTED, run_script

LIMIT_SECONDS = 600
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
RunRanks = Callable[..., subprocess.CompletedProcess[str]]
# Where a test sets another, its ranks are started anew: forks run no `sitecustomize`.
PYTHONPATH = os.environ.get("PYTHONPATH")


class RankHost:
    """A process that has imported torch, of which ranks are forks: see `rank_host.py`."""

    def __init__(self, *imported: str) -> None:
        """Starts nothing yet; modules to import can be named, beside those of all ranks."""
        self._imported = imported
        self._host: ForkHost | None = None

    def run(
        self, script: Path, processes: int, *arguments: object, limit_seconds: float
    ) -> subprocess.CompletedProcess[str]:
        if self._host is None:
            self._host = ForkHost(*IMPORTED, *self._imported, prepare=None, **SETTINGS)
        return self._host.capture(
            *(run_script, [str(script), *map(str, arguments)], processes, limit_seconds),
            environment=os.environ | SETTINGS,
        )

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


def _run_torchrun(
    script: Path | str, processes: int, *arguments: object, limit_seconds: float
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", str(script), *map(str, arguments)]
    return subprocess.run(
        command,
        env=os.environ | SETTINGS,
        timeout=limit_seconds,
        capture_output=True,
        text=True,
        check=False,
    )


def make_runner(host: RankHost) -> RunRanks:
    """Returns a function that runs a script on ranks over the loopback and checks its status.

    The function takes the script, the number of processes and the script's arguments; `status`
    is the expected exit status, None for any. `-m` as the script, `torchrun=True`, and another
    PYTHONPATH take torchrun itself.
    """

    def run(
        script: Path | str,
        processes: int,
        *arguments: object,
        status: int | None = 0,
        limit_seconds: float = LIMIT_SECONDS,
        torchrun: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        if torchrun or script == "-m" or os.environ.get("PYTHONPATH") != PYTHONPATH:
            start: Callable[..., subprocess.CompletedProcess[str]] = _run_torchrun
        else:
            start = host.run
        done = start(script, processes, *arguments, limit_seconds=limit_seconds)
        if status is not None:
            assert done.returncode == status, done.stdout[-4_000:] + done.stderr[-8_000:]
        return done

    return run
