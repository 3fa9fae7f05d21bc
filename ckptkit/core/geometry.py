"""Row-major arithmetic: boxes of a tensor, how chunks cover them, and the byte runs to read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.errors import LimitError
from ckptkit.core.index import Box, ChunkTable, Ints, Shape, Span

Integer = TypeVar("Integer", bound=np.integer[Any])
_GRID_DIMENSIONS = 4
_GRID_CELLS = 1 << 22  # beyond this a coverage grid is swept slab by slab instead
_SWEEP_STEPS = 1 << 17  # about a second; no real split of a tensor is as irregular as this


def row_major_strides(shape: Shape) -> Shape:
    """Returns the strides, in elements, of a dense row-major tensor.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """Says whether the elements are dense and in row-major order, or none.

    Strides of dimensions that hold a single element do not matter.
    """
    expected = row_major_strides(shape)
    return 0 in shape or all(
        size == 1 or stride == want
        for size, stride, want in zip(shape, strides, expected, strict=True)
    )


def slabs(span: Span, shape: Shape) -> list[Box]:
    """Cuts a range of row-major elements into the fewest boxes that hold it, in order.

    Each box fixes its leading dimensions to one index, takes a range of the next one, and is
    full in the rest, so it is contiguous; `n` dimensions give at most `2n - 1` boxes.

    Returns:
        Boxes that hold the elements of `span`, in order.

    >>> slabs(Span(1, 7), (3, 3))
    [Box(offsets=(0, 1), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(1, 3)), \
Box(offsets=(2, 0), sizes=(1, 1))]
    """
    if not shape:
        return [Box((), ())] if span.stop > span.start else []
    strides = row_major_strides(shape)
    boxes, at = [], span.start
    while at < span.stop:
        left = span.stop - at
        axis = len(shape) - 1
        while axis > 0 and at % strides[axis - 1] == 0 and left >= strides[axis - 1]:
            axis -= 1
        room = shape[axis] - (at // strides[axis]) % shape[axis]
        count = min(room, left // strides[axis])
        offsets = tuple((at // stride) % size for stride, size in zip(strides, shape, strict=True))
        boxes.append(Box(offsets, (1,) * axis + (count,) + shape[axis + 1 :]))
        at += count * strides[axis]
    return boxes


def slab_spans(sizes: Shape, most: int) -> Iterator[Span]:
    """Cuts a row-major box into slabs of at most `most` elements each, outer dimensions first.

    Each slab is one box: it fixes leading dimensions, takes a range of the next one, and is full
    in the rest.

    >>> list(slab_spans((3, 3), 6))
    [Span(start=0, stop=6), Span(start=6, stop=9)]
    """
    total, axis, inner = math.prod(sizes), 0, math.prod(sizes[1:])
    if total <= most:
        yield Span(0, total)
        return
    while inner > most:
        axis += 1
        inner //= sizes[axis]
    block = sizes[axis] * inner
    step = most // inner * inner
    for outer in range(0, total, block):
        for start in range(outer, outer + block, step):
            yield Span(start, min(start + step, outer + block))


def intersect(first: Box, second: Box) -> Box | None:
    """Returns what two boxes share, or None when that is empty."""
    offsets, sizes = [], []
    for a, m, b, n in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def hull(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box that holds all of them; there is at least one, none empty."""
    low = np.min([box.offsets for box in boxes], axis=0)
    high = np.max([np.add(box.offsets, box.sizes) for box in boxes], axis=0)
    return Box(tuple(low.tolist()), tuple((high - low).tolist()))


def distinct(values: NDArray[Integer]) -> NDArray[Integer]:
    """Returns the different values, sorted; `np.unique` would import masked arrays for that."""
    ordered = np.sort(values)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def flat_offset(offsets: Shape, strides: Shape) -> int:
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))


def is_contiguous_in(sizes: Shape, outer: Shape) -> bool:
    """Says whether a box of `sizes` is one run of elements of a row-major `outer` block."""
    axis = 0
    while axis < len(sizes) and sizes[axis] == 1:
        axis += 1
    return all(s == o for s, o in zip(sizes[axis + 1 :], outer[axis + 1 :], strict=True))


def flat_hulls(table: ChunkTable, shape: Shape) -> tuple[Ints, Ints]:
    """Returns for each chunk the range of row-major elements from its first to its last.

    The two int64 arrays are start and stop, half-open; equal where the chunk is empty.
    """
    if table.flat:
        start = table.offsets[:, 0]
        return start, start + table.sizes[:, 0]
    strides = np.array(row_major_strides(shape), np.int64)
    first = table.offsets @ strides if shape else np.zeros(len(table), np.int64)
    last = (table.offsets + table.sizes - 1) @ strides if shape else first
    return first, np.where(table.elements() > 0, last + 1, first)


class Defect(Struct, frozen=True):
    """A part of a tensor that is not stored exactly once.

    Attributes:
        place: The elements concerned.
        copies: How often they are stored: 0 when they are missing.
    """

    place: Box | Span
    copies: int


def drop_replicas(table: ChunkTable) -> ChunkTable:
    """Drops empty chunks, and all but the first of chunks that hold the same place."""
    rows = np.flatnonzero(table.elements() > 0)
    if len(rows) > 1:
        places = np.hstack([table.offsets[rows], table.sizes[rows]])
        order = np.lexsort(places.T[::-1]) if places.shape[1] else np.zeros(len(rows), np.intp)
        new = np.ones(len(rows), bool)
        new[1:] = np.any(places[order[1:]] != places[order[:-1]], axis=1)
        rows = rows[np.sort(order[new])]
    return table if len(rows) == len(table) else table.take(rows)


def find_defect(table: ChunkTable, shape: Shape) -> Defect | None:
    """Returns where distinct, non-empty chunks do not hold each element once; None if they do."""
    if 0 in shape:
        return None
    start, stop = flat_hulls(table, shape)
    if not bool(np.all(stop - start == table.elements())):
        return _defect_in_boxes(table, shape)
    # The common case: every chunk is one run of elements, so sorting them is enough.
    defect = _first_gap_or_overlap(start, stop, math.prod(shape))
    if defect is None:
        return None
    (low, high), copies = defect
    span = Span(low, high)
    return Defect(span if table.flat or not shape else slabs(span, shape)[0], copies)


def _first_gap_or_overlap(
    start: Ints, stop: Ints, total: int
) -> tuple[tuple[int, int], int] | None:
    """Finds where intervals fail to tile `[0, total)`, and how often that part is held."""
    order = np.argsort(start, kind="stable")
    ends = np.concatenate([np.zeros(1, np.int64), stop[order]])
    starts = np.concatenate([start[order], np.array([total], np.int64)])
    wrong = np.flatnonzero(ends != starts)
    if not len(wrong):
        return None
    at = int(wrong[0])
    end, begin = int(ends[at]), int(starts[at])
    if begin > end:
        return (end, begin), 0
    return (begin, min(end, int(stop[order[at]]))), 2


def _defect_in_boxes(table: ChunkTable, shape: Shape) -> Defect | None:
    whole = np.array(shape, np.int64)
    split = [
        axis for axis in range(len(shape)) if bool(np.any(table.sizes[:, axis] != whole[axis]))
    ]
    lower, upper = table.offsets[:, split], (table.offsets + table.sizes)[:, split]
    edges = [
        distinct(np.concatenate([lower[:, i], upper[:, i], [0, shape[axis]]]))
        for i, axis in enumerate(split)
    ]
    cells = math.prod(len(edge) - 1 for edge in edges)
    if len(split) <= _GRID_DIMENSIONS and cells <= _GRID_CELLS:
        defect = _defect_in_grid(lower, upper, edges)
    else:
        defect = _Sweep(lower, upper, edges).find(np.arange(len(lower)), 0)
    if defect is None:
        return None
    intervals, copies = defect
    offsets, sizes = [0] * len(shape), list(shape)
    for (low, high), axis in zip(intervals, split, strict=False):
        offsets[axis], sizes[axis] = low, high - low
    return Defect(Box(tuple(offsets), tuple(sizes)), copies)


_GridDefect = tuple[list[tuple[int, int]], int]


def _defect_in_grid(lower: Ints, upper: Ints, edges: list[Ints]) -> _GridDefect | None:
    """Counts the copies of every cell of the grid that all edges span, by difference arrays."""
    shape = tuple(len(edge) for edge in edges)
    counts = np.zeros(shape, np.int32)
    low = [np.searchsorted(edge, lower[:, i]) for i, edge in enumerate(edges)]
    high = [np.searchsorted(edge, upper[:, i]) for i, edge in enumerate(edges)]
    for corner in itertools.product((0, 1), repeat=len(edges)):
        where = tuple(high[i] if top else low[i] for i, top in enumerate(corner))
        np.add.at(counts, where, -1 if sum(corner) % 2 else 1)
    for axis in range(len(edges)):
        np.cumsum(counts, axis=axis, out=counts)
    inner: NDArray[np.int32] = counts[tuple(slice(0, size - 1) for size in shape)]
    wrong = np.argwhere(inner != 1)
    if not len(wrong):
        return None
    cell = wrong[0].tolist()
    intervals = [(int(edges[i][at]), int(edges[i][at + 1])) for i, at in enumerate(cell)]
    return intervals, int(inner[tuple(cell)])


class _Sweep:
    """Coverage of an irregular split, one elementary interval of one dimension at a time."""

    def __init__(self, lower: Ints, upper: Ints, edges: list[Ints]) -> None:
        self.lower, self.upper, self.edges = lower, upper, edges
        self.steps = 0

    def find(self, rows: Ints, axis: int) -> _GridDefect | None:
        """Finds a defect among the boxes `rows`, looking at dimensions from `axis` on."""
        low, high = self.lower[rows, axis], self.upper[rows, axis]
        edges = self.edges[axis]
        if axis == self.lower.shape[1] - 1:
            self._count(len(low))
            gap = _first_gap_or_overlap(low, high, int(edges[-1]))
            return None if gap is None else ([gap[0]], gap[1])
        local = distinct(np.concatenate([low, high, edges[:1], edges[-1:]]))
        for start, stop in itertools.pairwise(local.tolist()):
            self._count(len(rows))
            inside = rows[(low <= start) & (high >= stop)]
            defect = self.find(inside, axis + 1)
            if defect is not None:
                return [(start, stop), *defect[0]], defect[1]
        return None

    def _count(self, rows: int) -> None:
        self.steps += 1 + rows // 1024
        if self.steps > _SWEEP_STEPS:
            raise LimitError("the chunks are cut more irregularly than any real split")


class Overlap(Struct, frozen=True):
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


def widen(box: Box, outer: Shape, least_elements: int) -> Box:
    """Returns the box, grown until its runs in a row-major block have some length.

    Runs that are shorter than the cost of a read are better read with the bytes between them.

    Args:
        box: A box of the block.
        outer: The block's sizes.
        least_elements: How long a run should be.

    Returns:
        A box around it, full in so many of the last dimensions that its runs are long enough.

    >>> widen(Box((3, 1), (4, 2)), (8, 8), 8)
    Box(offsets=(3, 0), sizes=(4, 8))
    >>> widen(Box((3, 1), (4, 2)), (8, 8), 2)
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
    for part in cut(box, axis, count):
        yield from contiguous_parts(part, outer, most_elements)


def cut(box: Box, axis: int, count: int) -> Iterator[Box]:
    """Cuts a box across `axis` into boxes of `count` indexes, the last one thinner."""
    for low in range(0, box.sizes[axis], count):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += low
        sizes[axis] = min(count, sizes[axis] - low)
        yield Box(tuple(offsets), tuple(sizes))
