"""Weights of eight bits, as LLM.int8 holds them, turned back into numbers.

Each row of a matrix has one scale, its largest magnitude as float16 knows it; an element is
`code * scale / 127`, with the division written as a multiplication.

Source: bitsandbytes 0.50, `backends/default/ops.py` (`int8_vectorwise_dequant`,
`int8_vectorwise_quant`), `nn/modules.py` (`Int8Params._quantize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.index import Key, Span
from ckptkit.kernels.four_bit import Floats, Scales
from ckptkit.kernels.operands import Stored
from ckptkit.planning.plan import Demand

STEP = np.float32(7.874015718698502e-3)
"""1 / 127, with the digits that bitsandbytes has."""
_FLOAT32 = BY_NAME["float32"]


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    """A weight of eight bits, as the float32 numbers that it stands for.

    Attributes:
        packed: The tensor that holds the codes.
        scales: The scales of its rows.
        columns: How many elements a row has.
    """

    packed: Stored
    scales: Scales
    columns: int

    @property
    def dtype(self) -> DType:
        """Always float32: bitsandbytes leaves the rounding to who asks."""
        return _FLOAT32

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The codes, and what the scales are made from."""
        return (*self.packed.reads, *self.scales.reads)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """The codes of the range, and the scales of the rows that it touches."""
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


def row_mismatches(codes: NDArray[np.int8], rows: Floats, scales: Floats) -> NDArray[np.int64]:
    """Counts the elements of each row that would be packed differently.

    Args:
        codes: The packed rows, of the shape of `rows`.
        rows: The weight as float16 holds it, in float32, of shape [rows, columns].
        scales: The largest magnitude of each row.
    """
    counts: NDArray[np.int64] = np.count_nonzero(codes_of_rows(rows, scales) != codes, axis=1)
    return counts


def codes_of_rows(rows: Floats, scales: Floats) -> Floats:
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
