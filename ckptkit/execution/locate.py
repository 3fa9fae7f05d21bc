"""Where the data of a record really starts, and what checksum was stored for it.

A DCP index knows only the extent of each blob, so blobs are looked into when their tensors are
about to be read, not while planning: a million chunks would cost millions of small reads.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from ckptkit.core.errors import FormatError
from ckptkit.core.index import ChunkTable, Shape, TensorEntry, TensorIndex
from ckptkit.formats.torch_zip import TensorCache, locate_tensor
from ckptkit.storage.base import Source


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
    """

    path: str
    start: int
    stop: int
    crc32: int | None
    origin: int
    strides: Shape | None


class Locator:
    """Finds chunks of one source. Remembers nothing but a bounded cache: looking is cheap."""

    def __init__(self, source: Source, index: TensorIndex) -> None:
        self._source = source
        self._index = index
        self._cache = TensorCache()

    def locate(self, entry: TensorEntry, chunks: ChunkTable, row: int) -> Located:
        """Finds the data of chunk `row` of a table of a tensor's chunks.

        Returns:
            Where its bytes are, and what is known of them.

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
                f" {list(sizes)} in '.metadata'",
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
