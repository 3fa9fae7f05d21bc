"""Runs commands as a shell would, as forks of a process that has imported what they import.

What a command asks transformers is answered by the process that runs the tests, which has imported
it. Tests of how a command starts, ends on
signals, imports or asks start commands themselves.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptkit.conversion.naming_program import NamingProgram
from tests.fork_host import ForkHost

_IMPORTED = ("numpy", "s3fs", "ckptkit.api")
_PACKAGES = (
    *("ckptkit_cli", "ckptkit.conversion", "ckptkit.engine", "ckptkit.formats"),
    *("ckptkit.adapters", "ckptkit.deltas", "ckptkit.serving", "ckptkit.storage"),
    *("ckptkit.runs", "ckptkit.hub.watch"),
)
LIMIT_SECONDS = 240  # below pytest's limit of a test
ASKER = 3  # the descriptor at which a command asks for names
_PYTHONS_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning: ", re.MULTILINE)  # no message of ours
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


_HOST: list[ForkHost] = []  # started with the first command


def run_command(*words: object, given: str = "", **environment: str) -> Result:
    """Runs `ckptkit` with these words; `given` is its standard input."""
    if not _HOST:
        _HOST.append(ForkHost(prepare=import_commands))
    questions, asker = socket.socketpair()
    answers = threading.Thread(target=_answer_questions, args=(questions,))
    answers.start()
    try:
        result = _HOST[0].capture(
            *(_be_command, [str(word) for word in words], str(Path.cwd())),
            given=given,
            streams=(asker.fileno(),),
            environment=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            limit_seconds=LIMIT_SECONDS,
        )
    finally:
        asker.close()
        answers.join()
    assert _PYTHONS_WARNING.search(result.stderr) is None, result.stderr
    return result


def kill_command() -> None:
    """Kills the command that is running."""
    assert _HOST[0].newest is not None
    os.kill(_HOST[0].newest.pid, signal.SIGKILL)


def close_host() -> None:
    while _HOST:
        _HOST.pop().close()


def _be_command(words: list[str], folder: str) -> None:
    os.set_inheritable(ASKER, False)
    _ask_worker(socket.socket(fileno=ASKER))
    os.chdir(folder)
    sys.argv = ["ckptkit", *words]
    runpy.run_module("ckptkit_cli", run_name="__main__")


def import_commands() -> None:
    """Imports what commands import, but for what looks at the environment when it is imported."""
    for name in _IMPORTED:
        importlib.import_module(name)
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    assert "torch" not in sys.modules


def import_commands_and_hub() -> None:
    """Imports that too; the environment of the host is that of its commands then."""
    import_commands()
    for name in ("hf_xet", "huggingface_hub.hf_api"):
        importlib.import_module(name)
    for module in pkgutil.iter_modules(importlib.import_module("ckptkit.hub").__path__):
        importlib.import_module(f"ckptkit.hub.{module.name}")
