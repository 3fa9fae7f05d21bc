"""Reads ranges of tensors out of a source, whatever the layout of their chunks."""

from __future__ import annotations

import posixpath
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.index import Key, Shape, Span, TensorIndex
from ckptkit.execution.ledger import Account, ChecksumLedger
from ckptkit.execution.locate import Located, Locator
from ckptkit.execution.pieces import ChunkLookup, Piece
from ckptkit.storage.base import Source

RUN_BYTES = 1 << 20  # small enough that a checksum finds the bytes still in the cache
GATHER_BYTES = 4 << 20  # large enough that pieces of many column chunks stay worth a read
_LOOKUPS = 16
_LOCATED = 4096


class Origin:
    """A source with its index, opened for reading tensors.

    Attributes:
        ledger: The checksums of its records.
        unverified: Keys of tensors of which some bytes had no stored checksum.
    """

    def __init__(self, name: str, source: Source, index: TensorIndex) -> None:
        self.name = name
        self.source = source
        self.index = index
        self.ledger = ChecksumLedger(len(index.records))
        self.unverified: set[Key] = set()


class TensorReader:
    """Fills buffers with elements of tensors; one per thread, it owns its scratch memory."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._locator = Locator(origin.source, origin.index)
        self._lookups: OrderedDict[Key, ChunkLookup] = OrderedDict()
        self._located: OrderedDict[tuple[Key, int], Located] = OrderedDict()
        self._scratch: memoryview | None = None

    def fill(self, key: Key, span: Span, target: memoryview) -> None:
        """Writes the elements of `span` into `target`, which has exactly their size in bytes.

        Raises:
            InputError: If the source is damaged, or its bytes have another checksum.
        """
        lookup = self._lookup(key)
        itemsize = lookup.entry.dtype.itemsize
        step = max(1, (RUN_BYTES if lookup.in_runs else GATHER_BYTES) // itemsize)
        for start in range(span.start, span.stop, step):
            part = Span(start, min(start + step, span.stop))
            low = (start - span.start) * itemsize
            view = target[low : low + (part.stop - part.start) * itemsize]
            for piece in lookup.pieces(part):
                self._fill_piece(lookup, piece, view)

    def _fill_piece(self, lookup: ChunkLookup, piece: Piece, view: memoryview) -> None:
        located = self._locate(lookup, piece.row)
        itemsize = lookup.entry.dtype.itemsize
        low = piece.target_start * itemsize
        run = view[low : low + piece.elements * itemsize]
        if located.strides is not None:
            self._gather(located, located.strides, piece, view, itemsize)
        elif piece.placement is None:
            self._read_run(lookup, located, piece, run)
        else:
            scratch = self._scratch_of(piece.elements * itemsize)
            self._read_run(lookup, located, piece, scratch)
            _target_array(view, piece, itemsize)[...] = _elements(scratch, itemsize).reshape(
                piece.place.sizes
            )

    def _read_run(
        self, lookup: ChunkLookup, located: Located, piece: Piece, target: memoryview
    ) -> None:
        start = located.origin + piece.source_start * lookup.entry.dtype.itemsize
        self._origin.source.read_into(located.path, start, target)
        if located.crc32 is not None:
            booked = (start - located.start, len(target), zlib.crc32(target))
            self._origin.ledger.add(int(lookup.chunks.record[piece.row]), booked)

    def _gather(
        self, located: Located, strides: Shape, piece: Piece, view: memoryview, itemsize: int
    ) -> None:
        """Collects a box of a chunk that is not stored row-major; `finish` checks its CRC."""
        start = located.origin + itemsize * sum(
            o * s for o, s in zip(piece.place.offsets, strides, strict=True)
        )
        self._gather_box(located.path, start, strides, _target_array(view, piece, itemsize))

    def _gather_box(self, path: str, start: int, strides: Shape, target: NDArray[Any]) -> None:
        itemsize = target.itemsize
        reach = [(n - 1) * s for n, s in zip(target.shape, strides, strict=True)]
        extent = (sum(reach) + 1) * itemsize
        if extent <= GATHER_BYTES:
            scratch = self._scratch_of(extent)
            self._origin.source.read_into(path, start, scratch)
            target[...] = np.lib.stride_tricks.as_strided(
                _elements(scratch, itemsize),
                target.shape,
                [s * itemsize for s in strides],
                writeable=False,
            )
            return
        axis = max(range(len(reach)), key=lambda i: reach[i])
        rest = extent - reach[axis] * itemsize
        count = max(1, (GATHER_BYTES - rest) // (strides[axis] * itemsize) + 1)
        for low in range(0, target.shape[axis], min(count, max(1, target.shape[axis] - 1))):
            part = (slice(None),) * axis + (slice(low, low + count),)
            at = start + low * strides[axis] * itemsize
            self._gather_box(path, at, strides, target[part])

    def _lookup(self, key: Key) -> ChunkLookup:
        found = self._lookups.get(key)
        if found is None:
            found = self._lookups[key] = ChunkLookup(self._origin.index.tensors[key])
            if len(self._lookups) > _LOOKUPS:
                self._lookups.popitem(last=False)
        return found

    def _locate(self, lookup: ChunkLookup, row: int) -> Located:
        key = (lookup.entry.key, row)
        found = self._located.get(key)
        if found is None:
            found = self._located[key] = self._locate_anew(lookup, row)
            if len(self._located) > _LOCATED:
                self._located.popitem(last=False)
        return found

    def _locate_anew(self, lookup: ChunkLookup, row: int) -> Located:
        located = self._locator.locate(lookup.entry, lookup.chunks, row)
        if located.crc32 is None:
            self._origin.unverified.add(lookup.entry.key)
            return located
        source, path = self._origin.source, located.path
        where = f"{posixpath.join(source.location, path)}, tensor {lookup.entry.key!r}"
        self._origin.ledger.expect(
            int(lookup.chunks.record[row]),
            Account(
                start=located.start,
                stop=located.stop,
                expected=located.crc32,
                where=where,
                read_into=lambda start, view: source.read_into(path, start, view),
            ),
        )
        return located

    def _scratch_of(self, size_bytes: int) -> memoryview:
        if self._scratch is None or len(self._scratch) < size_bytes:
            self._scratch = memoryview(bytearray(max(size_bytes, RUN_BYTES)))
        return self._scratch[:size_bytes]


def _elements(data: memoryview, itemsize: int) -> NDArray[Any]:
    return np.frombuffer(data, f"V{itemsize}")


def _target_array(view: memoryview, piece: Piece, itemsize: int) -> NDArray[Any]:
    """Returns the part of a buffer that a piece goes to, in the piece's own shape."""
    whole = _elements(view, itemsize)
    if piece.placement is None:
        run = whole[piece.target_start : piece.target_start + piece.elements]
        return run.reshape(piece.place.sizes)
    outer = piece.placement.outer
    block = whole[piece.target_start :][: int(np.prod(outer, dtype=np.int64))].reshape(outer)
    inner = piece.placement.inner
    return block[tuple(slice(o, o + s) for o, s in zip(inner.offsets, inner.sizes, strict=True))]
