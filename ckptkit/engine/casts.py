"""Casts between float types, block by block, into memory that the caller owns.

Every value that is not NaN becomes what `torch.Tensor.to` makes of it: round to nearest, ties
to even, float64 through float32 on the way to anything narrower. Every NaN becomes the one
canonical NaN of the target, so that results do not depend on the processor or on a library.

numpy and ml_dtypes do the rounding (ml_dtypes without the GIL from 0.5.4 on). What they leave
open is corrected in the result while it is in the processor's cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import OverflowRefusedError, UnsupportedError

# Source and result of a block fit the second-level cache together; smaller blocks lose more to
# calls, and to two threads passing the GIL back and forth.
BLOCK_ELEMENTS = 1 << 16


class _Target(Struct, frozen=True):
    """The properties of a type that a cast to it needs."""

    nan: int  # bits of the canonical NaN
    suspect: int  # lowest magnitude, as bits, whose elements need a second look; 0 for all
    largest: float | None = None  # largest finite value where a cast beyond it is refused, or None


# Sources: IEEE 754; OCP 8-bit Floating Point Specification (E4M3 without infinities, E5M2);
# arXiv 2206.02915 for the "fnuz" types, whose only NaN is the pattern of minus zero.
# float8_e8m0fnu has neither sign nor zero and holds block scales: it is no target.
_TARGETS = {
    "float64": _Target(nan=0x7FF8 << 48, suspect=(0x7FF0 << 48) + 1),
    "float32": _Target(nan=0x7FC0_0000, suspect=0x7F80_0001),
    "bfloat16": _Target(nan=0x7FC0, suspect=0x7F81),
    "float16": _Target(nan=0x7E00, suspect=0x7C00, largest=65_504.0),
    "float8_e4m3fn": _Target(nan=0x7F, suspect=0, largest=448.0),
    "float8_e5m2": _Target(nan=0x7E, suspect=0, largest=57_344.0),
    "float8_e4m3fnuz": _Target(nan=0x80, suspect=0, largest=240.0),
    "float8_e5m2fnuz": _Target(nan=0x80, suspect=0, largest=57_344.0),
}
_FLOAT32 = BY_NAME["float32"]


class Overflow(Struct, frozen=True):
    """Values that the target of a cast cannot hold."""

    count: int  # how many there are in the block
    first: int  # position of the first, in elements from the block's start
    value: float


class Caster:
    """Casts blocks from one float type to another.

    It holds at most 256 KiB of scratch memory and is therefore for one thread at a time. A call
    takes up to 1 MiB more for a time: indices of a short source, bits of float16, masks of a block
    with NaN or overflow.
    """

    _at_once = BLOCK_ELEMENTS

    def __init__(self, source: DType, target: DType) -> None:
        """Prepares a cast.

        `source`: element type of what is read. `target`: element type of what is written.
        """
        if source.kind != "float" or target.name not in _TARGETS:
            raise UnsupportedError(
                f"no cast from {source.name} to {target.name}; casts go from float types to "
                f"{', '.join(_TARGETS)}"
            )
        self._source = numpy_dtype(source)
        self._target = numpy_dtype(target)
        self._named = target
        self._facts = _TARGETS[target.name]
        self._bits = np.dtype(f"uint{8 * target.itemsize}")
        self._signed = np.dtype(f"int{8 * target.itemsize}")
        self._sign = 1 << (8 * target.itemsize - 1)
        through = source.itemsize > _FLOAT32.itemsize > target.itemsize
        self._single = np.empty(BLOCK_ELEMENTS if through else 0, np.float32)
        is_half = source.name == "float16" and target.itemsize <= _FLOAT32.itemsize
        is_short = source.itemsize == 1 or is_half
        self._table = cast_table(self._source, self._target) if is_short else None

    def cast(self, source: NDArray[Any], target: NDArray[Any]) -> Overflow | None:
        """Casts a block.

        float16 and float8 have so small a range that weights can leave it. What does is
        counted, not hidden; the caller, who knows the tensor, turns the count into an error
        (see `overflow_error`). Infinities that the target can hold are not counted. float64
        and float32 values beyond the range of float32 and bfloat16 become infinities, as in
        torch. Between equal types bytes are copied, NaN included.

        `source`: one dimension, contiguous: the elements, or their bytes as uint8. Need not be
        aligned. `target`: the same for the result, with as many elements; does not overlap
        `source`. Returns what did not fit, or None. The rest of the target is written either way.
        """
        values, wanted = source.view(self._source), target.view(self._target)
        if values.size != wanted.size:
            raise ValueError(f"source has {values.size} elements but target has {wanted.size}")
        if self._source == self._target:
            target.view(np.uint8)[:] = source.view(np.uint8)
            return None
        overflow = None
        # Overflow and NaN are looked for in the result; numpy's warnings would only repeat it.
        with np.errstate(all="ignore"):
            for start in range(0, values.size, self._at_once):
                stop = start + self._at_once
                block = self._block(values[start:stop], wanted[start:stop])
                if block is None:
                    continue
                if overflow is None:
                    overflow = replace(block, first=start + block.first)
                else:
                    overflow = replace(overflow, count=overflow.count + block.count)
        return overflow

    def cast_all(
        self, source: NDArray[Any], target: NDArray[Any], *, where: str, block_start: int = 0
    ) -> None:
        """Casts a block of a tensor, and refuses values that do not fit; see `overflow_error`."""
        overflow = self.cast(source, target)
        if overflow is not None:
            raise overflow_error(overflow, self._named, where=where, block_start=block_start)

    def _block(self, values: NDArray[Any], wanted: NDArray[Any]) -> Overflow | None:
        bits = wanted.view(self._bits)
        # Rounds, and leaves NaN and overflow as they fall.
        if self._table is not None:
            # Clipping lets numpy write without a copy of its own; no index is out of bounds.
            places = values.view(f"u{values.itemsize}")
            np.take(self._table, places, out=bits, mode="clip")
        elif self._single.size:
            self._single[: values.size] = values
            copy_rounded(self._single[: values.size], wanted)
        else:
            copy_rounded(values, wanted)
        # Magnitudes of floats are ordered as their bits are: read as signed integers, the
        # largest is the largest positive one; as unsigned, the largest negative one. Below these
        # the block holds neither a NaN nor, where that matters, an infinity.
        suspect = self._facts.suspect
        if (
            int(wanted.view(self._signed).max()) < suspect
            and int(bits.max()) < self._sign + suspect
        ):
            return None
        overflow = None
        if self._facts.largest is not None:
            overflow = self._overflow(values, wanted)
        bits[np.isnan(wanted)] = self._facts.nan
        return overflow

    @staticmethod
    def _overflow(values: NDArray[Any], wanted: NDArray[Any]) -> Overflow | None:
        """Finds elements that were a number, or an infinity, and are NaN or an infinity now."""
        lost = np.isnan(wanted)
        lost |= np.isinf(wanted) & np.isfinite(values)
        lost &= ~np.isnan(values)
        first = int(lost.argmax())
        if not lost[first]:
            return None
        return Overflow(count=int(np.count_nonzero(lost)), first=first, value=float(values[first]))


@cache
def cast_table(source: np.dtype[Any], target: np.dtype[Any]) -> NDArray[Any]:
    """Returns the bits of each cast value of a short type, by its own: two to ten times faster."""
    codes = np.arange(1 << (8 * source.itemsize), dtype=f"u{source.itemsize}")
    with np.errstate(all="ignore"):
        # float32 holds them all; ml_dtypes has no direct way between some of its types.
        values = codes.view(source).astype(np.float32).astype(target)
    return values.view(np.dtype(f"uint{8 * target.itemsize}"))


# Bits of float32: its magnitude, the least normal number of float16, and the least one that
# float16 rounds to infinity.
_MAGNITUDE, _LEAST, _BEYOND = np.uint32(0x7FFF_FFFF), 0x3880_0000, 0x477F_F000
_HALF_REST, _HALF_BIAS = np.uint32(13), np.uint32(112 << 10)  # bits that it lacks; of exponents


def copy_rounded(values: NDArray[Any], target: NDArray[Any]) -> None:
    """Copies floats into an array of another type, as numpy does, and twice as fast to float16."""
    if values.dtype != np.float32 or target.dtype != np.float16:
        target[...] = values
        return
    bits = values.view(np.uint32)
    rounded = bits & _MAGNITUDE
    least = int((rounded - np.uint32(1)).min(initial=_MAGNITUDE))  # zero is the largest then
    if least < _LEAST - 1 or int(rounded.max(initial=0)) >= _BEYOND:
        target[...] = values
        return
    rounded += (rounded >> _HALF_REST & np.uint32(1)) + np.uint32(0xFFF)
    rounded >>= _HALF_REST
    np.maximum(rounded, _HALF_BIAS, out=rounded)  # zero
    rounded -= _HALF_BIAS
    rounded |= bits >> np.uint32(16) & np.uint32(0x8000)
    target.view(np.uint16)[...] = rounded


def overflow_error(
    overflow: Overflow, target: DType, *, where: str, block_start: int = 0
) -> OverflowRefusedError:
    """Words the refusal of a cast that lost values.

    `overflow`: what a `Caster` returned. `target`: the type that it cast to. `where`: the tensor,
    as the user knows it. `block_start`: first element of the block, from the start of the tensor.
    Returns the error, for the caller to raise.
    """
    largest = _TARGETS[target.name].largest
    limit = f", whose largest is {largest:,.0f}" if largest is not None else ""
    others = f" (with {overflow.count - 1:,} more near it)" if overflow.count > 1 else ""
    return OverflowRefusedError(
        f"value {overflow.value:,g} at element {block_start + overflow.first:,} does not fit "
        f"{target.name}{limit}{others}",
        where=where,
        hint="pass --dtype bfloat16, or keep this tensor as it is with --keep-dtype",
    )
