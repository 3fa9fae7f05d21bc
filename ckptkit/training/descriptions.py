"""What lies beside the shards of every step, kept in folders of their own for commits to copy."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.training.pieces import SmallFile
from ckptkit.writer.failures import as_failure


class Descriptions:
    """Folders whose content never changes; the newest one is for the next save.

    Commits that are under way copy from the ones before, as many as saves may be in flight.
    """

    def __init__(self, parents: Sequence[Path], in_flight: int) -> None:
        """Makes nothing yet.

        Args:
            parents: What the folders are made in: the first one that takes them.
            in_flight: How many saves may be under way, the next one included.
        """
        self._parents = parents
        self._kept: deque[Path] = deque()
        self._most = in_flight
        self._count = 0
        self._objects: tuple[object, ...] = ()
        self._places: object = ()
        self._files: Sequence[SmallFile] = ()

    @property
    def folder(self) -> Path:
        """The newest one."""
        return self._kept[-1]

    def is_of(self, objects: Sequence[object], places: object) -> bool:
        """Tells whether the newest one is there, and was made for these very objects."""
        is_there = bool(self._kept) and self.folder.is_dir()
        is_same = list(map(id, objects)) == list(map(id, self._objects))
        return is_there and is_same and places == self._places

    def put(self, objects: Sequence[object], places: object, files: Sequence[SmallFile]) -> None:
        """Makes a new one where the files differ, and removes those that no commit needs.

        Args:
            objects: What the files tell of.
            places: Where other values lie, of which they tell as well.
            files: What lies beside the shards.

        Raises:
            CkptkitError: If it cannot be written.
        """
        if not (self._kept and self.folder.is_dir() and tuple(files) == tuple(self._files)):
            self._count += 1
            self._kept.append(self._made(str(self._count), files))
            self._files = files
        self._objects, self._places = tuple(objects), places
        while len(self._kept) > self._most:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)

    def close(self) -> None:
        """Removes all of them."""
        for parent in self._parents:
            shutil.rmtree(parent, ignore_errors=True)
        self._kept.clear()

    def _made(self, name: str, files: Sequence[SmallFile]) -> Path:
        problems: list[CkptkitError] = []
        for parent in self._parents:
            new = parent / name
            try:
                for file in files:
                    _put(new, file)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                problems.append(as_failure(error, str(new)))
            else:
                return new
        raise problems[-1]


def _put(folder: Path, file: SmallFile) -> None:
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.data)
