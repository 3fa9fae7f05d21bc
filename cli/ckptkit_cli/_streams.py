"""Standard streams that neither a reader who left nor a strange character can break."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _PatientFile(io.FileIO):
    """A pipe whose reader may leave, as `| head` does: what nobody reads is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Readies stdout and stderr; streams that the parent closed swallow what is written."""
    sys.stdout = _prepared(sys.stdout)
    sys.stderr = _prepared(sys.stderr)


def flush_streams() -> None:
    """Writes out what is buffered, and gives up quietly where that fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds, and will be given, nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    except (OSError, ValueError):  # a stream without a descriptor has nothing to flush later
        return
    finally:
        os.close(null)


def _prepared(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  for all our life
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if stream.isatty():
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    raw = _PatientFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace"
    )
