"""Unpacking any range of a weight, whatever the layout of its numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.index import Key, Span
from ckptkit.engine import packed_numbers
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.packed_numbers import Grid, UnpackedOperand, make_table

EXPERTS, ROWS, COLUMNS = 3, 24, 40
Arrays = dict[str, NDArray[np.generic]]


def stored(name: str, dtype: str) -> StoredOperand:
    return StoredOperand("source", Key(name), BY_NAME[dtype])


def read(operand: UnpackedOperand, arrays: Arrays, span: Span) -> NDArray[np.generic]:
    """Returns a range, with copies of what is asked for and nothing else."""
    inputs = [
        arrays[demand.key].reshape(-1)[demand.place.start : demand.place.stop].copy()
        for demand in operand.demands(span)
    ]
    return operand.values(span, inputs)


def words(rng: np.random.Generator, *shape: int) -> NDArray[np.int32]:
    return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def of_bytes(rng: np.random.Generator) -> tuple[UnpackedOperand, Arrays]:
    """Blocks of rows and columns that end short."""
    arrays: Arrays = {
        "codes": rng.integers(-128, 128, (EXPERTS, ROWS, COLUMNS)).astype(np.int8),
        "scales": rng.random((EXPERTS, 4, 3), np.float32) + 1,
    }
    codes = Grid(stored("codes", "int8"), ROWS, COLUMNS, COLUMNS, "int8")
    scales = Grid(stored("scales", "float32"), 4, 3, 3)
    shape = EXPERTS, ROWS, COLUMNS
    return UnpackedOperand(codes, scales, (7, 16), shape, BY_NAME["float32"], ""), arrays


def of_pairs(rng: np.random.Generator) -> tuple[UnpackedOperand, Arrays]:
    """As GPT-OSS: columns of the packed tensor are rows of the weight."""
    arrays: Arrays = {
        "codes": rng.integers(0, 256, (EXPERTS, ROWS, COLUMNS // 2)).astype(np.uint8),
        "scales": rng.integers(100, 140, (EXPERTS, ROWS, 5)).astype(np.uint8),
    }
    codes = Grid(stored("codes", "uint8"), ROWS, COLUMNS, COLUMNS // 2, "e2m1")
    scales = Grid(stored("scales", "uint8"), ROWS, 5, 5, "e8m0")
    shape = EXPERTS, COLUMNS, ROWS
    operand = UnpackedOperand(codes, scales, (1, 8), shape, BY_NAME["float32"], "")
    return replace(operand, is_transposed=True), arrays


def of_gptq(rng: np.random.Generator) -> tuple[UnpackedOperand, Arrays]:
    """Numbers of a word below each other, and groups in no order."""
    arrays: Arrays = {
        "codes": words(rng, ROWS // 8, COLUMNS),
        "scales": rng.random((3, COLUMNS), np.float32) + 1,
        "zeros": words(rng, 3, COLUMNS // 8),
        "index": rng.integers(0, 3, ROWS).astype(np.int32),
    }
    codes = Grid(stored("codes", "int32"), ROWS, COLUMNS, COLUMNS, "uint4", packs_rows=True)
    scales = Grid(stored("scales", "float32"), 3, COLUMNS, COLUMNS)
    zeros = Grid(stored("zeros", "int32"), 3, COLUMNS, COLUMNS // 8, "uint4", added=0x11111111)
    operand = UnpackedOperand(codes, scales, (8, 1), (COLUMNS, ROWS), BY_NAME["float16"], "", zeros)
    index = stored("index", "int32")
    return replace(operand, index=index, index_axis=0, is_transposed=True), arrays


def of_awq(rng: np.random.Generator) -> tuple[UnpackedOperand, Arrays]:
    arrays: Arrays = {
        "codes": words(rng, ROWS, COLUMNS // 8),
        "scales": rng.random((3, COLUMNS), np.float32) + 1,
        "zeros": words(rng, 3, COLUMNS // 8),
    }
    codes = Grid(stored("codes", "int32"), ROWS, COLUMNS, COLUMNS // 8, "uint4", order="awq")
    scales = Grid(stored("scales", "float32"), 3, COLUMNS, COLUMNS)
    zeros = Grid(stored("zeros", "int32"), 3, COLUMNS, COLUMNS // 8, "uint4", order="awq")
    operand = UnpackedOperand(codes, scales, (8, 1), (COLUMNS, ROWS), BY_NAME["float32"], "", zeros)
    return replace(operand, is_transposed=True), arrays


@pytest.mark.parametrize("is_far", [False, True], ids=["read around", "runs"])
@pytest.mark.parametrize("make", [of_bytes, of_pairs, of_gptq, of_awq])
def test_any_range_has_the_elements_that_the_whole_has_there(
    make: object, is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_far:
        monkeypatch.setattr(packed_numbers, "_MOST_AROUND_BYTES", 0)
    assert callable(make)
    operand, arrays = make(np.random.default_rng(0))
    elements = int(np.prod(operand.shape))
    whole = read(operand, arrays, Span(0, elements))
    assert len(np.unique(whole)) > 10
    rng = np.random.default_rng(1)
    for _ in range(30):
        cuts = np.unique([0, *rng.integers(0, elements, 3), elements]).tolist()
        parts = [read(operand, arrays, Span(*pair)) for pair in pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_blocks_of_experts_are_those_of_each_expert() -> None:
    operand, arrays = of_bytes(np.random.default_rng(0))
    whole = read(operand, arrays, Span(0, EXPERTS * ROWS * COLUMNS)).reshape(operand.shape)
    for e, i, j in [(0, 0, 0), (1, 7, 16), (1, 6, 15), (2, 23, 39), (2, 14, 32)]:
        expected = arrays["codes"][e, i, j] * arrays["scales"][e, i // 7, j // 16]
        assert whole[e, i, j] == expected


@pytest.mark.parametrize(
    ("number", "byte", "expected"),
    [
        ("e2m1", 0x80, [0.0, -0.0]),
        ("e2m1 with one zero", 0x80, [0.0, 0.0]),
        ("e2m1", 0xF7, [6.0, -6.0]),
        ("uint2", 0b11_10_01_00, [0, 1, 2, 3]),
        ("int8", 0xFF, [-1]),
        ("float8_e4m3fn", 0x7E, [448]),
        ("e8m0", 0, [2.0**-127]),
    ],
)
def test_a_byte_stands_for_numbers(number: str, byte: int, expected: list[float]) -> None:
    made, wanted = make_table(number)[byte], np.array(expected, np.float32)
    assert np.array_equal(made.view(np.uint32), wanted.view(np.uint32))
