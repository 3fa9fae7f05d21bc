"""Proof of coverage, in words that name the tensor, the rows and the file."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import (
    IncompleteCheckpointError,
    InputError,
    LimitError,
    MissingFileError,
    TruncatedFileError,
)
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    FileRef,
    Fqn,
    Key,
    Problem,
    Record,
    RecordTable,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.plan.coverage import (
    describe,
    error_of,
    find_problems_by_key,
)

Place = Box | Span


def index_of(
    shape: Shape, *places: Place, sizes: tuple[int, ...] = (), problems: tuple[Problem, ...] = ()
) -> TensorIndex:
    """One tensor, each chunk in a file of its own, 100 bytes from byte 0 on."""
    files = [FileRef(f"{i}.distcp", 100, "") for i in range(len(places))]
    for number, size in enumerate(sizes):
        files[number] = FileRef(files[number].path, size, "")
    chunks = [Chunk(place, record=i) for i, place in enumerate(places)]
    entry = TensorEntry(
        key=Key("model.w"),
        key_path=("model", "w"),
        name=Fqn("w"),
        tree="model",
        part="model",
        dtype=dtype_named("float32"),
        shape=shape,
        chunks=ChunkTable.of(chunks, len(shape)),
    )
    return TensorIndex(
        format="test",
        files=files,
        records=RecordTable.of([Record(i, 0, 100) for i in range(len(places))]),
        tensors={entry.key: entry},
        problems=problems,
    )


def problems_of(index: TensorIndex) -> list[Problem]:
    return [problem for _, problem in find_problems_by_key(index, index.tensors.values())]


def rows(start: int, stop: int, columns: int = 4) -> Box:
    return Box((start, 0), (stop - start, columns))


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((4, 4), [rows(0, 2), rows(2, 4)]),
        ((4, 4), [Box((0, 0), (4, 1)), Box((0, 1), (4, 3))]),
        ((4, 4), [Span(0, 7), Span(7, 16)]),
        ((4, 4), [rows(0, 4), rows(0, 4)]),
        ((4, 4), [rows(0, 4), Box((4, 0), (0, 4))]),
        ((0, 4), []),
        ((0, 4), [Box((0, 0), (0, 4))]),
        ((), [Box((), ())]),
        ((), [Span(0, 1)]),
    ],
)
def test_a_tensor_that_is_stored_once_has_no_problem(shape: Shape, places: list[Place]) -> None:
    assert problems_of(index_of(shape, *places)) == []


@pytest.mark.parametrize(
    ("shape", "places", "told"),
    [
        ((8, 4), [rows(0, 3), rows(5, 8)], "rows [3, 5), columns [0, 4) of shape [8, 4] are in no"),
        ((8, 4), [rows(0, 3)], "rows [3, 8)"),
        ((8, 4), [rows(0, 5), rows(4, 8)], "rows [4, 5), columns [0, 4)"),
        ((8, 4), [rows(0, 5), rows(4, 8)], "are stored 2 times, in 0.distcp, 1.distcp"),
        ((4, 4), [Box((0, 0), (4, 2))], "columns [2, 4) of shape [4, 4] are in no file"),
        ((4, 4), [Span(0, 7), Span(9, 16)], "elements [7, 9)"),
        ((2, 2, 2), [Box((0, 0, 0), (2, 2, 1))], "dimension 2 [1, 2)"),
        ((3,), [], "rows [0, 3)"),
        ((), [], "elements [0, 1) of shape [] are in no file"),
    ],
)
def test_a_hole_or_an_overlap_is_named(shape: Shape, places: list[Place], told: str) -> None:
    (problem,) = problems_of(index_of(shape, *places))
    assert (problem.code, problem.where) == ("incomplete-checkpoint", "tensor 'model.w'")
    assert told in problem.message


def test_a_missing_file_comes_before_a_hole() -> None:
    (problem,) = problems_of(index_of((8, 4), rows(0, 3), rows(5, 8), sizes=(100, -1)))
    assert (problem.code, problem.where) == ("missing-file", "1.distcp")
    assert "rows [5, 8), columns [0, 4) of 'model.w'" in problem.message


def test_a_short_file_is_named_with_both_ends() -> None:
    (problem,) = problems_of(index_of((8, 4), rows(0, 8), sizes=(1,)))
    assert (problem.code, problem.where) == ("truncated-file", "0.distcp")
    assert "end at byte 100 but the file ends at byte 1" in problem.message


def test_a_missing_file_that_holds_only_empty_chunks_does_not_matter() -> None:
    assert problems_of(index_of((8, 4), rows(0, 8), rows(8, 8), sizes=(100, -1))) == []


def test_what_the_reader_found_comes_first() -> None:
    named = Problem("unsupported", "model.w", "is stored in knots")
    assert problems_of(index_of((8, 4), rows(0, 3), problems=(named,))) == [named]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("missing-file", MissingFileError),
        ("truncated-file", TruncatedFileError),
        ("incomplete-checkpoint", IncompleteCheckpointError),
        ("too-large", LimitError),
        ("something-new", InputError),
    ],
)
def test_a_problem_becomes_the_error_of_its_code(code: str, kind: type[InputError]) -> None:
    error = error_of(Problem(code, "a file", "is odd"), "here")
    assert (type(error), error.where, error.message) == (kind, "here", "a file: is odd")


def test_thousands_of_chunks_are_proven_at_once() -> None:
    count = 4_096
    starts = np.arange(count)[:, None]
    table = ChunkTable(starts, np.ones_like(starts), np.arange(count))
    entry = TensorEntry(
        Key("w"), ("w",), Fqn("w"), "", "model", dtype_named("int8"), (count,), table
    )
    index = TensorIndex(
        "test",
        [FileRef("f", count, "")],
        RecordTable(np.zeros(count, np.int64), starts[:, 0], starts[:, 0] + 1),
        {entry.key: entry},
    )
    assert problems_of(index) == []


def shattered(count: int, dimensions: int, size: int) -> list[Box]:
    """Boxes that tile a cube, from cuts through single boxes at random places."""
    chance = random.Random(0)  # noqa: S311
    boxes = [Box((0,) * dimensions, (size,) * dimensions)]
    while len(boxes) < count:
        box = boxes.pop(chance.randrange(len(boxes)))
        axis = chance.randrange(dimensions)
        cut = chance.randrange(box.sizes[axis])
        offsets, low, high = list(box.offsets), list(box.sizes), list(box.sizes)
        offsets[axis] += cut
        low[axis], high[axis] = cut, box.sizes[axis] - cut
        boxes.append(Box(tuple(offsets), tuple(high)))
        if cut:
            boxes.append(Box(box.offsets, tuple(low)))
    return boxes


def test_a_tensor_that_is_shattered_is_a_problem_with_its_name_and_soon_found() -> None:
    index = index_of((4_096,) * 5, *shattered(500, 5, 4_096))
    before = time.process_time()
    (problem,) = problems_of(index)
    assert time.process_time() - before < 5
    assert (problem.code, problem.where) == ("too-large", "tensor 'model.w'")
    assert "irregular" in problem.message


def test_problems_come_with_the_key_of_their_tensor() -> None:
    index = index_of((8, 4), rows(0, 3))
    entries = index.tensors.values()
    assert list(find_problems_by_key(index, entries)) == [(Key("model.w"), problems_of(index)[0])]


def test_places_are_described_as_people_say_them() -> None:
    assert describe(Span(1_000, 2_000)) == "elements [1,000, 2,000)"
    assert describe(Box((3,), (2,))) == "rows [3, 5)"
    assert describe(Box((), ())) == "the value"
