"""Starts the program that asks transformers, and takes its answers.

It is the only way from here to transformers: a process of its own, without a GPU, without the
network and without anyone's code but that of installed libraries, which ends with the command.
Answers are kept on disk, so that the same question does not start it again.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ckptkit.core.errors import CkptkitError, RefusedError, error_from_json
from ckptkit.pipeline.answer_cache import AnswerCache
from ckptkit.planning.hub_names import HubNames
from ckptkit.planning.hub_names_wire import NamingRequest, names_from_json
from ckptkit.planning.load_report import LoadReport, LoadRequest

_LOG = logging.getLogger(__name__)
_PROGRAM = "import sys; sys.path[:] = {!r}; from ckptkit.naming.program import {}; {}()"
_NEEDED = ("torch", "transformers")
_SECONDS = 600  # the largest models take ten, and importing from a slow disk a minute
_DTYPES = ("dtype", "torch_dtype")  # of which names and shapes are independent
_LAYOUT = "call `ckptkit.training.write_flat_layout` in the training script instead"
_LIVE = "pass --names live to write the names that training holds, which Transformers 5 loads too"


class NamingProgram:
    """The program, started with its first question; a context that ends it.

    One question is asked at a time.
    """

    def __init__(self, entry: str = "main") -> None:
        """Takes the function of the program that is run."""
        self._entry = entry
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Begins; nothing is started yet."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Ends the program: nothing outlives the command, however that ends."""
        self.close()

    def close(self) -> None:
        """Ends the program, if it was started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what it has not read is lost
                        pipe.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def ask(self, question: bytes) -> Future[bytes]:
        """Asks a question, and returns at once.

        Returns:
            The line of the answer to be; empty where the program ends without one.
        """
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the program
            self._process = subprocess.Popen(  # noqa: S603
                program_command(self._entry),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        answer: Future[bytes] = Future()
        arguments = self._process, question, answer
        # A daemon: it waits for a process that is killed when this one ends.
        threading.Thread(target=_exchange, args=arguments, daemon=True).start()
        return answer

    def wait(
        self, answer: Future[bytes], hint: str, seconds: float | None = None
    ) -> dict[str, Any]:
        """Waits for an answer.

        Args:
            answer: What `ask` returned.
            hint: What to do if there is none.
            seconds: How long to wait.

        Raises:
            RefusedError: If the program fails, or does not answer in time; it is ended then.
        """
        seconds = _SECONDS if seconds is None else seconds
        try:
            line = answer.result(seconds)
        except FutureTimeoutError as error:
            self.close()
            raise RefusedError(
                f"transformers gave no answer within {seconds:g} s", hint=hint
            ) from error
        if not line:
            raise self._failure(hint)
        try:
            document = json.loads(line)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            self.close()
            raise RefusedError("the program that asks transformers gave no answer", hint=hint)
        return document

    def _failure(self, hint: str) -> RefusedError:
        """Returns what to raise for a program that ended."""
        status, log = 0, ""
        if self._process is not None and self._log is not None:
            status = self._process.wait()
            self._log.seek(0)
            log = self._log.read().decode(errors="replace").strip()
        self.close()
        _LOG.debug("the program that asks transformers said: %s", log)
        last = log.splitlines()[-1] if log else f"it ended with status {status}"
        return RefusedError(f"transformers could not tell the names on disk: {last}", hint=hint)


def _exchange(process: subprocess.Popen[bytes], question: bytes, answer: Future[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018  pipes
    line = b""
    with suppress(OSError, ValueError):  # it may have ended, after an answer or without one
        process.stdin.write(question + b"\n")
        process.stdin.flush()
    with suppress(OSError, ValueError):
        line = process.stdout.readline()
    answer.set_result(line)


def ask_transformers(request: NamingRequest, program: NamingProgram | None = None) -> HubNames:
    """Asks the installed transformers what a model's tensors are called on disk.

    Args:
        request: The model and its tensors.
        program: What answers, if it has been begun; it is one of its own otherwise.

    Raises:
        RefusedError: If transformers is not installed, fails, or cannot be followed.
    """  # noqa: DOC501  `_refusal` makes it
    missing = what_is_not_installed()
    if missing:
        raise RefusedError(
            f"model type {request.config.get('model_type')!r} is kept under other names on disk,"
            f" and {' and '.join(missing)}, which would tell them, cannot be imported",
            hint=f"run `pip install {' '.join(missing)}`, or {_LIVE}",
        )
    cache, question = AnswerCache(request.config, _PROGRAM), request.to_json()
    known = cache.read(question)
    if known is not None:
        try:
            return names_from_json(known)
        except (LookupError, TypeError, ValueError):
            cache.forget(question)
    document = _asked(program, question)
    if "error" in document:
        raise _refusal(error_from_json(document["error"]), request)
    cache.keep(question, document)
    return names_from_json(document)


def _asked(program: NamingProgram | None, question: bytes) -> dict[str, Any]:
    if program is not None:
        return program.wait(program.ask(question), _LIVE)
    with NamingProgram() as own:
        return own.wait(own.ask(question), _LIVE)


class LoadQuestion:
    """What loading would report, asked of transformers; the program answers beside other work."""

    def __init__(self, request: LoadRequest, program: NamingProgram) -> None:
        """Takes what to ask, and what answers."""
        config = {key: value for key, value in request.config.items() if key not in _DTYPES}
        self._question = json.dumps({"loading": {**request.to_json(), "config": config}}).encode()
        self._cache = AnswerCache(request.config, _PROGRAM)
        self._program = program
        self._answer: Future[bytes] | None = None

    def known(self) -> LoadReport | None:
        """Returns the answer if it was given before."""
        known = self._cache.read(self._question)
        if known is None:
            return None
        try:
            return LoadReport.from_json(known)
        except (LookupError, TypeError, ValueError):
            self._cache.forget(self._question)
            return None

    def begin(self) -> None:
        """Asks; returns at once."""
        if self._answer is None:
            self._answer = self._program.ask(self._question)

    def is_answered(self, seconds: float) -> bool:
        """Tells whether there is an answer, or the program ended; waits so long at most."""
        self.begin()
        return bool(self._answer and wait([self._answer], seconds).done)

    def finish(self, seconds: float | None = None) -> LoadReport:
        """Waits for the answer.

        Raises:
            RefusedError: If there is none.
        """  # noqa: DOC501  what the program found comes from JSON
        self.begin()
        assert self._answer is not None  # noqa: S101  begun
        document = self._program.wait(self._answer, "", seconds)
        if "error" in document:
            raise error_from_json(document["error"])
        try:
            report = LoadReport.from_json(document)
        except (LookupError, TypeError, ValueError) as error:
            raise RefusedError("the program that asks transformers gave no answer") from error
        self._cache.keep(self._question, document)
        return report


def what_is_not_installed() -> list[str]:
    """Returns which of the libraries that know models cannot be imported."""
    return [name for name in _NEEDED if find_spec(name) is None]


def ask_parameters(config: Mapping[str, Any], live: Sequence[str]) -> list[Mapping[str, Any]]:
    """Asks the installed transformers for the parameters of a model, which it does not load.

    Args:
        config: The model's parsed `config.json`.
        live: Names that the checkpoint tells.

    Returns:
        For each parameter, in the order of modules, its `names` and its `shape`.

    Raises:
        RefusedError: If transformers is not installed, fails, or has no such model.
    """
    missing = what_is_not_installed()
    if missing:
        raise RefusedError(
            f"{' and '.join(missing)}, which would build the model, cannot be imported",
            where="--model-config",
            hint=f"run `pip install {' '.join(missing)}`",
        )
    request = json.dumps({"config": config, "live": list(live)}).encode()
    with NamingProgram("parameters") as program:
        document = program.wait(program.ask(request), _LAYOUT)
    if "error" in document:
        error = error_from_json(document["error"])
        raise RefusedError(error.message, where="--model-config", hint=error.hint or _LAYOUT)
    found: list[Mapping[str, Any]] = document["parameters"]
    return found


def program_command(entry: str) -> list[str]:
    """Returns the command that starts the program.

    Args:
        entry: The function of it that is run.
    """
    # Where a model folder is at hand, its python files must not pass for libraries.
    here = {"", str(Path.cwd())}
    roots = [path for path in sys.path if path not in here]
    roots.append(str(Path(__file__).resolve().parents[2]))
    return [sys.executable, "-P", "-c", _PROGRAM.format(roots, entry, entry)]


def _refusal(error: CkptkitError, request: NamingRequest) -> RefusedError:
    return RefusedError(
        f"the names on disk of model type {request.config.get('model_type')!r} cannot be told:"
        f" {error.message}",
        hint=error.hint or _LIVE,
    )
