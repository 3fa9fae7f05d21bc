"""The scales of four-bit weights, made again from the weights that were quantized.

FSDP loses them in most configurations, but they follow from the original model: a scale is the
largest magnitude in its block, and double quantization is arithmetic on those. Nothing is kept:
the scales of a block are made when the block is needed, out of the elements that it had.

Double quantization takes the mean of all scales of a weight off first. It is a sum in float32,
whose last bit depends on the order of its terms, and scales are then rounded to the nearest of 256
numbers by way of a table of 65,536. Both follow bitsandbytes and torch on a processor with AVX2;
a GPU may round the mean up instead of down, and one scale in a thousand to its other neighbour.

Source: bitsandbytes 0.50, `functional.py` (`quantize_4bit`, `create_dynamic_map`),
`csrc/cpu_ops.cpp` (`build_quantize_lut`, `quantize_cpu_impl`); torch 2.13,
`aten/src/ATen/native/cpu/SumKernel.cpp` (`vectorized_inner_sum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Key, Span
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.four_bit import Floats
from ckptkit.kernels.operands import Operand
from ckptkit.planning.plan import Demand

NESTED_BLOCKSIZE = 256
_BINS = 65_536
_LANES, _ROWS, _LEVELS = 8, 4, 4  # of a vector of AVX2; vectors added side by side; carries


def block_maxima(elements: NDArray[Any], dtype: DType, blocksize: int) -> tuple[Floats, Floats]:
    """Returns elements in the type that was quantized, and the largest magnitude of each block.

    Args:
        elements: From the first element of a block on; only a weight's last block may be short.
        dtype: What the elements were cast to before they were quantized.
        blocksize: How many elements share a scale.

    Returns:
        The elements as float32 of shape [blocks, blocksize], zeros after the last, and the scales.
    """
    blocks = np.zeros((-(-elements.size // blocksize), blocksize), np.float32)
    with np.errstate(over="ignore"):
        cast = elements.astype(numpy_dtype(dtype), copy=False)
    blocks.reshape(-1)[: elements.size] = cast
    return blocks, np.maximum(np.abs(blocks.max(axis=1)), np.abs(blocks.min(axis=1)))


@dataclass(frozen=True, slots=True)
class DerivedScales:
    """Scales taken from the elements of the original weight.

    Attributes:
        original: The weight before it was quantized.
        dtype: What it was cast to before.
        blocksize: How many elements share a scale.
        elements: How many there are.
    """

    original: Operand
    dtype: DType
    blocksize: int
    elements: int

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The original weight."""
        return self.original.reads

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        """The elements of the blocks."""
        return self.original.demands(self._span(blocks))

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """The largest magnitude of each block."""
        elements = self.original.values(self._span(blocks), inputs)
        return block_maxima(elements, self.dtype, self.blocksize)[1]

    def _span(self, blocks: Span) -> Span:
        stop = min(blocks.stop * self.blocksize, self.elements)
        return Span(blocks.start * self.blocksize, stop)


@dataclass(frozen=True, slots=True)
class DerivedNestedScales:
    """Scales taken from the original weight, as double quantization leaves them.

    Attributes:
        scales: The scales before they were quantized.
        offset: Their mean.
    """

    scales: DerivedScales
    offset: float

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The original weight."""
        return self.scales.reads

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        """The elements of all blocks that share a scale of scales with one of these."""
        return self.scales.demands(self._whole(blocks))

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Quantizes the scales and turns them back."""
        whole = self._whole(blocks)
        scales = nested_scales(self.scales.values(whole, inputs), self.offset)
        first = blocks.start - whole.start
        return scales[first : first + blocks.stop - blocks.start]

    def _whole(self, blocks: Span) -> Span:
        count = -(-self.scales.elements // self.scales.blocksize)
        start = blocks.start // NESTED_BLOCKSIZE * NESTED_BLOCKSIZE
        stop = -(-blocks.stop // NESTED_BLOCKSIZE) * NESTED_BLOCKSIZE
        return Span(start, min(stop, count))


def nested_scales(maxima: Floats, offset: float) -> Floats:
    """Quantizes scales and turns them back, as double quantization leaves them.

    Args:
        maxima: From the first of a group of 256 on.
        offset: Their mean over the whole weight.
    """
    codes, shared = quantize_scales(maxima - np.float32(offset))
    scales: Floats = dynamic_map()[codes]
    scales *= np.repeat(shared, NESTED_BLOCKSIZE)[: scales.size]
    scales += np.float32(offset)
    return scales


def quantize_scales(centred: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Quantizes scales, their mean taken off, to a byte each.

    Args:
        centred: From the first of a group of 256 on.

    Returns:
        The bytes, and the scale of each group.
    """
    blocks = np.zeros((-(-centred.size // NESTED_BLOCKSIZE), NESTED_BLOCKSIZE), np.float32)
    blocks.reshape(-1)[: centred.size] = centred
    shared = np.abs(blocks).max(axis=1)
    one = np.float32(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        blocks *= (one / shared)[:, np.newaxis]
    blocks[shared == 0] = -1  # a group without any magnitude has the code 0
    bins = (np.clip(blocks, -1, 1) + one) * np.float32(0.5) * np.float32(_BINS - 1)
    bins += np.float32(0.5)
    return _codes_of_bins()[bins.astype(np.uint16)].reshape(-1)[: centred.size], shared


@cache
def dynamic_map() -> Floats:
    """Returns the 256 numbers that a byte picks from, in order.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = _linspace(2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        scaled = (np.float32(10.0 ** (exponent - 6)) * means).tolist()
        numbers += [*scaled, *(-number for number in scaled)]
    return np.array(sorted(numbers), np.float32)


def _linspace(steps: int) -> Floats:
    """Returns numbers from 0.1 to 1, counted from both ends and rounded once, as in torch."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(steps - 1))
    at = np.arange(steps)
    up, down = first + step * at, last - step * (steps - 1 - at)
    return np.where(at < steps // 2, up, down).astype(np.float32)


@cache
def _codes_of_bins() -> NDArray[np.uint8]:
    """Returns the code of each of the bins that numbers from -1 to 1 fall into."""
    table = dynamic_map()
    middles = np.float32(0.5) * (table[:-1] + table[1:])
    centres = np.float32(-1) + np.float32(2) * np.arange(_BINS, dtype=np.float32) / np.float32(
        _BINS - 1
    )
    return np.searchsorted(middles, centres, side="left").astype(np.uint8)


def float32_mean(numbers: Floats) -> np.float32:
    """Returns the mean that torch computes of one thread's worth of contiguous numbers.

    Vectors are added in four rows side by side, and each row in steps whose sums are carried to
    the next level, so that numbers of one size meet.
    """
    lanes = _LANES if numbers.size >= _LANES else 1
    vectors = numbers[: numbers.size // lanes * lanes].reshape(-1, lanes)
    deep = len(vectors) // _ROWS
    rows = _carried(vectors[: deep * _ROWS].reshape(deep, _ROWS, lanes))
    total = rows[0]
    for vector in (*vectors[deep * _ROWS :], *rows[1:]):
        total = total + vector
    scalar = np.float32(0)
    for number in (*numbers[vectors.size :], *total):
        scalar = scalar + number
    return np.float32(scalar / np.float32(numbers.size))


def _carried(terms: Floats) -> Floats:
    """Adds along the first axis, level by level."""
    power = max(4, (max(1, len(terms)) - 1).bit_length() // _LEVELS)
    step, rests = 1 << power, []
    for _ in range(_LEVELS - 1):
        whole = len(terms) // step * step
        rests.append(_in_order(terms[whole:]))
        terms = _in_order(terms[:whole].reshape(-1, step, *terms.shape[1:]).swapaxes(0, 1))
    rests.append(_in_order(terms))
    return _in_order(np.stack(rests))


def _in_order(terms: Floats) -> Floats:
    """Adds along the first axis, one after the other; numpy would add in pairs."""
    total: Floats = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total
