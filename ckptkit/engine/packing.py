"""Packing: the numbers and the scales of weights, each a kernel over the same dense weight.

A scale is that of the largest magnitude in its block, so a kernel reads whole blocks, and for that
whole rows. What forms there are is said by `ckptkit.plan.packed_forms`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.errors import RefusedError
from ckptkit.core.geometry import cut_span
from ckptkit.core.index import Span
from ckptkit.engine.kernels import ConstantKernel
from ckptkit.engine.packed_numbers import Floats, make_table
from ckptkit.plan.packed_forms import Number, PackedForm
from ckptkit.plan.plan import Demand, Kernel, Reading, TensorSpec

Part = Literal["numbers", "scales", "total"]
_READ_ELEMENTS = 1 << 20  # of the dense weight for one block of scales
_MEASURED_ELEMENTS = 1 << 16  # that stay in a processor's cache
# The least and the greatest number of each format. Half of their distance is the greatest
# magnitude that a scale maps to.
_LIMITS: dict[Number, tuple[float, float]] = {
    "float8_e4m3fn": (-448, 448),
    "int8": (-128, 127),
    "int4": (-8, 7),
    "e2m1": (-6, 6),
}
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of e2m1
_LARGEST_SCALE = 448  # of float8_e4m3fn
_LEAST_SCALE = np.float32(0.125)  # what compressed-tensors stores of those for 0
_FACTOR_LIMIT = np.finfo(np.float32).max
_EPSILON = np.float32(2**-7)  # of bfloat16: the scale of a block of zeros in compressed-tensors
_HELD = 8  # numbers of four bits in a word


class PackingLoss:
    """How far the numbers of a packed weight are from those that were packed; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._largest = self._distance = 0.0

    def add(self, given: Floats, restored: Floats) -> None:
        largest = float(np.abs(given).max(initial=0))
        restored -= given
        distance = float(np.abs(restored, out=restored).max(initial=0))
        with self._lock:
            self._largest = max(self._largest, largest)
            self._distance = max(self._distance, distance)

    @property
    def relative(self) -> float:
        """The largest difference, divided by the largest magnitude that was packed."""
        return self._distance / self._largest if self._largest else self._distance


class PackingKernel(Kernel, Struct, frozen=True):
    """Makes the numbers of a weight, its scales, or the one scale of all of it."""

    form: PackedForm
    weight: TensorSpec
    body: Kernel  # of the weight
    part: Part
    total: float | None = None  # the one scale, once it was computed
    loss: PackingLoss | None = None  # what is measured of the numbers as they are packed

    @property
    def is_ready(self) -> bool:
        return self.body.is_ready and not (self.form.scheme.total and self.total is None)

    def prepare(self, _out: TensorSpec, reading: Reading) -> Kernel:
        made = replace(self, body=self.body.prepare(self.weight, reading))
        if not self.form.scheme.total:
            return made
        total = made.find_total(reading)
        if self.part == "total":
            return ConstantKernel(np.array([total], np.float32))
        return replace(made, total=total)

    def find_total(self, reading: Reading) -> float:
        """Reads a whole weight, and returns the scale that it has besides those of its blocks."""
        rows, columns = self.weight.shape
        largest = 0.0
        for part in cut_span(Span(0, rows), max(1, _READ_ELEMENTS // columns)):
            demands = self.body.demands(self.weight, self._place(part))
            values = self._read(part, [reading.read(demand) for demand in demands])
            largest = max(largest, float(self._find_largest(values, part).max()))
        tiny = np.float32(2.0**-126)
        with np.errstate(over="ignore"):
            inverse = _rounded(np.float32(1) / np.maximum(np.float32(largest), tiny))
            total = float(_rounded(inverse * np.float32(_LARGEST_SCALE * 6)))
        return total if np.isfinite(total) else 1.0

    def most_elements(self, out: TensorSpec) -> int:
        """Returns how many elements are made at a time."""
        high = self.form.blocks[0] if self.part == "scales" else 1
        # What is measured takes memory of its own, and comes of merges, which do too.
        most = _READ_ELEMENTS if self.loss is None else _READ_ELEMENTS // 2
        rows = max(1, most // (high * self.weight.shape[1]))
        return rows * out.shape[-1]

    def grain_elements(self, out: TensorSpec) -> int:
        return out.shape[-1]

    def _rows(self, out: TensorSpec, block: Span) -> Span:
        """Returns the rows of the weight whose blocks an output's block is made from."""
        high, rows = self.form.blocks[0], self.weight.shape[0]
        first, last = block.start // out.shape[1], -(-block.stop // out.shape[1])
        if self.part == "numbers":
            first, last = first // high, -(-last // high)
        return Span(first * high, min(last * high, rows))

    def _place(self, rows: Span) -> Span:
        columns = self.weight.shape[1]
        return Span(rows.start * columns, rows.stop * columns)

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return self.body.demands(self.weight, self._place(self._rows(out, block)))

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block."""
        rows = self._rows(out, block)
        values = self._read(rows, inputs)
        scales, factors = self._find_scales(self._find_largest(values, rows))
        high = self.form.blocks[0]
        if self.part == "scales":
            first, made = rows.start // high * out.shape[1], scales.astype(numpy_dtype(out.dtype))
        else:
            # In the type that they were read in, which is smaller.
            given = None if self.loss is None else values.astype(numpy_dtype(self.weight.dtype))
            first, made = rows.start * out.shape[1], self._find_numbers(values, factors)
            if given is not None:
                self._measure(given, made, scales if self.form.scale == "float32" else factors)
        target[...] = made.reshape(-1)[block.start - first : block.stop - first]

    def _read(self, rows: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        place = self._place(rows)
        stored = np.empty(place.stop - place.start, numpy_dtype(self.weight.dtype))
        self.body.run(self.weight, place, inputs, stored)
        values: Floats = stored.astype(np.float32).reshape(-1, self.weight.shape[1])
        return values

    def _find_largest(self, values: Floats, rows: Span) -> Floats:
        """Returns the greatest magnitude of each block; refuses what is no number."""
        high, wide = self.form.blocks
        columns = range(0, values.shape[1], wide or values.shape[1])
        largest = np.maximum.reduceat(np.abs(values), columns, axis=1)
        if high > 1:
            largest = np.maximum.reduceat(largest, range(0, len(values), high), axis=0)
        if not np.isfinite(largest).all():
            place = np.argwhere(~np.isfinite(values))[0]
            found, where = values[tuple(place)], [rows.start + int(place[0]), int(place[1])]
            raise RefusedError(
                f"value {found:g} at {where} gives its block no scale",
                where=f"tensor {self.weight.name!r}",
                hint="take an earlier checkpoint; `ckptkit stats` counts such values",
            )
        made: Floats = largest
        return made

    def _find_scales(self, largest: Floats) -> tuple[Floats, Floats]:
        """Returns the scales as they are stored, and what numbers are made with."""
        low, high = _LIMITS[self.form.number]
        if self.form.scale == "float32":  # as Transformers: multiplied by the inverse
            with np.errstate(over="ignore", divide="ignore"):
                factors = np.float32(1) / largest * np.float32(high)
            factors[factors > _FACTOR_LIMIT] = 1  # where all is zero, or nearly
            return np.float32(1) / factors, factors
        if self.form.scale == "uint8":
            return _find_exponents(largest)
        scales = _rounded(largest / np.float32((high - low) / 2))
        if self.total is not None:
            total = np.float32(self.total)
            scales = np.minimum(scales * total, _LARGEST_SCALE)
            scales = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            scales[scales == 0] = _LEAST_SCALE
            return scales, scales / total
        scales[scales == 0] = _EPSILON
        return scales, scales

    def _find_numbers(self, values: Floats, factors: Floats) -> NDArray[Any]:
        low, high = _LIMITS[self.form.number]
        tall, wide = self.form.blocks
        for number, row in enumerate(factors):
            band = values[number * tall : (number + 1) * tall]
            if len(row) > 1:
                row = np.repeat(row, wide)[: values.shape[1]]  # noqa: PLW2901
            if self.form.scale == "float32":
                band *= row
            else:
                band /= row
        if self.form.scale in {"bfloat16", "uint8"}:
            values = _rounded(values)
        if self.form.scale == "bfloat16":
            values += 0  # as the library adds a zero point: -0 becomes 0
        np.clip(values, low, high, out=values)
        if self.form.number == "e2m1":
            return _join_pairs(_round_to_e2m1(values))
        if self.form.number == "float8_e4m3fn":
            return values.astype(ml_dtypes.float8_e4m3fn)
        whole = np.rint(values, out=values).astype(np.int8)
        if self.form.number == "int8":
            return whole
        whole -= np.int8(low)
        held = np.zeros((len(whole), -(-whole.shape[1] // _HELD) * _HELD), np.uint8)
        held[:, : whole.shape[1]] = whole.view(np.uint8)
        return _join_pairs(held).view("<i4")

    def _measure(self, given: NDArray[Any], numbers: NDArray[Any], factors: Floats) -> None:
        """Compares packed numbers with those that were packed, a few rows at a time."""
        high = self.form.blocks[0]
        step = high * max(1, _MEASURED_ELEMENTS // (high * given.shape[1]))
        for start in range(0, len(given), step):
            rows = slice(start, start + step)
            own = factors[start // high : -(-(start + step) // high)]
            assert self.loss is not None  # noqa: S101  of what is measured
            self.loss.add(given[rows].astype(np.float32), self._restore(numbers[rows], own))

    def _restore(self, numbers: NDArray[Any], factors: Floats) -> Floats:
        """Returns what packed numbers stand for."""
        number = "uint4" if self.form.number == "int4" else self.form.number
        table, rows = make_table(number), len(numbers)
        values = table[numbers.view(np.uint8)].reshape(rows, -1)
        if self.form.number == "int4":
            values += np.float32(_LIMITS["int4"][0])
        high, wide = self.form.blocks
        spread = np.repeat(factors, high, axis=0)[:rows]
        if wide:
            spread = np.repeat(spread, wide, axis=1)[:, : self.weight.shape[1]]
        made: Floats = values[:, : self.weight.shape[1]] * spread
        return made


def _join_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Puts two numbers of four bits into each byte, the first one low."""
    made: NDArray[np.uint8] = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return made


def _round_to_e2m1(values: Floats) -> NDArray[np.uint8]:
    """Rounds to nearest, ties to even."""
    magnitudes, codes = np.abs(values), np.zeros(values.shape, np.uint8)
    for number, tie in enumerate(_TIES):
        codes += magnitudes >= tie if number % 2 else magnitudes > tie
    return codes | (values < 0).astype(np.uint8) << np.uint8(3)


def _find_exponents(largest: Floats) -> tuple[Floats, Floats]:
    """Returns the powers of two of blocks, stored as exponents, and as numbers.

    Magnitudes are rounded to powers of two; 7/4 and more become 2.
    """
    bits = largest.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int32)
    exponents = np.maximum(((bits + 32) >> 7) - 2, 0)
    scales: Floats = np.ldexp(np.float32(1), exponents - 127)
    return exponents.astype(np.float32), scales


def _rounded(values: Floats) -> Floats:
    """Rounds to bfloat16, as each operation of a library that computes in it does."""
    made: Floats = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return made
