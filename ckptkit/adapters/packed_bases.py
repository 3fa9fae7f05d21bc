"""Decides for a merge how each packed weight is unpacked; refuses what cannot be proven.

`trained` are the weights that the adapter was trained on, as the checkpoint holds them; `original`
are those of `--base`. Either may be packed, or be absent; names are those of the plain model. Where
nothing is packed, the result of `plan_quantized` is empty.

The original of packed weights is read once, to prove that it is the one that was packed. Memory is
bounded by a few blocks and, for one weight at a time, four bytes for every block of elements that
shares a scale.

An extracted adapter is stored without its packed base. The numbers of that base follow from the
weights before: they are packed and unpacked, block by block, as they are read. Settings that are
not recorded are found by the checksums of packed bytes, if there are any, or have to be given.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.packed_operands import (
    NESTED_BLOCKSIZE,
    DerivedNestedScales,
    DerivedScales,
    EightBitWeight,
    FourBitWeight,
    NestedScales,
    RequantizedEightBit,
    RequantizedFourBit,
    Scales,
    StoredScales,
    compute_float32_mean,
    count_mismatches,
    count_row_mismatches,
    find_block_maxima,
)
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError, FormatError, InputError, RefusedError
from ckptkit.core.index import Fqn, Shape, Span, TensorEntry
from ckptkit.core.threads import run_crew
from ckptkit.engine.kernels import Operand, StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.changes import QloraBase
from ckptkit.lora.quantized import (
    BLOCKSIZES,
    DTYPES,
    EIGHT_BITS,
    FOUR_BITS,
    MAX_STATE_BYTES,
    QUANT_TYPES,
    SCALES_OF_ROWS,
    FourBitSettings,
    FourBitState,
    PackedRecord,
    PackedWeight,
    Packing,
    find_packed_weights,
    list_companions,
    read_dtype,
    read_settings,
    refuse_unmodelled,
)
from ckptkit.plan.weight_kinds import looks_packed

_RIGHT_BASE = "pass as --base the model, and the revision of it, that training started from"


class ModelWeights(Struct, frozen=True):
    origin: Origin  # its name is the origin of operands
    entries: Mapping[str, TensorEntry]  # by plain names, with the companions of packed weights
    config: Mapping[str, Any] | None = None
    location: str = ""  # for messages


class PackedBases:
    """The packed weights of the checkpoint and the base."""

    def __init__(
        self,
        trained: ModelWeights | None,
        original: ModelWeights | None,
        shapes: Mapping[str, Shape],
        *,
        nested: bool | None = None,
    ) -> None:
        """Finds them; see `plan_quantized`. Only quantization states are read."""
        self._trained, self._original = trained, original
        sides = [weights for weights in (trained, original) if weights is not None]
        self._origins = {weights.origin.name: weights.origin for weights in sides}
        entries = original.entries if original is not None else {}
        own = trained.entries if trained is not None else {}
        self._in_original = find_packed_weights(entries, shapes)
        all_shapes = {n: e.shape for n, e in entries.items() if e.dtype.kind == "float"}
        if self._in_original:  # their states have shapes
            place = self._place(original, self.reader())
            states = {name: weight.state for name, weight in self._in_original.items()}
            all_shapes |= {n: place.state(state).shape for n, state in states.items() if state}
        all_shapes |= shapes
        self._in_trained = find_packed_weights(own, all_shapes)
        settings = read_settings(trained.config if trained is not None else None)
        self._settings = settings if nested is None else replace(settings, nested=nested)
        self._state: FourBitState | None = None
        self.names = list(dict.fromkeys([*self._in_trained, *self._in_original]))
        packed = (*self._in_trained.values(), *self._in_original.values())
        self.hidden = frozenset(self.names).union(*map(list_companions, packed))
        self.assumed_nested = False
        written = original if original is not None else trained
        if written is None:
            return
        for name, entry in written.entries.items():
            is_known = name in self.hidden or (written is trained and all_shapes.get(name))
            # It would be written as it is.
            if not is_known and looks_packed(name, entry.shape, entry.dtype.name):
                raise RefusedError(
                    f"tensor {entry.name!r} of shape {entry.shape} looks like a part of a packed"
                    " weight of unknown shape",
                    where=written.location,
                    hint="pass the model that was quantized for training as --base",
                )

    def reader(self) -> ArrayReader:
        """Returns a reader of both sides, for one thread."""
        return ArrayReader(*self._origins.values())

    def find_original(self, name: str) -> StoredOperand | None:
        """Returns the original of a packed weight, if the base model has it unpacked."""
        if self._original is None or name in self._in_original or name not in self._in_trained:
            return None
        entry = self._original.entries.get(name)
        if entry is None or entry.dtype.kind != "float":
            return None
        return StoredOperand(self._original.origin.name, entry.key, entry.dtype)

    def unpack(self, name: str, reader: ArrayReader) -> UnpackedWeight:
        """Returns a weight as an operand, compared with its original if there is one."""
        packed_original = self._in_original.get(name)
        if name not in self._in_trained:
            return self._unpack_by_companions(self._original, self._in_original[name], reader)
        weight, plain = self._in_trained[name], self.find_original(name)
        if packed_original is not None:
            return self._compare_packed(weight, packed_original, reader)
        if weight.is_whole:
            unpacked = self._unpack_by_companions(self._trained, weight, reader)
            return unpacked if plain is None else self._prove(weight, unpacked, plain, reader)
        place = self._place(self._trained, reader)
        if plain is None:
            raise _make_state_error(weight, place.location, searched=self._original)
        return self._unpack_by_original(weight, plain, place)

    def _unpack_by_companions(
        self, holder: ModelWeights | None, weight: PackedWeight, reader: ArrayReader
    ) -> UnpackedWeight:
        place = self._place(holder, reader)
        if not weight.is_whole:
            raise _make_state_error(weight, place.location)
        if weight.state is not None:
            return unpack_four_bits(weight, place, place.state(weight.state))
        # The element type before is the configured one, or the commonest.
        name = read_dtype(holder.config if holder is not None else None)
        entries = holder.entries.values() if holder is not None else ()
        others = Counter(e.dtype for e in entries if e.dtype.kind == "float" and len(e.shape) > 1)
        commonest = max(others, key=lambda dtype: others[dtype], default=FLOAT16)
        return unpack_eight_bits(weight, place, commonest if name is None else BY_NAME[name])

    def _compare_packed(
        self, weight: PackedWeight, other: PackedWeight, reader: ArrayReader
    ) -> UnpackedWeight:
        """Returns a weight that the base model has packed as well, by the state of either."""
        if weight.is_whole:
            unpacked = self._unpack_by_companions(self._trained, weight, reader)
        else:
            unpacked = self._unpack_by_companions(self._original, other, reader)
        ours = (self._place(self._trained, reader).origin, weight.packed)
        theirs = (self._place(self._original, reader).origin, other.packed)
        proof = prove_same_bytes(reader, ours, theirs)
        return replace(unpacked, proof=self._check(weight.name, proof))

    def _unpack_by_original(
        self, weight: PackedWeight, plain: StoredOperand, place: PackedLocation
    ) -> UnpackedWeight:
        if weight.bits == EIGHT_BITS:
            unpacked = derive_eight_bits(weight, place, plain)
            return self._prove(weight, unpacked, plain, place.reader)
        self._check_shape(weight.name, weight.shape or ())
        packed = place.stored(weight.packed)
        state = self._find_state(weight, packed, plain, place.reader)
        proof = self._check(weight.name, prove_four_bits(place.reader, packed, plain, state))
        if state.nested_blocksize:
            state = replace(state, nested_offset=proof.mean)
        return replace(derive_four_bits(weight, place, plain, state), proof=proof)

    def _find_state(
        self, weight: PackedWeight, packed: StoredOperand, plain: StoredOperand, reader: ArrayReader
    ) -> FourBitState:
        """Returns how weights without a state were packed, as found for the first of them."""
        shape = weight.shape or ()
        if self._state is None:
            state, proof = find_settings(packed, plain, shape, self._settings, reader)
            self._check(weight.name, proof)
            self.assumed_nested = self._settings.nested is None
            self._state = state
        return replace(self._state, shape=shape)

    def _prove(
        self,
        weight: PackedWeight,
        unpacked: UnpackedWeight,
        plain: StoredOperand,
        reader: ArrayReader,
    ) -> UnpackedWeight:
        self._check_shape(weight.name, unpacked.shape)
        packed = self._place(self._trained, reader).stored(weight.packed)
        if unpacked.state is None:
            proof = prove_eight_bits(reader, packed, plain, unpacked.shape)
        else:
            proof = prove_four_bits(reader, packed, plain, unpacked.state)
        return replace(unpacked, proof=self._check(weight.name, proof))

    def _check_shape(self, name: str, shape: Shape) -> None:
        original = self._original
        actual = original.entries[name].shape if original is not None else shape
        if original is not None and actual != shape:
            raise RefusedError(
                f"is not the model that was quantized: {name!r} has shape {actual}, expected"
                f" {shape}",
                where=original.location,
                hint=_RIGHT_BASE,
            )

    def _check(self, name: str, proof: PackingProof) -> PackingProof:
        if not proof.holds:
            where = "" if self._original is None else self._original.location
            share = proof.differing / max(1, proof.elements)
            raise RefusedError(
                f"is not the model that was quantized: {proof.differing:,} of {proof.elements:,}"
                f" packed values of {name!r} ({share:.2%}) are not those of its weights",
                where=where,
                hint=_RIGHT_BASE,
            )
        return proof

    def _place(self, weights: ModelWeights | None, reader: ArrayReader) -> PackedLocation:
        if weights is None:
            raise RuntimeError("a packed weight without a source")
        return PackedLocation(weights.origin.name, weights.location, reader)


def _make_state_error(
    weight: PackedWeight, location: str, *, searched: ModelWeights | None = None
) -> CkptkitError:
    absent = "" if searched is None else f", nor is the weight in {searched.location}"
    return RefusedError(
        f"weight {weight.name!r} is packed in {weight.bits} bits without its quantization state,"
        f" so that the meaning of its numbers is unknown{absent}",
        where=location,
        hint="pass the model that was quantized for training as --base: the state follows from it",
    )


_EIGHT = "8 bits"


class QuantizedBase(Struct, frozen=True):
    """The packed weights of a base model, as operands."""

    operands: Mapping[str, Operand] = field(default_factory=dict)  # by the name of the weight
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    # To write: of the original model if given, else before packing.
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()  # packed weights and their companions
    notes: tuple[str, ...] = ()
    dequantized: Mapping[str, Operand] = field(default_factory=dict)  # whatever was chosen
    # In the original model, if it was given.
    originals: Mapping[str, Operand] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the manifest

    @property
    def is_proven(self) -> bool:
        """Whether packed bytes prove that the original model is the one that was packed."""
        facts = self.facts
        return bool(facts.get("compared") or (facts.get("proven") and not facts.get("unlike")))


def plan_quantized(
    trained: ModelWeights | None,
    original: ModelWeights | None,
    *,
    shapes: Mapping[str, Shape],
    choice: QloraBase | None = None,
    nested: bool | None = None,
    workers: int = 1,
) -> QuantizedBase:
    """Finds packed weights, and makes operands of them.

    Quantization states are read where they are stored with the weights, and else derived from
    `original`, block by block. Where packed weights and their original are both given, the packed
    bytes are compared with the original, which is read once. `shapes` are [out, in], by the
    adapter's factors. A worker takes about 40 MB.
    """
    for weights in filter(None, (trained, original)):
        refuse_unmodelled(weights.entries, weights.config, location=weights.location)
    bases = PackedBases(trained, original, shapes, nested=nested)
    if not bases.names:
        return _plan_nothing(trained, original, choice)
    originals = {name: plain for name in bases.names if (plain := bases.find_original(name))}
    if choice == "original":
        _refuse_without_original(bases.names, originals)
    unpacked = _unpack(bases, workers)
    facts = collect_facts(unpacked)
    dtypes = {name: weight.dtype for name, weight in unpacked.items()}
    dequantized = {name: weight.operand for name, weight in unpacked.items()}
    return QuantizedBase(
        operands=originals if choice == "original" else dequantized,
        shapes={name: weight.shape for name, weight in unpacked.items()},
        dtypes=dtypes | {name: plain.dtype for name, plain in originals.items()},
        hidden=bases.hidden,
        notes=tuple(_notes(bases, facts, choice)),
        dequantized=dequantized,
        originals=originals,
        facts=facts,
    )


def measure_quantization(
    base: QuantizedBase, names: Iterable[str], reader: ArrayReader
) -> dict[str, float]:
    """Measures what quantizing changed in weights: the Frobenius norms of dequantized - original.

    Weights without an original are left out.
    """
    return {
        name: measure_change(
            reader, base.originals[name], base.dequantized[name], base.shapes[name]
        )
        for name in names
        if name in base.originals
    }


def _plan_nothing(
    trained: ModelWeights | None, original: ModelWeights | None, choice: QloraBase | None
) -> QuantizedBase:
    sides = [weights for weights in (trained, original) if weights is not None]
    is_configured = any((weights.config or {}).get("quantization_config") for weights in sides)
    if choice == "dequantized":
        raise RefusedError(
            "no weight is packed here, so there is no dequantized base to merge onto",
            where="--qlora-base dequantized",
            hint="leave the option out to merge onto the base as it is; for the function that was"
            " trained, pass the checkpoint of the run, or the base as it was saved in 4 bits",
        )
    if choice == "original" and not is_configured:
        note = (
            "--qlora-base original changes nothing here: no weight is packed, and the adapter is"
            " merged onto the base as it is"
        )
        return QuantizedBase(notes=(note,))
    if not is_configured or choice == "original":
        return QuantizedBase()
    note = (
        "the configuration speaks of quantized weights, but none were saved: the adapter is"
        " merged onto the base as it is, which is not quite what it was trained on"
    )
    return QuantizedBase(notes=(note,))


def _refuse_without_original(names: Sequence[str], originals: Mapping[str, StoredOperand]) -> None:
    without = next((name for name in names if name not in originals), None)
    if without is not None:
        raise RefusedError(
            f"the original of the packed weight {without!r} is not there",
            where="--qlora-base original",
            hint="pass the model that was quantized for training as --base",
        )


def _unpack(bases: PackedBases, workers: int) -> dict[str, UnpackedWeight]:
    """Unpacks all weights in parallel; the first one alone, as it decides unknown settings."""
    unpacked: dict[str, UnpackedWeight] = {}

    def work(names: Iterator[str]) -> None:
        reader = bases.reader()
        for name in names:
            unpacked[name] = bases.unpack(name, reader)

    work(iter(bases.names[:1]))
    run_crew(workers, iter(bases.names[1:]), work)
    return {name: unpacked[name] for name in bases.names}


def collect_facts(unpacked: Mapping[str, UnpackedWeight]) -> dict[str, Any]:
    kinds = set()
    for state in (weight.state for weight in unpacked.values()):
        if state is None:
            kinds.add(_EIGHT)
            continue
        nested = " with double quantization" if state.nested_blocksize else ""
        blocks = f"blocks of {state.blocksize} of {state.dtype}"
        kinds.add(f"{state.quant_type} in {blocks}{nested}")
    proofs = [weight.proof for weight in unpacked.values() if weight.proof is not None]
    return {
        "weights": len(unpacked),
        "kinds": sorted(kinds),
        "derived": sum(weight.derived for weight in unpacked.values()),
        "compared": sum(proof.elements for proof in proofs),
        "differing": sum(proof.differing for proof in proofs),
    }


def _notes(bases: PackedBases, facts: Mapping[str, Any], choice: QloraBase | None) -> Iterator[str]:
    count, kinds = facts["weights"], ", ".join(facts["kinds"])
    done = "replaced by their originals" if choice == "original" else "dequantized"
    made = ", their scales made again from --base" if facts["derived"] else ""
    proven = ""
    if facts["compared"]:
        differing = f"{facts['differing']:,}" if facts["differing"] else "none"
        proven = (
            "; --base is the model that they were packed from:"
            f" {differing} of {facts['compared']:,} values differ"
        )
    yield f"{count:,} packed weights ({kinds}) are {done}{made}{proven}"
    if _EIGHT in facts["kinds"]:
        yield (
            "8-bit layers also round their inputs, which merged weights cannot do: apart from that"
            " the merged model computes what was trained, with DoRA's norms of the packed weights"
        )
    if bases.assumed_nested:
        yield (
            "it is not recorded whether the scales were quantized too, and packed bytes cannot show"
            " it: double quantization was assumed, as in PEFT's recipes for FSDP; pass"
            " --double-quant or --no-double-quant to decide it"
        )


FLOAT16 = BY_NAME["float16"]
_BLOCK_ELEMENTS = 1 << 20  # whole groups of blocks, whatever their size
# A GPU rounds divisions differently, so elements between two codes may get either: at most one in
# thousands, and never many in one block. Other weights differ in whole blocks, or everywhere.
_TOLERATED = 1e-3
_TOLERATED_OF_BLOCK = 1 / 8


class PackingProof(Struct, frozen=True):
    """The result of comparing a packed weight with its original."""

    differing: int  # elements that would be packed differently
    elements: int  # that were compared
    crowded: bool  # one block has more of them than rounding explains
    mean: float = 0.0  # of the scales, as float32

    @property
    def holds(self) -> bool:
        return not self.crowded and self.differing <= _TOLERATED * self.elements


def prove_four_bits(
    reader: ArrayReader,
    packed: Operand,
    original: Operand,
    state: FourBitState,
    *,
    at_most: int | None = None,
) -> PackingProof:
    """Counts the codes into which the original would not be packed.

    `at_most` limits the number of compared elements.
    """
    elements = state.elements if at_most is None else min(at_most, state.elements)
    codes_per_item = 2 * packed.dtype.itemsize
    differing, crowded, maxima = 0, False, []
    for span in cut_blocks(elements):
        stored = Span(span.start // codes_per_item, -(-span.stop // codes_per_item))
        codes = reader.compute(packed, stored).view(np.uint8)
        numbers = reader.compute(original, span)
        blocks, scales = find_block_maxima(numbers, BY_NAME[state.dtype], state.blocksize)
        mismatches = count_mismatches(
            codes, blocks, scales, state.quant_type, elements=numbers.size
        )
        differing += int(mismatches.sum())
        crowded |= bool(mismatches.max() > _TOLERATED_OF_BLOCK * state.blocksize)
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
            codes.append(reader.read(entry.key, part, origin).view(np.uint8))
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
    operand: Operand
    shape: Shape
    dtype: DType  # before packing
    state: FourBitState | None = None  # None for eight bits
    derived: bool = False  # its scales are derived from the original weight
    proof: PackingProof | None = None  # None without an original


class PackedLocation(Struct, frozen=True):
    origin: str
    location: str
    reader: ArrayReader

    def stored(self, entry: TensorEntry) -> StoredOperand:
        return StoredOperand(self.origin, entry.key, entry.dtype)

    def state(self, entry: TensorEntry) -> FourBitState:
        where = f"{self.location}, tensor {entry.name!r}"
        if entry.size_bytes > MAX_STATE_BYTES:
            raise FormatError(f"has {entry.size_bytes:,} bytes, too many for a state", where=where)
        return FourBitState.parse(self.reader.read_whole(entry, self.origin).tobytes(), where=where)


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
    quantized too, and which of two element types that fit equally well the weight had. The mean of
    the scales is not found.
    """
    tried: list[tuple[FourBitState, PackingProof]] = []
    nested = NESTED_BLOCKSIZE if known.nested is not False else 0
    for likely in list_likely_settings(known, packed.dtype, original.dtype):
        if likely.quant_type is None or likely.blocksize is None or likely.dtype is None:
            continue
        state = FourBitState(likely.quant_type, likely.blocksize, likely.dtype, shape, nested)
        proof = prove_four_bits(reader, packed, original, state, at_most=_TRIAL_ELEMENTS)
        tried.append((state, proof))
        if not proof.differing:
            break
    return min(tried, key=lambda trial: (trial[1].crowded, trial[1].differing))


def list_likely_settings(
    known: FourBitSettings, storage: DType, original: DType
) -> Iterator[FourBitSettings]:
    """Yields settings with which a weight may have been packed, the likeliest first.

    FSDP takes parameters of one type only, so a float type of storage is that of the model.
    """
    types = dict.fromkeys(QUANT_TYPES[t] for t in filter(None, (known.quant_type, *QUANT_TYPES)))
    sizes = dict.fromkeys(filter(None, (known.blocksize, *_LIKELY_BLOCKSIZES)))
    names = (known.dtype, storage.name, original.name, *DTYPES)
    dtypes = dict.fromkeys(name for name in names if name in DTYPES)
    for size, dtype, quant_type in itertools.product(sizes, dtypes, types):
        yield FourBitSettings(quant_type, known.nested, size, dtype)


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


_MATRIX = 2


def find_packings(
    origin: Origin,
    base: Mapping[Fqn, TensorEntry],
    packed: Mapping[str, PackedWeight],
    configured: FourBitSettings,
    crcs: Mapping[str, int],
) -> tuple[Packing, ...]:
    """Finds how the weights of a checkpoint were packed; only their states are read.

    Nothing where one of them was packed in a way that is not modelled, or has a damaged state: the
    base is no part of the adapter.
    """
    location = PackedLocation(origin.name, origin.source.location, ArrayReader(origin))
    groups: dict[tuple[FourBitSettings | None, str], dict[str, PackedRecord]] = {}
    for name, weight in packed.items():
        settings, offset = None, None
        if weight.bits == FOUR_BITS:
            settings = configured
            try:
                state = None if weight.state is None else location.state(weight.state)
            except InputError:
                return ()
            if state is not None and state.nested_blocksize not in {0, NESTED_BLOCKSIZE}:
                return ()
            if state is not None:
                nested = bool(state.nested_blocksize)
                settings = FourBitSettings(state.quant_type, nested, state.blocksize, state.dtype)
                offset = state.nested_offset if nested else None
        group = groups.setdefault((settings, weight.packed.dtype.name), {})
        group[name] = PackedRecord(weight.packed.size_bytes, offset, crcs.get(name))
    for key, names in _find_doubtful(base, packed, configured):
        groups.setdefault(key, {}).update(names)
    return tuple(Packing(*key, weights) for key, weights in groups.items())


def _find_doubtful(
    base: Mapping[Fqn, TensorEntry], packed: Mapping[str, PackedWeight], configured: FourBitSettings
) -> Iterator[tuple[tuple[FourBitSettings | None, str], dict[str, PackedRecord]]]:
    """Yields weights without companions that may be packed too, which only the plain base shows."""
    bare = {weight.bits for weight in packed.values() if not weight.is_whole}
    for name, entry in base.items():
        is_column = len(entry.shape) == _MATRIX and entry.shape[1] == 1
        is_bytes = len(entry.shape) == _MATRIX and entry.dtype.name == "int8" and not is_column
        if name in packed or not name.endswith(".weight"):
            continue
        if (is_column and FOUR_BITS in bare) or (is_bytes and bare - {FOUR_BITS}):
            settings = configured if is_column else None
            yield (settings, entry.dtype.name), {str(name): PackedRecord(entry.size_bytes)}


_ORIGINAL = "pass --qlora-base original to merge onto the weights as they were before"


class _Weight(Struct, frozen=True):
    name: str
    original: StoredOperand
    shape: Shape
    record: PackedRecord

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))


def requantize(
    packings: Sequence[Packing],
    base: ModelWeights,
    *,
    nested: bool | None,
    where: str,
    workers: int,
) -> QuantizedBase:
    """Derives the weights of a base as training used them.

    `nested` says whether scales were quantized too, where that is not recorded.
    """
    try:
        return _Requantizing(base, nested=nested, workers=workers).run(packings)
    except RefusedError as error:
        raise error.located(where) from error


class _Requantizing:
    def __init__(self, base: ModelWeights, *, nested: bool | None, workers: int) -> None:
        self._base = base
        self._nested = nested
        self._workers = workers
        self._proven = 0
        self._differing = 0

    def run(self, packings: Sequence[Packing]) -> QuantizedBase:
        unpacked: dict[str, UnpackedWeight] = {}
        originals: dict[str, StoredOperand] = {}
        for packing in packings:
            weights = list(self._find_weights(packing))
            originals |= {weight.name: weight.original for weight in weights}
            unpacked |= self._unpack(packing, weights)
        operands = {name: weight.operand for name, weight in unpacked.items()}
        facts = collect_facts(unpacked)
        return QuantizedBase(
            operands=operands,
            shapes={name: weight.shape for name, weight in unpacked.items()},
            dtypes={name: original.dtype for name, original in originals.items()},
            hidden=frozenset(operands),
            notes=tuple(self._notes(", ".join(facts["kinds"]), len(operands))),
            dequantized=operands,
            originals=originals,
            facts={**facts, "proven": self._proven, "unlike": self._differing},
        )

    def _find_weights(self, packing: Packing) -> Iterator[_Weight]:
        for name, record in packing.weights.items():
            entry = self._base.entries.get(name)
            if entry is None or entry.dtype.kind != "float":
                raise self._make_base_error(name, "is not in it as a plain weight")
            taken = entry.elements if packing.settings is None else -(-entry.elements // 2)
            if record.size_bytes == taken:
                stored = StoredOperand(self._base.origin.name, entry.key, entry.dtype)
                yield _Weight(name, stored, entry.shape, record)
            # What is as large in the base was not packed.
            elif record.size_bytes != entry.elements * BY_NAME[packing.storage].itemsize:
                raise self._make_base_error(
                    name, f"takes {taken:,} bytes packed, expected {record.size_bytes:,}"
                )

    def _make_base_error(self, name: str, what: str) -> RefusedError:
        return RefusedError(
            f"weight {name!r}, which was packed in training, {what}",
            where=self._base.location,
            hint="pass as --base the model, and the revision of it, that training started from",
        )

    def _unpack(self, packing: Packing, weights: Sequence[_Weight]) -> dict[str, UnpackedWeight]:
        if packing.settings is None:
            return {
                weight.name: UnpackedWeight(
                    RequantizedEightBit(weight.original, weight.shape[-1]),
                    weight.shape,
                    weight.original.dtype,
                    derived=True,
                )
                for weight in weights
            }
        settings = self._complete(packing, packing.settings, weights)
        unpacked: dict[str, UnpackedWeight] = {}

        def work(batch: Iterator[_Weight]) -> None:
            reader = ArrayReader(self._base.origin)
            for weight in batch:
                unpacked[weight.name] = self._unpack_four_bits(weight, settings, reader)

        run_crew(self._workers, iter(weights), work)
        return {weight.name: unpacked[weight.name] for weight in weights}

    def _unpack_four_bits(
        self, weight: _Weight, settings: FourBitSettings, reader: ArrayReader
    ) -> UnpackedWeight:
        operand = _make_operand(weight, settings)
        offset = weight.record.offset
        if settings.nested and offset is None:
            maxima = [
                operand.maxima(span, [reader.compute(weight.original, span)])
                for span in cut_blocks(weight.elements)
            ]
            offset = float(compute_float32_mean(np.concatenate(maxima)))
        state = FourBitState(
            operand.quant_type,
            operand.blocksize,
            operand.dtype.name,
            weight.shape,
            NESTED_BLOCKSIZE if settings.nested else 0,
            offset or 0.0,
        )
        operand = replace(operand, nested_offset=offset if settings.nested else None)
        return UnpackedWeight(operand, weight.shape, operand.dtype, state, derived=True)

    def _complete(
        self, packing: Packing, settings: FourBitSettings, weights: Sequence[_Weight]
    ) -> FourBitSettings:
        """Completes the recorded settings, and compares recorded checksums."""
        if settings.nested is None:
            settings = replace(settings, nested=self._nested)
        if settings.nested is None:
            raise RefusedError(
                "the record of the adapter does not say whether the scales of its packed base"
                " were quantized too",
                hint=f"pass --double-quant or --no-double-quant; or {_ORIGINAL}",
            )
        reader = ArrayReader(self._base.origin)
        settings = self._find_settings(packing, settings, weights, reader)
        for weight in weights:
            if weight.record.crc32 is not None:
                is_equal = _has_recorded_bytes(_make_operand(weight, settings), weight, reader)
                self._proven += is_equal
                self._differing += not is_equal
        return settings

    def _find_settings(
        self,
        packing: Packing,
        known: FourBitSettings,
        weights: Sequence[_Weight],
        reader: ArrayReader,
    ) -> FourBitSettings:
        if None not in {known.quant_type, known.blocksize, known.dtype}:
            return known
        recorded = [weight for weight in weights if weight.record.crc32 is not None]
        smallest = min(recorded, key=lambda weight: weight.elements, default=None)
        if smallest is not None:
            storage = BY_NAME[packing.storage]
            for likely in list_likely_settings(known, storage, smallest.original.dtype):
                trial = replace(likely, nested=known.nested)
                if _has_recorded_bytes(_make_operand(smallest, trial), smallest, reader):
                    return trial
        options = {"type": known.quant_type, "block size": known.blocksize, "dtype": known.dtype}
        missing = ", ".join(name for name, value in options.items() if value is None)
        raise RefusedError(
            f"the record of the adapter does not have the {missing} of its packed base"
            f" ({known.quant_type or '4 bits'}), and no checksum of packed bytes agrees with this"
            " one",
            hint=f"merge from the checkpoint itself, which holds packed weights; or {_ORIGINAL}",
        )

    def _notes(self, kinds: str, count: int) -> Iterator[str]:
        proven = ""
        if self._proven and not self._differing:
            proven = (
                "; --base is the model that they were packed from, proven by the packed bytes of"
                f" {self._proven:,}"
            )
        yield (
            f"{count:,} weights of --base are packed and dequantized again ({kinds}), as they were"
            f" in training{proven}"
        )
        if self._differing:
            yield (
                f"{self._differing:,} of {self._differing + self._proven:,} weights have other"
                " packed bytes than in training: a GPU rounds a few elements differently, another"
                " model differs in nearly all; a merge from the checkpoint itself is exact"
            )


def _make_operand(weight: _Weight, settings: FourBitSettings) -> RequantizedFourBit:
    if settings.quant_type is None or settings.blocksize is None or settings.dtype is None:
        raise RuntimeError("incomplete settings")
    return RequantizedFourBit(
        weight.original,
        settings.quant_type,
        settings.blocksize,
        weight.elements,
        BY_NAME[settings.dtype],
    )


def _has_recorded_bytes(operand: RequantizedFourBit, weight: _Weight, reader: ArrayReader) -> bool:
    """Returns whether packing a weight gives bytes with the recorded checksum."""
    crcs = dict.fromkeys((False, True) if operand.quant_type == "fp4" else (False,), 0)
    for span in cut_blocks(weight.elements):
        inputs = [reader.compute(weight.original, span)]
        for on_gpu, crc in crcs.items():
            crcs[on_gpu] = crc32(operand.packed(span, inputs, on_gpu=on_gpu).data, crc)
    return weight.record.crc32 in crcs.values()
