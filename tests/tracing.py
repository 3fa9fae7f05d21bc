"""Records which functions and types of ckptkit a process uses: `runpy.run_path` starts it.

A line is written when a function is called for the first time, so that a process that is killed
or leaves with `os._exit` has its lines too. Standard library only: the writer's process runs it.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any


class Tracer:
    """A profile function that appends lines to a file: process, kind, file or module, name."""

    def __init__(self, lines: str, trees: tuple[str, ...]) -> None:
        self.lines = lines
        self.trees = trees
        self.seen: set[tuple[str, str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or self._imports(frame):
            return
        if code.co_filename.startswith(self.trees):
            self._note("function", code.co_filename, code.co_qualname)
        if code.co_name == "__init__":  # of a dataclass it is in no file
            kind = type(frame.f_locals.get("self"))
            if kind.__module__.startswith("ckptkit"):
                self._note("type", kind.__module__, kind.__qualname__)

    def _note(self, kind: str, home: str, name: str) -> None:
        if (kind, home, name) in self.seen:
            return
        self.seen.add((kind, home, name))
        file = os.open(self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{os.getpid()}\t{kind}\t{home}\t{name}\n".encode())
        os.close(file)

    def _imports(self, frame: FrameType | None) -> bool:
        """Whether a module of ours is being imported by this call or a caller of it."""
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(
                self.trees
            ):
                return True
            frame = frame.f_back
        return False


def start(lines: str, root: str) -> None:
    tracer = Tracer(lines, (f"{root}/ckptkit/", f"{root}/cli/"))
    threading.setprofile(tracer)
    sys.setprofile(tracer)
