"""Several directories that are read as one: each node's copy of its ranks' files."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckptkit.core.errors import CkptkitError, FormatError, MissingFileError
from ckptkit.core.index import FileRef
from ckptkit.storage.base import Source
from ckptkit.storage.local import LocalSource
from ckptkit.storage.memory import MemorySource


class OverlaySource:
    """Directories laid over one another: a path stands for the file of that path in any of them.

    A file that lies in several must be the same in all: its size is compared, and of some files
    every byte.
    """

    def __init__(self, folders: Sequence[LocalSource], *, compared: Collection[str] = ()) -> None:
        """Takes the directories, which stay the caller's to close.

        Args:
            folders: The directories, one at least; the first one names the place.
            compared: Names of files of which every byte must be the same wherever they lie.
        """
        self._folders = tuple(folders)
        self._compared = frozenset(compared)
        self._made: Mapping[str, bytes] = {}
        self._places: dict[str, Source] = {}
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        """The first directory, as the user named it."""
        return self._folders[0].location

    @property
    def folders(self) -> tuple[LocalSource, ...]:
        """The directories, in order."""
        return self._folders

    def lay_over(self, made: Mapping[str, bytes]) -> None:
        """Has files that were made up stand for those of their paths, in all directories."""
        with self._lock:
            self._made = {**self._made, **made}
            self._places.clear()

    def walk(self, depth: int) -> Iterator[str]:
        """Yields the paths of files in any of the directories, as `LocalSource.walk` does."""
        found = {path for path in self._made if path.count("/") <= depth}
        for folder in self._folders:
            found.update(folder.walk(depth))
        yield from sorted(found)

    def stat(self, path: str) -> FileRef:
        """Returns size and identity of a file.

        Raises:
            MissingFileError: If it is in none of the directories.
            FormatError: If it is in several, and not the same in all of them.
        """
        return self._place(path).stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`; raises what `stat` and the reading raise."""
        return self._place(path).read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on; raises what `stat` and the reading raise."""
        self._place(path).read_into(path, start, target)

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        """Returns the first file that is no longer the one it was, or None."""
        for ref in refs:
            try:
                now = self.stat(ref.path)
            except CkptkitError:
                return ref
            if now.identity != ref.identity:
                return ref
        return None

    def linked_folders(self) -> list[str]:
        """Returns the names of folders right below that are links, in any of the directories."""
        return sorted({name for folder in self._folders for name in folder.linked_folders()})

    def _place(self, path: str) -> Source:
        with self._lock:
            known = self._places.get(path)
        if known is None:
            known = self._find(path)
            with self._lock:
                self._places[path] = known
        return known

    def _find(self, path: str) -> Source:
        if path in self._made:
            return MemorySource(self._made, self.location)
        if len(self._folders) == 1:
            return self._folders[0]
        found: list[tuple[LocalSource, FileRef]] = []
        for folder in self._folders:
            try:
                found.append((folder, folder.stat(path)))
            except MissingFileError:
                continue
        if not found:
            others = ", ".join(folder.location for folder in self._folders[1:])
            raise MissingFileError(
                f"nothing was found there, nor in {others}"
                if others
                else "nothing was found there",
                where=f"{self.location}/{path}",
            )
        for other in found[1:]:
            self._check_same(path, found[0], other)
        return found[0][0]

    def _check_same(
        self, path: str, first: tuple[LocalSource, FileRef], other: tuple[LocalSource, FileRef]
    ) -> None:
        sizes = first[1].size_bytes, other[1].size_bytes
        differs = ""
        if sizes[0] != sizes[1]:
            differs = f"{sizes[0]:,} bytes were found against {sizes[1]:,}"
        elif path.rpartition("/")[2] in self._compared:
            contents = [folder.read(path, 0, ref.size_bytes) for folder, ref in (first, other)]
            differs = "" if contents[0] == contents[1] else "other bytes were found than"
        if differs:
            raise FormatError(
                f"{differs} in {other[0].location}",
                where=f"{first[0].location}/{path}",
                hint="a file that lies in several places must be the same in all: see whether they"
                " belong to one save",
            )
