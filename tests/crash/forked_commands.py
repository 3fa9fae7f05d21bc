"""Commands in forked children of one process, which has imported all they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "s3fs",
    "ckptkit_cli._pages",
    "ckptkit_cli._progress",
    "ckptkit_cli.consolidate",
    "ckptkit.conversion.job",
    "ckptkit.deltas.create",
)


class ForkedCommands:
    """The process; see `command_host.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    def start(self, arguments: Sequence[str], log: Path, *, die_at: int = 0) -> int:
        """Starts a command, which writes to the log; returns its number.

        It is killed when it changes something in `all` beside the log for the nth time.
        """
        return self._ask(
            {
                "arguments": [*arguments],
                "beside": True,
                "die_at": die_at,
                "folder": str(log.parent / "all"),
                "log": str(log),
            }
        )

    def wait(self, pid: int) -> int:
        """Returns the status of a command once it has ended."""
        return self._ask({"pid": pid})

    def run(self, arguments: Sequence[str], log: Path, *, die_at: int = 0) -> int:
        return self.wait(self.start(arguments, log, die_at=die_at))

    def _ask(self, request: dict[str, object]) -> int:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        (answer,) = json.loads(self._answers.readline()).values()
        return int(answer)


@contextmanager
def running_forks() -> Iterator[ForkedCommands]:
    """Starts the process, ready to write to stores, too."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.command_host", *IMPORTED],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        forks = ForkedCommands(process)
        yield forks
        assert process.stdin is not None
        process.stdin.close()
