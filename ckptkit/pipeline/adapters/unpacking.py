"""The way from one packed weight to its elements: by what lies beside it, or by its original."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptkit.adapters.quant_state import (
    BLOCKSIZES,
    DTYPES,
    MAX_STATE_BYTES,
    QUANT_TYPES,
    FourBitSettings,
    FourBitState,
)
from ckptkit.adapters.quantized import SCALES_OF_ROWS, PackedWeight
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape, TensorEntry
from ckptkit.kernels.derived_scales import NESTED_BLOCKSIZE, DerivedNestedScales, DerivedScales
from ckptkit.kernels.eight_bit import EightBitWeight
from ckptkit.kernels.four_bit import FourBitWeight, NestedScales, Scales, StoredScales
from ckptkit.kernels.operands import Operand, Stored
from ckptkit.pipeline.adapters.packed_proof import (
    FourBitClaim,
    PackedReader,
    Proof,
    prove_four_bits,
)

FLOAT16 = BY_NAME["float16"]
_TRIAL_ELEMENTS = 1 << 18
_LIKELY_BLOCKSIZES = tuple(sorted(BLOCKSIZES, key=lambda size: (size not in {64, 128}, size)))


@dataclass(frozen=True, slots=True)
class Unpacked:
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
    proof: Proof | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a packed weight lies.

    Attributes:
        origin: The source.
        location: What messages call it.
        reader: Reads from it.
    """

    origin: str
    location: str
    reader: PackedReader

    def stored(self, entry: TensorEntry) -> Stored:
        """Returns a tensor of the source as an operand."""
        return Stored(self.origin, entry.key, entry.dtype)

    def state(self, entry: TensorEntry) -> FourBitState:
        """Reads a quantization state.

        Raises:
            FormatError: If it is damaged.
        """
        where = f"{self.location}, tensor {entry.name!r}"
        if entry.size_bytes > MAX_STATE_BYTES:
            raise FormatError(f"has {entry.size_bytes:,} bytes, too many for a state", where=where)
        return FourBitState.parse(self.reader.whole(self.origin, entry).tobytes(), where=where)


def eight_bits_by_companions(weight: PackedWeight, place: Place, dtype: DType) -> Unpacked:
    """Returns an 8-bit weight that has its scales beside it.

    Args:
        weight: The weight.
        place: Where it lies.
        dtype: What it was before.

    Raises:
        FormatError: If the scales are those of another weight.
    """
    scales = weight.companions[SCALES_OF_ROWS]
    rows, columns = weight.packed.shape
    _check_size(scales, rows, place.location)
    stored = StoredScales(place.stored(scales))
    operand = EightBitWeight(place.stored(weight.packed), stored, columns)
    return Unpacked(operand, weight.packed.shape, dtype)


def eight_bits_by_original(weight: PackedWeight, place: Place, original: Stored) -> Unpacked:
    """Returns an 8-bit weight whose scales are made from its original."""
    columns = weight.packed.shape[1]
    rows = DerivedScales(original, FLOAT16, columns, weight.packed.elements)
    operand = EightBitWeight(place.stored(weight.packed), rows, columns)
    return Unpacked(operand, weight.packed.shape, original.dtype, derived=True)


def four_bits_by_companions(weight: PackedWeight, place: Place, state: FourBitState) -> Unpacked:
    """Returns a 4-bit weight that has its scales beside it.

    Raises:
        FormatError: If what lies beside it belongs to another weight.
    """
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


def four_bits_by_original(
    weight: PackedWeight, place: Place, original: Stored, state: FourBitState
) -> Unpacked:
    """Returns a 4-bit weight whose scales are made from its original."""
    dtype = BY_NAME[state.dtype]
    maxima = DerivedScales(original, dtype, state.blocksize, state.elements)
    scales: Scales = maxima
    if state.nested_blocksize:
        scales = DerivedNestedScales(maxima, state.nested_offset)
    return replace(_four_bits(place.stored(weight.packed), scales, state), derived=True)


def proof_of_four_bits(
    packed: Stored, original: Stored, state: FourBitState, reader: PackedReader
) -> Proof:
    """Compares packed codes with the weight that they are said to stand for."""
    return prove_four_bits(reader, _claim(packed, original, state))


def settled(
    packed: Stored, original: Stored, shape: Shape, told: FourBitSettings, reader: PackedReader
) -> tuple[FourBitState, Proof]:
    """Finds out how a weight was packed, by comparing some of it with its original.

    What is told is tried first, and believed where bytes cannot tell: whether the scales were
    quantized too, and which of two types the weight had that hold it equally well.

    Returns:
        The settings that fit best, without the mean of scales, and how well they fit.
    """
    tried: list[tuple[FourBitState, Proof]] = []
    nested = NESTED_BLOCKSIZE if told.nested is not False else 0
    for likely in likely_settings(told, packed.dtype, original.dtype):
        if likely.quant_type is None or likely.blocksize is None or likely.dtype is None:
            continue
        state = FourBitState(likely.quant_type, likely.blocksize, likely.dtype, shape, nested)
        proof = prove_four_bits(reader, _claim(packed, original, state), at_most=_TRIAL_ELEMENTS)
        tried.append((state, proof))
        if not proof.differing:
            break
    return min(tried, key=lambda one: (one[1].crowded, one[1].differing))


def likely_settings(
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


def _claim(packed: Stored, original: Stored, state: FourBitState) -> FourBitClaim:
    return FourBitClaim(
        packed, original, state.elements, state.quant_type, state.blocksize, BY_NAME[state.dtype]
    )


def _four_bits(packed: Stored, scales: Scales, state: FourBitState) -> Unpacked:
    dtype = BY_NAME[state.dtype]
    operand = FourBitWeight(
        packed, scales, state.quant_type, state.blocksize, state.elements, dtype
    )
    return Unpacked(operand, state.shape, dtype, state)


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
