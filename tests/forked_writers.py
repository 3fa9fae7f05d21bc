"""Writers of a `Checkpointer` in this process, as forks of a process that has imported theirs.

Each would import the same again, which takes longer than what most tests have it write. Ranks, and
tests of how a writer starts and ends, start writers themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fork_host import ForkHost

_SOCKET = 3  # the descriptor, behind the three of every process
_HOST: list[ForkHost] = []  # started with the first writer
USUAL_WORDS: list[str] = []  # of the command of a writer, but for its arguments


class ForkedWriter:
    """Such a fork, with what is used of `Popen`."""

    def __init__(self, descriptor: int, niceness: str) -> None:
        if not _HOST:
            _HOST.append(ForkHost("ckptkit.writer.process", __name__))
        with Path(os.devnull).open("r+b") as null:
            streams = (null.fileno(), null.fileno(), 2, descriptor)
            inherited = (niceness, str(Path.cwd()), _umask())
            self._child = _HOST[0].start(be_writer, *inherited, streams=streams)
        self.pid = self._child.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._child.status
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._child.wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("writer", timeout or 0)
        return self.returncode

    def kill(self) -> None:
        self._child.signal()


def _umask() -> int:
    """Returns that of this process without changing it, as `os.umask` does."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return int(status.partition("\nUmask:")[2].split()[0], 8)


def be_writer(niceness: str, folder: str, umask: int) -> None:
    from ckptkit.writer.process import main

    os.setsid()
    os.chdir(folder)
    os.umask(umask)
    os.set_inheritable(_SOCKET, False)
    sys.argv = ["-c", str(_SOCKET), niceness]
    main()


class Processes:
    """What `writer_process` takes for the module `subprocess`."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], **options: Any) -> Any:  # noqa: N802
        """Starts a writer; the command of a test is another one, and started as it is."""
        *words, descriptor, niceness = command
        if words != USUAL_WORDS:
            return subprocess.Popen(command, **options)
        return ForkedWriter(int(descriptor), niceness)


@contextmanager
def forked_writers() -> Iterator[None]:
    """Forks them from now on, if anything that was imported starts writers."""
    writers: Any = sys.modules.get("ckptkit.training.save.writer_process")
    if writers is None:
        yield
        return
    USUAL_WORDS[:] = writers.writer_command(0)[:-2]
    with mock.patch.object(writers, "subprocess", Processes):
        yield
    while _HOST:
        _HOST.pop().close()
