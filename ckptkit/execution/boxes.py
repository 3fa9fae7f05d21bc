"""Which parts of stored chunks make up a box of a tensor, and in which runs to read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptkit.core.geometry import intersect, is_contiguous_in
from ckptkit.core.index import Box, ChunkTable, Shape


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a chunk holds of a wanted box.

    Attributes:
        row: The chunk, in its table.
        chunk: Sizes of the chunk, in elements.
        source: The shared elements, counted from the chunk's first corner.
        target: The same ones, counted from the wanted box's.
    """

    row: int
    chunk: Shape
    source: Box
    target: Box


def overlaps(chunks: ChunkTable, wanted: Box) -> Iterator[Overlap]:
    """Yields what each chunk of a table, whose places are boxes, holds of a box."""
    low, size = chunks.offsets, chunks.sizes
    start = np.array(wanted.offsets, np.int64)
    stop = start + np.array(wanted.sizes, np.int64)
    touching = np.all((low < stop) & (low + size > start), axis=1)
    for row in np.flatnonzero(touching).tolist():
        chunk = Box(tuple(low[row].tolist()), tuple(size[row].tolist()))
        shared = intersect(chunk, wanted)
        if shared is not None:
            yield Overlap(row, chunk.sizes, relative(shared, chunk), relative(shared, wanted))


def relative(box: Box, outer: Box) -> Box:
    """Returns the box counted from the first corner of another one.

    >>> relative(Box((5, 2), (1, 1)), Box((4, 2), (3, 3)))
    Box(offsets=(1, 0), sizes=(1, 1))
    """
    return Box(tuple(b - o for b, o in zip(box.offsets, outer.offsets, strict=True)), box.sizes)


def widened(box: Box, outer: Shape, least_elements: int) -> Box:
    """Returns the box, grown until its runs in a row-major block have some length.

    Runs that are shorter than what a read costs anyway are better read with what lies between.

    Args:
        box: A box of the block.
        outer: The block's sizes.
        least_elements: How long a run should be.

    Returns:
        A box around it, full in so many of the last dimensions that its runs are long enough.

    >>> widened(Box((3, 1), (4, 2)), (8, 8), 8)
    Box(offsets=(3, 0), sizes=(4, 8))
    >>> widened(Box((3, 1), (4, 2)), (8, 8), 2)
    Box(offsets=(3, 1), sizes=(4, 2))
    """
    offsets, sizes = list(box.offsets), list(box.sizes)
    for axis in range(len(outer) - 1, 0, -1):
        if is_contiguous_in(tuple(sizes), outer) or math.prod(sizes[axis:]) >= least_elements:
            break
        offsets[axis], sizes[axis] = 0, outer[axis]
    return Box(tuple(offsets), tuple(sizes))


def contiguous_parts(box: Box, outer: Shape, most_elements: int) -> Iterator[Box]:
    """Cuts a box into parts that are each one run of elements of a row-major block, in order.

    Args:
        box: A box of the block.
        outer: The block's sizes.
        most_elements: How long a run may be.

    Yields:
        Boxes of the block.

    >>> list(contiguous_parts(Box((0, 1), (2, 2)), (4, 4), 100))
    [Box(offsets=(0, 1), sizes=(1, 2)), Box(offsets=(1, 1), sizes=(1, 2))]
    """
    elements = math.prod(box.sizes)
    whole = is_contiguous_in(box.sizes, outer)
    if whole and elements <= most_elements:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    count = max(1, most_elements * box.sizes[axis] // elements) if whole else 1
    for low in range(0, box.sizes[axis], count):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += low
        sizes[axis] = min(count, sizes[axis] - low)
        yield from contiguous_parts(Box(tuple(offsets), tuple(sizes)), outer, most_elements)
