"""Tiles against numpy, which moves every element one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.geometry import (
    Arrangement,
    Loop,
    Tile,
    find_tile,
    row_major_strides,
    slices_of,
    walk_boxes,
)
from ckptkit.core.index import Box, Fqn, Shape
from ckptkit.engine.reader import ArrayMemory
from tests.property.examples import examples

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    pairs = zip(offsets, shape, strict=True)
    return Box(offsets, tuple(draw(st.integers(1, size - at)) for at, size in pairs))


@st.composite
def joined(draw: st.DrawFn, grid: Shape) -> Shape:
    """A shape whose dimensions the grid splits."""
    shape = [grid[0]]
    for size in grid[1:]:
        if draw(st.booleans()):
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)


@st.composite
def moved(draw: st.DrawFn) -> tuple[Shape, Shape, Box, tuple[int, Shape], Shape]:
    """A box of a tensor that is a part of another tensor with its dimensions exchanged."""
    finer = draw(sizes)
    other = draw(joined(finer))
    order = draw(st.permutations(range(len(finer))))
    part = draw(boxes(finer))
    strides = row_major_strides(finer)
    start = sum(at * stride for at, stride in zip(part.offsets, strides, strict=True))
    kept = tuple(part.sizes[axis] for axis in order)
    steps = tuple(strides[axis] for axis in order)
    before = tuple(draw(st.integers(0, 2)) for _ in kept)
    after = tuple(draw(st.integers(0, 2)) for _ in kept)
    grid = tuple(map(sum, zip(before, kept, after, strict=True)))
    return draw(joined(grid)), grid, Box(before, kept), (start, steps), other


def tile_of(corner: Shape, sizes: Shape, start: int, steps: Shape) -> Tile:
    """A box of a tensor whose elements have regular steps in a flat source."""
    loops = (
        Loop(size, ((axis, 1), (0, step)))
        for axis, (size, step) in enumerate(zip(sizes, steps, strict=True))
        if size > 1
    )
    return Tile((corner, (start,)), tuple(loops))


def fill(tile: Tile, stored: Any, target: Any, wanted: Box) -> None:
    memory = ArrayMemory(target)
    for walk in walk_boxes(tile, wanted):
        part = memory.walked(walk.start, walk.walks, walk.box.sizes)
        whole = Box((0,) * len(walk.box.sizes), walk.box.sizes)
        part.put(whole, stored[slices_of(walk.box)])


@settings(max_examples=examples(400), deadline=None)
@given(moved(), st.data())
def test_what_a_tile_finds_is_what_numpy_moves(case: Any, data: st.DataObject) -> None:
    shape, grid, part, (start, steps), other = case
    source = np.arange(1, 1 + math.prod(other), dtype=np.uint32).reshape(other)
    made = np.zeros(grid, np.uint32)
    view = np.lib.stride_tricks.as_strided(
        source.reshape(-1)[start:], part.sizes, [4 * step for step in steps]
    )
    made[slices_of(part)] = view
    made = made.reshape(shape)
    flat = Arrangement(grid, ((Fqn(""), tile_of(part.offsets, part.sizes, start, steps)),))
    tiles = [find_tile(tile, other) for _, tile in flat.viewed(shape).parts]
    # The other tensor is stored, and a box of this one is wanted.
    wanted = data.draw(boxes(shape))
    found = np.zeros(wanted.sizes, np.uint32)
    # This one is stored, and a box of the other one is wanted.
    asked = data.draw(boxes(other))
    back = np.zeros(asked.sizes, np.uint32)
    for tile in tiles:
        if tile is None:
            return
        fill(tile.swapped, source, found, wanted)
        fill(tile, made, back, asked)
    assert np.array_equal(found, made[slices_of(wanted)])
    there = np.isin(source, view)
    assert np.array_equal(back, np.where(there, source, 0)[slices_of(asked)])


@settings(max_examples=examples(200), deadline=None)
@given(sizes, st.permutations(range(4)), st.data())
def test_exchanged_dimensions_are_always_found(
    shape: Shape, order: list[int], data: st.DataObject
) -> None:
    axes = [axis for axis in order if axis < len(shape)]
    strides = row_major_strides(shape)
    turned = tuple(shape[axis] for axis in axes)
    steps = tuple(strides[axis] for axis in axes)
    tile = find_tile(tile_of((0,) * len(shape), turned, 0, steps), shape)
    assert tile is not None
    wanted = data.draw(boxes(turned))
    walks = list(walk_boxes(tile.swapped, wanted))
    assert sum(math.prod(walk.box.sizes) for walk in walks) == math.prod(wanted.sizes)
    assert len(walks) == 1


def test_rows_of_groups_are_found_group_by_group() -> None:
    # The queries of a fused projection: of 3 groups of 6 rows, 4 rows each.
    fused = Arrangement.of(Fqn(""), (18, 5)).viewed((3, 6, 5)).sliced(1, 0, 4).viewed((12, 5))
    ((_, part),) = fused.parts
    tile = find_tile(part, (18, 5))
    assert tile is not None
    found = [walk.box for walk in walk_boxes(tile.swapped, Box((2, 0), (9, 5)))]
    assert found == [Box((6, 0), (4, 5)), Box((2, 0), (2, 5)), Box((12, 0), (3, 5))]


def test_steps_that_follow_no_dimension_are_not_found() -> None:
    assert find_tile(tile_of((0,), (4,), 0, (6,)), (5, 5)) is None
    beyond = tile_of((0,), (4,), 3, (1,))
    assert find_tile(beyond, (2, 3)) is find_tile(beyond, (0, 3)) is None


@pytest.mark.slow
def test_a_conversion_into_too_many_pieces_is_refused() -> None:
    turned = Arrangement.of(Fqn(""), (2, 300_009)).permuted((1, 0))
    with pytest.raises(CannotPlanError, match="more than 65,536 pieces"):
        turned.viewed((200_006, 3))
