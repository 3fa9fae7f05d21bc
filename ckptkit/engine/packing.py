"""Packing: the numbers and the scales of weights, each a kernel over the same dense weight.

A scale is that of the largest magnitude in its block, so a kernel reads whole blocks, and for that
whole rows. The largest magnitudes that one tensor of a weight needed are kept for the others, while
there is room, so that a weight is mostly read once. What forms there are is said by
`ckptkit.plan.packed_forms`.

Magnitudes of bfloat16 are ordered as their bits are, so the largest is found among integers. The
quotient of a number and its scale is made a bfloat16, whose bits are the place of the packed number
in a table of 65,536. Some libraries round the quotient to bfloat16, and so does the kernel. For the
others it takes the bfloat16 that rounds to the same packed number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
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
from ckptkit.engine.kernels import ComputedOperand, ConstantKernel, StoredOperand
from ckptkit.engine.packed_numbers import Floats, make_table
from ckptkit.plan.packed_forms import Number, PackedForm
from ckptkit.plan.plan import Demand, Kernel, Reading, TensorSpec

Part = Literal["numbers", "scales", "total"]
Stored = NDArray[np.uint16]  # the bits of bfloat16
Codes = NDArray[np.uint8]
_READ_ELEMENTS = 1 << 22  # of the dense weight for one block
_MERGED_ELEMENTS = 1 << 19  # of one that a merge computes, which takes memory too
_BAND_ELEMENTS = 1 << 17  # that are computed at once: they fit into the processor's cache
# The least and the greatest number of each format. Half of their distance is the greatest
# magnitude that a scale maps to.
_LIMITS: dict[Number, tuple[float, float]] = {
    "float8_e4m3fn": (-448, 448),
    "int8": (-128, 127),
    "int4": (-8, 7),
    "e2m1": (-6, 6),
}
_FOUR_BITS = frozenset({"int4", "e2m1"})  # a byte holds two of these
_LARGEST_SCALE = 448  # of float8_e4m3fn
_LEAST_SCALE = np.float32(0.125)  # what compressed-tensors stores of those for 0
_FACTOR_LIMIT = np.finfo(np.float32).max
_EPSILON = np.float32(2**-7)  # of bfloat16: the scale of a block of zeros in compressed-tensors
_HUGE = 2.0**126  # no scale of smaller numbers stands for infinity
_MAGNITUDE, _INFINITE = 0x7FFF, 0x7F80  # bits of bfloat16
_UNKNOWN = 0xFFFF  # in place of the bits of a largest magnitude
_LOW = np.uint32(0xFFFF)  # the bits of float32 that bfloat16 lacks


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
    body: StoredOperand | ComputedOperand  # the elements of the weight
    part: Part
    # The largest magnitude of each block, as far as a tensor of the weight has found it.
    largest: Stored | None = None
    total: float | None = None  # the one scale, once it was computed
    loss: PackingLoss | None = None  # what is measured of the numbers as they are packed

    @property
    def is_ready(self) -> bool:
        return self.largest is not None

    def prepare(self, _out: TensorSpec, reading: Reading) -> Kernel:
        make = partial(np.full, self.form.grid(self.weight.shape), _UNKNOWN, np.uint16)
        made = replace(self, largest=reading.share(("largest", self.weight.name), make))
        if isinstance(self.body, ComputedOperand):
            made = replace(made, body=self.body.prepare(reading))
        if not self.form.scheme.total:
            return made
        # All tensors of a weight need it.
        total = reading.open_once(
            ("total", self.weight.name), lambda: nullcontext(made.find_total(reading))
        )
        if self.part == "total":
            return ConstantKernel(np.array([total], np.float32))
        return replace(made, total=total)

    def find_total(self, reading: Reading) -> float:
        """Reads a whole weight, and returns the scale that it has besides those of its blocks."""
        rows, columns = self.weight.shape
        largest = 0.0
        for part in cut_span(Span(0, rows), max(1, _BAND_ELEMENTS // columns)):
            found = self._known(part)
            if found is None:
                demands = self.body.demands(self._place(part))
                values = self._read(part, [reading.read(demand) for demand in demands])
                found = self._find_largest(part, values)
            largest = max(largest, float(found.max()))
        tiny = np.float32(2.0**-126)
        with np.errstate(over="ignore"):
            inverse = _rounded(np.float32(1) / np.maximum(np.float32(largest), tiny))
            total = float(_rounded(inverse * np.float32(_LARGEST_SCALE * 6)))
        return total if np.isfinite(total) else 1.0

    def most_elements(self, out: TensorSpec) -> int:
        """Returns how many elements are made at a time."""
        high = self.form.blocks[0] if self.part == "scales" else 1
        most = _READ_ELEMENTS if self.loss is None else _MERGED_ELEMENTS
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
        rows = self._rows(out, block)
        if self.part == "scales" and self._known(rows) is not None:
            return ()
        return self.body.demands(self._place(rows))

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block."""
        rows = self._rows(out, block)
        high = self.form.blocks[0]
        step = high if high > 1 else max(1, _BAND_ELEMENTS // self.weight.shape[1])
        # What was known when a block asked for its inputs is known now.
        is_read = self.part == "numbers" or self._known(rows) is None
        values = self._read(rows, inputs) if is_read else np.empty(0, np.uint16)
        bands = []
        for part in cut_span(rows, step):
            band = values[part.start - rows.start : part.stop - rows.start]
            largest = self._known(part)
            if largest is None:
                largest = self._find_largest(part, band)
            scales, factors = self._find_scales(largest)
            used = scales if self.form.scale == "float32" else factors
            if largest.max(initial=0) > _HUGE:
                self._refuse_overflow(largest, used)
            if self.part == "numbers":
                bands.append(self._find_numbers(band, factors))
                if self.loss is not None:
                    self.loss.add(_as_floats(band), self._restore(bands[-1], used))
            elif out.dtype.name == "float8_e4m3fn":
                bands.append(_look_up("float8_e4m3fn", scales))
            else:
                bands.append(scales.astype(numpy_dtype(out.dtype)))
        made = np.concatenate(bands).view(target.dtype).reshape(-1)
        first = (rows.start if self.part == "numbers" else rows.start // high) * out.shape[1]
        target[...] = made[block.start - first : block.stop - first]

    def _read(self, rows: Span, inputs: Sequence[NDArray[Any]]) -> Stored:
        values = self.body.values(self._place(rows), inputs)
        return values.view(np.uint16).reshape(-1, self.weight.shape[1])

    def _known(self, rows: Span) -> Floats | None:
        """Returns the greatest magnitude of each block in some rows, or None if it is not known."""
        if self.largest is None:
            return None
        high = self.form.blocks[0]
        known = self.largest[rows.start // high : -(-rows.stop // high)]
        return None if int(known.max(initial=0)) == _UNKNOWN else _as_floats(known)

    def _find_largest(self, rows: Span, values: Stored) -> Floats:
        """Returns the greatest magnitude of each block in a band; refuses what is no number.

        A band is one row of blocks, or of blocks that are a row high so many that the cache holds
        them. `rows`: those of the weight that it has.
        """
        high, wide = self.form.blocks
        columns = values.shape[1]
        largest = values & np.uint16(_MAGNITUDE)
        if high > 1:
            largest = largest.max(axis=0, keepdims=True)
            largest = np.maximum.reduceat(largest, range(0, columns, wide), axis=1)
        elif wide:
            # Neighbours in pairs: groups are powers of two, too short to be reduced one by one.
            largest = largest.reshape(-1)
            while largest.size > values.size // wide:
                largest = np.maximum(largest[::2], largest[1::2])
            largest = largest.reshape(len(values), -1)
        else:
            largest = largest.max(axis=1, keepdims=True)
        if int(largest.max(initial=0)) >= _INFINITE:
            place = np.argwhere(values & np.uint16(_MAGNITUDE) >= _INFINITE)[0].tolist()
            found, where = _as_floats(values)[tuple(place)], [rows.start + place[0], place[1]]
            raise RefusedError(
                f"value {found:g} at {where} gives its block no scale",
                where=f"tensor {self.weight.name!r}",
                hint="take an earlier checkpoint; `ckptkit stats` counts such values",
            )
        if self.largest is not None:
            self.largest[rows.start // high : -(-rows.stop // high)] = largest
        return _as_floats(largest)

    def _refuse_overflow(self, largest: Floats, scales: Floats) -> None:
        """Refuses a block whose largest number unpacked is infinite, or may be.

        compressed-tensors 0.20.1 packs such blocks as infinity or as zeros.
        """
        with np.errstate(over="ignore"):
            most = scales * np.float32(max(map(abs, _LIMITS[self.form.number])))
            is_lost = ~np.isfinite(_rounded(most))
        if is_lost.any():
            found = largest[tuple(np.argwhere(is_lost)[0])]
            raise RefusedError(
                f"magnitude {found:g} is too large to be packed: unpacked, it would be infinite",
                where=f"tensor {self.weight.name!r}",
                hint="take an earlier checkpoint, or pass --dtype bfloat16, which leaves weights"
                " unpacked",
            )

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
            scales = make_table("float8_e4m3fn")[_look_up("float8_e4m3fn", scales), 0]
            scales[scales == 0] = _LEAST_SCALE
            return scales, scales / total
        scales[scales == 0] = _EPSILON
        return scales, scales

    def _find_numbers(self, values: Stored, factors: Floats) -> Codes:
        quotients = _as_floats(values)
        if factors.shape[1] > 1:
            factors = np.repeat(factors, self.form.blocks[1], axis=1)[:, : values.shape[1]]
        if self.form.scale == "float32":
            quotients *= factors
        else:
            quotients /= factors
        is_rounded = self.form.scale in {"bfloat16", "uint8"}
        made = _look_up(self.form.number, quotients, is_rounded=is_rounded)
        if self.form.number in _FOUR_BITS:
            pairs = made.view("<u2")
            made = (pairs | pairs >> np.uint16(4)).astype(np.uint8)
        return made

    def _restore(self, numbers: Codes, factors: Floats) -> Floats:
        """Returns what packed numbers stand for."""
        number = "uint4" if self.form.number == "int4" else self.form.number
        table, rows = make_table(number), len(numbers)
        values = table[numbers].reshape(rows, -1)
        if self.form.number == "int4":
            values += np.float32(_LIMITS["int4"][0])
        high, wide = self.form.blocks
        spread = np.repeat(factors, high, axis=0)[:rows]
        if wide:
            spread = np.repeat(spread, wide, axis=1)[:, : self.weight.shape[1]]
        made: Floats = values[:, : self.weight.shape[1]] * spread
        return made


@cache
def _make_codes(number: Number, *, is_rounded: bool) -> Codes:
    """Returns the byte of each number in bfloat16, by its bits."""
    low, high = _LIMITS[number]
    values = np.nan_to_num(_as_floats(np.arange(1 << 16, dtype=np.uint16)), nan=0)
    if is_rounded or number == "e2m1":
        values += 0  # as compressed-tensors adds a zero point: -0 becomes 0
    values = np.clip(values, low, high)
    if number == "float8_e4m3fn":
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if number == "e2m1":
        return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    first = low if number in _FOUR_BITS else 0
    return (np.rint(values).astype(np.int8) - np.int8(first)).view(np.uint8)


def _look_up(number: Number, values: Floats, *, is_rounded: bool = False) -> Codes:
    """Returns the bytes of numbers, which are rounded to bfloat16 before, or only once."""
    if is_rounded:
        index = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    else:
        # Cut to the bits of bfloat16, the last one set where others were: a tie stays a tie.
        bits = values.view(np.uint32)
        rest = bits & _LOW
        rest += _LOW
        rest |= bits
        rest >>= np.uint32(16)
        index = rest.astype(np.uint16)
    return np.take(_make_codes(number, is_rounded=is_rounded), index, mode="clip")


def _as_floats(values: Stored) -> Floats:
    made: Floats = values.view(ml_dtypes.bfloat16).astype(np.float32)
    return made


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
