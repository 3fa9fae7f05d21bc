"""Whether boxes fill a tensor: the ways in which training cuts tensors are told apart quickly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from operator import mul

Sizes = tuple[int, ...]
Box = tuple[Sizes, Sizes]
_MOST_PAIRS_OF = 256  # boxes; more of them than that are never cut irregularly


def is_tiling(shape: Sizes, boxes: Sequence[Box]) -> bool:
    """Says whether boxes hold every element of a tensor once.

    Args:
        shape: Of the tensor, in elements.
        boxes: Offsets and sizes; none is empty, none leaves the tensor, no two begin at the same
            element, and together they have as many elements as the tensor.

    Returns:
        False if two boxes overlap. Of more than 256 that neither lie on a grid nor are runs of
        elements, which no way of training makes, it is taken that they do not.

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
    return len(boxes) > _MOST_PAIRS_OF or not any(
        _overlap(*pair) for pair in combinations(boxes, 2)
    )


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


def _overlap(first: Box, second: Box) -> bool:
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
