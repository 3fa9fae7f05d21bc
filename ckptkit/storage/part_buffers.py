"""Puts an object's parts together from writes that come in about the order of its bytes."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

from ckptkit.core.object_parts import ObjectPart


@dataclass(slots=True)
class _Filling:
    data: BytesIO  # which clients send piece by piece, where they would send bytes in one go
    missing: int


class PartBuffers:
    """The parts of one object that are being filled; those are few if writes come in order."""

    def __init__(self, parts: Sequence[ObjectPart]) -> None:
        self._parts = parts
        self._starts = [part.start for part in parts]
        self._filling: dict[int, _Filling] = {}
        self._free: list[BytesIO] = []  # new memory would have to be cleared page by page
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> Iterator[tuple[ObjectPart, BytesIO]]:
        """Takes a write, and yields every part that it completes.

        Args:
            start: Its first byte in the object.
            data: Its bytes, one dimension; disjoint from those of all other writes.

        Yields:
            Parts with their bytes, which are the caller's until the next one is asked for.

        Raises:
            ValueError: If a byte lies outside the object, or in a part that the store copies.
        """
        stop = start + data.nbytes
        for part in self._between(start, stop):
            low, high = max(start, part.start), min(stop, part.stop)
            whole = self._put(part, low, data[low - start : high - start])
            if whole is not None:
                yield part, whole
                with self._lock:
                    self._free.append(whole)

    def _between(self, start: int, stop: int) -> Iterator[ObjectPart]:
        size = self._parts[-1].stop if self._parts else 0
        if start < 0 or stop > size:
            raise ValueError(f"bytes [{start}, {stop}) are not in an object of {size} bytes")
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part = self._parts[at]
            if part.copied is not None:
                raise ValueError(f"bytes from {start} on are not to be sent but copied")
            yield part
            start, at = part.stop, at + 1

    def _put(self, part: ObjectPart, start: int, data: memoryview) -> BytesIO | None:
        size = part.stop - part.start
        with self._lock:
            filling = self._filling.get(part.number)
            if filling is None:
                filling = self._filling[part.number] = _Filling(self._buffer(size), size)
        low = start - part.start
        with filling.data.getbuffer() as view:
            view[low : low + data.nbytes] = data
        with self._lock:
            filling.missing -= data.nbytes
            if filling.missing:
                return None
            del self._filling[part.number]
        return filling.data

    def _buffer(self, size_bytes: int) -> BytesIO:
        """Returns a buffer of exactly that size, one that was used before if there is one."""
        for at, known in enumerate(self._free):
            if known.getbuffer().nbytes == size_bytes:
                return self._free.pop(at)
        made = BytesIO()
        made.seek(size_bytes - 1)
        made.write(b"\0")
        return made
