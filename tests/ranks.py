"""Starting scripts on several ranks, as torchrun does, or with torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, script: Path, processes: int, *arguments: object, limit_seconds: float
    ) -> subprocess.CompletedProcess[str]:
        words = [str(script), *map(str, arguments)]
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            command = {
                "arguments": words,
                "processes": processes,
                "environment": os.environ | SETTINGS,
                "folder": folder,
                "limit_seconds": limit_seconds,
            }
            status = self._ask(command)
            output = [
                (Path(folder) / name).read_text(errors="replace") for name in ("stdout", "stderr")
            ]
        return subprocess.CompletedProcess(words, status, *output)

    def _ask(self, command: dict[str, Any]) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(Path(__file__).with_name("rank_host.py"))),
                    *self._imported,
                ],
                env=os.environ | SETTINGS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._answer()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


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
