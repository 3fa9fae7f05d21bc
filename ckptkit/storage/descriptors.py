"""A bounded set of open files that several threads share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """Anything that is closed when it is done with."""

    def close(self) -> None:
        """Gives the descriptor back."""
        ...


File = TypeVar("File", bound=Closable)


@dataclass(slots=True)
class _Slot(Generic[File]):
    file: File
    users: int = 0


class DescriptorPool(Generic[File]):
    """Keeps the files used last open, and never closes one that a thread is using."""

    def __init__(
        self,
        open_file: Callable[[str], File],
        limit: int,
        retire: Callable[[File], None] = lambda file: file.close(),
    ) -> None:
        """Makes an empty pool.

        Args:
            open_file: Opens the file of a path; called outside any lock.
            limit: How many files may lie open unused.
            retire: Closes a file that had to make room for others.
        """
        self._open_file = open_file
        self._limit = limit
        self._retire = retire
        self._slots: OrderedDict[str, _Slot[File]] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, path: str) -> Iterator[File]:
        """Yields the open file of a path.

        Raises:
            ValueError: If the pool was closed.
        """
        slot = self._acquire(path)
        try:
            yield slot.file
        finally:
            self._release(slot)

    def close(self) -> None:
        """Closes every file, those in use as soon as they are given back."""
        with self._lock:
            self._closed = True
            idle = self._take_idle(keep=0)
        for file in idle:
            file.close()

    def _acquire(self, path: str) -> _Slot[File]:
        slot = self._reuse(path)
        if slot is not None:
            return slot
        file = self._open_file(path)
        with self._lock:
            slot = self._slots.setdefault(path, _Slot(file))
            slot.users += 1
            surplus = self._take_idle(keep=self._limit)
        if slot.file is not file:  # another thread was faster
            file.close()
        self._retire_all(surplus)
        return slot

    def _reuse(self, path: str) -> _Slot[File] | None:
        with self._lock:
            if self._closed:
                raise ValueError("the files are closed")
            slot = self._slots.get(path)
            if slot is not None:
                slot.users += 1
                self._slots.move_to_end(path)
            return slot

    def _release(self, slot: _Slot[File]) -> None:
        with self._lock:
            slot.users -= 1
            surplus = self._take_idle(keep=0 if self._closed else self._limit)
        self._retire_all(surplus)

    def _retire_all(self, files: list[File]) -> None:
        for file in files:
            if self._closed:
                file.close()
            else:
                self._retire(file)

    def _take_idle(self, *, keep: int) -> list[File]:
        surplus = len(self._slots) - keep
        if surplus <= 0:
            return []
        idle = [path for path, slot in self._slots.items() if not slot.users][:surplus]
        return [self._slots.pop(path).file for path in idle]
