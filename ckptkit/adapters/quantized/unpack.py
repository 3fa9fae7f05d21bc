"""The way from one packed weight to its elements: by what lies beside it, or by its original.

Reading the original of packed weights once, to prove that it is the one that was packed.

Memory is bounded by a few blocks and, for the weight at hand, by four bytes for every block of
elements that shares a scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.adapters.quantized.dequantize import (
    EightBitWeight,
    FourBitWeight,
    NestedScales,
    Scales,
    StoredScales,
    count_mismatches,
    count_row_mismatches,
)
from ckptkit.adapters.quantized.scales import (
    NESTED_BLOCKSIZE,
    DerivedNestedScales,
    DerivedScales,
    compute_float32_mean,
    find_block_maxima,
)
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import FormatError
from ckptkit.core.index import Key, Shape, Span, TensorEntry
from ckptkit.engine.kernels import Operand, StoredOperand
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.lora.quantized import (
    BLOCKSIZES,
    DTYPES,
    MAX_STATE_BYTES,
    QUANT_TYPES,
    SCALES_OF_ROWS,
    FourBitSettings,
    FourBitState,
    FourBitType,
    PackedWeight,
)

# As in the executor: a block of fp32 is then as large as one read.
_PIECE_ELEMENTS = 1 << 20
_FLOAT16 = BY_NAME["float16"]
# A GPU's division is rounded otherwise, so elements between two codes may go either way: at most
# one in thousands, and never many in one block. Weights that were trained on differ in whole
# blocks, or everywhere.
_TOLERATED = 1e-3
_TOLERATED_OF_BLOCK = 1 / 8


@dataclass(frozen=True, slots=True)
class PackingProof:
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
        return self.read(origin, entry.key, Span(0, entry.elements))

    def values(self, operand: Operand, span: Span) -> NDArray[Any]:
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
) -> PackingProof:
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
        blocks, scales = find_block_maxima(numbers, claim.dtype, claim.blocksize)
        found = count_mismatches(
            codes.view(np.uint8), blocks, scales, claim.quant_type, elements=numbers.size
        )
        differing += int(found.sum())
        crowded |= bool(found.max() > _TOLERATED_OF_BLOCK * claim.blocksize)
        maxima.append(scales)
    return PackingProof(
        differing, elements, crowded, float(compute_float32_mean(np.concatenate(maxima)))
    )


def prove_eight_bits(
    reader: PackedReader, packed: Operand, original: Operand, shape: Shape
) -> PackingProof:
    """Asks of every code of a matrix whether the original would be packed into it."""
    differing, crowded = 0, False
    columns, elements = shape[1], math.prod(shape)
    step = max(1, _PIECE_ELEMENTS // columns) * columns
    for start in range(0, elements, step):
        span = Span(start, min(start + step, elements))
        rows, scales = find_block_maxima(reader.values(original, span), _FLOAT16, columns)
        codes = reader.values(packed, span).view(np.int8).reshape(rows.shape)
        found = count_row_mismatches(codes, rows, scales)
        differing += int(found.sum())
        crowded |= bool(found.max() > max(1, _TOLERATED_OF_BLOCK * columns))
    return PackingProof(differing, elements, crowded)


def prove_same_bytes(
    reader: PackedReader, first: tuple[str, TensorEntry], second: tuple[str, TensorEntry]
) -> PackingProof:
    """Compares the codes of two packed weights, whatever types they are stored under.

    Args:
        reader: Of both sources.
        first: One of them, with its source.
        second: The other.
    """
    size = first[1].size_bytes
    if second[1].size_bytes != size:
        return PackingProof(2 * size, 2 * size, crowded=True)
    differing = 0
    for span in _pieces(size):
        one, other = (_bytes(reader, origin, entry, span) for origin, entry in (first, second))
        differing += int(np.count_nonzero(one != other))
    return PackingProof(differing, 2 * size, crowded=differing > 0)


def measure_change(
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


FLOAT16 = BY_NAME["float16"]
_TRIAL_ELEMENTS = 1 << 18
_LIKELY_BLOCKSIZES = tuple(sorted(BLOCKSIZES, key=lambda size: (size not in {64, 128}, size)))


@dataclass(frozen=True, slots=True)
class UnpackedWeight:
    """One packed weight, and what is known of it.

    Attributes:
        operand: Its elements.
        shape: Its shape.
        dtype: What it was before it was packed.
        state: How it was packed; None for eight bits.
        derived: Whether its scales are made from the original weight.
        proof: What comparing it with the original found, None where there was none.
    """

    operand: Operand
    shape: Shape
    dtype: DType
    state: FourBitState | None = None
    derived: bool = False
    proof: PackingProof | None = None


@dataclass(frozen=True, slots=True)
class PackedLocation:
    """Where a packed weight lies.

    Attributes:
        origin: The source.
        location: What messages call it.
        reader: Reads from it.
    """

    origin: str
    location: str
    reader: PackedReader

    def stored(self, entry: TensorEntry) -> StoredOperand:
        return StoredOperand(self.origin, entry.key, entry.dtype)

    def state(self, entry: TensorEntry) -> FourBitState:
        """Reads a quantization state."""
        where = f"{self.location}, tensor {entry.name!r}"
        if entry.size_bytes > MAX_STATE_BYTES:
            raise FormatError(f"has {entry.size_bytes:,} bytes, too many for a state", where=where)
        return FourBitState.parse(self.reader.whole(self.origin, entry).tobytes(), where=where)


def unpack_eight_bits(weight: PackedWeight, place: PackedLocation, dtype: DType) -> UnpackedWeight:
    """Returns an 8-bit weight that has its scales beside it.

    Args:
        weight: The weight.
        place: Where it lies.
        dtype: What it was before.
    """
    scales = weight.companions[SCALES_OF_ROWS]
    rows, columns = weight.packed.shape
    _check_size(scales, rows, place.location)
    stored = StoredScales(place.stored(scales))
    operand = EightBitWeight(place.stored(weight.packed), stored, columns)
    return UnpackedWeight(operand, weight.packed.shape, dtype)


def derive_eight_bits(
    weight: PackedWeight, place: PackedLocation, original: StoredOperand
) -> UnpackedWeight:
    """Returns an 8-bit weight whose scales are made from its original."""
    columns = weight.packed.shape[1]
    rows = DerivedScales(original, FLOAT16, columns, weight.packed.elements)
    operand = EightBitWeight(place.stored(weight.packed), rows, columns)
    return UnpackedWeight(operand, weight.packed.shape, original.dtype, derived=True)


def unpack_four_bits(
    weight: PackedWeight, place: PackedLocation, state: FourBitState
) -> UnpackedWeight:
    """Returns a 4-bit weight that has its scales beside it."""
    if weight.packed.size_bytes != -(-state.elements // 2):
        raise FormatError(
            f"{weight.packed.name!r} has {weight.packed.size_bytes:,} bytes, but its state is"
            f" that of a weight of shape {state.shape}",
            where=place.location,
        )
    blocks = -(-state.elements // state.blocksize)
    absmax = weight.companions["absmax"]
    _check_size(absmax, blocks, place.location)
    scales: Scales = StoredScales(place.stored(absmax))
    if state.nested_blocksize:
        shared = _companion(weight, "nested_absmax", place.location)
        table = _companion(weight, "nested_quant_map", place.location)
        _check_size(shared, -(-blocks // state.nested_blocksize), place.location)
        _check_size(table, 256, place.location)
        _check_bytes(absmax, place.location)
        scales = NestedScales(
            place.stored(absmax),
            place.stored(shared),
            place.stored(table),
            state.nested_blocksize,
            state.nested_offset,
        )
    else:
        _check_numbers(absmax, place.location)
    return _four_bits(place.stored(weight.packed), scales, state)


def derive_four_bits(
    weight: PackedWeight, place: PackedLocation, original: StoredOperand, state: FourBitState
) -> UnpackedWeight:
    """Returns a 4-bit weight whose scales are made from its original."""
    dtype = BY_NAME[state.dtype]
    maxima = DerivedScales(original, dtype, state.blocksize, state.elements)
    scales: Scales = maxima
    if state.nested_blocksize:
        scales = DerivedNestedScales(maxima, state.nested_offset)
    return replace(_four_bits(place.stored(weight.packed), scales, state), derived=True)


def proof_of_four_bits(
    packed: StoredOperand, original: StoredOperand, state: FourBitState, reader: PackedReader
) -> PackingProof:
    return prove_four_bits(reader, _claim(packed, original, state))


def find_settings(
    packed: StoredOperand,
    original: StoredOperand,
    shape: Shape,
    told: FourBitSettings,
    reader: PackedReader,
) -> tuple[FourBitState, PackingProof]:
    """Finds out how a weight was packed, by comparing some of it with its original.

    What is told is tried first, and believed where bytes cannot tell: whether the scales were
    quantized too, and which of two types the weight had that hold it equally well.

    Returns:
        The settings that fit best, without the mean of scales, and how well they fit.
    """
    tried: list[tuple[FourBitState, PackingProof]] = []
    nested = NESTED_BLOCKSIZE if told.nested is not False else 0
    for likely in list_likely_settings(told, packed.dtype, original.dtype):
        if likely.quant_type is None or likely.blocksize is None or likely.dtype is None:
            continue
        state = FourBitState(likely.quant_type, likely.blocksize, likely.dtype, shape, nested)
        proof = prove_four_bits(reader, _claim(packed, original, state), at_most=_TRIAL_ELEMENTS)
        tried.append((state, proof))
        if not proof.differing:
            break
    return min(tried, key=lambda one: (one[1].crowded, one[1].differing))


def list_likely_settings(
    told: FourBitSettings, storage: DType, original: DType
) -> Iterator[FourBitSettings]:
    """Yields what weights are packed with, the likeliest first.

    FSDP takes parameters of one type only, so that a float type of storage is that of the model.

    Args:
        told: What is known.
        storage: What the packed numbers are stored under.
        original: The type of the weight before.
    """
    types = dict.fromkeys(QUANT_TYPES[t] for t in filter(None, (told.quant_type, *QUANT_TYPES)))
    sizes = dict.fromkeys(filter(None, (told.blocksize, *_LIKELY_BLOCKSIZES)))
    names = (told.dtype, storage.name, original.name, *DTYPES)
    dtypes = dict.fromkeys(name for name in names if name in DTYPES)
    for size, dtype, quant_type in itertools.product(sizes, dtypes, types):
        yield FourBitSettings(quant_type, told.nested, size, dtype)


def _claim(packed: StoredOperand, original: StoredOperand, state: FourBitState) -> FourBitClaim:
    return FourBitClaim(
        packed, original, state.elements, state.quant_type, state.blocksize, BY_NAME[state.dtype]
    )


def _four_bits(packed: StoredOperand, scales: Scales, state: FourBitState) -> UnpackedWeight:
    dtype = BY_NAME[state.dtype]
    operand = FourBitWeight(
        packed, scales, state.quant_type, state.blocksize, state.elements, dtype
    )
    return UnpackedWeight(operand, state.shape, dtype, state)


def _companion(weight: PackedWeight, kind: str, location: str) -> TensorEntry:
    if kind not in weight.companions:
        raise FormatError(
            f"{weight.name!r} is doubly quantized, but {kind!r} does not lie beside it",
            where=location,
        )
    return weight.companions[kind]


def _check_size(entry: TensorEntry, elements: int, location: str) -> None:
    if entry.elements != elements:
        raise FormatError(
            f"{entry.name!r} has {entry.elements:,} elements against the {elements:,} that its"
            " weight takes",
            where=location,
        )


def _check_numbers(entry: TensorEntry, location: str) -> None:
    if entry.dtype.kind != "float":
        raise FormatError(
            f"{entry.name!r} has element type {entry.dtype.name}, where scales that were not"
            " quantized are floating numbers",
            where=location,
        )


def _check_bytes(entry: TensorEntry, location: str) -> None:
    if entry.dtype.itemsize != 1:
        raise FormatError(
            f"{entry.name!r} has element type {entry.dtype.name}, where double quantization"
            " leaves bytes",
            where=location,
        )
