"""The elements of a tile, one by one."""

from __future__ import annotations

from itertools import product

from ckptkit.core.geometry import Tile
from ckptkit.core.index import Shape


def positions(tile: Tile) -> tuple[list[Shape], list[Shape]]:
    """Returns where the elements are in both tensors."""
    found: tuple[list[Shape], list[Shape]] = [], []
    for indexes in product(*(range(loop.size) for loop in tile.loops)):
        for side, places in enumerate(found):
            at = list(tile.corners[side])
            for loop, index in zip(tile.loops, indexes, strict=True):
                axis, step = loop.walks[side]
                at[axis] += index * step
            places.append(tuple(at))
    return found
