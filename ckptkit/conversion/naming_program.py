"""Questions to the installed transformers, answered by a process of its own and cached on disk.

ckptkit uses transformers in this way only. The process has no GPU, no network and no code but
that of installed libraries, and it ends with the command.

The name of a cache entry is a digest of the question, of the installed transformers and of the
cache's format. Entries that are damaged, too large or of another user are ignored, as is a folder
that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from ckptkit.consumers.class_facts import kept_by_transformers
from ckptkit.core.errors import OutputError, RefusedError, error_from_json
from ckptkit.core.model_configs import list_model_types
from ckptkit.core.text import Closing
from ckptkit.hub_names.disk_tensors import HubNames, NamingRequest, names_from_json
from ckptkit.plan.selection import KeptDtypes
from ckptkit.storage.local.ownership import make_private
from ckptkit.version import __version__

logger = logging.getLogger(__name__)

_FORMAT = 1
_FOLDER = f"ckptkit/answers-{_FORMAT}"
_MOST_BYTES = 16 << 20  # of an entry on disk
_MOST_ANSWER_BYTES = 48 << 20
_MOST_ENTRIES = 512
_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']{1,64})["']""", re.MULTILINE)
_FILES = ("modeling_utils.py", "core_model_loading.py", "conversion_mapping.py")


class AnswerCache:
    """The answers to questions about one model, in files of the user's cache folder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._library = _library(config)

    def read(self, question: bytes) -> dict[str, Any] | None:
        """Returns the cached answer to a question, or None."""
        path = self._path(question)
        if path is None:
            return None
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with os.fdopen(os.open(path, flags), "rb") as file:
                status = os.fstat(file.fileno())
                is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not stat.S_ISREG(status.st_mode) or not is_own or status.st_size > _MOST_BYTES:
                    return None
                packed = file.read(_MOST_BYTES)
            size = hashlib.sha256().digest_size
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(packed[size:], _MOST_ANSWER_BYTES)
            if not unpacking.eof or hashlib.sha256(data).digest() != packed[:size]:
                return None
            answer = json.loads(data)
        except (OSError, ValueError, RecursionError, MemoryError, zlib.error):
            return None
        return answer if isinstance(answer, dict) else None

    def keep(self, question: bytes, answer: Mapping[str, Any]) -> None:
        """Stores an answer; does nothing where that fails."""
        path = self._path(question)
        data = json.dumps(answer).encode()
        if path is None or len(data) > _MOST_ANSWER_BYTES:
            return
        packed = hashlib.sha256(data).digest() + zlib.compress(data, 1)
        if len(packed) <= _MOST_BYTES:
            with suppress(OSError):
                _write(path, packed)

    def _path(self, question: bytes) -> Path | None:
        """Returns the file of an answer in the user's cache folder by the XDG specification."""
        if self._library is None:
            return None
        folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not folder.is_absolute():
            try:
                folder = Path.home() / ".cache"
            except RuntimeError:  # a user without a home
                return None
        versions = json.dumps([_FORMAT, __version__, _PROGRAM, self._library]).encode()
        return folder / _FOLDER / hashlib.sha256(versions + b"\n" + question).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Writes an entry by one rename, and removes the oldest ones where there are too many."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_private(path.parent, exist_ok=True)
    except OutputError:  # of another user, or a link, which may lead to files that are not ours
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    aged: list[tuple[float, str]] = []
    with os.scandir(path.parent) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process has renamed or removed it
                aged.append((entry.stat().st_mtime, entry.path))
    for _, old in sorted(aged)[:-_MOST_ENTRIES]:
        Path(old).unlink(missing_ok=True)


def _library(config: Mapping[str, Any]) -> list[Any] | None:
    """Returns values that change with the installed transformers; None if there is none."""
    installed = find_transformers_version()
    if "_class_name" in config:
        spec = find_spec("diffusers")
        path = None if spec is None or spec.origin is None else Path(spec.origin)
        match = None if path is None else _VERSION.search(path.read_text(encoding="utf-8"))
        return None if match is None else [f"diffusers {match[1]}"]
    if installed is None:
        return None
    version, folder = installed
    models = sorted({re.sub(r"\W", "_", name)[:64] for name in list_model_types(config)})
    files = [*_FILES, *(f"models/{name}/modeling_{name}.py" for name in models)]
    own = Path(__file__).resolve().parents[1].joinpath("hub_names", "transformers").glob("*.py")
    sizes = []
    for path in (*(folder / file for file in files), *sorted(own)):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            sizes.append(-1)
    return [version, sizes]


def find_transformers_version() -> tuple[str, Path] | None:
    """Returns the version and the folder of the installed transformers, without importing it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    try:
        match = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return None if match is None else (match[1], Path(spec.origin).parent)


_PROGRAM = (
    "import sys; sys.path[:] = {!r}; from ckptkit.hub_names.transformers.program import {}; {}()"
)
_NEEDED = ("torch", "transformers")
_SILENT_SECONDS = 1.0
_SECONDS = 600  # the largest models take ten, and importing from a slow disk a minute
_LAYOUT = "call `ckptkit.training.write_flat_layout` in the training script instead"
_LIVE = "pass --names live to write the names that training holds, which Transformers 5 loads too"


class NamingProgram(Closing):
    """The process, started with its first question. Use it as a context manager.

    One question is asked at a time.
    """

    def __init__(self, entry: str = "main") -> None:
        """Takes the name of the function that the process runs."""
        self._entry = entry
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def close(self) -> None:
        """Ends the process, if it was started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # unread data cannot be flushed
                        pipe.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def ask(self, question: bytes) -> Future[bytes]:
        """Asks a question; does not wait."""
        if self._process is None:
            with suppress(OSError):  # without a file, what the process prints is lost
                self._log = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
            self._process = start_program(self._entry, self._log or subprocess.DEVNULL)
        answer: Future[bytes] = Future()
        arguments = self._process, question, answer
        # A daemon: `close` kills the process that it waits for.
        threading.Thread(target=_exchange, args=arguments, daemon=True).start()
        return answer

    def wait(
        self,
        answer: Future[bytes],
        hint: str,
        seconds: float | None = None,
        *,
        failing: str = "transformers could not answer",
        is_logged: bool = True,
    ) -> dict[str, Any]:
        """Waits for an answer."""
        seconds = _SECONDS if seconds is None else seconds
        try:
            if is_logged and not wait([answer], min(_SILENT_SECONDS, seconds)).done:
                logger.info("waiting for a process that imports transformers, to ask it")
            line = answer.result(seconds)
        except FutureTimeoutError as error:
            self.close()
            raise RefusedError(
                f"transformers gave no answer within {seconds:g} s", hint=hint
            ) from error
        if not line:  # the process ended
            status, log = 0 if self._process is None else self._process.wait(), ""
            if self._log is not None:
                self._log.seek(0)
                log = self._log.read().decode(errors="replace").strip()
            self.close()
            logger.debug("the program that asks transformers said: %s", log)
            last = log.splitlines()[-1] if log else f"it ended with status {status}"
            raise RefusedError(f"{failing}: {last}", hint=hint)
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            self.close()
            raise RefusedError("the program that asks transformers gave no answer", hint=hint)
        return document


def _exchange(process: subprocess.Popen[bytes], question: bytes, answer: Future[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018  pipes
    line = b""
    with suppress(OSError, ValueError):  # the process may have ended
        process.stdin.write(question + b"\n")
        process.stdin.flush()
    with suppress(OSError, ValueError):
        line = process.stdout.readline()
    answer.set_result(line)


def ask_transformers(request: NamingRequest, program: NamingProgram | None = None) -> HubNames:
    """Asks the installed transformers for the names of a model's tensors on disk."""
    missing = list_missing_libraries()
    if missing:
        raise RefusedError(
            f"model type {request.config.get('model_type')!r} is kept under other names on disk,"
            f" and {' and '.join(missing)}, which know them, cannot be imported",
            hint=f"run `pip install {' '.join(missing)}`, or {_LIVE}",
        )
    cache, question = AnswerCache(request.config), request.to_json()
    cached = cache.read(question)
    if cached is not None:
        with suppress(LookupError, TypeError, ValueError):  # else it is asked for again
            return names_from_json(cached)
    with ExitStack() as stack:
        answering = program or stack.enter_context(NamingProgram())
        document = answering.wait(answering.ask(question), _LIVE)
    if "error" in document:
        error = error_from_json(document["error"])
        raise RefusedError(
            f"the names on disk of model type {request.config.get('model_type')!r} are not known:"
            f" {error.message}",
            hint=error.hint or _LIVE,
        )
    cache.keep(question, document)
    return names_from_json(document)


def ask_kept(config: Mapping[str, Any], program: NamingProgram) -> KeptDtypes | None:
    """Asks the installed transformers what a class keeps in float32; None where it cannot say."""
    if list_missing_libraries():
        return None
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    cache, question = AnswerCache(plain), json.dumps({"kept": plain}).encode()
    try:
        document = cache.read(question) or program.wait(program.ask(question), "")
        always, in_float16 = document["kept"]
        kept = kept_by_transformers(map(str, always), map(str, in_float16))
    except (RefusedError, LookupError, TypeError, ValueError):
        return None
    cache.keep(question, document)
    return kept


def list_missing_libraries(library: str = "transformers") -> list[str]:
    """Returns what the process needs to ask a library, and what of it cannot be imported."""
    needed = _NEEDED if library != "diffusers" else (*_NEEDED[:1], library)
    return [name for name in needed if find_spec(name) is None]


def ask_parameters(config: Mapping[str, Any], live: Sequence[str]) -> list[Mapping[str, Any]]:
    """Asks the installed transformers for the parameters of a model, which it does not load."""
    missing = list_missing_libraries()
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
    parameters: list[Mapping[str, Any]] = document["parameters"]
    return parameters


def start_program(entry: str, log: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Starts the process."""
    here, own = "", Path(__file__).resolve().parents[2]
    with suppress(OSError):  # it was removed
        here = str(Path.cwd())
    # Python files of a model folder must not be imported as libraries.
    roots = [path for path in sys.path if path == str(own) or path not in {"", here}]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-c", _PROGRAM.format([*roots, str(own)], entry, entry)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=None if here else own,  # transformers is not imported in a directory that was removed
    )
