"""Weights of four and eight bits as bitsandbytes packs them: unpacking, and proof of the original.

Four bits: an element is a code and a scale. The code selects one of sixteen numbers between -1 and
1, and each block of elements shares one scale, the largest magnitude in it. The first of two
elements is in the upper half of a byte. The dtype under which the bytes are stored has no meaning.
bitsandbytes multiplies in float32 and rounds once, to the dtype of the weight before it was
quantized; so does this. Its kernels disagree about the sign of fp4's second zero; here it is +0, as
in the table that it saves.

Eight bits (LLM.int8): each row of a matrix has one scale, its largest magnitude in float16. An
element is `code * scale / 127`, with the division written as a multiplication.

The proof that a given weight is the one that was packed: quantizing takes the nearest of sixteen
numbers, so each code is checked to be the number nearest to its element. That is the same as
quantizing and comparing bytes, and faster. The two zeros of fp4 count as one, since devices differ.

Source: bitsandbytes 0.50, `functional.py` (`get_4bit_type`, `dequantize_4bit`),
`backends/default/ops.py` (`_dequantize_4bit_compute`, `quantize_4bit`, `int8_vectorwise_dequant`,
`int8_vectorwise_quant`), `nn/modules.py` (`Int8Params._quantize`), `csrc/kernels.cu`
(`kDequantizeBlockwise`, `dQuantizeNF4`, `dQuantizeFP4`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.index import Key, Span
from ckptkit.engine.kernels import StoredOperand
from ckptkit.plan.plan import Demand

FourBitType = Literal["nf4", "fp4"]
Floats = NDArray[np.float32]

# Numbers and scales of a piece fit the second-level cache together.
_PIECE = 1 << 16
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


_MAGNITUDES = np.array(_FP4, np.float32) / np.float32(12)
CODES: dict[FourBitType, Floats] = {
    "nf4": np.array(_NF4, np.float32),
    # Zero minus, and not minus: the second zero has no sign.
    "fp4": np.concatenate([_MAGNITUDES, np.float32(0) - _MAGNITUDES]),
}


def make_pairs(table: Floats) -> Floats:
    """Returns what each byte stands for, given what each code does; of shape [256, 2].

    >>> make_pairs(CODES["nf4"])[0x70].tolist()
    [0.0, -1.0]
    """
    return np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)


_PAIRS = {name: make_pairs(table) for name, table in CODES.items()}


class Scales(Protocol):
    """The scales of the blocks of one weight, wherever they come from."""

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The source tensors that any of them is made from."""
        ...

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        """Returns what the scales of a range of blocks are made from."""
        ...

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Returns the scales of a range of blocks.

        Args:
            blocks: The range.
            inputs: One array for each of `demands(blocks)`.
        """
        ...


class StoredScales(Struct, frozen=True):
    """Scales as they are stored, one number for each block.

    Attributes:
        absmax: The tensor that holds them.
    """

    absmax: StoredOperand

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.absmax.reads

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        return self.absmax.demands(blocks)

    def values(self, _blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        return inputs[0].astype(np.float32, copy=False)


class NestedScales(Struct, frozen=True):
    """Scales that were quantized themselves ("double quantization"): a byte for each block.

    Attributes:
        absmax: The bytes.
        nested_absmax: The scales of the scales.
        nested_map: The 256 numbers that a byte picks from.
        blocksize: How many scales share a scale.
        offset: What was taken off the scales before, and is put back.
    """

    absmax: StoredOperand
    nested_absmax: StoredOperand
    nested_map: StoredOperand
    blocksize: int
    offset: float

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return (*self.absmax.reads, *self.nested_absmax.reads, *self.nested_map.reads)

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        """The bytes of the blocks, the scales that they share, and all of the map."""
        groups = Span(blocks.start // self.blocksize, -(-blocks.stop // self.blocksize))
        return (
            *self.absmax.demands(blocks),
            *self.nested_absmax.demands(groups),
            *self.nested_map.demands(Span(0, 256)),
        )

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Multiplies and adds in float32, as bitsandbytes does."""
        codes, shared, table = inputs
        first = blocks.start % self.blocksize
        scales: Floats = table[codes.view(np.uint8)].astype(np.float32, copy=False)
        scales *= np.repeat(shared, self.blocksize)[first : first + scales.size]
        scales += np.float32(self.offset)
        return scales


class FourBitWeight(Struct, frozen=True):
    """A weight of four bits, as the numbers that it stands for.

    Attributes:
        packed: The tensor that holds the codes, of whatever type.
        scales: The scales of its blocks.
        quant_type: What the codes stand for.
        blocksize: How many elements share a scale, even.
        elements: How many elements the weight has.
        dtype: Their type, the one that they had before they were quantized.
    """

    packed: StoredOperand
    scales: Scales
    quant_type: FourBitType
    blocksize: int
    elements: int
    dtype: DType

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return (*self.packed.reads, *self.scales.reads)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """The codes and scales of the blocks that the range touches."""
        blocks = self._blocks(span)
        held = 2 * self.packed.dtype.itemsize  # codes in one stored element
        last = min(blocks.stop * self.blocksize, self.elements)
        codes = Span(blocks.start * self.blocksize // held, -(-last // held))
        return (*self.packed.demands(codes), *self.scales.demands(blocks))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Looks up the codes and multiplies them by their scales."""
        blocks = self._blocks(span)
        scales = self.scales.values(blocks, inputs[1:])
        codes = inputs[0].view(np.uint8)
        found = np.empty(len(scales) * self.blocksize, numpy_dtype(self.dtype))
        step = max(1, _PIECE // self.blocksize)
        table = _PAIRS[self.quant_type]
        for low in range(0, len(scales), step):
            held = scales[low : low + step]
            start, stop = low * self.blocksize, (low + len(held)) * self.blocksize
            numbers = table[codes[start // 2 : stop // 2]].reshape(-1)
            blockwise = np.zeros((len(held), self.blocksize), np.float32)
            blockwise.reshape(-1)[: numbers.size] = numbers
            blockwise *= held[:, np.newaxis]
            with np.errstate(over="ignore"):
                found[start:stop] = blockwise.reshape(-1)
        first = span.start - blocks.start * self.blocksize
        return found[first : first + span.stop - span.start]

    def _blocks(self, span: Span) -> Span:
        return Span(span.start // self.blocksize, -(-span.stop // self.blocksize))


STEP = np.float32(7.874015718698502e-3)
"""1 / 127, with the digits that bitsandbytes has."""
_FLOAT32 = BY_NAME["float32"]


class EightBitWeight(Struct, frozen=True):
    """A weight of eight bits, as the float32 numbers that it stands for.

    Attributes:
        packed: The tensor that holds the codes.
        scales: The scales of its rows.
        columns: How many elements a row has.
    """

    packed: StoredOperand
    scales: Scales
    columns: int

    @property
    def dtype(self) -> DType:
        return _FLOAT32

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return (*self.packed.reads, *self.scales.reads)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return (*self.packed.demands(span), *self.scales.demands(self._rows(span)))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Multiplies by the scale first and by 1/127 then, in float32."""
        rows = self._rows(span)
        scales = self.scales.values(rows, inputs[1:])
        first = span.start - rows.start * self.columns
        numbers: Floats = inputs[0].view(np.int8).astype(np.float32)
        numbers *= np.repeat(scales, self.columns)[first : first + numbers.size]
        numbers *= STEP
        return numbers

    def _rows(self, span: Span) -> Span:
        return Span(span.start // self.columns, -(-span.stop // self.columns))


def count_row_mismatches(
    codes: NDArray[np.int8], rows: Floats, scales: Floats
) -> NDArray[np.int64]:
    """Counts the elements of each row that would be packed differently.

    Args:
        codes: The packed rows, of the shape of `rows`.
        rows: The weight as float16 holds it, in float32, of shape [rows, columns].
        scales: The largest magnitude of each row.
    """
    counts: NDArray[np.int64] = np.count_nonzero(encode_rows(rows, scales) != codes, axis=1)
    return counts


def encode_rows(rows: Floats, scales: Floats) -> Floats:
    """Returns the codes that rows are packed into, as float32.

    Args:
        rows: The weight as float16 holds it, in float32, of shape [rows, columns].
        scales: The largest magnitude of each row.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        # The reciprocal is rounded before it is multiplied by 127.
        codes: Floats = np.rint(rows * (np.float32(1) / scales * np.float32(127))[:, np.newaxis])
    codes[scales == 0] = 0
    return codes


_SMALLEST = np.float32(1e-38)  # bitsandbytes divides by no less


def count_mismatches(
    codes: NDArray[np.uint8],
    blocks: Floats,
    scales: Floats,
    quant_type: FourBitType,
    *,
    elements: int,
) -> NDArray[np.int64]:
    """Counts the elements of each block that would be packed differently.

    Args:
        codes: Packed bytes, from the first element of the first block on.
        blocks: The weight's elements, of shape [blocks, blocksize].
        scales: The largest magnitude of each block.
        quant_type: What the codes stand for.
        elements: How many elements there are; fewer than `blocks` holds where the last is short.

    Returns:
        The counts, of shape [blocks].
    """
    lower, upper = _intervals(quant_type)
    scaled = scale_blocks(blocks, scales, elements).reshape(-1)[:elements]
    held = codes[: -(-elements // 2)]
    wrong = np.zeros(blocks.shape, np.bool_)
    flat = wrong.reshape(-1)[:elements]
    np.less_equal(scaled, lower[held].reshape(-1)[:elements], out=flat)
    flat |= scaled > upper[held].reshape(-1)[:elements]
    counts: NDArray[np.int64] = np.count_nonzero(wrong, axis=1)
    return counts


def scale_blocks(blocks: Floats, scales: Floats, elements: int) -> Floats:
    """Returns elements between -1 and 1, rounded as the quantizer rounds them.

    Args:
        blocks: The weight's elements, of shape [blocks, blocksize].
        scales: The largest magnitude of each block.
        elements: How many elements there are; fewer than `blocks` holds where the last is short.
    """
    divisors = np.maximum(scales, _SMALLEST)
    scaled = blocks * (np.float32(1) / divisors).astype(np.float32)[:, np.newaxis]
    if elements < blocks.size:
        # A short block is divided, where whole ones are multiplied by the reciprocal.
        scaled[-1] = blocks[-1] / divisors[-1]
    return np.clip(scaled, -1, 1, out=scaled)


@cache
def _intervals(quant_type: FourBitType) -> tuple[Floats, Floats]:
    """Returns what elements of each byte's codes are larger than, and what they are no more than.

    Both are of shape [256, 2], as `make_pairs` makes them.
    """
    table = CODES[quant_type]
    numbers = np.unique(table)
    middles = (numbers[:-1] + numbers[1:]) / np.float32(2)
    edges = np.concatenate([[-np.inf], middles, [np.inf]]).astype(np.float32)
    at = np.searchsorted(numbers, table)
    return make_pairs(edges[at]), make_pairs(edges[at + 1])
