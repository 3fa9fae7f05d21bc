"""Reading a step at a URL, and what of it lies on the node's own disk from there."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptkit.core.closing import Closing
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.index import FileRef
from ckptkit.core.manifest import Manifest
from ckptkit.core.ranges import FileRange
from ckptkit.storage.base import Folder, distant, foresee
from ckptkit.storage.local import LocalSource
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import Place


class NearPlace(Place):
    """A URL, of which this node may have a part.

    Attributes:
        near: The directory where it does.
    """

    __slots__ = ("near",)

    near: Path

    @classmethod
    def of(cls, place: Place, near: Path) -> NearPlace:
        """Returns a place with the directory where some of its files may lie."""
        found = cls(place, place.options)
        found.near = near
        return found

    def step(self, name: str) -> NearPlace:
        """Returns a folder in it."""
        return NearPlace.of(self.beside(posixpath.join(self, name)), self.near / name)


def with_near_files(far: Folder, near: Path, manifest: Manifest) -> Folder:
    """Returns a step's source that takes from the node's own disk what lies there of that save.

    Args:
        far: The step.
        near: This node's part of it, if it is there.
        manifest: Of the step.
    """
    try:
        copy = read_manifest(near)
    except (CkptkitError, OSError):
        return far
    if not _attempt(manifest) or _attempt(copy) != _attempt(manifest):
        return far
    names = [
        name
        for name, record in copy.files.items()
        if manifest.files.get(name) == record and _size(near / name) == record.size_bytes
    ]
    return _NearFirst(far, LocalSource(near), names)


def _attempt(manifest: Manifest) -> Any:
    return manifest.source.get("attempt")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


class _NearFirst(Closing):
    """A folder of which some files are read elsewhere, as long as that works."""

    def __init__(self, far: Folder, near: LocalSource, names: Collection[str]) -> None:
        self._far = far
        self._near = near
        self._names = frozenset(names)

    @property
    def location(self) -> str:
        return self._far.location

    def walk(self, depth: int) -> Iterator[str]:
        return self._far.walk(depth)

    def stat(self, path: str) -> FileRef:
        return self._far.stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        if path in self._names:
            try:
                return self._near.read(path, start, stop)
            except (InputError, OSError):
                self._names -= {path}
        return self._far.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if path in self._names:
            try:
                self._near.read_into(path, start, target)
            except (InputError, OSError):
                self._names -= {path}
            else:
                return
        self._far.read_into(path, start, target)

    @property
    def is_distant(self) -> bool:
        return distant(self._far) is not None

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        for wanted, target in reads:
            self.read_into(wanted.path, wanted.start, target)

    def foresee(self, ranges: Collection[FileRange]) -> None:
        foresee(self._far, [one for one in ranges if one.path not in self._names])

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        return self._far.changed(refs)

    def linked_folders(self) -> list[str]:
        return self._far.linked_folders()

    def close(self) -> None:
        self._near.close()
        self._far.close()
