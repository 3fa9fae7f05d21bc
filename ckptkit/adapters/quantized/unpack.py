"""How a packed weight is unpacked, by its companions or by its original; and proof that they match.

The original of packed weights is read once, to prove that it is the one that was packed. Memory is
bounded by a few blocks and, for one weight at a time, four bytes for every block of elements that
shares a scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
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
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape, Span, TensorEntry
from ckptkit.engine.kernels import Operand, StoredOperand
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

FLOAT16 = BY_NAME["float16"]
_BLOCK_ELEMENTS = 1 << 20  # whole groups of blocks, whatever their size
# A GPU rounds divisions differently, so elements between two codes may get either: at most one in
# thousands, and never many in one block. Other weights differ in whole blocks, or everywhere.
_TOLERATED = 1e-3
_TOLERATED_OF_BLOCK = 1 / 8


class PackingProof(Struct, frozen=True):
    """The result of comparing a packed weight with its original.

    Attributes:
        differing: Elements that would be packed differently.
        elements: How many were compared.
        crowded: Whether one block has more of them than rounding explains.
        mean: The mean of the scales, as float32.
    """

    differing: int
    elements: int
    crowded: bool
    mean: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.crowded and self.differing <= _TOLERATED * self.elements


class FourBitClaim(Struct, frozen=True):
    """A packed weight, and how it is assumed to have been packed.

    Attributes:
        packed: The codes.
        original: The weight that was packed.
        elements: Its number of elements.
        quant_type: The meaning of the codes.
        blocksize: How many elements share a scale.
        dtype: The element type to which the original was cast first.
    """

    packed: Operand
    original: Operand
    elements: int
    quant_type: FourBitType
    blocksize: int
    dtype: DType


def prove_four_bits(
    reader: ArrayReader, claim: FourBitClaim, *, at_most: int | None = None
) -> PackingProof:
    """Counts the codes into which the original would not be packed.

    `at_most` limits the number of compared elements.
    """
    elements = claim.elements if at_most is None else min(at_most, claim.elements)
    codes_per_item = 2 * claim.packed.dtype.itemsize
    differing, crowded, maxima = 0, False, []
    for span in cut_blocks(elements):
        codes = reader.compute(
            claim.packed, Span(span.start // codes_per_item, -(-span.stop // codes_per_item))
        )
        numbers = reader.compute(claim.original, span)
        blocks, scales = find_block_maxima(numbers, claim.dtype, claim.blocksize)
        mismatches = count_mismatches(
            codes.view(np.uint8), blocks, scales, claim.quant_type, elements=numbers.size
        )
        differing += int(mismatches.sum())
        crowded |= bool(mismatches.max() > _TOLERATED_OF_BLOCK * claim.blocksize)
        maxima.append(scales)
    return PackingProof(
        differing, elements, crowded, float(compute_float32_mean(np.concatenate(maxima)))
    )


def prove_eight_bits(
    reader: ArrayReader, packed: Operand, original: Operand, shape: Shape
) -> PackingProof:
    """Counts the codes of a matrix into which the original would not be packed."""
    differing, crowded = 0, False
    columns, elements = shape[1], math.prod(shape)
    step = max(1, _BLOCK_ELEMENTS // columns) * columns
    for start in range(0, elements, step):
        span = Span(start, min(start + step, elements))
        rows, scales = find_block_maxima(reader.compute(original, span), FLOAT16, columns)
        codes = reader.compute(packed, span).view(np.int8).reshape(rows.shape)
        mismatches = count_row_mismatches(codes, rows, scales)
        differing += int(mismatches.sum())
        crowded |= bool(mismatches.max() > max(1, _TOLERATED_OF_BLOCK * columns))
    return PackingProof(differing, elements, crowded)


def prove_same_bytes(
    reader: ArrayReader, first: tuple[str, TensorEntry], second: tuple[str, TensorEntry]
) -> PackingProof:
    """Compares the codes of two packed weights, whatever types they are stored as."""
    size = first[1].size_bytes
    if second[1].size_bytes != size:
        return PackingProof(2 * size, 2 * size, crowded=True)
    differing = 0
    for span in cut_blocks(size):
        codes = []
        for origin, entry in (first, second):  # a range begins and ends between stored elements
            item = entry.dtype.itemsize
            part = Span(span.start // item, span.stop // item)
            codes.append(reader.read(origin, entry.key, part).view(np.uint8))
        differing += int(np.count_nonzero(codes[0] != codes[1]))
    return PackingProof(differing, 2 * size, crowded=differing > 0)


def measure_change(
    reader: ArrayReader, original: Operand, dequantized: Operand, shape: Shape
) -> float:
    """Returns the Frobenius norm of what quantizing changed in a weight."""
    total = 0.0
    for span in cut_blocks(math.prod(shape)):
        change = reader.compute(dequantized, span).astype(np.float64)
        change -= reader.compute(original, span)
        total += float(change @ change)
    return math.sqrt(total)


def cut_blocks(elements: int) -> Iterator[Span]:
    for start in range(0, elements, _BLOCK_ELEMENTS):
        yield Span(start, min(start + _BLOCK_ELEMENTS, elements))


_TRIAL_ELEMENTS = 1 << 18
_LIKELY_BLOCKSIZES = tuple(sorted(BLOCKSIZES, key=lambda size: (size not in {64, 128}, size)))


class UnpackedWeight(Struct, frozen=True):
    """A packed weight as an operand.

    Attributes:
        operand: Its elements.
        shape: Its shape.
        dtype: Its element type before packing.
        state: How it was packed; None for eight bits.
        derived: Whether its scales are derived from the original weight.
        proof: The result of comparing it with the original; None without an original.
    """

    operand: Operand
    shape: Shape
    dtype: DType
    state: FourBitState | None = None
    derived: bool = False
    proof: PackingProof | None = None


class PackedLocation(Struct, frozen=True):
    """The source of a packed weight.

    Attributes:
        origin: Its name.
        location: Its location, for messages.
        reader: Reads from it.
    """

    origin: str
    location: str
    reader: ArrayReader

    def stored(self, entry: TensorEntry) -> StoredOperand:
        return StoredOperand(self.origin, entry.key, entry.dtype)

    def state(self, entry: TensorEntry) -> FourBitState:
        where = f"{self.location}, tensor {entry.name!r}"
        if entry.size_bytes > MAX_STATE_BYTES:
            raise FormatError(f"has {entry.size_bytes:,} bytes, too many for a state", where=where)
        return FourBitState.parse(self.reader.read_whole(self.origin, entry).tobytes(), where=where)


def unpack_eight_bits(weight: PackedWeight, place: PackedLocation, dtype: DType) -> UnpackedWeight:
    """Unpacks an 8-bit weight by its stored scales; `dtype` is that of the weight before."""
    scales = weight.companions[SCALES_OF_ROWS]
    rows, columns = weight.packed.shape
    _check_size(scales, rows, place.location)
    stored = StoredScales(place.stored(scales))
    operand = EightBitWeight(place.stored(weight.packed), stored, columns)
    return UnpackedWeight(operand, weight.packed.shape, dtype)


def derive_eight_bits(
    weight: PackedWeight, place: PackedLocation, original: StoredOperand
) -> UnpackedWeight:
    """Unpacks an 8-bit weight by scales that are derived from its original."""
    columns = weight.packed.shape[1]
    rows = DerivedScales(original, FLOAT16, columns, weight.packed.elements)
    operand = EightBitWeight(place.stored(weight.packed), rows, columns)
    return UnpackedWeight(operand, weight.packed.shape, original.dtype, derived=True)


def unpack_four_bits(
    weight: PackedWeight, place: PackedLocation, state: FourBitState
) -> UnpackedWeight:
    """Unpacks a 4-bit weight by its stored scales."""
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
        shared = _get_companion(weight, "nested_absmax", place.location)
        table = _get_companion(weight, "nested_quant_map", place.location)
        _check_size(shared, -(-blocks // state.nested_blocksize), place.location)
        _check_size(table, 256, place.location)
        _check_scales(absmax, place.location, are_bytes=True)
        scales = NestedScales(
            place.stored(absmax),
            place.stored(shared),
            place.stored(table),
            state.nested_blocksize,
            state.nested_offset,
        )
    else:
        _check_scales(absmax, place.location, are_bytes=False)
    return _four_bits(place.stored(weight.packed), scales, state)


def derive_four_bits(
    weight: PackedWeight, place: PackedLocation, original: StoredOperand, state: FourBitState
) -> UnpackedWeight:
    """Unpacks a 4-bit weight by scales that are derived from its original."""
    dtype = BY_NAME[state.dtype]
    maxima = DerivedScales(original, dtype, state.blocksize, state.elements)
    scales: Scales = maxima
    if state.nested_blocksize:
        scales = DerivedNestedScales(maxima, state.nested_offset)
    return replace(_four_bits(place.stored(weight.packed), scales, state), derived=True)


def find_settings(
    packed: StoredOperand,
    original: StoredOperand,
    shape: Shape,
    known: FourBitSettings,
    reader: ArrayReader,
) -> tuple[FourBitState, PackingProof]:
    """Finds how a weight was packed, by comparing some of it with its original.

    Known settings are tried first, and used where the bytes do not decide: whether the scales were
    quantized too, and which of two element types that fit equally well the weight had.

    Returns:
        The settings that fit best, without the mean of scales, and how well they fit.
    """
    tried: list[tuple[FourBitState, PackingProof]] = []
    nested = NESTED_BLOCKSIZE if known.nested is not False else 0
    for likely in list_likely_settings(known, packed.dtype, original.dtype):
        if likely.quant_type is None or likely.blocksize is None or likely.dtype is None:
            continue
        state = FourBitState(likely.quant_type, likely.blocksize, likely.dtype, shape, nested)
        claim = make_claim(packed, original, state)
        proof = prove_four_bits(reader, claim, at_most=_TRIAL_ELEMENTS)
        tried.append((state, proof))
        if not proof.differing:
            break
    return min(tried, key=lambda trial: (trial[1].crowded, trial[1].differing))


def list_likely_settings(
    known: FourBitSettings, storage: DType, original: DType
) -> Iterator[FourBitSettings]:
    """Yields settings with which a weight may have been packed, the likeliest first.

    FSDP takes parameters of one type only, so a float type of storage is that of the model.

    Args:
        known: The known settings.
        storage: The element type in which the packed numbers are stored.
        original: The element type of the weight before.
    """
    types = dict.fromkeys(QUANT_TYPES[t] for t in filter(None, (known.quant_type, *QUANT_TYPES)))
    sizes = dict.fromkeys(filter(None, (known.blocksize, *_LIKELY_BLOCKSIZES)))
    names = (known.dtype, storage.name, original.name, *DTYPES)
    dtypes = dict.fromkeys(name for name in names if name in DTYPES)
    for size, dtype, quant_type in itertools.product(sizes, dtypes, types):
        yield FourBitSettings(quant_type, known.nested, size, dtype)


def make_claim(packed: StoredOperand, original: StoredOperand, state: FourBitState) -> FourBitClaim:
    return FourBitClaim(
        packed, original, state.elements, state.quant_type, state.blocksize, BY_NAME[state.dtype]
    )


def _four_bits(packed: StoredOperand, scales: Scales, state: FourBitState) -> UnpackedWeight:
    dtype = BY_NAME[state.dtype]
    operand = FourBitWeight(
        packed, scales, state.quant_type, state.blocksize, state.elements, dtype
    )
    return UnpackedWeight(operand, state.shape, dtype, state)


def _get_companion(weight: PackedWeight, kind: str, location: str) -> TensorEntry:
    if kind not in weight.companions:
        raise FormatError(
            f"{weight.name!r} is doubly quantized, but {kind!r} was not stored with it",
            where=location,
        )
    return weight.companions[kind]


def _check_size(entry: TensorEntry, elements: int, location: str) -> None:
    if entry.elements != elements:
        raise FormatError(
            f"{entry.name!r} has {entry.elements:,} elements, expected {elements:,} for its weight",
            where=location,
        )


def _check_scales(entry: TensorEntry, location: str, *, are_bytes: bool) -> None:
    expected = "bytes of double quantization" if are_bytes else "floating numbers"
    if (entry.dtype.itemsize != 1) if are_bytes else (entry.dtype.kind != "float"):
        raise FormatError(
            f"{entry.name!r} has element type {entry.dtype.name}, expected scales as {expected}",
            where=location,
        )
