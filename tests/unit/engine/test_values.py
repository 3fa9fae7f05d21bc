"""Measures of elements against numpy and exact arithmetic, and their independence of the cut."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME
from ckptkit.engine import values
from ckptkit.engine.values import (
    BLOCK_ELEMENTS,
    ELEMENT_COUNTS,
    Measures,
    combine,
    count_not_finite,
    measure,
    measure_gaps,
    wide_dtype,
    widen,
)

FLOATS = [dtype for dtype in BY_NAME.values() if dtype.kind == "float"]
RANDOM = np.random.default_rng(17)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_widening_keeps_every_value_of_small_types(dtype: Any) -> None:
    kind = numpy_dtype(dtype)
    bits = RANDOM.integers(0, 256, 70_000 * dtype.itemsize, np.uint8)
    values = bits.view(kind)
    wide = np.empty(values.size, wide_dtype(dtype))
    with np.errstate(all="ignore"):
        widen(values, wide)
        back = wide.astype(kind)
        numbers = ~np.isnan(wide)
        assert np.array_equal(np.isnan(values), ~numbers)
    raw = f"u{dtype.itemsize}"
    assert np.array_equal(back.view(raw)[numbers], values.view(raw)[numbers])


@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=lambda dtype: dtype.name)
def test_the_measures_of_random_bits_are_those_of_their_values(dtype: Any) -> None:
    bits = RANDOM.integers(0, 256, 3_000 * dtype.itemsize, np.uint8)
    values = (bits % 2 if dtype.kind == "bool" else bits).view(numpy_dtype(dtype))
    with np.errstate(all="ignore"):
        exact = values.astype(np.complex128 if dtype.kind == "complex" else np.longdouble)
        finite = exact[np.isfinite(exact)]
        found = measure(values)
        assert found.elements == 3_000
        assert found.nan == np.count_nonzero(np.isnan(exact))
        assert found.infinite == np.count_nonzero(np.isinf(exact) & ~np.isnan(exact))
        assert found.zeros == np.count_nonzero(exact == 0)
    if dtype.kind == "complex":
        assert found.minimum is found.maximum is found.mean is None
        return
    ends = finite.min(), finite.max()
    # numpy 1 compares a whole number with an extended one as doubles.
    whole = isinstance(found.minimum, int)
    assert (found.minimum, found.maximum) == (tuple(map(int, ends)) if whole else ends)
    assert found.norm == pytest.approx(float(np.sqrt(np.sum(finite**2))), rel=1e-12)
    size = float(np.abs(finite).sum())
    if math.isfinite(size):
        assert found.mean is not None
        assert abs(found.mean - float(finite.mean())) <= 1e-12 * size / len(finite)


def test_a_leaf_that_is_cut_elsewhere_or_measured_in_another_order_has_the_same_measures() -> None:
    values = RANDOM.standard_normal(5 * BLOCK_ELEMENTS).astype(ml_dtypes.bfloat16)
    parts = [measure(part) for part in np.split(values, 5)]
    assert combine(parts) == combine(parts[::-1]) == measure(values)


def test_each_measure_of_parts_is_joined_or_follows_from_others() -> None:
    assert {*values._JOINED, "mean"} == {*Measures.__struct_fields__}


def test_squares_that_leave_the_range_of_float64_do_not_spoil_a_norm() -> None:
    assert measure(np.full(4, 1e300)).norm == pytest.approx(2e300)
    assert measure(np.full(4, 1e-300)).norm == pytest.approx(2e-300)
    assert measure(np.full(4, 5e-324)).norm == 1e-323
    largest = measure(np.full(4, 1.7e308))
    assert largest.norm == math.inf
    assert largest.mean is None
    assert largest.maximum == 1.7e308


def test_what_has_no_finite_element_has_no_range_and_no_mean() -> None:
    found = measure(np.array([np.nan, np.inf, -np.inf], np.float32))
    assert (found.minimum, found.maximum, found.mean) == (None, None, None)
    assert (found.norm, found.nan, found.infinite) == (0.0, 1, 2)
    empty = measure(np.zeros(0, np.float16))
    assert (empty.elements, empty.norm, empty.mean) == (0, 0.0, None)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float16", "complex64", "float64"])
def test_only_the_kinds_that_are_asked_for_are_counted(name: str) -> None:
    kind = numpy_dtype(BY_NAME[name])
    values = np.ones(BLOCK_ELEMENTS + 9, kind)
    values[[3, BLOCK_ELEMENTS + 1]] = np.nan
    has_infinity = name != "float8_e4m3fn"
    if has_infinity:
        values[7] = -np.inf
    assert count_not_finite(values, ["nan"]) == (2, 0)
    assert count_not_finite(values, ["inf"]) == (0, int(has_infinity))
    assert count_not_finite(values[8:BLOCK_ELEMENTS], ("nan", "inf")) == (0, 0)


SIDES = hnp.arrays(np.float32, 6, elements=st.floats(width=32, allow_nan=True))


@given(SIDES, SIDES, st.sampled_from([0, 1e-3, 0.5]), st.sampled_from([0, 1e-3, 10]))
def test_a_tolerance_means_what_it_means_for_numpy(
    first: NDArray[Any], second: NDArray[Any], rtol: float, atol: float
) -> None:
    gaps = measure_gaps(first, second, rtol=rtol, atol=atol)
    sides = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(all="ignore"):
        close = np.isclose(*sides, rtol=rtol, atol=atol, equal_nan=True)
    assert gaps.beyond == np.count_nonzero(~close)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    assert gaps.unequal == np.count_nonzero(~same)


def test_gaps_between_types_are_exact() -> None:
    values = RANDOM.standard_normal(BLOCK_ELEMENTS + 5).astype(np.float32)
    rounded = values.astype(ml_dtypes.bfloat16)
    gaps = measure_gaps(rounded, values, rtol=2**-8, atol=0.0)
    exact = rounded.astype(np.float64) - values  # both are short, so that this is not rounded
    assert gaps.largest == np.abs(exact).max()
    assert gaps.beyond == 0
    assert 0.9999 < (gaps.cosine or 0) < 1
    assert measure_gaps(rounded, rounded.astype(np.float32), rtol=0, atol=0).unequal == 0


def test_integers_beyond_the_precision_of_float64_still_differ() -> None:
    first = np.array([2**62, 5], np.int64)
    gaps = measure_gaps(first, first + 1, rtol=0, atol=0)
    assert (gaps.unequal, gaps.beyond) == (2, 2)


INTEGERS = [np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64, np.bool_]


def integers(kinds: st.DataObject) -> NDArray[Any]:
    kind = kinds.draw(st.sampled_from(INTEGERS))
    bounds = (0, 1) if kind is np.bool_ else (np.iinfo(kind).min, np.iinfo(kind).max)
    near = st.sampled_from([*bounds, bounds[1] // 2, bounds[1] // 2 + 1, bounds[1] - 1])
    elements = near | st.integers(int(bounds[0]), int(bounds[1]))
    return np.array(kinds.draw(st.lists(elements, min_size=5, max_size=5)), kind)


@given(st.data(), st.sampled_from([0, 1, 10, 2**61]), st.sampled_from([0, 0.5]))
def test_integers_are_compared_exactly(kinds: st.DataObject, atol: int, rtol: float) -> None:
    first, second = integers(kinds), integers(kinds)
    if np.result_type(first, second).kind == "f":
        return  # no type of numpy holds both
    gaps = measure_gaps(first, second, rtol=rtol, atol=atol)
    pairs = [(int(a), int(b)) for a, b in zip(first, second, strict=True)]
    assert gaps.unequal == sum(a != b for a, b in pairs)
    allowed = [float(abs(a - b)) <= atol + rtol * float(abs(b)) for a, b in pairs]
    assert gaps.beyond == len(pairs) - sum(allowed)
    assert gaps.largest == float(max(abs(a - b) for a, b in pairs))


def test_nothing_has_an_angle_to_zero() -> None:
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert measure_gaps(zeros, ones, rtol=0, atol=0).cosine is None
    assert measure_gaps(-ones, ones, rtol=0, atol=0).cosine == -1.0
    assert measure_gaps(ones, zeros, rtol=9, atol=0).relative == 0.0


def test_every_count_of_the_parts_is_in_their_sum() -> None:
    part = Measures(**dict.fromkeys(ELEMENT_COUNTS, 3))
    assert {"elements", "zeros", "nan", "infinite"} <= ELEMENT_COUNTS
    assert {name: getattr(combine([part, part]), name) for name in ELEMENT_COUNTS} == dict.fromkeys(
        ELEMENT_COUNTS, 6
    )
