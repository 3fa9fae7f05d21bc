"""Elements that a stored tensor and another one share, in regular steps of both.

A tensor that is made by moving elements (slices, joins, stacks, transpositions, the order of rotary
positions) consists of tiles of what is stored. A tile is cut to the part that is wanted, and then
into boxes of the stored tensor, which can be read like any other box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.geometry import flat_offset, row_major_strides
from ckptkit.core.index import Box, Shape

Walk = tuple[int, int]
"""An axis of a tensor, and how many of its indexes a step moves along it."""
_OTHER = 1  # position of the other tensor's walk in a loop


class Loop(Struct, frozen=True):
    """One dimension of a tile.

    Attributes:
        size: How many elements, at least two.
        walks: How a step moves in the stored tensor, and in the other one.
    """

    size: int
    walks: tuple[Walk, Walk]


class Tile(Struct, frozen=True):
    """Elements that two tensors share.

    Attributes:
        corners: The first of the elements in the stored tensor, and in the other one.
        loops: The dimensions along which the elements follow each other, in any order.
    """

    corners: tuple[Shape, Shape]
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
    """A box of a stored tensor, and where its elements are in a box of another one.

    Attributes:
        box: In the stored tensor.
        start: The place of its first corner, counted from the first corner of the other box.
        walks: For each dimension of the stored tensor, how a step along it moves in the other.
    """

    box: Box
    start: Shape
    walks: tuple[Walk, ...]


def find_tile(
    shape: Shape, grid: Shape, part: Box, walked: tuple[int, Shape], other: Shape
) -> Tile | None:
    """Returns the elements of a box, which have regular steps in another tensor, as a tile.

    Args:
        shape: Of the tensor that the box belongs to; the tile's stored one.
        grid: The same with dimensions split further.
        part: The box of the grid.
        walked: The element of the other tensor, counted row-major, at the first corner of the box,
            and its elements from one index to the next, per dimension of the grid.
        other: The shape of the other tensor.

    Returns:
        None where the steps do not follow the dimensions of both tensors.
    """
    owners = _split(shape, grid)
    if owners is None:
        return None
    start, steps = walked
    corner = [0] * len(shape)
    flat: list[tuple[int, Walk, int]] = []
    for (axis, step), offset, size, flat_step in zip(
        owners, part.offsets, part.sizes, steps, strict=True
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


def _split(shape: Shape, grid: Shape) -> list[Walk] | None:
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
