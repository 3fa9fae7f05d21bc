"""Whether boxes fill a tensor: the ways in which training cuts tensors are told apart quickly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from operator import mul

Sizes = tuple[int, ...]
Box = tuple[Sizes, Sizes]
_FEW = 32  # boxes that are quickly compared with each other


def is_tiling(shape: Sizes, boxes: Sequence[Box]) -> bool:
    """Says whether boxes hold every element of a tensor once.

    Args:
        shape: Of the tensor, in elements.
        boxes: Offsets and sizes; none is empty, none leaves the tensor, no two begin at the same
            element, and together they have as many elements as the tensor.

    Returns:
        False if two boxes overlap.

    >>> is_tiling((4,), [((0,), (2,)), ((2,), (2,))])
    True
    >>> is_tiling((4,), [((0,), (2,)), ((1,), (2,))])
    False
    """
    if _fill_grid(shape, boxes):
        return True
    runs = _runs(shape, boxes)
    if runs is not None:
        return all(before[1] <= after[0] for before, after in pairwise(sorted(runs)))
    return _are_apart(boxes)


def _fill_grid(shape: Sizes, boxes: Sequence[Box]) -> bool:
    """Says whether the boxes are all cells of a grid, as those of sharded dimensions are."""
    cells = 1
    for axis, size in enumerate(shape):
        intervals = sorted({(offsets[axis], sizes[axis]) for offsets, sizes in boxes})
        at = 0
        for start, length in intervals:
            if start != at:
                return False
            at += length
        if at != size:
            return False
        cells *= len(intervals)
    return cells == len(boxes)


def _runs(shape: Sizes, boxes: Sequence[Box]) -> list[tuple[int, int]] | None:
    """Returns the row-major elements of each box, as flat parameters cut them; None if not so."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    runs = []
    for offsets, sizes in boxes:
        axis = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
        if sizes[axis + 1 :] != shape[axis + 1 :]:
            return None
        start = sum(map(mul, offsets, strides))
        runs.append((start, start + math.prod(sizes)))
    return runs


def _are_apart(boxes: Sequence[Box]) -> bool:
    """Says whether no two boxes overlap, by cutting the space between them again and again.

    What is cut from side to side, as a mesh cuts tensors one dimension after the other, takes
    little more than sorting; anything else as many comparisons as boxes lie side by side.
    """
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        if len(group) <= _FEW:
            if any(_overlap(*pair) for pair in combinations(group, 2)):
                return False
            continue
        for axis in range(len(group[0][0])):
            parts = list(_cut(group, axis))
            if len(parts) > 1:
                groups += parts
                break
        else:
            if not _pass_by(group):
                return False
    return True


def _cut(boxes: list[Box], axis: int) -> Iterator[list[Box]]:
    """Yields the groups of boxes between which a plane across the axis meets no box."""
    ordered = sorted(boxes, key=lambda box: box[0][axis])
    first = end = 0
    for number, (offsets, sizes) in enumerate(ordered):
        if number and offsets[axis] >= end:
            yield ordered[first:number]
            first = number
        end = max(end, offsets[axis] + sizes[axis])
    yield ordered[first:]


def _pass_by(boxes: list[Box]) -> bool:
    """Says whether no two boxes overlap, moving a plane along the axis with the most cuts."""
    axis = max(
        range(len(boxes[0][0])), key=lambda axis: len({offsets[axis] for offsets, _ in boxes})
    )
    met: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        start = box[0][axis]
        met = [other for other in met if other[0][axis] + other[1][axis] > start]
        if any(_overlap(box, other) for other in met):
            return False
        met.append(box)
    return True


def _overlap(first: Box, second: Box) -> bool:
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
