"""Row-major arithmetic against numpy, which counts every element one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core import geometry
from ckptkit.core.errors import LimitError
from ckptkit.core.geometry import (
    drop_replicas,
    find_defect,
    flat_hulls,
    intersect,
    is_contiguous_in,
    is_row_major,
    row_major_strides,
    slabs,
)
from ckptkit.core.index import Box, Chunk, ChunkTable, Shape, Span
from tests.property.examples import examples

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def table(boxes: list[Box], dimensions: int) -> ChunkTable:
    return ChunkTable.of([Chunk(box, row) for row, box in enumerate(boxes)], dimensions)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    shape = draw(solid_shapes)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 10))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[axis]))  # 0 and all of it make empty boxes
        first, rest = list(box.sizes), list(box.sizes)
        first[axis], rest[axis] = cut, box.sizes[axis] - cut
        moved = list(box.offsets)
        moved[axis] += cut
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(moved), tuple(rest))]
    return shape, boxes


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    return Box(
        tuple(offsets),
        tuple(draw(st.integers(1, s - o)) for o, s in zip(offsets, shape, strict=True)),
    )


@given(shapes)
def test_strides_are_those_of_numpy(shape: Shape) -> None:
    if 0 not in shape:
        strides = np.zeros(shape, np.uint8).strides
        assert row_major_strides(shape) == strides
    assert is_row_major(shape, row_major_strides(shape))


@given(st.data(), solid_shapes)
def test_slabs_hold_exactly_the_span_in_order_and_are_few(
    data: st.DataObject, shape: Shape
) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbered = np.arange(total).reshape(shape)
    boxes = slabs(Span(start, stop), shape)
    held = [numbered[region(box)].ravel() for box in boxes]
    assert np.concatenate([np.zeros(0, int), *held]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_the_slab_of_a_scalar_is_the_scalar() -> None:
    assert slabs(Span(0, 1), ()) == [Box((), ())]
    assert slabs(Span(0, 0), ()) == []


@given(st.data(), solid_shapes)
def test_intersections_hold_the_elements_that_both_boxes_hold(
    data: st.DataObject, shape: Shape
) -> None:
    first, second = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    marks = np.zeros(shape, int)
    marks[region(first)] += 1
    marks[region(second)] += 1
    both = intersect(first, second)
    expected = marks == 2
    found = np.zeros(shape, bool)
    if both is not None:
        found[region(both)] = True
    assert np.array_equal(found, expected)


@given(st.data(), solid_shapes)
def test_a_box_is_contiguous_where_its_elements_follow_each_other(
    data: st.DataObject, shape: Shape
) -> None:
    box = data.draw(boxes_in(shape))
    numbers = np.arange(math.prod(shape)).reshape(shape)[region(box)].ravel()
    assert is_contiguous_in(box.sizes, shape) == bool(np.all(np.diff(numbers) == 1))


@given(tilings())
def test_a_tiling_has_no_defect(tiling: tuple[Shape, list[Box]]) -> None:
    shape, boxes = tiling
    assert find_defect(drop_replicas(table(boxes, len(shape))), shape) is None


@pytest.mark.parametrize("grid_cells", [1 << 22, 0], ids=["grid", "sweep"])
def test_what_is_missing_or_doubled_is_found_and_named(
    grid_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "_GRID_CELLS", grid_cells)

    @settings(max_examples=examples(150))
    @given(st.data(), tilings())
    def check(data: st.DataObject, tiling: tuple[Shape, list[Box]]) -> None:
        shape, boxes = tiling
        row = data.draw(st.integers(0, len(boxes) - 1))
        if data.draw(st.booleans()):
            boxes[row] = data.draw(boxes_in(shape))
        else:
            del boxes[row]
        unique = drop_replicas(table(boxes, len(shape)))
        counts = np.zeros(shape, int)
        for chunk in unique:
            assert isinstance(chunk.place, Box)
            counts[region(chunk.place)] += 1
        defect = find_defect(unique, shape)
        assert (defect is None) == bool(np.all(counts == 1))
        if defect is not None:
            assert isinstance(defect.place, Box)
            inside = counts[region(defect.place)]
            assert inside.size
            assert np.all(inside == 0) if defect.copies == 0 else np.all(inside > 1)

    check()


@given(st.lists(st.integers(0, 30), max_size=8))
def test_spans_are_covered_when_they_follow_each_other(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 31]
    spans = [Chunk(Span(a, b), 0) for a, b in itertools.pairwise(edges)]
    assert find_defect(drop_replicas(ChunkTable.of(spans[::-1], 1)), (31,)) is None
    whole = [chunk for chunk in spans if chunk.place != Span(edges[0], edges[1])]
    if edges[1] > 0:
        defect = find_defect(drop_replicas(ChunkTable.of(whole, 1)), (31,))
        assert defect is not None
        assert defect.copies == 0


@given(tilings())
def test_hulls_reach_from_the_first_to_the_last_element(tiling: tuple[Shape, list[Box]]) -> None:
    shape, boxes = tiling
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start, stop = flat_hulls(table(boxes, len(shape)), shape)
    for row, box in enumerate(boxes):
        held: Any = numbers[region(box)]
        if held.size:
            assert (start[row], stop[row]) == (held.min(), held.max() + 1)
        else:
            assert start[row] == stop[row]


def test_a_hostile_split_is_refused_instead_of_searched_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(geometry, "_GRID_CELLS", 0)
    monkeypatch.setattr(geometry, "_SWEEP_STEPS", 10)
    boxes = [Box((2 * i, 2 * j, 2 * k), (2, 2, 2)) for i, j, k in np.ndindex(6, 6, 6)]
    with pytest.raises(LimitError, match="more irregularly than any real split"):
        find_defect(drop_replicas(table(boxes, 3)), (12, 12, 12))
