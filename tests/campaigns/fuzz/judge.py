"""Decides whether a parser behaved: our errors only, in time, little memory, nothing done."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from ckptkit.core.errors import CkptkitError
from tests.campaigns.fuzz.mutation import Mutator

LONGEST_SECONDS = 1.0
"""Of CPU time: other work on the machine does not count."""
_ROOT = Path(__file__).resolve().parents[3]
# What no parser has any reason to do; opening for writing is looked at more closely.
_ACTIONS = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.remove"),
    *("os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("subprocess.Popen", "socket.connect", "socket.bind", "shutil.", "ctypes.dlopen", "exec"),
    *("pickle.find_class", "marshal.loads", "webbrowser.open", "urllib.Request", "os.kill"),
)
# What ckptkit imports late.
_IMPORTED = frozenset(
    {"ckptkit", "fsspec", "blake3", "botocore", "huggingface_hub", "regex", "torch", "yaml"}
)

# msgspec evaluates the annotations of a class when it is decoded into for the first time.
_MAKE_CLASSES = ("dataclasses.py", "collections/__init__.py", "msgspec/_utils.py")


@dataclass(frozen=True)
class Target:
    """A parser that is fuzzed."""

    name: str
    run: Callable[[bytes], object]  # parses an input
    seeds: Callable[[], list[bytes]]  # returns valid inputs
    mutate: Mutator  # the mutations that keep the form of an input
    errors: tuple[type[Exception], ...] = (CkptkitError,)  # the errors that a bad input may give
    # How many inputs it gets of each batch, in relation to the others; fast ones get more.
    share: int = 4
    most_bytes_per_byte: int = 300  # the memory that it may take for each byte of the input
    free_bytes: int = 2 << 20  # the memory that it may take in any case
    most_bytes: int = 1 << 13  # the longest input


@dataclass(frozen=True)
class Finding:
    """What a parser should not have done."""

    target: str
    kind: str  # `crash`, `hang`, `memory`, `action` or `message`
    place: str  # the innermost line of ours
    what: str  # the error, or the figure


class _Actions:
    """The forbidden actions of this process, by an audit hook, which cannot be removed again."""

    def __init__(self) -> None:
        self.is_watching = False
        self.seen: list[str] = []
        self._is_hooked = False
        self._thread = 0

    def watch(self) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._note)
        self._thread = threading.get_ident()
        self.is_watching = True

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_watching or threading.get_ident() != self._thread:
            return
        if event == "import":
            name = str(arguments[0]).partition(".")[0]
            known = name in sys.modules or name in _IMPORTED or name in sys.stdlib_module_names
            if not known and not _is_of_python(sys._getframe(1).f_back):  # by one of these
                self.seen.append(f"import of {arguments[0]}")
        elif event == "open":
            if isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
                self.seen.append(f"open {arguments[0]!r:.100} {arguments[1]}")
        elif event.startswith(_ACTIONS) and not _is_of_python(sys._getframe(1)):
            self.seen.append(f"{event} {arguments!r:.100}")


def _is_of_python(frame: FrameType | None) -> bool:
    """Says whether it happens in a late import of ours, or in the making or reading of a class."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "importlib" in name or name.endswith(_MAKE_CLASSES):
            return True
        frame = frame.f_back
    return False


_ACTIONS_SEEN = _Actions()


def judge(target: Target, data: bytes, *, with_memory: bool = False) -> Finding | None:
    """Lets a target parse an input."""
    if with_memory:
        tracemalloc.start()
    began = time.thread_time()
    try:
        _ACTIONS_SEEN.watch()
        finding = _run(target, data)
        _ACTIONS_SEEN.is_watching = False
        seconds = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if with_memory else 0
    finally:
        if with_memory:
            tracemalloc.stop()
    actions, _ACTIONS_SEEN.seen = _ACTIONS_SEEN.seen, []
    if finding is not None:
        return finding
    if actions:
        return Finding(target.name, "action", "", actions[0])
    if seconds > LONGEST_SECONDS * (4 if with_memory else 1):
        return Finding(target.name, "hang", "", f"{seconds:.1f} s for {len(data):,} bytes")
    if peak > target.free_bytes + target.most_bytes_per_byte * len(data):
        return Finding(target.name, "memory", "", f"{peak:,} bytes for {len(data):,}")
    return None


def _run(target: Target, data: bytes) -> Finding | None:
    try:
        target.run(data)
    except target.errors as error:
        try:
            str(error).encode()
        except UnicodeEncodeError as unprintable:
            return Finding(target.name, "message", _place(error), str(unprintable))
    except Exception as error:  # noqa: BLE001  the very thing that is looked for
        what = f"{type(error).__name__}: {error}"
        return Finding(
            target.name, "crash", _place(error), what.encode("ascii", "replace").decode()
        )
    return None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/ckptkit" in frame.filename] or list(frames)
    last = own[-1]
    path = Path(last.filename)
    name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    return f"{name}:{last.lineno}"


def mutated(target: Target, data: bytes, rng: Random) -> bytes:
    """Returns a changed input, no longer than the target takes."""
    return target.mutate(rng, data)[: target.most_bytes]
