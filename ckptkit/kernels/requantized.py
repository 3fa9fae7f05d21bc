"""Weights that were packed in training, made again from the weights before: packed, and unpacked.

What training computed with are the numbers that packed weights stand for. They follow from the
original weights, block by block: the scale of a block is its largest magnitude, and an element is
the nearest of sixteen numbers, or of 255, times that.

On a processor this gives what bitsandbytes gives. A GPU divides otherwise, so that an element
midway between two numbers may go the other way there.

Source: bitsandbytes 0.50, `backends/default/ops.py` (`quantize_4bit`, `int8_vectorwise_quant`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.index import Key, Span
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.derived_scales import (
    NESTED_BLOCKSIZE,
    block_maxima,
    nested_scales,
)
from ckptkit.kernels.eight_bit import STEP, codes_of_rows
from ckptkit.kernels.four_bit import CODES, Floats, FourBitType
from ckptkit.kernels.four_bit_proof import scaled_blocks
from ckptkit.kernels.operands import Operand
from ckptkit.planning.plan import Demand

_FLOAT16, _FLOAT32 = BY_NAME["float16"], BY_NAME["float32"]


@dataclass(frozen=True, slots=True)
class RequantizedFourBit:
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
        """The original weight."""
        return self.original.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """The elements of all blocks that have to do with the range."""
        return self.original.demands(self._elements(self._blocks(span)))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Packs and unpacks the blocks."""
        around = self._elements(self._blocks(span))
        blocks, maxima = self._scaled(around, inputs)
        scales = maxima
        if self.nested_offset is not None:
            scales = nested_scales(maxima, self.nested_offset)
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
        return block_maxima(self.original.values(span, inputs), self.dtype, self.blocksize)[1]

    def _scaled(self, span: Span, inputs: Sequence[NDArray[Any]]) -> tuple[Floats, Floats]:
        elements = self.original.values(span, inputs)
        blocks, maxima = block_maxima(elements, self.dtype, self.blocksize)
        return scaled_blocks(blocks, maxima, elements.size), maxima

    def _blocks(self, span: Span) -> Span:
        """Returns the blocks of a range, and those that share scales of scales with them."""
        group = 1 if self.nested_offset is None else NESTED_BLOCKSIZE
        size = self.blocksize * group
        return Span(span.start // size * group, -(-span.stop // size) * group)

    def _elements(self, blocks: Span) -> Span:
        return Span(blocks.start * self.blocksize, min(blocks.stop * self.blocksize, self.elements))


@dataclass(frozen=True, slots=True)
class RequantizedEightBit:
    """A weight as LLM.int8 would hold it, as the float32 numbers that it stands for.

    Attributes:
        original: The weight before.
        columns: How many elements a row has.
    """

    original: Operand
    columns: int

    @property
    def dtype(self) -> DType:
        """Always float32, as of stored weights of eight bits."""
        return _FLOAT32

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The original weight."""
        return self.original.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """The rows that the range touches."""
        return self.original.demands(self._rows(span))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Packs and unpacks the rows."""
        around = self._rows(span)
        elements = self.original.values(around, inputs)
        rows, scales = block_maxima(elements, _FLOAT16, self.columns)
        made = codes_of_rows(rows, scales)
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
    """Returns the numbers that codes stand for, in order, and the middles between them."""
    numbers = np.unique(CODES[quant_type])
    return numbers, ((numbers[:-1] + numbers[1:]) / np.float32(2)).astype(np.float32)


@cache
def _codes(quant_type: FourBitType) -> NDArray[np.uint8]:
    """Returns the first code of each of those numbers."""
    return np.unique(CODES[quant_type], return_index=True)[1].astype(np.uint8)
