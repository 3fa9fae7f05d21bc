"""Where the data of a record really starts, and what checksum was stored for it.

A DCP index knows only the extent of each blob, so blobs are looked into when their tensors are
about to be read, not while planning: a million chunks would cost millions of small reads.
"""

from __future__ import annotations

import posixpath
import threading
from dataclasses import dataclass
from typing import Protocol

from ckptkit.core.errors import FormatError
from ckptkit.core.index import ChunkTable, Key, Shape, TensorEntry, TensorIndex
from ckptkit.formats.torch_zip import TensorCache, locate_tensor


@dataclass(frozen=True, slots=True)
class Located:
    """A chunk's data.

    Attributes:
        path: The file.
        start: First byte of the record's data.
        stop: First byte after it.
        crc32: Checksum of `[start, stop)`, or None where none was stored.
        origin: Byte of the chunk's first element.
        strides: In elements; None for row-major.
        compressed: The record, where all positions are those in what it decodes to; its checksum
            is then proven by whoever decodes it. Else None.
    """

    path: str
    start: int
    stop: int
    crc32: int | None
    origin: int
    strides: Shape | None
    compressed: int | None = None


class Readable(Protocol):
    """As much of a source as is needed here."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`."""
        ...


class LocatedChunks:
    """Where chunks lie that were looked into lately; threads share it."""

    def __init__(self, limit: int = 16384) -> None:
        self._limit = limit
        self._found: dict[tuple[Key, int], Located] = {}
        self._lock = threading.Lock()

    def get(self, chunk: tuple[Key, int]) -> Located | None:
        """Returns the place of a chunk, by its tensor's key and its row; None if it is unknown."""
        return self._found.get(chunk)

    def put(self, chunk: tuple[Key, int], located: Located) -> None:
        """Keeps the place of a chunk, and forgets the one that was kept longest if need be."""
        with self._lock:
            if len(self._found) >= self._limit:
                del self._found[next(iter(self._found))]
            self._found[chunk] = located


class Locator:
    """Finds chunks of one source. Remembers nothing but a bounded cache: looking is cheap."""

    def __init__(self, source: Readable, index: TensorIndex) -> None:
        self._source = source
        self._index = index
        self._cache = TensorCache()

    def locate(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        """Finds the data of chunk `row` of a table of a tensor's chunks.

        Returns:
            Where its bytes are, and what is known of them; of a compressed record just that it
            is one.

        Raises:
            InputError: If the record is not what the index says, or is damaged.
        """
        chunk = chunks[row]
        record = self._index.records[chunk.record]
        path = self._index.files[record.file].path
        if record.container == "torch_zip":
            return self._in_torch_zip(entry, chunks, row)
        return Located(
            path=path,
            start=record.start,
            stop=record.stop,
            crc32=record.crc32,
            origin=record.start + (chunk.byte_offset or 0),
            strides=chunk.strides,
            compressed=chunk.record if record.container == "zstd_torch_zip" else None,
        )

    def _in_torch_zip(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        record = self._index.records[int(chunks.record[row])]
        path = self._index.files[record.file].path
        where = f"{posixpath.join(self._source.location, path)}, tensor {entry.key!r}"

        def read(start: int, stop: int) -> bytes:
            return self._source.read(path, record.start + start, record.start + stop)

        payload = locate_tensor(read, record.stop - record.start, where=where, cache=self._cache)
        sizes = tuple(chunks.sizes[row].tolist())
        if payload.dtype != entry.dtype or payload.shape != sizes:
            raise FormatError(
                f"holds {payload.dtype.name} {list(payload.shape)} against {entry.dtype.name}"
                f" {list(sizes)} in the index",
                where=where,
                hint="the file belongs to another save, or was damaged",
            )
        start = record.start + payload.start
        return Located(
            path=path,
            start=start,
            stop=record.start + payload.stop,
            crc32=payload.crc32,
            origin=start + payload.storage_offset * entry.dtype.itemsize,
            strides=None if payload.row_major else payload.strides,
        )
