"""The two seams between ckptkit and the places where bytes live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

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


class Folder(Source, Protocol):
    """A source that was opened, and is closed again."""

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        """Returns the first file that is no longer the one it was, or None."""
        ...

    def linked_folders(self) -> list[str]:
        """Returns the names of folders right below that are links, which `walk` does not enter."""
        ...

    def close(self) -> None:
        """Lets go of descriptors and connections; what is read afterwards fails."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Target(Protocol):
    """A place where the files of one output are put, invisible until committed."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def free_bytes(self) -> int | None:
        """Returns how much room there is, None where nobody knows."""
        ...

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
