"""However a tensor is cut among ranks, the merged index says so, and a lost piece is missed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.errors import FormatError, IncompleteCheckpointError
from ckptkit.formats.dcp.metadata import parse_metadata
from ckptkit.plan.layouts.dcp_metadata import make_metadata
from ckptkit.writer.merge import Merger, is_tiling
from ckptkit.writer.record import RankRecord, WrittenFile

Box = tuple[tuple[int, ...], tuple[int, ...]]
BLOB_BYTES = 10_000


@st.composite
def cut_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draws a shape, and boxes that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[axis]))
        low = tuple(at if i == axis else s for i, s in enumerate(sizes))
        high = tuple(s - at if i == axis else s for i, s in enumerate(sizes))
        begin = tuple(o + at if i == axis else o for i, o in enumerate(offsets))
        boxes += [box for box in ((offsets, low), (begin, high)) if math.prod(box[1])]
    return shape, boxes


def records(shape: tuple[int, ...], boxes: list[tuple[int, Box]], ranks: int) -> list[RankRecord]:
    made = []
    for rank in range(ranks):
        own = [box for owner, box in boxes if owner == rank]
        name = f"__{rank}_0.distcp"
        claim: Any = {"path": ["w"], "dtype": "float64", "shape": list(shape), "aliases": []}
        unit = {
            "tensors": [claim] if own else [],
            "chunks": [
                [0, list(o), list(s), 0, i * BLOB_BYTES, BLOB_BYTES] for i, (o, s) in enumerate(own)
            ],
            "objects": [],
            "data_files": [name],
            "expected": [["w"]],
        }
        file = WrittenFile(name, len(own) * BLOB_BYTES, None)
        made.append(RankRecord(rank, ranks, "a", {"": unit}, (file,)))
    return made


def merged(made: list[RankRecord]) -> Any:
    merger = Merger(len(made))
    for record in made:
        merger.add(record, where=f"{record.rank}.json")
    return merger.result().units[""]


@given(cut_boxes(), st.integers(1, 4), st.data())
def test_every_tiling_is_merged_and_parsed_back(
    cut: tuple[tuple[int, ...], list[Box]], ranks: int, data: st.DataObject
) -> None:
    shape, boxes = cut
    owned = [(data.draw(st.integers(0, ranks - 1)), box) for box in boxes]
    unit = merged(records(shape, owned, ranks))
    parsed = parse_metadata(make_metadata(unit.tensors, unit.objects), where="").tensors["w"]
    found = zip(parsed.offsets.tolist(), parsed.sizes.tolist(), parsed.file.tolist(), strict=True)
    paths = {(tuple(o), tuple(s)) for o, s, _ in found}
    assert paths == set(boxes)
    assert parsed.shape == shape


@given(cut_boxes(), st.integers(0, 100))
def test_a_lost_piece_and_a_doubled_one_are_found(
    cut: tuple[tuple[int, ...], list[Box]], number: int
) -> None:
    shape, boxes = cut
    box = boxes[number % len(boxes)]
    rest = [(0, other) for other in boxes if other != box]
    with pytest.raises(IncompleteCheckpointError):
        merged(records(shape, rest, 2))
    with pytest.raises(FormatError):
        merged(records(shape, [*rest, (0, box), (1, box)], 2))


@given(cut_boxes(), st.integers(0, 100), st.integers(0, 100), st.integers(0, 2))
def test_a_box_moved_over_another_one_is_found(
    cut: tuple[tuple[int, ...], list[Box]], number: int, step: int, axis: int
) -> None:
    shape, boxes = cut
    offsets, sizes = moved = boxes[number % len(boxes)]
    if axis >= len(shape):
        return
    room = shape[axis] - sizes[axis] + 1
    at = (offsets[axis] + step) % room
    place = (*offsets[:axis], at, *offsets[axis + 1 :])
    rest = [box for box in boxes if box != moved]
    if place == offsets or any(box[0] == place for box in rest):
        return
    assert is_tiling(shape, boxes)
    assert not is_tiling(shape, [*rest, (place, sizes)])


def windmills(number: int) -> list[Box]:
    """Squares of 3 x 3 that no straight cut goes through, one beside another."""
    boxes: list[Box] = []
    for row, column in ((3 * i, 3 * j) for i in range(number) for j in range(number)):
        for (top, left), sizes in (
            ((0, 0), (1, 2)),
            ((0, 2), (2, 1)),
            ((2, 1), (1, 2)),
            ((1, 0), (2, 1)),
            ((1, 1), (1, 1)),
        ):
            boxes.append(((row + top, column + left), sizes))
    return boxes


def brickwork(rows: int, columns: int) -> list[Box]:
    """Bricks whose joints are moved from one row to the next: only the rows can be cut apart."""
    boxes: list[Box] = []
    for row in range(rows):
        shift = (0, 2)[row % 2]
        cuts = sorted({0, *range(shift, columns * 4, 4), columns * 4})
        boxes += [((row, a), (1, b - a)) for a, b in pairwise(cuts)]
    return [((x, y), (n, m)) for (y, x), (m, n) in boxes]


def spiral(arms: int) -> list[Box]:
    """Four bars around a square, again and again: nothing can be cut off straight."""
    boxes: list[Box] = [((arms, arms), (1, 1))]
    for arm in range(1, arms + 1):
        at, side = arms - arm, 2 * arm
        boxes += [
            ((at, at), (1, side)),
            ((at, at + side), (side, 1)),
            ((at + side, at + 1), (1, side)),
            ((at + 1, at), (side, 1)),
        ]
    return boxes


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((36, 36), windmills(12)),
        ((120, 20), brickwork(20, 30)),
        ((401, 401), spiral(200)),
    ],
)
def test_an_overlap_among_many_irregular_boxes_is_found(
    shape: tuple[int, ...], boxes: list[Box]
) -> None:
    assert len(boxes) > 256
    assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)
    assert is_tiling(shape, boxes)
    for number in (0, len(boxes) // 2, len(boxes) - 1):
        offsets, sizes = boxes[number]
        moved = tuple(at - 1 if at else at + 1 for at in offsets)
        if all(at + size <= full for at, size, full in zip(moved, sizes, shape, strict=True)):
            others = [box for index, box in enumerate(boxes) if index != number]
            assert not is_tiling(shape, [*others, (moved, sizes)])
