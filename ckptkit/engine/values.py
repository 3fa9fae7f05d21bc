"""Numbers about the elements of tensors: of one tensor, or of two that are compared.

Elements are measured block by block, in float64, and measures of blocks are combined in such a way
that neither the number of threads nor their order changes a result: sums are rounded once
(`math.fsum`), and norms are those of norms (`math.hypot`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.engine.casts import cast_table
from ckptkit.options import NotFinite

Array = NDArray[Any]
# Few calls for many elements, whose copy in float32 still fits the second-level cache.
BLOCK_ELEMENTS = 1 << 17
_TABLED_BYTES = 2  # float16 and one-byte types are widened with a table, which is faster
# Squares of float64 values outside are computed on a scaled copy, since they would leave its range.
_SAFE = (2.0**-500, 2.0**500)


def wide_dtype(dtype: DType) -> np.dtype[Any]:
    """Returns the type in which floats are computed: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype.name == "float64" else np.float32)


def widen(values: Array, out: Array) -> None:
    """Converts floats to a type that holds each of them exactly.

    `values`: one dimension, contiguous, of any float type. `out`: as many elements of float32, or
    of float64.
    """
    is_tabled = values.itemsize < _TABLED_BYTES or values.dtype == np.float16
    if not is_tabled or out.dtype != np.float32:
        out[:] = values
        return
    # Clipping lets numpy write without a copy of its own; no index is out of bounds.
    bits = out.view(np.uint32)
    table = cast_table(values.dtype, out.dtype)
    np.take(table, values.view(f"u{values.itemsize}"), out=bits, mode="clip")


class Measured(Struct, frozen=True, kw_only=True):
    """What is measured of elements; None stands for what no element has, or no float64 holds.

    Attributes:
        elements: How many there are; of a 4-bit weight, which is measured so, its bytes.
        norm: The Euclidean norm of those that are finite.
        minimum: The smallest of them; None for complex numbers.
        maximum: The largest of them; None for complex numbers.
        mean: Their mean; None for complex numbers.
        zeros: How many elements are zero, of either sign.
        nan: How many are not a number.
        infinite: How many are infinite.
    """

    elements: int = 0
    norm: float | None = 0.0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    zeros: int = 0
    nan: int = 0
    infinite: int = 0


STATISTICS = Measured.__struct_fields__[1:]
"""The columns of `ckptkit stats`, and of the page of a checkpoint."""
TITLES: Mapping[str, str] = {"minimum": "min", "maximum": "max", "nan": "NaN", "infinite": "inf"}
"""Of columns that are not called as the statistic."""


class Measures(Measured, frozen=True, kw_only=True):
    """The statistics of some elements of a tensor, and what those of several parts follow from."""

    total: float | None = 0.0  # the sum of those that are finite; None for complex numbers


def _known(parts: Iterable[float | None]) -> list[float]:
    return [part for part in parts if part is not None]


_JOINED: Mapping[str, Callable[[list[Any]], Any]] = {
    "elements": sum,
    "norm": lambda parts: math.hypot(*sorted(parts)),
    "total": lambda parts: None if None in parts else add_exactly(parts),
    "minimum": lambda parts: min(_known(parts), default=None),
    "maximum": lambda parts: max(_known(parts), default=None),
    "zeros": sum,
    "nan": sum,
    "infinite": sum,
}
"""From a measure of each part to that of all parts together; the mean follows from others."""
ELEMENT_COUNTS = frozenset(name for name, join in _JOINED.items() if join is sum)


def combine(parts: Sequence[Measures]) -> Measures:
    """Returns the measures of all parts together, whatever their order."""
    joined = {name: join([getattr(p, name) for p in parts]) for name, join in _JOINED.items()}
    total, count = joined["total"], joined["elements"] - joined["nan"] - joined["infinite"]
    has_mean = total is not None and count and math.isfinite(total)
    return Measures(**joined, mean=total / count if has_mean else None)


def finite(value: float | None) -> float | None:
    """Returns a number that JSON has, or None."""
    return value if value is not None and math.isfinite(value) else None


def add_exactly(values: Iterable[float]) -> float:
    """Returns the sum, rounded once; infinite where it is beyond the range of float64."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
    except ValueError:  # infinities of both signs
        return math.nan


def measure(values: Array) -> Measures:
    """Measures elements of any type; one dimension, contiguous."""
    scratch = _Scratch(min(values.size, BLOCK_ELEMENTS))
    with np.errstate(all="ignore"):
        parts = [_measure_block(values[part], scratch) for part in _blocks(values.size)]
    return combine(parts)


class _Scratch:
    """Memory for one block, which costs more to be allocated than to be filled."""

    def __init__(self, elements: int) -> None:
        self._single = np.empty(elements, np.float32)
        self._double = np.empty(elements, np.float64)
        self._flags = np.empty(elements, np.bool_)

    def widen(self, values: Array) -> Array:
        """Returns floats in float32, or in their own type if that is as wide."""
        if values.dtype in {np.dtype(np.float32), np.dtype(np.float64)}:
            return values
        wide = self._single[: values.size]
        widen(values, wide)
        return wide

    def doubles(self, values: Array) -> Array:
        """Returns a copy in float64."""
        wide = self._double[: values.size]
        wide[:] = values
        return wide

    def count_zeros(self, values: Array) -> int:
        return int(np.count_nonzero(np.equal(values, 0, out=self._flags[: values.size])))


def _blocks(elements: int) -> Iterator[slice]:
    for start in range(0, elements, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, elements))


def _measure_block(values: Array, scratch: _Scratch) -> Measures:
    kind, nan, infinite = values.dtype.kind, 0, 0
    if kind == "c":
        zeros, ends = values.size - int(np.count_nonzero(values)), None
        nan, infinite = count_nan(values), count_infinite(values)
        finite = values[np.isfinite(values)]
        doubles = finite.view(finite.real.dtype).astype(np.float64)
        peak = _peak(doubles)
    else:
        wide = values.view(np.uint8) if kind == "b" else values
        wide = wide if kind in "iub" else scratch.widen(values)
        zeros, ends = scratch.count_zeros(wide), _ends(wide)
        if kind not in "iub" and not all(map(math.isfinite, ends)):  # NaN where any element is
            nan, infinite = count_nan(wide), count_infinite(wide)
            wide = wide[np.isfinite(wide)]
            ends = _ends(wide) if wide.size else None
        doubles, peak = scratch.doubles(wide), 0.0 if ends is None else max(ends[1], -ends[0])
    norm, total = _norm_and_total(doubles, float(peak))
    return Measures(
        elements=values.size,
        norm=norm,
        total=None if kind == "c" else total,
        minimum=None if ends is None else ends[0],
        maximum=None if ends is None else ends[1],
        zeros=zeros,
        nan=nan,
        infinite=infinite,
    )


def _ends(values: Array) -> tuple[float, float]:
    """Returns the smallest and the largest element: integers of integers; minus zero is zero."""
    return values.min().item() + 0, values.max().item() + 0


def _peak(values: Array) -> float:
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def _norm_and_total(values: Array, peak: float) -> tuple[float, float]:
    """Returns the norm and the sum of float64 values, which are overwritten.

    `peak` is the largest magnitude of them.
    """
    total = float(values.sum())
    exponent = 0
    if peak and not _SAFE[0] < peak < _SAFE[1]:
        exponent = math.frexp(peak)[1]
        np.ldexp(values, -exponent, out=values)
    np.multiply(values, values, out=values)
    root = math.sqrt(float(values.sum()))
    try:
        return math.ldexp(root, exponent), total
    except OverflowError:
        return math.inf, total


def _norm_of(values: Array) -> float:
    return _norm_and_total(values, _peak(values))[0]


def count_nan(values: Array) -> int:
    return int(np.count_nonzero(np.isnan(values)))


def count_infinite(values: Array) -> int:
    """Counts infinite elements; of a complex one that is not NaN, either part may be."""
    return int(np.count_nonzero(np.isinf(values) & ~np.isnan(values)))


def count_not_finite(values: Array, kinds: Collection[NotFinite]) -> tuple[int, int]:
    """Counts NaN and infinities among floats or complex numbers, each only if it is asked for.

    `values`: one dimension, contiguous. `kinds`: `nan`, `inf`, or both. Returns how many elements
    are NaN, and how many infinite.
    """
    nan = infinite = 0
    for part in _blocks(values.size):
        wide = values[part]
        if wide.dtype.kind == "V":  # a type of ml_dtypes
            wide = np.empty(wide.size, np.float32)
            widen(values[part], wide)
        if bool(np.isfinite(wide).all()):
            continue
        nan += count_nan(wide) if "nan" in kinds else 0
        infinite += count_infinite(wide) if "inf" in kinds else 0
    return nan, infinite


def describe_not_finite(nan: int, infinite: int, kinds: Collection[NotFinite]) -> str:
    """Returns the counts of the wanted kinds in words, such as `3 NaN and 1 infinite`."""
    counts = {"nan": f"{nan:,} NaN", "inf": f"{infinite:,} infinite"}
    found = {"nan": nan, "inf": infinite}
    return " and ".join(text for kind, text in counts.items() if kind in kinds and found[kind])


class Gaps(Struct, frozen=True):
    """What was measured of the differences between elements of two tensors."""

    elements: int = 0  # how many pairs there are
    unequal: int = 0  # in how many of them the values differ; two NaN are equal, and two zeros
    beyond: int = 0  # in how many they differ by more than a tolerance
    largest: float = 0.0  # the largest absolute difference of two finite values
    # The largest difference as a part of the second value, where that is not zero.
    relative: float = 0.0
    dot: float = 0.0  # the sum of the products of all pairs of finite values
    norms: tuple[float, float] = (0.0, 0.0)  # the norms of the values on both sides in these pairs
    # In how many one value is finite and the other is not, or both are not and differ.
    lone: int = 0
    change: float = 0.0  # the norm of the differences of all pairs of finite values

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both tensors; None where one of them is zero."""
        product = self.norms[0] * self.norms[1]
        if not product or not math.isfinite(product):
            return None
        return max(-1.0, min(1.0, self.dot / product))


def combine_gaps(parts: Sequence[Gaps]) -> Gaps:
    """Returns the gaps of all parts together, whatever their order."""
    return Gaps(
        elements=sum(part.elements for part in parts),
        unequal=sum(part.unequal for part in parts),
        beyond=sum(part.beyond for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        relative=max((part.relative for part in parts), default=0.0),
        dot=add_exactly(part.dot for part in parts),
        norms=(
            math.hypot(*sorted(part.norms[0] for part in parts)),
            math.hypot(*sorted(part.norms[1] for part in parts)),
        ),
        lone=sum(part.lone for part in parts),
        change=math.hypot(*sorted(part.change for part in parts)),
    )


def measure_gaps(first: Array, second: Array, *, rtol: float, atol: float) -> Gaps:
    """Compares elements by their values, whatever their types.

    `second`: as many elements. `rtol`: how much of the second value a difference may be. `atol`:
    how much it may be in addition.
    """
    with np.errstate(all="ignore"):
        parts = [
            _measure_gaps_of_block(first[part], second[part], rtol, atol)
            for part in _blocks(first.size)
        ]
    return combine_gaps(parts)


def _measure_gaps_of_block(first: Array, second: Array, rtol: float, atol: float) -> Gaps:
    sides = [_in_doubles(first), _in_doubles(second)]
    gaps, is_equal = np.abs(sides[0] - sides[1]), sides[0] == sides[1]
    kinds = {first.dtype.kind, second.dtype.kind}
    if kinds <= {"i", "u", "b"} and np.result_type(first, second).kind != "f":
        gaps, is_equal = _integer_gaps(first, second)
    is_equal |= np.isnan(sides[0]) & np.isnan(sides[1])
    is_finite = np.isfinite(sides[0]) & np.isfinite(sides[1])
    lone = int(np.count_nonzero(~is_finite & ~is_equal))
    if not is_finite.all():
        is_equal, gaps = is_equal[is_finite], gaps[is_finite]
        sides = [side[is_finite] for side in sides]
    if not is_finite.any():
        return Gaps(first.size, lone, lone, lone=lone)
    sizes = np.abs(sides[1])
    is_beyond = ~is_equal & ~(gaps <= atol + rtol * sizes)
    is_other = sizes > 0
    relative = float((gaps[is_other] / sizes[is_other]).max()) if is_other.any() else 0.0
    dot = float(np.sum(sides[0] * np.conj(sides[1])).real)
    parts = [side.view(np.float64).copy() for side in sides]
    return Gaps(
        elements=first.size,
        unequal=lone + int(np.count_nonzero(~is_equal)),
        beyond=lone + int(np.count_nonzero(is_beyond)),
        largest=float(gaps.max()),
        relative=relative,
        dot=dot,
        norms=(_norm_of(parts[0]), _norm_of(parts[1])),
        lone=lone,
        change=_norm_of(gaps),
    )


def _integer_gaps(first: Array, second: Array) -> tuple[Array, Array]:
    """Returns the absolute differences in float64, each rounded once, and where there is none."""
    wide = np.uint64 if np.result_type(first, second).kind == "u" else np.int64
    sides = first.astype(wide), second.astype(wide)
    one, other = (side.view(np.uint64) for side in sides)  # whose differences do not overflow
    gaps = np.where(sides[0] > sides[1], one - other, other - one)
    return gaps.astype(np.float64), gaps == 0


def _in_doubles(values: Array) -> Array:
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    if values.dtype.kind in "iub":
        return values.astype(np.float64)
    wide = np.empty(
        values.size, np.float64 if values.itemsize == np.dtype(float).itemsize else "f4"
    )
    widen(values, wide)
    return wide.astype(np.float64)
