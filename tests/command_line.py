"""Runs commands as a shell would, as forks of a process that has imported what they import.

Started as a program, this module is that process. What a command asks transformers is answered by
the process that runs the tests, which has imported it. Tests of how a command starts, ends on
signals, imports or asks start commands themselves.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ckptkit.conversion.naming_program import NamingProgram
from tests.s3_client import prepare_clients

_ROOT = Path(__file__).resolve().parents[1]
_IMPORTED = ("numpy", "s3fs", "ckptkit.api")
_PACKAGES = (
    *("ckptkit_cli", "ckptkit.conversion", "ckptkit.engine", "ckptkit.formats"),
    *("ckptkit.adapters", "ckptkit.deltas", "ckptkit.serving", "ckptkit.storage"),
    *("ckptkit.runs", "ckptkit.hub.watch"),
)
LIMIT_SECONDS = 240  # below pytest's limit of a test
ENTRIES = ("main", "parameters")  # of the program that is asked for names
Result = subprocess.CompletedProcess[str]


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a process, and kills it at the end, which may be that of a test that failed."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


class _CommandHost:
    """The process, which is started with the first command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.command = 0  # the number of its process, once one was started

    def run(self, command: dict[str, Any], given: str) -> Result:
        with self._lock:
            if self._process is None:
                self._start()
            return self._run(command, given)

    def close(self) -> None:
        if self._process is not None:
            self._answers.close()
            self._socket.close()
            self._process.wait(60)
            self._process = None

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("r")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.command_line", str(theirs.fileno())],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def _run(self, command: dict[str, Any], given: str) -> Result:
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = (
            os.pipe() for _ in range(3)
        )
        questions, asker = socket.socketpair()
        try:
            socket.send_fds(self._socket, [b"\n"], [stdin, stdout, stderr, asker.fileno()])
            self._socket.sendall(json.dumps(command).encode() + b"\n")
        finally:
            asker.close()
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
        process = self.command = int(self._answers.readline())
        with ThreadPoolExecutor(4) as pool:
            pool.submit(_answer_questions, questions)
            pool.submit(_write, to_stdin, given)
            said = [pool.submit(_read, descriptor) for descriptor in (from_stdout, from_stderr)]
            try:
                texts = [text.result(LIMIT_SECONDS) for text in said]
            except FutureTimeoutError:
                os.kill(process, signal.SIGKILL)
                self._answers.readline()
                raise subprocess.TimeoutExpired(command["words"], LIMIT_SECONDS) from None
        status = int(self._answers.readline())
        return subprocess.CompletedProcess(command["words"], status, *texts)


def _write(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError), os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        pipe.write(text)


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        return pipe.read()


def answer_question(entry: str, question: bytes) -> bytes:
    """Answers what a `NamingProgram` is asked, without the import of transformers in another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ckptkit.hub_names.transformers import program

        answer = program._parameters if entry == "parameters" else program.answer_question
        return json.dumps(answer(json.loads(question))).encode()


def _answer_questions(questions: socket.socket) -> None:
    """Answers what a command asks until it has ended."""
    with questions, questions.makefile("r") as lines:
        for line in lines:
            answer = b""
            with suppress(Exception):  # the command sees that there is none
                answer = answer_question(*json.loads(line))
            questions.sendall(answer + b"\n")


def _ask_worker(questions: socket.socket) -> None:
    """Has `NamingProgram` ask the process that runs the tests."""
    start = NamingProgram.ask
    answers = questions.makefile("rb")

    def ask(program: NamingProgram, question: bytes) -> Future[bytes]:
        if program._entry not in ENTRIES:
            return start(program, question)
        questions.sendall(json.dumps([program._entry, question.decode()]).encode() + b"\n")
        future: Future[bytes] = Future()
        future.set_result(answers.readline().rstrip())
        return future

    setattr(NamingProgram, "ask", ask)  # noqa: B010


_HOST = _CommandHost()


def run_command(*words: object, given: str = "", **environment: str) -> Result:
    """Runs `ckptkit` with these words; `given` is its standard input."""
    command = {
        "words": [str(word) for word in words],
        "environment": os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        "folder": str(Path.cwd()),
    }
    return _HOST.run(command, given)


def kill_command() -> None:
    os.kill(_HOST.command, signal.SIGKILL)


def close_host() -> None:
    _HOST.close()


def _become_command(
    command: dict[str, Any], streams: list[int], questions: socket.socket
) -> NoReturn:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _ask_worker(questions)
    os.environ.clear()
    os.environ |= command["environment"]
    os.chdir(command["folder"])
    sys.argv = ["ckptkit", *command["words"]]
    status = 1
    try:
        runpy.run_module("ckptkit_cli", run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  shown, and visible in the status
        traceback.print_exc()
    finally:  # as at the end of any program
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                output.flush()
        os._exit(status)


def _serve(commands: socket.socket) -> None:
    with commands.makefile("r") as lines:
        while found := socket.recv_fds(commands, 1, 4)[1]:
            *streams, asker = found
            os.set_inheritable(asker, False)
            command = json.loads(lines.readline())
            with socket.socket(fileno=asker) as questions:
                process = os.fork()
                if process == 0:
                    _become_command(command, streams, questions)
            commands.sendall(f"{process}\n".encode())
            for stream in streams:
                os.close(stream)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            commands.sendall(f"{status}\n".encode())


def _main() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    prepare_clients()
    assert "torch" not in sys.modules
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
