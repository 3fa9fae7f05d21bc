"""Which element lies where: boxes of tensors, how chunks cover them, and rearrangements.

Everything is exact and in elements, counted row-major. Two views build on boxes:

- A tile is a set of elements that two tensors share, found by regular steps in both. The part that
  is wanted of one is found as boxes of the other, which can be read like any box.
- An arrangement starts as a whole tensor and goes through reshapes, slices and permutations; it
  consists of tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.errors import CannotPlanError, LimitError
from ckptkit.core.index import Box, ChunkTable, Fqn, Ints, Shape, Span

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


def cut_span(span: Span, most: int) -> Iterator[Span]:
    """Cuts a range into ranges of at most so many elements, in order."""
    for start in range(span.start, span.stop, most):
        yield Span(start, min(start + most, span.stop))


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
    """A part of a tensor that is not stored exactly once."""

    place: Box | Span
    copies: int  # how often they are stored: 0 when they are missing


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
        defect = _defect_in_sweep(lower, upper, edges)
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


def _defect_in_sweep(lower: Ints, upper: Ints, edges: list[Ints]) -> _GridDefect | None:
    """Finds a defect of an irregular split, one interval of one dimension at a time."""
    steps = 0

    def count(rows: int) -> None:
        nonlocal steps
        steps += 1 + rows // 1024
        if steps > _SWEEP_STEPS:
            raise LimitError("the chunks are cut more irregularly than any real split")

    def find(rows: Ints, axis: int) -> _GridDefect | None:
        low, high, ends = lower[rows, axis], upper[rows, axis], edges[axis][[0, -1]]
        if axis == lower.shape[1] - 1:
            count(len(rows))
            gap = _first_gap_or_overlap(low, high, int(ends[1]))
            return None if gap is None else ([gap[0]], gap[1])
        for start, stop in itertools.pairwise(distinct(np.concatenate([low, high, ends])).tolist()):
            count(len(rows))
            defect = find(rows[(low <= start) & (high >= stop)], axis + 1)
            if defect is not None:
                return [(start, stop), *defect[0]], defect[1]
        return None

    return find(np.arange(len(lower)), 0)


class Overlap(Struct, frozen=True):
    """What a chunk holds of a wanted box."""

    row: int  # the chunk, in its table
    chunk: Shape  # sizes of the chunk, in elements
    source: Box  # the shared elements, counted from the chunk's first corner
    target: Box  # the same ones, counted from the wanted box's


def overlaps(chunks: ChunkTable, wanted: Box) -> Iterator[Overlap]:
    """Yields what each chunk of a table holds of a box; ranges are boxes of one dimension."""
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

    `box`: a box of the block. `least_elements`: how long a run should be. Returns a box around it,
    full in so many of the last dimensions that its runs are long enough.

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

    `box`: a box of the block. `most_elements`: how long a run may be. Yields boxes of the block.

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


def slab_spans(sizes: Shape, most: int) -> Iterator[Span]:
    """Cuts a row-major box into slabs of at most `most` elements each, in order; each is one box.

    >>> list(slab_spans((3, 3), 6))
    [Span(start=0, stop=6), Span(start=6, stop=9)]
    """
    strides = row_major_strides(sizes)
    for box in contiguous_parts(Box((0,) * len(sizes), sizes), sizes, most):
        start = flat_offset(box.offsets, strides)
        yield Span(start, start + math.prod(box.sizes))


def cut(box: Box, axis: int, count: int) -> Iterator[Box]:
    """Cuts a box across `axis` into boxes of `count` indexes, the last one thinner."""
    for low in range(0, box.sizes[axis], count):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += low
        sizes[axis] = min(count, sizes[axis] - low)
        yield Box(tuple(offsets), tuple(sizes))


def slices_of(box: Box) -> tuple[Any, ...]:
    """Returns the index of a box in an array or tensor.

    Its ellipsis makes a view, and no scalar, of an array without dimensions.
    """
    return (*(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)), Ellipsis)


# Tiles

Walk = tuple[int, int]
"""An axis of a tensor, and how many of its indexes a step moves along it."""
_MOST_PARTS = 1 << 16


class Loop(Struct, frozen=True):
    """One dimension of a tile."""

    size: int  # how many elements, at least two
    walks: tuple[Walk, Walk]  # how a step moves in the first tensor, and in the second


class Tile(Struct, frozen=True):
    """Elements that two tensors share; mostly the second one is the source of the first.

    A source may be a tensor of one dimension: its elements in row-major order.
    """

    corners: tuple[Shape, Shape]  # the first of the elements in both tensors
    loops: tuple[Loop, ...]  # the dimensions along which the elements follow each other

    @property
    def elements(self) -> int:
        return math.prod(loop.size for loop in self.loops)

    @property
    def swapped(self) -> Tile:
        """The same with the tensors exchanged."""
        loops = tuple(Loop(loop.size, (loop.walks[1], loop.walks[0])) for loop in self.loops)
        return Tile((self.corners[1], self.corners[0]), loops)

    def take(self, number: int, first: int, count: int) -> Tile:
        """Returns the part in which one loop has `count` indexes from `first` on."""
        loop = self.loops[number]
        corners = tuple(
            tuple(at + step * first if i == axis else at for i, at in enumerate(corner))
            for corner, (axis, step) in zip(self.corners, loop.walks, strict=True)
        )
        kept = () if count == 1 else (replace(loop, size=count),)
        loops = (*self.loops[:number], *kept, *self.loops[number + 1 :])
        return Tile((corners[0], corners[1]), loops)


class BoxWalk(Struct, frozen=True):
    """A box of a stored tensor, and where its elements are in a box of another one."""

    box: Box  # in the stored tensor
    start: Shape  # the place of its first corner, counted from the first corner of the other box
    # For each dimension of the stored tensor, how a step along it moves in the other.
    walks: tuple[Walk, ...]


def whole_tile(shape: Shape) -> Tile:
    """Returns all elements of a tensor, made of a source with the same row-major order."""
    strides = row_major_strides(tuple(max(size, 1) for size in shape))
    loops = (
        Loop(size, ((axis, 1), (0, step)))
        for axis, (size, step) in enumerate(zip(shape, strides, strict=True))
        if size != 1
    )
    return Tile(((0,) * len(shape), (0,)), tuple(loops))


def find_tile(tile: Tile, source: Shape, start: int = 0) -> Tile | None:
    """Returns a tile whose source has one dimension with the source in its real shape.

    None where the steps do not follow the dimensions of the source, or leave it. `start`: the
    element of the real source at which the flat one begins.
    """
    flat = _moved(tile.swapped, 0, start)
    if flat.corners[0][0] + _reach(flat, 0) >= math.prod(source):
        return None
    folded = _fold_whole(flat, source)
    return folded.swapped if isinstance(folded, Tile) else None


def clip(tile: Tile, box: Box) -> list[Tile]:
    """Returns the parts of a tile that are inside of a box of the first tensor."""
    if box.sizes:  # most of many tiles are outside, and found so before anything is built
        low, begin = tile.corners[0][0], box.offsets[0]
        if low >= begin + box.sizes[0] or low + _reach(tile, 0) < begin:
            return []
    parts = [tile]
    for axis, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        parts = [kept for part in parts for kept in _between(part, axis, begin, begin + size)]
        if not parts:
            break
    return parts


def _between(tile: Tile, axis: int, begin: int, end: int) -> Iterator[Tile]:
    """Yields the parts of a tile that are inside of a range of indexes of the first tensor."""
    low = tile.corners[0][axis]
    if end <= low:
        return
    high = low + _reach(tile, axis)
    if begin <= low and high < end:
        yield tile
        return
    if high < begin:
        return
    number = max(
        (i for i, loop in enumerate(tile.loops) if loop.walks[0][0] == axis),
        key=lambda i: tile.loops[i].walks[0][1],
    )
    loop = tile.loops[number]
    step = loop.walks[0][1]
    rest = high - low - (loop.size - 1) * step
    touching = range(
        max(0, -(-(begin - low - rest) // step)), min(loop.size, (end - 1 - low) // step + 1)
    )
    inside = range(
        max(0, -(-(begin - low) // step)), min(loop.size, (end - 1 - low - rest) // step + 1)
    )
    if inside:
        yield tile.take(number, inside.start, len(inside))
    for index in touching:
        if index not in inside:
            yield from _between(tile.take(number, index, 1), axis, begin, end)


def _reach(tile: Tile, axis: int) -> int:
    """Returns how far the last element is from the first along an axis of the first tensor."""
    reach = 0
    for loop in tile.loops:
        along, step = loop.walks[0]
        if along == axis:
            reach += (loop.size - 1) * step
    return reach


def walk_boxes(tile: Tile, wanted: Box) -> Iterator[BoxWalk]:
    """Yields the boxes of the first tensor that hold what a tile has of a box of the second."""
    for clipped in clip(tile.swapped, wanted):
        part = join_loops(clipped.swapped)
        # A box has at most one loop along each axis, and that takes every index.
        spread = [i for i, loop in enumerate(part.loops) if loop.walks[0][1] != 1]
        for indexes in itertools.product(*(range(part.loops[i].size) for i in spread)):
            dense = part
            for number, index in zip(reversed(spread), reversed(indexes), strict=True):
                dense = dense.take(number, index, 1)
            along = {loop.walks[0][0]: loop for loop in dense.loops}
            stored, other = dense.corners
            axes = range(len(stored))
            yield BoxWalk(
                Box(stored, tuple(along[i].size if i in along else 1 for i in axes)),
                tuple(at - first for at, first in zip(other, wanted.offsets, strict=True)),
                tuple(along[i].walks[1] if i in along else (0, 0) for i in axes),
            )


def join_loops(tile: Tile) -> Tile:
    """Returns a tile in which loops that continue each other in both tensors are one."""
    loops: list[Loop] = []
    for loop in sorted(tile.loops, key=lambda loop: loop.walks[0][1]):
        for number, inner in enumerate(loops):
            continued = tuple((axis, step * inner.size) for axis, step in inner.walks)
            if continued == loop.walks:
                loops[number] = replace(inner, size=inner.size * loop.size)
                break
        else:
            loops.append(loop)
    return Tile(tile.corners, tuple(loops))


def _flatten(tile: Tile, shape: Shape) -> Tile:
    """Returns a tile whose first tensor, of this shape, has one dimension instead."""
    strides = row_major_strides(shape)
    loops = (
        replace(loop, walks=((0, loop.walks[0][1] * strides[loop.walks[0][0]]), loop.walks[1]))
        for loop in tile.loops
    )
    corners = ((flat_offset(tile.corners[0], strides),), tile.corners[1])
    return join_loops(Tile(corners, tuple(loops)))


def _fold(tile: Tile, shape: Shape) -> Iterator[Tile]:
    """Yields a tile whose first tensor has one dimension with that tensor in another shape.

    It is cut where its loops do not follow the dimensions of the shape.
    """
    pending = [tile]
    while pending:
        flat = pending.pop()
        folded = _fold_whole(flat, shape)
        if isinstance(folded, Tile):
            yield folded
            continue
        number, cuts = folded
        if len(pending) + len(cuts) > _MOST_PARTS:
            raise _too_many_parts_error()
        bounds = itertools.pairwise([0, *cuts, flat.loops[number].size])
        pending += reversed([flat.take(number, low, high - low) for low, high in bounds])


def _fold_whole(flat: Tile, shape: Shape) -> Tile | tuple[int, range]:
    """Returns the same for the whole tile, or which of its loops has to be cut, and where."""
    strides = row_major_strides(shape)
    (start,), other = flat.corners
    corner = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
    loops: list[Loop] = []
    for number, loop in enumerate(flat.loops):
        found, cuts = _follow(loop, corner, shape, strides)
        if cuts:
            return number, cuts
        loops += found
    folded = Tile((corner, other), tuple(loops))
    if all(at + _reach(folded, axis) < shape[axis] for axis, at in enumerate(corner)):
        return folded
    number = max(range(len(flat.loops)), key=lambda i: flat.loops[i].walks[0][1])
    return number, range(1, flat.loops[number].size)


def _follow(loop: Loop, corner: Shape, shape: Shape, strides: Shape) -> tuple[list[Loop], range]:
    """Returns a loop of flat steps as loops along the dimensions of a tensor, from a corner on.

    They are several where it goes around a dimension. Where it follows none, it returns the indexes
    at which the loop has to be cut.
    """
    (_, flat_step), other = loop.walks
    axis = next(i for i, n in enumerate(shape) if n > 1 and strides[i] <= flat_step)
    size, start = shape[axis], corner[axis]
    step, odd = divmod(flat_step, strides[axis])
    if odd:
        return [], range(1, loop.size)
    room = -(-(size - start) // step)
    if loop.size <= room:
        return [Loop(loop.size, ((axis, step), other))], range(0)
    cut = room if size % step or start >= step else loop.size - loop.size % room
    if cut < loop.size:
        return [], range(cut, cut + 1)
    around = Loop(loop.size // room, ((0, flat_step * room), (other[0], other[1] * room)))
    outer, cuts = _follow(around, corner, shape, strides)
    return (
        [*outer, Loop(room, ((axis, step), other))],
        range(cuts.start * room, cuts.stop * room, cuts.step * room),
    )


# Arrangements

Part = tuple[Fqn, Tile]
"""A source, as a tensor of one dimension, and the elements that a tensor takes from it."""


class Arrangement(Struct, frozen=True):
    """A tensor made of parts of others, which do not overlap; all other elements are zero."""

    shape: Shape
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: Fqn, shape: Shape) -> Arrangement:
        """Returns a tensor as it is."""
        return cls(shape, ((name, whole_tile(shape)),))

    def permuted(self, order: Sequence[int]) -> Arrangement:
        """Returns it with dimension `order[i]` in place `i`."""
        places = {axis: place for place, axis in enumerate(order)}
        return self._with_axes(list(order), places)

    def sliced(self, dim: int, start: int, stop: int) -> Arrangement:
        """Returns the indices from `start` up to `stop` of a dimension."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if 0 in shape:  # with a source all the same
            return Arrangement(shape, tuple((name, whole_tile(shape)) for name, _ in self.parts))
        return Arrangement(
            shape,
            _few(
                (name, _moved(kept, dim, -start))
                for name, tile in self.parts
                for kept in _between(tile, dim, start, stop)
            ),
        )

    def padded(self, dim: int, size: int) -> Arrangement:
        """Returns it with further indices at the end of a dimension, whose elements are zero."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        # A source without elements is a part of a tensor without elements alone.
        parts = (part for part in self.parts if 0 in shape or part[1].elements)
        return Arrangement(shape, tuple(parts))

    def selected(self, dim: int, index: int) -> Arrangement:
        """Returns one index of a dimension, without the dimension."""
        return self.sliced(dim, index, index + 1).squeezed(dim)

    def squeezed(self, dim: int) -> Arrangement:
        """Returns it without a dimension of one index."""
        kept = [axis for axis in range(len(self.shape)) if axis != dim]
        return self._with_axes(kept, {axis: place for place, axis in enumerate(kept)})

    def unsqueezed(self, dim: int) -> Arrangement:
        """Returns it with a further dimension of one index."""
        return self.viewed((*self.shape[:dim], 1, *self.shape[dim:]))

    def viewed(self, shape: Shape) -> Arrangement:
        """Returns the same elements in the same row-major order under another shape."""
        if 0 in shape:
            return Arrangement(shape, tuple((name, whole_tile(shape)) for name, _ in self.parts))
        folded = (
            (name, part)
            for name, tile in self.parts
            for part in _fold(_flatten(tile, self.shape), shape)
        )
        return Arrangement(shape, _few(folded))

    def _with_axes(self, kept: Sequence[int], places: Mapping[int, int]) -> Arrangement:
        """Returns it with some of its dimensions, `places` saying where each is now."""
        parts = []
        for name, tile in self.parts:
            loops = tuple(
                replace(loop, walks=((places[loop.walks[0][0]], loop.walks[0][1]), loop.walks[1]))
                for loop in tile.loops
            )
            corner = tuple(tile.corners[0][axis] for axis in kept)
            parts.append((name, Tile((corner, tile.corners[1]), loops)))
        return Arrangement(tuple(self.shape[axis] for axis in kept), tuple(parts))


def join(arrangements: Sequence[Arrangement], dim: int) -> Arrangement:
    """Returns arrangements one after the other along a dimension."""
    parts: list[Part] = []
    at = 0
    for arrangement in arrangements:
        parts += [(name, _moved(tile, dim, at)) for name, tile in arrangement.parts]
        at += arrangement.shape[dim]
    shape = (*arrangements[0].shape[:dim], at, *arrangements[0].shape[dim + 1 :])
    is_empty = 0 in shape
    return Arrangement(shape, _few(part for part in parts if is_empty or part[1].elements))


def _moved(tile: Tile, dim: int, by: int) -> Tile:
    corner, other = tile.corners
    return replace(tile, corners=((*corner[:dim], corner[dim] + by, *corner[dim + 1 :]), other))


def _few(parts: Iterable[Part]) -> tuple[Part, ...]:
    found = tuple(itertools.islice(parts, _MOST_PARTS + 1))
    if len(found) > _MOST_PARTS:
        raise _too_many_parts_error()
    return found


def _too_many_parts_error() -> CannotPlanError:
    return CannotPlanError(
        f"a conversion cuts a tensor into more than {_MOST_PARTS:,} pieces",
        hint="pass --names live",
    )
