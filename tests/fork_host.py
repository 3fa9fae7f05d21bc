"""A process that has imported what is needed, and forks a child for each call that it is asked for.

Started as a program, this module is that process: it imports the modules that are its arguments,
calls the function behind `--prepare=`, and then takes requests from its input, a line of JSON each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

ROOT = Path(__file__).resolve().parents[1]
Function = Callable[..., Any]


class ForkHost:
    """That process. Functions are those of modules that it can import; arguments are JSON."""

    def __init__(self, *modules: str, prepare: Function | None = None, **environment: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="forks-")
        self.folder = Path(self._scratch.name)
        self._started = 0
        self._answers: dict[int, Path] = {}
        prepared = [] if prepare is None else [f"--prepare={_name_of(prepare)}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_host", *prepared, *modules],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate()
        self._scratch.cleanup()

    def start(self, function: Function, *arguments: Any, log: Path | None = None) -> int:
        """Starts a child, which appends what it prints to the log; returns its number."""
        self._started += 1
        place = self.folder / str(self._started)
        log = log or place.with_suffix(".log")
        request = [_name_of(function), arguments, str(log), str(place)]
        pid = self._ask(request)
        self._answers[pid] = place
        return pid

    def wait(self, pid: int) -> int:
        """Returns the status of a child once it has ended; minus the signal that ended it."""
        return self._ask(pid)

    def run(self, function: Function, *arguments: Any, log: Path | None = None) -> int:
        return self.wait(self.start(function, *arguments, log=log))

    def call(self, function: Function, *arguments: Any) -> Any:
        """Returns what a function returns in a child, which has to be JSON."""
        pid = self.start(function, *arguments)
        status, place = self.wait(pid), self._answers[pid]
        assert status == 0, place.with_suffix(".log").read_text(errors="replace")[-16_000:]
        return json.loads(place.read_text())

    def _ask(self, request: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _name_of(function: Function) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _named(name: str) -> Function:
    module, _, function = name.partition(":")
    found: Function = getattr(importlib.import_module(module), function)
    return found


def _be_child(name: str, arguments: list[Any], log: str, place: str) -> NoReturn:
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        answer = _named(name)(*arguments)
        status = answer if isinstance(answer, int) else 0
        if not isinstance(answer, int | None):
            Path(place).write_text(json.dumps(answer))
    except BaseException:  # noqa: BLE001  the child must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _main() -> None:
    for name in sys.argv[1:]:
        if name.startswith("--prepare="):
            _named(name.partition("=")[2])()
        else:
            importlib.import_module(name)
    if "s3fs" in sys.modules:
        from tests.s3_client import prepare_clients

        prepare_clients()
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()  # no fork looks through what its parent made
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _be_child(*request)
        print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
