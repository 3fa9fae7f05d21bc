"""Ranges of bytes in files, as they are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class FileRange:
    """The bytes `[start, stop)` of a file; the path is relative to its source."""

    path: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.stop - self.start
