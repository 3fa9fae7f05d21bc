"""A process that has imported what its forks need: ranks, stores, commands.

`python -m tests.campaigns.soak.forks PACKAGE...` takes commands from its input, a line of JSON
each, and prints lines of JSON: the process that does a command, and later its status. It has no
threads, since a fork has none of them.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[3]
MARK = "CKPTKIT_SOAK"  # of the environment; shows which processes belong to a soak
_POLL_SECONDS = 0.01
_END_SECONDS = 30.0


class Child:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self._ended = threading.Event()

    def end(self, status: int) -> None:
        self.status = status
        self._ended.set()

    def wait(self, seconds: float | None = None) -> int | None:
        """Returns the status, None if it has not ended by then."""
        self._ended.wait(seconds)
        return self.status

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            if self.status is None:
                os.kill(self.pid, number)


class Forks:
    """The process, from the view of who asks it."""

    def __init__(self, *packages: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.campaigns.soak.forks", *packages],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._children: dict[int, Child] = {}
        self._new: list[Child] = []
        self._is_new = threading.Condition()
        self._asking = threading.Lock()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def start(self, **command: Any) -> Child:
        """Starts what a command says; see `_do`."""
        assert self._process.stdin is not None
        with self._asking:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            with self._is_new:
                while not self._new:
                    assert self._reader.is_alive(), "the process that forks has ended"
                    self._is_new.wait(1.0)
                return self._new.pop()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "status" in answer:
                self._children.pop(answer["pid"]).end(answer["status"])
                continue
            with self._is_new:
                child = Child(answer["pid"])
                self._children[child.pid] = child
                self._new.append(child)
                self._is_new.notify()


def _do(command: Mapping[str, Any]) -> int:
    """Does what a command asks for, in the fork."""
    os.environ |= command.get("environment", {})
    if command["kind"] == "store":
        _host_store(Path(command["file"]))
    if command["kind"] == "rank":
        from tests.campaigns.soak.ranks import live

        return live(command["spec"], command["rank"])
    from ckptkit_cli.main import main

    return main(command["arguments"])


def _host_store(file: Path) -> NoReturn:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    draft = file.with_suffix(".draft")
    draft.write_text(str(store.port))
    draft.rename(file)
    while True:
        time.sleep(3600)


def _live(command: Mapping[str, Any]) -> NoReturn:
    """Does a command in a fork, as a process of its own would, and ends it."""
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        empty = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((empty, log, log)):
            os.dup2(file, number)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        status = _do(command)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  shown, and visible in the status
        traceback.print_exc()
    finally:
        # As at the end of any program, but for the teardown of gloo's threads, which may abort.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Takes commands until the input ends; what was forked ends then."""
    running: set[int] = set()
    unread = b""
    while True:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                child = os.fork()
                if child == 0:
                    _live(json.loads(line))
                running.add(child)
                _answer({"pid": child})
        while running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            running.discard(child)
            _answer({"pid": child, "status": os.waitstatus_to_exitcode(status)})
    for child in running:
        os.kill(child, signal.SIGKILL)


def _answer(value: Mapping[str, int]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # no fork looks through what was imported here
    serve()


if __name__ == "__main__":
    main()
