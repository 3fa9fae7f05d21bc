"""The two seams between ckptkit and the places where bytes live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ckptkit.core.index import FileRef


class Source(Protocol):
    """A directory, or something like one, that is only read. Paths are relative, with `/`."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def walk(self, depth: int) -> Iterator[str]:
        """Yields the paths of files down to `depth` folders below, sorted."""
        ...

    def stat(self, path: str) -> FileRef:
        """Returns size and identity of a file.

        Raises:
            MissingFileError: If it is not there.
            UnsafePathError: If it leads out of the source.
        """
        ...

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`.

        Raises:
            TruncatedFileError: If the file ends before `stop`.
        """
        ...

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on.

        Raises:
            TruncatedFileError: If the file ends before `target` is full.
        """
        ...


class Target(Protocol):
    """A place where the files of one output are put, invisible until committed."""

    def create(self, path: str, size_bytes: int) -> None:
        """Makes a file of that size, its content undefined until written.

        Raises:
            NoSpaceError: If the place has no room for it.
        """
        ...

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start` of a created file; thread-safe for disjoint ranges."""
        ...

    def commit(self, last: str) -> None:
        """Makes everything durable and visible at once, the file `last` after all others.

        Raises:
            OutputExistsError: If the destination was filled by somebody else meanwhile.
        """
        ...

    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit."""
        ...
