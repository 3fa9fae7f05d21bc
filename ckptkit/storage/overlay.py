"""Several directories that are read as one, and files in memory that are read like them.

Each node of a training has a directory with the files of its ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from ckptkit.core.errors import FormatError, InputError, MissingFileError
from ckptkit.core.index import FileRange, FileRef
from ckptkit.storage.base import CopySource, Source, truncated_error
from ckptkit.storage.locations import check_relative

if TYPE_CHECKING:
    from ckptkit.storage.local.disk import OpenFile

_WHOLE_BYTES = 16 << 20  # up to which files are compared as a whole
_READ_BYTES = 1 << 20
_PART_BYTES = 64 << 10
_PARTS = 64  # of larger ones; the first and the last bytes are among them


class MemorySource(Source):
    """A directory whose files are given as bytes."""

    def __init__(self, files: Mapping[str, bytes], location: str = "memory") -> None:
        self._files = files
        self.location = location

    def walk(self, depth: int) -> Iterator[str]:
        yield from sorted(path for path in self._files if path.count("/") <= depth)

    def stat(self, path: str) -> FileRef:
        """Returns size and identity of a file, the latter a digest of its bytes."""
        data = self._data(path)
        return FileRef(path, len(data), blake2b(data, digest_size=16).hexdigest())

    def read(self, path: str, start: int, stop: int) -> bytes:
        data = self._data(path)
        if stop > len(data):
            raise truncated_error(f"{self.location}/{path}", start, stop, len(data))
        return data[start:stop]

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if target.nbytes:
            target.cast("B")[:] = self.read(path, start, start + target.nbytes)

    def _data(self, path: str) -> bytes:
        check_relative(path, self.location)
        if path not in self._files:
            raise MissingFileError("nothing was found there", where=f"{self.location}/{path}")
        return self._files[path]


class OverlaySource(Source):
    """Several directories that are read as one: a path names the file of that path in any of them.

    A file that is in several directories must be the same in all. Small files are compared as a
    whole, large ones in many places: reading all of them would take as long as the work itself,
    and two saves differ nearly everywhere.
    """

    def __init__(self, folders: Sequence[Source], *, compared: Collection[str] = ()) -> None:
        """Takes directories, which the caller closes; files in `compared` are compared whole."""
        self.folders = tuple(folders)
        self.location = self.folders[0].location
        self.is_remote = any(folder.is_remote for folder in self.folders)
        self._compared = frozenset(compared)
        self._generated: Mapping[str, bytes] = {}
        self._without: tuple[str, ...] = ()
        self._places: dict[str, Source] = {}
        self._lock = threading.Lock()

    def lay_over(self, generated: Mapping[str, bytes], *, without: Sequence[str] = ()) -> None:
        """Puts generated files over those of the directories, and hides some folders."""
        with self._lock:
            self._generated = {**self._generated, **generated}
            self._without = (*self._without, *(f"{folder}/" for folder in without))
            self._places.clear()

    def walk(self, depth: int) -> Iterator[str]:
        paths = {path for path in self._generated if path.count("/") <= depth}
        for folder in self.folders:
            paths.update(folder.walk(depth))
        yield from sorted(path for path in paths if not path.startswith(self._without))

    def stat(self, path: str) -> FileRef:
        return self._place(path).stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        return self._place(path).read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        self._place(path).read_into(path, start, target)

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        places: dict[int, list[tuple[FileRange, memoryview]]] = {}
        for wanted, view in reads:
            places.setdefault(id(self._place(wanted.path)), []).append((wanted, view))
        for group in places.values():
            self._place(group[0][0].path).fetch(group)

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        places: dict[int, list[FileRange]] = {}
        for wanted in ranges:
            with suppress(InputError):  # reported when the file is read
                places.setdefault(id(self._place(wanted.path)), []).append(wanted)
        for group in places.values():
            self._place(group[0].path).prefetch(group)

    def copy_source(self, path: str) -> CopySource | None:
        return self._place(path).copy_source(path)

    def local_file(self, path: str) -> AbstractContextManager[OpenFile] | None:
        return self._place(path).local_file(path)

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        places: dict[int, list[FileRef]] = {}
        for ref in refs:
            try:
                place = self._place(ref.path)
            except InputError:
                return ref
            places.setdefault(id(place), []).append(ref)
        for group in places.values():
            changed = self._place(group[0].path).changed(group)
            if changed is not None:
                return changed
        return None

    def linked_folders(self) -> list[str]:
        return sorted({name for folder in self.folders for name in folder.linked_folders()})

    def _place(self, path: str) -> Source:
        with self._lock:
            place = self._places.get(path)
        if place is None:
            place = self._find(path)
            with self._lock:
                self._places[path] = place
        return place

    def _find(self, path: str) -> Source:
        if path in self._generated:
            return MemorySource(self._generated, self.location)
        if len(self.folders) == 1:
            return self.folders[0]
        copies: list[tuple[Source, FileRef]] = []
        for folder in self.folders:
            try:
                copies.append((folder, folder.stat(path)))
            except MissingFileError:
                continue
        if not copies:
            others = ", ".join(folder.location for folder in self.folders[1:])
            raise MissingFileError(
                f"nothing was found there, nor in {others}"
                if others
                else "nothing was found there",
                where=f"{self.location}/{path}",
            )
        first, ref = copies[0]
        for other, other_ref in copies[1:]:
            differs = ""
            if ref.size_bytes != other_ref.size_bytes:
                differs = f"{ref.size_bytes:,} bytes were found against {other_ref.size_bytes:,}"
            elif self._differ(ref, first, other):
                differs = "other bytes were found than"
            if differs:
                raise FormatError(
                    f"{differs} in {other.location}",
                    where=f"{first.location}/{path}",
                    hint="a file that is in several places must be the same in all: check that they"
                    " belong to one save",
                )
        return first

    def _differ(self, ref: FileRef, first: Source, other: Source) -> bool:
        path = ref.path
        whole = ref.size_bytes <= _WHOLE_BYTES or path.rpartition("/")[2] in self._compared
        step = _READ_BYTES if whole else _PART_BYTES
        last = ref.size_bytes - _PART_BYTES
        some = (number * last // (_PARTS - 1) for number in range(_PARTS))
        starts = range(0, ref.size_bytes, _READ_BYTES) if whole else some
        parts = ((start, min(start + step, ref.size_bytes)) for start in starts)
        return any(first.read(path, *part) != other.read(path, *part) for part in parts)
