"""The scales and the values of packed weights, computed from the weights that were quantized.

FSDP loses the scales in most configurations, but they follow from the original model: a scale is
the largest magnitude in its block, and double quantization is arithmetic on the scales. Nothing is
kept: the scales of a block are computed when the block is needed, from its original elements. With
them the numbers that training computed with are known too: an element is the nearest of sixteen
numbers, or of 255, times its scale.

Double quantization first subtracts the mean of all scales of a weight. It is a sum in float32,
whose last bit depends on the order of its terms. Scales are then rounded to the nearest of 256
numbers by a table of 65,536. Both follow bitsandbytes and torch on a processor with AVX2. On a GPU
the mean may be rounded up instead of down, one scale in a thousand to its other neighbour, and an
element midway between two numbers to the other one.

Source: bitsandbytes 0.50, `functional.py` (`quantize_4bit`, `create_dynamic_map`),
`csrc/cpu_ops.cpp` (`build_quantize_lut`, `quantize_cpu_impl`), `backends/default/ops.py`
(`quantize_4bit`, `int8_vectorwise_quant`); torch 2.13, `aten/src/ATen/native/cpu/SumKernel.cpp`
(`vectorized_inner_sum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.adapters.quantized.dequantize import (
    CODES,
    STEP,
    Floats,
    FourBitType,
    encode_rows,
    scale_blocks,
)
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.index import Key, Span
from ckptkit.engine.kernels import Operand
from ckptkit.plan.plan import Demand

NESTED_BLOCKSIZE = 256
_BINS = 65_536
_LANES, _ROWS, _LEVELS = 8, 4, 4  # of a vector of AVX2; vectors added side by side; carries


def find_block_maxima(
    elements: NDArray[Any], dtype: DType, blocksize: int
) -> tuple[Floats, Floats]:
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


class DerivedScales(Struct, frozen=True):
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
        return self.original.reads

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        return self.original.demands(self._span(blocks))

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        elements = self.original.values(self._span(blocks), inputs)
        return find_block_maxima(elements, self.dtype, self.blocksize)[1]

    def _span(self, blocks: Span) -> Span:
        stop = min(blocks.stop * self.blocksize, self.elements)
        return Span(blocks.start * self.blocksize, stop)


class DerivedNestedScales(Struct, frozen=True):
    """Scales taken from the original weight, as double quantization leaves them.

    Attributes:
        scales: The scales before they were quantized.
        offset: Their mean.
    """

    scales: DerivedScales
    offset: float

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.scales.reads

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        return self.scales.demands(self._whole(blocks))

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Quantizes the scales and turns them back."""
        whole = self._whole(blocks)
        scales = requantize_scales(self.scales.values(whole, inputs), self.offset)
        first = blocks.start - whole.start
        return scales[first : first + blocks.stop - blocks.start]

    def _whole(self, blocks: Span) -> Span:
        count = -(-self.scales.elements // self.scales.blocksize)
        start = blocks.start // NESTED_BLOCKSIZE * NESTED_BLOCKSIZE
        stop = -(-blocks.stop // NESTED_BLOCKSIZE) * NESTED_BLOCKSIZE
        return Span(start, min(stop, count))


def requantize_scales(maxima: Floats, offset: float) -> Floats:
    """Quantizes scales and turns them back, as double quantization leaves them.

    Args:
        maxima: From the first of a group of 256 on.
        offset: Their mean over the whole weight.
    """
    codes, shared = quantize_scales(maxima - np.float32(offset))
    scales: Floats = make_dynamic_map()[codes]
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
def make_dynamic_map() -> Floats:
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
    table = make_dynamic_map()
    middles = np.float32(0.5) * (table[:-1] + table[1:])
    centres = np.float32(-1) + np.float32(2) * np.arange(_BINS, dtype=np.float32) / np.float32(
        _BINS - 1
    )
    return np.searchsorted(middles, centres, side="left").astype(np.uint8)


def compute_float32_mean(numbers: Floats) -> np.float32:
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


_FLOAT16, _FLOAT32 = BY_NAME["float16"], BY_NAME["float32"]


class RequantizedFourBit(Struct, frozen=True):
    """A weight as four bits would hold it.

    Attributes:
        original: The weight before.
        quant_type: What the codes stand for.
        blocksize: How many elements share a scale, even.
        elements: How many elements the weight has.
        dtype: Their type when they were packed, and after.
        nested_offset: The mean of the scales, where they were quantized too; else None.
    """

    original: Operand
    quant_type: FourBitType
    blocksize: int
    elements: int
    dtype: DType
    nested_offset: float | None = None

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.original.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.original.demands(self._elements(self._blocks(span)))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Packs and unpacks the blocks."""
        around = self._elements(self._blocks(span))
        blocks, maxima = self._scaled(around, inputs)
        scales = maxima
        if self.nested_offset is not None:
            scales = requantize_scales(maxima, self.nested_offset)
        numbers, middles = _grid(self.quant_type)
        made = numbers[np.searchsorted(middles, blocks, side="left")]
        made *= scales[:, np.newaxis]
        with np.errstate(over="ignore"):
            found: NDArray[Any] = made.reshape(-1).astype(numpy_dtype(self.dtype))
        first = span.start - around.start
        return found[first : first + span.stop - span.start]

    def packed(
        self, span: Span, inputs: Sequence[NDArray[Any]], *, on_gpu: bool = False
    ) -> NDArray[np.uint8]:
        """Returns the bytes that hold a range of whole blocks.

        Args:
            span: The range; it begins at a block, and at a group of blocks with shared scales.
            inputs: One array for each of `demands(span)`.
            on_gpu: Whether fp4's second zero stands for what lies below zero, as GPUs write it;
                processors write it for what lies above.
        """
        blocks, _ = self._scaled(span, inputs)
        codes = _codes(self.quant_type)[
            np.searchsorted(_grid(self.quant_type)[1], blocks, side="left")
        ]
        if self.quant_type == "fp4":
            is_second = blocks < 0 if on_gpu else blocks > 0
            codes[(codes == 0) & is_second] = len(CODES[self.quant_type]) // 2
        flat = codes.reshape(-1)[: span.stop - span.start]
        if flat.size % 2:  # a byte that is half full holds a zero
            flat = np.append(flat, np.uint8(CODES[self.quant_type].tolist().index(0.0)))
        made: NDArray[np.uint8] = (flat[::2] << np.uint8(4)) | flat[1::2]
        return made

    def maxima(self, span: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Returns the scales of a range of whole blocks, before they are quantized themselves."""
        return find_block_maxima(self.original.values(span, inputs), self.dtype, self.blocksize)[1]

    def _scaled(self, span: Span, inputs: Sequence[NDArray[Any]]) -> tuple[Floats, Floats]:
        elements = self.original.values(span, inputs)
        blocks, maxima = find_block_maxima(elements, self.dtype, self.blocksize)
        return scale_blocks(blocks, maxima, elements.size), maxima

    def _blocks(self, span: Span) -> Span:
        """Returns the blocks of a range, and those that share scales of scales with them."""
        group = 1 if self.nested_offset is None else NESTED_BLOCKSIZE
        size = self.blocksize * group
        return Span(span.start // size * group, -(-span.stop // size) * group)

    def _elements(self, blocks: Span) -> Span:
        return Span(blocks.start * self.blocksize, min(blocks.stop * self.blocksize, self.elements))


class RequantizedEightBit(Struct, frozen=True):
    """A weight as LLM.int8 would hold it, as the float32 numbers that it stands for.

    Attributes:
        original: The weight before.
        columns: How many elements a row has.
    """

    original: Operand
    columns: int

    @property
    def dtype(self) -> DType:
        return _FLOAT32

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.original.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.original.demands(self._rows(span))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Packs and unpacks the rows."""
        around = self._rows(span)
        elements = self.original.values(around, inputs)
        rows, scales = find_block_maxima(elements, _FLOAT16, self.columns)
        made = encode_rows(rows, scales)
        made += np.float32(0)  # whole numbers have no zero below zero
        made *= scales[:, np.newaxis]
        made *= STEP
        first = span.start - around.start
        return made.reshape(-1)[first : first + span.stop - span.start]

    def _rows(self, span: Span) -> Span:
        columns = self.columns
        return Span(span.start // columns * columns, -(-span.stop // columns) * columns)


@cache
def _grid(quant_type: FourBitType) -> tuple[Floats, Floats]:
    numbers = np.unique(CODES[quant_type])
    return numbers, ((numbers[:-1] + numbers[1:]) / np.float32(2)).astype(np.float32)


@cache
def _codes(quant_type: FourBitType) -> NDArray[np.uint8]:
    """Returns the first code of each of those numbers."""
    return np.unique(CODES[quant_type], return_index=True)[1].astype(np.uint8)
