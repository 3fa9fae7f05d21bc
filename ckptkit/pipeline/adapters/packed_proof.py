"""Reading the original of packed weights once, to prove that it is the one that was packed.

Memory is bounded by a few blocks and, for the weight at hand, by four bytes for every block of
elements that shares a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.adapters.quant_state import FourBitType
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.index import Key, Shape, Span, TensorEntry
from ckptkit.execution.tensors import Origin, TensorReader
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.derived_scales import block_maxima, float32_mean
from ckptkit.kernels.eight_bit import row_mismatches
from ckptkit.kernels.four_bit_proof import mismatches
from ckptkit.kernels.operands import Operand

# As in the executor: a block of fp32 is then as large as one read.
_PIECE_ELEMENTS = 1 << 20
_FLOAT16 = BY_NAME["float16"]
# A GPU's division is rounded otherwise, so elements between two codes may go either way: at most
# one in thousands, and never many in one block. Weights that were trained on differ in whole
# blocks, or everywhere.
_TOLERATED = 1e-3
_TOLERATED_OF_BLOCK = 1 / 8


@dataclass(frozen=True, slots=True)
class Proof:
    """What comparing a packed weight with its original found.

    Attributes:
        differing: Elements that would be packed differently.
        elements: How many were compared.
        crowded: Whether more of them lie in one block than rounding explains.
        mean: The mean of the scales, as float32.
    """

    differing: int
    elements: int
    crowded: bool
    mean: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the packed weight was made from the original."""
        return not self.crowded and self.differing <= _TOLERATED * self.elements


class PackedReader:
    """Reads tensors of any source, whole or in part; for one thread at a time."""

    def __init__(self, origins: Mapping[str, Origin]) -> None:
        # Origins of its own: what is read for a proof is read, and checked, once more when used.
        self._readers = {
            name: TensorReader(Origin(name, origin.source, origin.index))
            for name, origin in origins.items()
        }
        self._indexes = {name: origin.index for name, origin in origins.items()}

    def read(self, origin: str, key: Key, span: Span) -> NDArray[Any]:
        """Returns elements of a stored tensor."""
        dtype = self._indexes[origin].tensors[key].dtype
        data = bytearray((span.stop - span.start) * dtype.itemsize)
        self._readers[origin].fill(key, span, memoryview(data))
        return np.frombuffer(data, numpy_dtype(dtype))

    def whole(self, origin: str, entry: TensorEntry) -> NDArray[Any]:
        """Returns all elements of a stored tensor."""
        return self.read(origin, entry.key, Span(0, entry.elements))

    def values(self, operand: Operand, span: Span) -> NDArray[Any]:
        """Returns elements of an operand."""
        inputs = [self.read(d.origin, d.key, d.place) for d in operand.demands(span)]
        return operand.values(span, inputs)


@dataclass(frozen=True, slots=True)
class FourBitClaim:
    """A packed weight, and what is said of it.

    Attributes:
        packed: The codes.
        original: What they were made from.
        elements: How many elements that has.
        quant_type: What the codes stand for.
        blocksize: How many elements share a scale.
        dtype: What the original was cast to before.
    """

    packed: Operand
    original: Operand
    elements: int
    quant_type: FourBitType
    blocksize: int
    dtype: DType


def prove_four_bits(
    reader: PackedReader, claim: FourBitClaim, *, at_most: int | None = None
) -> Proof:
    """Asks of every code whether the original would be packed into it.

    Args:
        reader: Of both sources.
        claim: What is to be proven.
        at_most: How many elements to look at, None for all.
    """
    elements = claim.elements if at_most is None else min(at_most, claim.elements)
    held = 2 * claim.packed.dtype.itemsize
    differing, crowded, maxima = 0, False, []
    for span in _pieces(elements):
        codes = reader.values(claim.packed, Span(span.start // held, -(-span.stop // held)))
        numbers = reader.values(claim.original, span)
        blocks, scales = block_maxima(numbers, claim.dtype, claim.blocksize)
        found = mismatches(
            codes.view(np.uint8), blocks, scales, claim.quant_type, elements=numbers.size
        )
        differing += int(found.sum())
        crowded |= bool(found.max() > _TOLERATED_OF_BLOCK * claim.blocksize)
        maxima.append(scales)
    return Proof(differing, elements, crowded, float(float32_mean(np.concatenate(maxima))))


def prove_eight_bits(
    reader: PackedReader, packed: Operand, original: Operand, shape: Shape
) -> Proof:
    """Asks of every code of a matrix whether the original would be packed into it."""
    differing, crowded = 0, False
    columns, elements = shape[1], math.prod(shape)
    step = max(1, _PIECE_ELEMENTS // columns) * columns
    for start in range(0, elements, step):
        span = Span(start, min(start + step, elements))
        rows, scales = block_maxima(reader.values(original, span), _FLOAT16, columns)
        codes = reader.values(packed, span).view(np.int8).reshape(rows.shape)
        found = row_mismatches(codes, rows, scales)
        differing += int(found.sum())
        crowded |= bool(found.max() > max(1, _TOLERATED_OF_BLOCK * columns))
    return Proof(differing, elements, crowded)


def prove_same_bytes(
    reader: PackedReader, first: tuple[str, TensorEntry], second: tuple[str, TensorEntry]
) -> Proof:
    """Compares the codes of two packed weights, whatever types they are stored under.

    Args:
        reader: Of both sources.
        first: One of them, with its source.
        second: The other.
    """
    size = first[1].size_bytes
    if second[1].size_bytes != size:
        return Proof(2 * size, 2 * size, crowded=True)
    differing = 0
    for span in _pieces(size):
        one, other = (_bytes(reader, origin, entry, span) for origin, entry in (first, second))
        differing += int(np.count_nonzero(one != other))
    return Proof(differing, 2 * size, crowded=differing > 0)


def change_norm(
    reader: PackedReader, original: Operand, dequantized: Operand, shape: Shape
) -> float:
    """Returns the Frobenius norm of what quantizing changed in a weight."""
    total = 0.0
    for span in _pieces(math.prod(shape)):
        change = reader.values(dequantized, span).astype(np.float64)
        change -= reader.values(original, span)
        total += float(change @ change)
    return math.sqrt(total)


def _bytes(reader: PackedReader, origin: str, entry: TensorEntry, span: Span) -> NDArray[Any]:
    """Returns a range of a tensor's bytes; no storage is wider than what ranges begin at."""
    held = entry.dtype.itemsize
    part = Span(span.start // held, span.stop // held)
    return reader.read(origin, entry.key, part).view(np.uint8)


def _pieces(elements: int) -> Iterator[Span]:
    for start in range(0, elements, _PIECE_ELEMENTS):
        yield Span(start, min(start + _PIECE_ELEMENTS, elements))
