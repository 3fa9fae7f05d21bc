"""Which stored pieces make up a range of a tensor's elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptkit.core.geometry import (
    flat_hulls,
    flat_offset,
    intersect,
    is_contiguous_in,
    row_major_strides,
    slabs,
    without_replicas,
)
from ckptkit.core.index import Box, Shape, Span, TensorEntry
from ckptkit.core.ranges import FileRange


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a piece that is not one run lands: the box `inner` of a block of shape `outer`."""

    inner: Box
    outer: Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one chunk, and where it goes.

    Attributes:
        row: The chunk, in the table of `ChunkLookup`.
        place: The piece as a box of the chunk, for chunks that are not stored row-major.
        source_start: First element, counted row-major in the chunk.
        elements: How many.
        target_start: First element, counted from the start of the range asked for, of the
            piece itself or, with a `placement`, of the block that it lies in.
        placement: Set when the piece is scattered over the range.
    """

    row: int
    place: Box
    source_start: int
    elements: int
    target_start: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a tensor that lie together where they are stored and where they go.

    Attributes:
        place: Where they are stored.
        target: The first of them, from the start of what was asked for.
        record: The record that they are part of.
        checked_at: The first of them, from the start of what the record's checksum was stored
            for; None where there is none.
    """

    place: FileRange
    target: int
    record: int
    checked_at: int | None


class ChunkLookup:
    """The chunks of one tensor, without replicas, ready to be searched."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.chunks = without_replicas(entry.chunks)
        self._start, self._stop = flat_hulls(self.chunks, entry.shape)

    def pieces(self, span: Span) -> Iterator[Piece]:
        """Yields the pieces of a range of elements; with proven coverage they fill it.

        A piece is always one run of its chunk's row-major elements, because the range is cut
        into boxes that are full behind their first varying dimension.
        """
        rows = np.flatnonzero((self._start < span.stop) & (self._stop > span.start)).tolist()
        if self.chunks.flat:
            yield from (self._flat_piece(row, span) for row in rows)
            return
        at = 0
        places = [(row, self._box(row)) for row in rows]
        for slab in slabs(span, self.entry.shape):
            for row, box in places:
                inter = intersect(slab, box)
                if inter is not None:
                    yield _piece(row, box, inter, slab, at)
            at += math.prod(slab.sizes)

    def _box(self, row: int) -> Box:
        return Box(tuple(self.chunks.offsets[row].tolist()), tuple(self.chunks.sizes[row].tolist()))

    def _flat_piece(self, row: int, span: Span) -> Piece:
        start, stop = int(self._start[row]), int(self._stop[row])
        low, high = max(start, span.start), min(stop, span.stop)
        return Piece(
            row, Box((low - start,), (high - low,)), low - start, high - low, low - span.start
        )


def _piece(row: int, chunk: Box, inter: Box, slab: Box, at: int) -> Piece:
    local = tuple(i - c for i, c in zip(inter.offsets, chunk.offsets, strict=True))
    inner = tuple(i - s for i, s in zip(inter.offsets, slab.offsets, strict=True))
    contiguous = is_contiguous_in(inter.sizes, slab.sizes)
    return Piece(
        row=row,
        place=Box(local, inter.sizes),
        source_start=flat_offset(local, row_major_strides(chunk.sizes)),
        elements=math.prod(inter.sizes),
        target_start=at + flat_offset(inner, row_major_strides(slab.sizes)) if contiguous else at,
        placement=None if contiguous else Placement(Box(inner, inter.sizes), slab.sizes),
    )
