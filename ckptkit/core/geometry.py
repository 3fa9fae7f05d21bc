"""Which element lies where: boxes of tensors, how chunks cover them, and rearrangements.

Everything is exact and in elements, counted row-major. Three views build on boxes:

- A strided box says that a box of one tensor has regular steps in another one. It describes what a
  tensor is made of that is made by moving elements.
- A tile is a strided box seen from both tensors, so that the part that is wanted of one is found as
  boxes of the other, which can be read like any box.
- An arrangement starts as a whole tensor and goes through reshapes, splits and permutations; it
  ends as strided boxes. An operation whose outcome it cannot express is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.errors import CannotPlanError, LimitError
from ckptkit.core.index import Box, ChunkTable, Fqn, Ints, Shape, Span

_Value = TypeVar("_Value")
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
    """What a chunk holds of a wanted box."""

    row: int  # the chunk, in its table
    chunk: Shape  # sizes of the chunk, in elements
    source: Box  # the shared elements, counted from the chunk's first corner
    target: Box  # the same ones, counted from the wanted box's


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


# Strided boxes and tiles


class StridedBox(Struct, frozen=True):
    """A box of a tensor whose elements have regular steps in another one, its source."""

    box: Box  # of the tensor, or of a grid: its shape with dimensions split further
    source: Fqn
    start: int  # the source's element, counted row-major, at the box's first corner
    steps: Shape  # elements of the source from one index to the next, per dimension of the box


Walk = tuple[int, int]
"""An axis of a tensor, and how many of its indexes a step moves along it."""
_OTHER = 1  # position of the other tensor's walk in a loop


class Loop(Struct, frozen=True):
    """One dimension of a tile."""

    size: int  # how many elements, at least two
    walks: tuple[Walk, Walk]  # how a step moves in the stored tensor, and in the other one


class Tile(Struct, frozen=True):
    """Elements that two tensors share."""

    # The first of the elements in the stored tensor, and in the other one.
    corners: tuple[Shape, Shape]
    # The dimensions along which the elements follow each other, in any order.
    loops: tuple[Loop, ...]

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


def find_tile(shape: Shape, grid: Shape, piece: StridedBox, other: Shape) -> Tile | None:
    """Returns a strided box as a tile, its own tensor being the stored one.

    None where the steps do not follow the dimensions of both tensors; `grid` is `shape` with
    dimensions split further, `other` the shape of the other tensor.
    """
    owners = _owners_in(shape, grid)
    if owners is None:
        return None
    start = piece.start
    corner = [0] * len(shape)
    flat: list[tuple[int, Walk, int]] = []
    for (axis, step), offset, size, flat_step in zip(
        owners, piece.box.offsets, piece.box.sizes, piece.steps, strict=True
    ):
        if axis >= 0:
            corner[axis] += offset * step
        if size > 1:
            flat.append((size, (axis, step), flat_step))
    strides = row_major_strides(other)
    there = tuple((start // stride) % n for stride, n in zip(strides, other, strict=True))
    if flat_offset(there, strides) != start:
        return None
    loops: list[Loop] = []
    for size, walk, flat_step in flat:
        found = _follow(size, walk, flat_step, there, other)
        if found is None:
            return None
        loops += found
    tile = Tile((tuple(corner), there), tuple(loops))
    return tile if _fits(tile, _OTHER, other) else None


def _owners_in(shape: Shape, grid: Shape) -> list[Walk] | None:
    """Returns for each dimension of the grid the one of the tensor that it is a part of."""
    owners: list[Walk] = []
    at = 0
    for axis, size in enumerate(shape):
        first, product = at, 1
        while product < size and at < len(grid):
            product *= grid[at]
            at += 1
        if product != size:
            return None
        owners += [(axis, math.prod(grid[i + 1 : at])) for i in range(first, at)]
    if any(size != 1 for size in grid[at:]):
        return None
    return owners + [(len(shape) - 1, 0)] * (len(grid) - at)


def _follow(size: int, walk: Walk, flat_step: int, start: Shape, shape: Shape) -> list[Loop] | None:
    """Returns one dimension as loops, several where it goes around a dimension of the tensor."""
    strides = row_major_strides(shape)
    usable = (i for i, n in enumerate(shape) if n > 1 and 0 < strides[i] <= flat_step)
    axis = next(usable, None)
    if axis is None or flat_step % strides[axis]:
        return None
    step = flat_step // strides[axis]
    room = -(-(shape[axis] - start[axis]) // step)
    if size <= room:
        return [Loop(size, (walk, (axis, step)))]
    if shape[axis] % step or start[axis] >= step or size % room:
        return None
    outer = _follow(size // room, (walk[0], walk[1] * room), flat_step * room, start, shape)
    return None if outer is None else [*outer, Loop(room, (walk, (axis, step)))]


def _fits(tile: Tile, side: int, shape: Shape) -> bool:
    return all(
        tile.corners[side][axis] + _reach(tile.loops, side, axis) < size
        for axis, size in enumerate(shape)
    )


def _reach(loops: Sequence[Loop], side: int, axis: int) -> int:
    """Returns how far the last element is from the first along an axis."""
    return sum(
        (loop.size - 1) * loop.walks[side][1] for loop in loops if loop.walks[side][0] == axis
    )


def walk_boxes(tile: Tile, wanted: Box) -> Iterator[BoxWalk]:
    """Yields the boxes of the stored tensor that hold what a tile has of a box of the other."""
    for part in _clip(tile, wanted):
        yield from _boxes(part, wanted)


def _clip(tile: Tile, wanted: Box) -> Iterator[Tile]:
    """Yields parts of a tile that are inside of a box of the other tensor."""
    for axis, (begin, count) in enumerate(zip(wanted.offsets, wanted.sizes, strict=True)):
        low, end = tile.corners[_OTHER][axis], begin + count
        high = low + _reach(tile.loops, _OTHER, axis)
        if begin <= low and high < end:
            continue
        if high < begin or end <= low:
            return
        number = max(
            (i for i, loop in enumerate(tile.loops) if loop.walks[_OTHER][0] == axis),
            key=lambda i: tile.loops[i].walks[_OTHER][1],
        )
        loop = tile.loops[number]
        step = loop.walks[_OTHER][1]
        rest = high - low - (loop.size - 1) * step
        touching = range(
            max(0, -(-(begin - low - rest) // step)), min(loop.size, (end - 1 - low) // step + 1)
        )
        inside = range(
            max(0, -(-(begin - low) // step)), min(loop.size, (end - 1 - low - rest) // step + 1)
        )
        if inside:
            yield from _clip(tile.take(number, inside.start, len(inside)), wanted)
        for index in touching:
            if index not in inside:
                yield from _clip(tile.take(number, index, 1), wanted)
        return
    yield tile


def _boxes(tile: Tile, wanted: Box) -> Iterator[BoxWalk]:
    """Yields the boxes of the stored tensor that a tile consists of."""
    tile = _joined(tile)
    # A box has at most one loop along each axis, and that takes every index.
    spread = [i for i, loop in enumerate(tile.loops) if loop.walks[0][1] != 1]
    for indexes in itertools.product(*(range(tile.loops[i].size) for i in spread)):
        part = tile
        for number, index in zip(reversed(spread), reversed(indexes), strict=True):
            part = part.take(number, index, 1)
        along = {loop.walks[0][0]: loop for loop in part.loops}
        stored, other = part.corners
        box = Box(stored, tuple(along[i].size if i in along else 1 for i in range(len(stored))))
        walks = tuple(along[i].walks[_OTHER] if i in along else (0, 0) for i in range(len(stored)))
        start = tuple(at - first for at, first in zip(other, wanted.offsets, strict=True))
        yield BoxWalk(box, start, walks)


def _joined(tile: Tile) -> Tile:
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


# Arrangements

Run = tuple[int, int]
"""So many elements, and the step of the source from one to the next."""
Runs = tuple[Run, ...]
"""The steps along one dimension: runs within runs, the outermost first; empty for one index."""
_MOST_PARTS = 1 << 16


class _SourceBox(Struct, frozen=True):
    """A box of an arrangement that is in one source."""

    offsets: Shape  # its first corner
    source: Fqn
    start: int  # the source's element at that corner
    walks: tuple[Runs, ...]  # per dimension; the product of the counts is the box's size there

    @property
    def sizes(self) -> Shape:
        return tuple(_length(walk) for walk in self.walks)


class Arrangement(Struct, frozen=True):
    """A tensor made of parts of others, which do not overlap; all other elements are zero."""

    shape: Shape
    parts: tuple[_SourceBox, ...]

    @classmethod
    def of(cls, name: Fqn, shape: Shape) -> Arrangement:
        """Returns a tensor as it is."""
        walks = tuple(
            _plain(size, step) for size, step in zip(shape, row_major_strides(shape), strict=True)
        )
        return cls(shape, (_SourceBox((0,) * len(shape), name, 0, walks),))

    def permuted(self, order: Sequence[int]) -> Arrangement:
        """Returns it with dimension `order[i]` in place `i`."""
        parts = (
            replace(
                part,
                offsets=tuple(part.offsets[i] for i in order),
                walks=tuple(part.walks[i] for i in order),
            )
            for part in self.parts
        )
        return Arrangement(tuple(self.shape[i] for i in order), tuple(parts))

    def sliced(self, dim: int, start: int, stop: int) -> Arrangement:
        """Returns the indices from `start` up to `stop` of a dimension."""
        parts = [
            _moved(kept, dim, -start)
            for part in self.parts
            for kept in _between(part, dim, start, stop)
        ]
        return Arrangement(_with(self.shape, dim, stop - start), _few(parts))

    def padded(self, dim: int, size: int) -> Arrangement:
        """Returns it with further indices at the end of a dimension, whose elements are zero."""
        return Arrangement(_with(self.shape, dim, size), self.parts)

    def selected(self, dim: int, index: int) -> Arrangement:
        """Returns one index of a dimension, without the dimension."""
        return self.sliced(dim, index, index + 1).squeezed(dim)

    def squeezed(self, dim: int) -> Arrangement:
        """Returns it without a dimension of one index."""
        parts = (
            replace(p, offsets=_without(p.offsets, dim), walks=_without(p.walks, dim))
            for p in self.parts
        )
        return Arrangement(_without(self.shape, dim), tuple(parts))

    def unsqueezed(self, dim: int) -> Arrangement:
        """Returns it with a further dimension of one index."""
        nothing: Runs = ()
        parts = (
            replace(
                part,
                offsets=(*part.offsets[:dim], 0, *part.offsets[dim:]),
                walks=(*part.walks[:dim], nothing, *part.walks[dim:]),
            )
            for part in self.parts
        )
        return Arrangement((*self.shape[:dim], 1, *self.shape[dim:]), tuple(parts))

    def viewed(self, shape: Shape) -> Arrangement:
        """Returns the same elements in the same row-major order under another shape."""
        if 0 in shape:
            return Arrangement(shape, ())
        size, parts = self.shape, self.parts
        for at, count, new in _groups(self.shape, shape):
            end = at + count
            merged = _few([flat for part in parts for flat in _merged(part, size, at, end)])
            parts = _few([fine for part in merged for fine in _split(part, at, new)])
            size = (*size[:at], *new, *size[end:])
        return Arrangement(size, parts)

    def to_grid(self) -> tuple[Shape, tuple[StridedBox, ...]]:
        """Returns it as boxes of a grid: its shape, with dimensions split further where needed."""
        inner = [_inner_of(dim, self.parts) for dim in range(len(self.shape))]
        parts = self.parts
        for dim, counts in enumerate(inner):
            parts = _few([flat for part in parts for flat in _fitted(part, dim, counts)])
        grid = tuple(
            size
            for total, counts in zip(self.shape, inner, strict=True)
            for size in (total // math.prod(counts), *counts)
        )
        return grid, tuple(_piece(part, inner) for part in parts)


def join(arrangements: Sequence[Arrangement], dim: int) -> Arrangement:
    """Returns arrangements one after the other along a dimension."""
    parts: list[_SourceBox] = []
    at = 0
    for arrangement in arrangements:
        parts += [_moved(part, dim, at) for part in arrangement.parts]
        at += arrangement.shape[dim]
    return Arrangement(_with(arrangements[0].shape, dim, at), _few(parts))


def _plain(size: int, step: int) -> Runs:
    return ((size, step),) if size != 1 else ()


def _length(walk: Runs) -> int:
    return math.prod(count for count, _ in walk)


def _moved(part: _SourceBox, dim: int, by: int) -> _SourceBox:
    return replace(part, offsets=_with(part.offsets, dim, part.offsets[dim] + by))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _without(values: tuple[_Value, ...], dim: int) -> tuple[_Value, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _few(parts: Sequence[_SourceBox]) -> tuple[_SourceBox, ...]:
    if len(parts) > _MOST_PARTS:
        raise CannotPlanError(
            f"a conversion cuts a tensor into {len(parts):,} pieces; found against at most"
            f" {_MOST_PARTS:,}",
            hint="pass --names live",
        )
    return tuple(parts)


def _between(part: _SourceBox, dim: int, start: int, stop: int) -> Iterator[_SourceBox]:
    """Yields what a part holds of a range of indices, as parts."""
    offset, walk = part.offsets[dim], part.walks[dim]
    low, high = max(start - offset, 0), min(stop - offset, _length(walk))
    if low >= high:
        return
    for at, first, kept in _range_of(walk, low, high):
        yield _SourceBox(
            _with(part.offsets, dim, offset + at),
            part.source,
            part.start + first,
            (*part.walks[:dim], kept, *part.walks[dim + 1 :]),
        )


def _cut(part: _SourceBox, dim: int, width: int) -> Iterator[_SourceBox]:
    """Yields a part in parts of so many indices of a dimension."""
    low = part.offsets[dim]
    for at in range(low, low + part.sizes[dim], width):
        yield from _between(part, dim, at, at + width)


def _range_of(walk: Runs, low: int, high: int) -> Iterator[tuple[int, int, Runs]]:
    """Cuts indices `[low, high)` out of a walk: `(first index, elements to skip, walk)`."""
    if low == 0 and high == _length(walk):
        yield 0, 0, walk
        return
    (_, step), inner = walk[0], walk[1:]
    width = _length(inner)
    first, last = -(-low // width), high // width
    if first > last:  # within one round of the inner runs
        around = low // width
        for at, skip, kept in _range_of(inner, low - around * width, high - around * width):
            yield around * width + at, around * step + skip, kept
        return
    if low < first * width:
        yield from _shifted(_range_of(inner, low - (first - 1) * width, width), first - 1, walk)
    if first < last:
        yield first * width, first * step, (*_plain(last - first, step), *inner)
    if last * width < high:
        yield from _shifted(_range_of(inner, 0, high - last * width), last, walk)


def _shifted(
    found: Iterator[tuple[int, int, Runs]], around: int, walk: Runs
) -> Iterator[tuple[int, int, Runs]]:
    width = _length(walk[1:])
    for at, skip, kept in found:
        yield around * width + at, around * walk[0][1] + skip, kept


def _groups(old: Shape, new: Shape) -> list[tuple[int, int, Shape]]:
    """Finds the smallest groups of neighbouring dimensions that become others of equal size.

    Each is its position in the result, the number of old dimensions, and the new ones.
    """
    found: list[tuple[int, int, Shape]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        begun, at = i, j
        left, right = 1, 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new) and (left > 1 or begun == i):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        if (i - begun, j - at) != (1, 1):
            found.append((at, i - begun, new[at:j]))
    return found


def _merged(part: _SourceBox, shape: Shape, at: int, end: int) -> Iterator[_SourceBox]:
    """Yields a part with dimensions `[at, end)` made one."""
    outer, sizes = shape[at:end], part.sizes[at:end]
    strides = row_major_strides(outer)
    axis = next((i for i in range(len(outer)) if sizes[i] > 1), len(outer))
    is_run = sizes[axis + 1 :] == outer[axis + 1 :]
    if not is_run:
        for kept in _cut(part, at + axis, 1):
            yield from _merged(kept, shape, at, end)
        return
    offset = flat_offset(part.offsets[at:end], strides)
    walk = tuple(run for inner in part.walks[at:end] for run in inner)
    yield replace(
        part,
        offsets=(*part.offsets[:at], offset, *part.offsets[end:]),
        walks=(*part.walks[:at], _simplified(walk), *part.walks[end:]),
    )


def _simplified(walk: Runs) -> Runs:
    """Joins runs that together are one."""
    runs: list[Run] = []
    for count, step in walk:
        if runs and runs[-1][1] == count * step:
            runs[-1] = (runs[-1][0] * count, step)
        else:
            runs.append((count, step))
    return tuple(runs)


def _split(part: _SourceBox, dim: int, sizes: Shape) -> Iterator[_SourceBox]:
    """Yields a part with one dimension made several."""
    low = part.offsets[dim]
    for box in slabs(Span(low, low + part.sizes[dim]), sizes):
        start = flat_offset(box.offsets, row_major_strides(sizes))
        for kept in _between(part, dim, start, start + math.prod(box.sizes)):
            if kept.sizes[dim] != math.prod(box.sizes):  # the walk itself had to be cut
                yield from _split(kept, dim, sizes)
                continue
            yield replace(
                kept,
                offsets=(*kept.offsets[:dim], *box.offsets, *kept.offsets[dim + 1 :]),
                walks=(*kept.walks[:dim], *_dealt(kept.walks[dim], box), *kept.walks[dim + 1 :]),
            )


def _dealt(walk: Runs, box: Box) -> list[Runs]:
    """Deals the runs of a walk out to dimensions of the given sizes, the innermost first."""
    runs = list(walk)
    dealt: list[Runs] = []
    for size in reversed(box.sizes):
        mine: list[Run] = []
        left = size
        while left > 1:
            count, step = runs.pop()
            if left % count == 0:
                mine.insert(0, (count, step))
                left //= count
            elif count % left == 0:
                mine.insert(0, (left, step))
                runs.append((count // left, step * left))
                left = 1
            else:
                raise CannotPlanError(
                    "a conversion reshapes a tensor across the joints of its pieces",
                    hint="pass --names live",
                )
        dealt.insert(0, _simplified(tuple(mine)))
    return dealt


def _inner_of(dim: int, parts: Sequence[_SourceBox]) -> Shape:
    """Returns the counts of the inner runs that a dimension's parts share; none where they do not.

    With one run for every part a dimension needs no finer grid.
    """
    found = {tuple(count for count, _ in part.walks[dim][1:]) for part in parts}
    found.discard(())
    if len(found) != 1:
        return ()
    (counts,) = found
    width = math.prod(counts)
    fits = all(part.offsets[dim] % width == 0 and part.sizes[dim] % width == 0 for part in parts)
    return counts if fits else ()


def _fitted(part: _SourceBox, dim: int, counts: Shape) -> Iterator[_SourceBox]:
    """Yields a part so that a dimension has one run within each of the grid's dimensions."""
    walk = part.walks[dim]
    if counts or len(walk) <= 1:
        yield part
        return
    for kept in _cut(part, dim, _length(walk[1:])):
        yield from _fitted(kept, dim, counts)


def _piece(part: _SourceBox, inner: Sequence[Shape]) -> StridedBox:
    offsets: list[int] = []
    sizes: list[int] = []
    steps: list[int] = []
    for offset, walk, counts in zip(part.offsets, part.walks, inner, strict=True):
        size = _length(walk)
        box = Box((0,) * (len(counts) + 1), (size // math.prod(counts), *counts))
        offsets += [offset // math.prod(counts), *box.offsets[1:]]
        sizes += box.sizes
        steps += [run[0][1] if run else 0 for run in _dealt(walk, box)]
    return StridedBox(Box(tuple(offsets), tuple(sizes)), part.source, part.start, tuple(steps))
