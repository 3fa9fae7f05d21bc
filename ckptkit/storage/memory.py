"""A directory in memory that is read as one on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b

from ckptkit.core.errors import MissingFileError
from ckptkit.core.index import FileRef
from ckptkit.storage.base import truncated_error
from ckptkit.storage.local.names import check_relative


class MemorySource:
    """A directory whose files are given as bytes."""

    def __init__(self, files: Mapping[str, bytes], location: str = "memory") -> None:
        self._files = files
        self._location = location

    @property
    def location(self) -> str:
        return self._location

    def walk(self, depth: int) -> Iterator[str]:
        yield from sorted(path for path in self._files if path.count("/") <= depth)

    def stat(self, path: str) -> FileRef:
        """Returns size and identity of a file, the latter a digest of its bytes."""
        data = self._data(path)
        return FileRef(path, len(data), blake2b(data, digest_size=16).hexdigest())

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`."""
        data = self._data(path)
        if stop > len(data):
            raise truncated_error(self._where(path), start, stop, len(data))
        return data[start:stop]

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on."""
        if target.nbytes:
            target.cast("B")[:] = self.read(path, start, start + target.nbytes)

    def _data(self, path: str) -> bytes:
        check_relative(path, self._location)
        if path not in self._files:
            raise MissingFileError("nothing was found there", where=self._where(path))
        return self._files[path]

    def _where(self, path: str) -> str:
        return f"{self._location}/{path}"
