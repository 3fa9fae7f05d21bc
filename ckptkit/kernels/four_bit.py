"""Weights of four bits, as bitsandbytes packs them, turned back into numbers.

An element is a code of four bits and a scale: the code picks one of sixteen numbers between -1 and
1, and each block of elements shares one scale, the largest magnitude in it. The first of two
elements lies in the upper half of a byte. What type the bytes are stored under says nothing: they
are never more than bytes here.

bitsandbytes multiplies in float32 and rounds once, to the type that the weight had before it was
quantized; so does this. Its kernels disagree about the sign of fp4's second zero; here it is +0, as
in the table that it saves.

Source: bitsandbytes 0.50, `functional.py` (`get_4bit_type`, `dequantize_4bit`), and the kernels
`_dequantize_4bit_compute` in `backends/default/ops.py` and `kDequantizeBlockwise` in
`csrc/kernels.cu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Key, Span
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.operands import Stored
from ckptkit.planning.plan import Demand

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


def _fp4() -> Floats:
    magnitudes = np.array(_FP4, np.float32) / np.float32(12)
    # Zero minus, and not minus: the second zero has no sign.
    return np.concatenate([magnitudes, np.float32(0) - magnitudes])


CODES: dict[FourBitType, Floats] = {"nf4": np.array(_NF4, np.float32), "fp4": _fp4()}


def pairs(table: Floats) -> Floats:
    """Returns what each byte stands for, given what each code does; of shape [256, 2].

    >>> pairs(CODES["nf4"])[0x70].tolist()
    [0.0, -1.0]
    """
    return np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)


_PAIRS = {name: pairs(table) for name, table in CODES.items()}


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


@dataclass(frozen=True, slots=True)
class StoredScales:
    """Scales as they are stored, one number for each block.

    Attributes:
        absmax: The tensor that holds them.
    """

    absmax: Stored

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The tensor itself."""
        return self.absmax.reads

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        """The same range of it."""
        return self.absmax.demands(blocks)

    def values(self, _blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """What was read, as float32."""
        return inputs[0].astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales that were quantized themselves ("double quantization"): a byte for each block.

    Attributes:
        absmax: The bytes.
        nested_absmax: The scales of the scales.
        nested_map: The 256 numbers that a byte picks from.
        blocksize: How many scales share a scale.
        offset: What was taken off the scales before, and is put back.
    """

    absmax: Stored
    nested_absmax: Stored
    nested_map: Stored
    blocksize: int
    offset: float

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The three tensors."""
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


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """A weight of four bits, as the numbers that it stands for.

    Attributes:
        packed: The tensor that holds the codes, of whatever type.
        scales: The scales of its blocks.
        quant_type: What the codes stand for.
        blocksize: How many elements share a scale, even.
        elements: How many elements the weight has.
        dtype: Their type, the one that they had before they were quantized.
    """

    packed: Stored
    scales: Scales
    quant_type: FourBitType
    blocksize: int
    elements: int
    dtype: DType

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The codes, and what the scales are made from."""
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
