"""Answers of the program that asks transformers, kept on disk for the next command.

What an entry is an answer to is its name: a digest of the question, of the installed transformers
and of this version's format. An entry that is damaged, too large, or not this user's own is no
entry, and a folder that cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptkit.version import __version__

_FORMAT = 1
_FOLDER = f"ckptkit/answers-{_FORMAT}"
_MOST_BYTES = 16 << 20  # of an entry as it lies on disk
_MOST_ANSWER_BYTES = 48 << 20
_MOST_ENTRIES = 512
_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']{1,64})["']""", re.MULTILINE)
_FILES = ("modeling_utils.py", "core_model_loading.py", "conversion_mapping.py")
_NESTING = 4  # real configurations nest twice


class AnswerCache:
    """The answers to questions about one model."""

    def __init__(self, config: Mapping[str, Any], program: str) -> None:
        """Takes the model's configuration, and what is started to ask."""
        self._library = _library(config)
        self._program = program

    def read(self, question: bytes) -> dict[str, Any] | None:
        """Returns the answer to a question, None where there is none."""
        path = self._path(question)
        try:
            data = None if path is None else _read(path)
            answer = None if data is None else json.loads(data)
        except (OSError, ValueError, RecursionError, MemoryError, zlib.error):
            return None
        return answer if isinstance(answer, dict) else None

    def keep(self, question: bytes, answer: Mapping[str, Any]) -> None:
        """Keeps an answer, if that can be done."""
        path = self._path(question)
        data = json.dumps(answer).encode()
        if path is None or len(data) > _MOST_ANSWER_BYTES:
            return
        packed = hashlib.sha256(data).digest() + zlib.compress(data, 1)
        if len(packed) <= _MOST_BYTES:
            with suppress(OSError):
                _write(path, packed)

    def forget(self, question: bytes) -> None:
        """Removes an answer that turned out to be none."""
        path = self._path(question)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def _path(self, question: bytes) -> Path | None:
        folder = _folder()
        if folder is None or self._library is None:
            return None
        told = json.dumps([_FORMAT, __version__, self._program, self._library]).encode()
        name = hashlib.sha256(told + b"\n" + question).hexdigest()
        return folder / name


def _folder() -> Path | None:
    """Returns where a user's answers are kept, as the XDG specification says."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return Path(named, _FOLDER)
    try:
        return Path.home() / ".cache" / _FOLDER
    except RuntimeError:  # a user without a home
        return None


def _read(path: Path) -> bytes | None:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        is_own = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or not is_own or found.st_size > _MOST_BYTES:
            return None
        packed = file.read(_MOST_BYTES)
    size = hashlib.sha256().digest_size
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(packed[size:], _MOST_ANSWER_BYTES)
    if not unpacking.eof or hashlib.sha256(data).digest() != packed[:size]:
        return None
    return data


def _write(path: Path, data: bytes) -> None:
    """Puts an entry in place by one rename, and removes the oldest where there are too many."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    entries = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(path.parent)]
    for _, old in sorted(entries)[:-_MOST_ENTRIES]:
        Path(old).unlink(missing_ok=True)


def _library(config: Mapping[str, Any]) -> list[Any] | None:
    """Returns what stands for the installed transformers, which is not imported; None if absent."""
    found = transformers_version()
    if found is None:
        return None
    version, folder = found
    models = sorted({_module(name) for name in _model_types(config, _NESTING)})
    files = [*_FILES, *(f"models/{name}/modeling_{name}.py" for name in models)]
    own = sorted(Path(__file__).resolve().parents[1].joinpath("naming").glob("*.py"))
    return [version, [_size(path) for path in (*(folder / file for file in files), *own)]]


def transformers_version() -> tuple[str, Path] | None:
    """Returns the version and the folder of the installed transformers, without importing it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    try:
        match = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return None if match is None else (match[1], Path(spec.origin).parent)


def _model_types(config: Mapping[str, Any], depth: int) -> set[str]:
    found = {str(config["model_type"])} if isinstance(config.get("model_type"), str) else set()
    for value in config.values() if depth else ():
        if isinstance(value, Mapping):
            found |= _model_types(value, depth - 1)
    return found


def _module(model_type: str) -> str:
    return re.sub(r"\W", "_", model_type)[:64]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
