"""An output in memory: the same contract as on disk, without the disk."""

from __future__ import annotations

import threading

from ckptkit.core.errors import NoSpaceError, OutputError, OutputExistsError
from ckptkit.storage.base import Target
from ckptkit.storage.locations import check_relative


class MemoryTarget(Target):
    """A directory whose files appear in a mapping when it is committed."""

    location = "memory"

    def __init__(
        self,
        files: dict[str, bytes] | None = None,
        *,
        overwrite: bool = False,
        room_bytes: int | None = None,
    ) -> None:
        """Prepares the place."""
        self.files: dict[str, bytes] = {} if files is None else files
        self._overwrite = overwrite
        self._room_bytes = room_bytes
        self._staged: dict[str, bytearray] = {}
        self._lock = threading.Lock()
        self._refuse_filled()

    def free_bytes(self) -> int | None:
        """Returns how much more may be created, None where there is no limit."""
        if self._room_bytes is None:
            return None
        return self._room_bytes - sum(map(len, self._staged.values()))

    def create(self, path: str, size_bytes: int) -> None:
        check_relative(path, "memory")
        with self._lock:
            if path in self._staged:
                raise OutputError(f"the file {path!r} is there already", where="memory")
            free = self.free_bytes()
            if free is not None and size_bytes > free:
                raise NoSpaceError(
                    f"needs {size_bytes:,} bytes more, but {free:,} are free", where="memory"
                )
            self._staged[path] = bytearray(size_bytes)

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start` of a created file; thread-safe for disjoint ranges."""
        file = self._staged.get(path)
        if file is None or start < 0 or start + data.nbytes > len(file):
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        if data.nbytes:
            file[start : start + data.nbytes] = data.cast("B")

    def commit(self, last: str) -> None:
        """Makes everything visible at once, the file `last` after all others."""
        if last not in self._staged:
            raise ValueError(f"file {last!r} was not created")
        self._refuse_filled()
        self.files.clear()
        ordered = sorted(self._staged, key=lambda path: (path == last, path))
        self.files.update((path, bytes(self._staged[path])) for path in ordered)
        self._staged.clear()

    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit."""
        self._staged.clear()

    def _refuse_filled(self) -> None:
        if self.files and not self._overwrite:
            raise OutputExistsError(
                f"{len(self.files):,} files were found where an empty place was expected",
                where="memory",
            )
