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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError, InputError, RefusedError
from ckptkit.core.index import Shape, Span, TensorEntry
from ckptkit.core.threads import run_crew
from ckptkit.engine.bitsandbytes import (
    NESTED_BLOCKSIZE,
    DerivedScales,
    EightBitWeight,
    RequantizedEightBit,
    RequantizedFourBit,
    compute_float32_mean,
    count_mismatches,
    count_row_mismatches,
    find_block_maxima,
    make_four_bits,
    read_state,
    unpack_by_companions,
)
from ckptkit.engine.kernels import Operand, StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.changes import QloraBase
from ckptkit.lora.quantized import (
    BLOCKSIZES,
    DTYPES,
    EIGHT_BITS,
    FOUR_BITS,
    QUANT_TYPES,
    BlockSize,
    FourBitSettings,
    FourBitState,
    FourBitType,
    PackedDType,
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

    def stored(self, entry: TensorEntry) -> StoredOperand:
        return StoredOperand(self.origin.name, entry.key, entry.dtype)

    def read_with(self, reader: ArrayReader) -> Callable[[TensorEntry], bytes]:
        return lambda entry: reader.read_whole(entry, self.origin.name).tobytes()

    def read_state(self, entry: TensorEntry, reader: ArrayReader) -> FourBitState:
        return read_state(entry, self.read_with(reader), self.location)


class UnpackedWeight(Struct, frozen=True):
    operand: Operand
    shape: Shape
    dtype: DType  # before packing
    state: FourBitState | None = None  # None for eight bits
    derived: bool = False  # its scales are derived from the original weight
    proof: PackingProof | None = None  # None without an original


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
        sides = [weights for weights in (trained, original) if weights is not None]
        # One that is not given has no entries, and so is asked for nothing.
        self._trained, self._original = sides[0], sides[-1]
        self._origins = [weights.origin for weights in sides]
        own = {} if trained is None else trained.entries
        entries = self._plain = {} if original is None else original.entries
        self._in_original = find_packed_weights(entries, shapes)
        all_shapes = {n: e.shape for n, e in entries.items() if e.dtype.kind == "float"}
        for name, weight in self._in_original.items():  # their states have shapes
            if weight.state is not None:
                state = self._original.read_state(weight.state, self.reader())
                all_shapes[name] = state.shape
        all_shapes |= shapes
        self._in_trained = find_packed_weights(own, all_shapes)
        settings = read_settings(None if trained is None else trained.config)
        self._settings = settings if nested is None else replace(settings, nested=nested)
        self._state: FourBitState | None = None
        self.names = list(dict.fromkeys([*self._in_trained, *self._in_original]))
        packed = (*self._in_trained.values(), *self._in_original.values())
        self.hidden = frozenset(self.names).union(*map(list_companions, packed))
        self.assumed_nested = False
        for name, entry in self._original.entries.items():
            is_known = name in self.hidden or (original is None and all_shapes.get(name))
            # It would be written as it is.
            if not is_known and looks_packed(name, entry.shape, entry.dtype.name):
                raise RefusedError(
                    f"tensor {entry.name!r} of shape {entry.shape} looks like a part of a packed"
                    " weight of unknown shape",
                    where=self._original.location,
                    hint="pass the model that was quantized for training as --base",
                )

    def reader(self) -> ArrayReader:
        """Returns a reader of both sides, for one thread."""
        return ArrayReader(*self._origins)

    def find_original(self, name: str) -> StoredOperand | None:
        """Returns the original of a packed weight, if the base model has it unpacked."""
        entry = self._plain.get(name)
        is_packed = name in self._in_original or name not in self._in_trained
        if entry is None or is_packed or entry.dtype.kind != "float":
            return None
        return self._original.stored(entry)

    def unpack(self, name: str, reader: ArrayReader) -> UnpackedWeight:
        """Returns a weight as an operand, compared with its original if there is one."""
        if name not in self._in_trained:
            return _unpack_by_companions(self._original, self._in_original[name], reader)
        weight, plain = self._in_trained[name], self.find_original(name)
        packed = self._trained.stored(weight.packed)
        other = self._in_original.get(name)
        if other is not None:  # the state of either serves
            unpacked = (
                _unpack_by_companions(self._trained, weight, reader)
                if weight.is_whole
                else _unpack_by_companions(self._original, other, reader)
            )
            origins = self._trained.origin.name, self._original.origin.name
            proof = prove_same_bytes(reader, weight.packed, other.packed, origins)
            return replace(unpacked, proof=self._check(name, proof))
        if weight.is_whole:
            unpacked = _unpack_by_companions(self._trained, weight, reader)
            if plain is None:
                return unpacked
        elif plain is None:
            absent = f", nor is the weight in {self._original.location}" if self._plain else ""
            raise _make_state_error(weight, self._trained.location, absent)
        elif weight.bits == EIGHT_BITS:
            columns = weight.packed.shape[1]
            scales = DerivedScales(plain, FLOAT16, columns, weight.packed.elements)
            unpacked = UnpackedWeight(
                *(EightBitWeight(packed, scales, columns), weight.packed.shape, plain.dtype),
                derived=True,
            )
        else:
            self._check_shape(name, weight.shape or ())
            state = self._find_state(weight, packed, plain, reader)
            proof = self._check(name, prove_packing(reader, packed, plain, state.shape, state))
            offset = proof.mean if state.nested_blocksize else None
            state = replace(state, nested_offset=offset or 0.0)
            derived = DerivedScales(
                *(plain, BY_NAME[state.dtype], state.blocksize, state.elements, offset)
            )
            operand = make_four_bits(packed, derived, state)
            return UnpackedWeight(
                *(operand, state.shape, operand.dtype, state), derived=True, proof=proof
            )
        self._check_shape(name, unpacked.shape)
        proof = prove_packing(reader, packed, plain, unpacked.shape, unpacked.state)
        return replace(unpacked, proof=self._check(name, proof))

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

    def _check_shape(self, name: str, shape: Shape) -> None:
        actual = self._original.entries[name].shape
        if actual != shape:
            raise RefusedError(
                f"is not the model that was quantized: {name!r} has shape {actual}, expected"
                f" {shape}",
                where=self._original.location,
                hint=_RIGHT_BASE,
            )

    def _check(self, name: str, proof: PackingProof) -> PackingProof:
        if not proof.holds:
            share = proof.differing / max(1, proof.elements)
            raise RefusedError(
                f"is not the model that was quantized: {proof.differing:,} of {proof.elements:,}"
                f" packed values of {name!r} ({share:.2%}) are not those of its weights",
                where=self._original.location,
                hint=_RIGHT_BASE,
            )
        return proof


def _make_state_error(weight: PackedWeight, location: str, absent: str = "") -> CkptkitError:
    return RefusedError(
        f"weight {weight.name!r} is packed in {weight.bits} bits without its quantization state,"
        f" so that the meaning of its numbers is unknown{absent}",
        where=location,
        hint="pass the model that was quantized for training as --base: the state follows from it",
    )


def _unpack_by_companions(
    holder: ModelWeights, weight: PackedWeight, reader: ArrayReader
) -> UnpackedWeight:
    """Unpacks a weight by the scales that are stored with it."""
    if not weight.is_whole:
        raise _make_state_error(weight, holder.location)
    operand, shape, state = unpack_by_companions(
        weight,
        holder.read_with(reader),
        origin=holder.origin.name,
        location=holder.location,
    )
    dtype = operand.dtype
    if state is None:
        # The element type before is the configured one, or the commonest.
        name, entries = read_dtype(holder.config), holder.entries.values()
        others = Counter(e.dtype for e in entries if e.dtype.kind == "float" and len(e.shape) > 1)
        commonest = max(others, key=lambda dtype: others[dtype], default=FLOAT16)
        dtype = commonest if name is None else BY_NAME[name]
    return UnpackedWeight(operand, shape, dtype, state)


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
    without = next((name for name in bases.names if name not in originals), None)
    if choice == "original" and without is not None:
        raise RefusedError(
            f"the original of the packed weight {without!r} is not there",
            where="--qlora-base original",
            hint="pass the model that was quantized for training as --base",
        )
    # The first weight is unpacked alone, as it decides unknown settings.
    unpacked = {name: bases.unpack(name, bases.reader()) for name in bases.names[:1]}

    def work(names: Iterator[str]) -> None:
        reader = bases.reader()
        for name in names:
            unpacked[name] = bases.unpack(name, reader)

    run_crew(workers, iter(bases.names[1:]), work)
    unpacked = {name: unpacked[name] for name in bases.names}
    facts = collect_facts(unpacked)
    dtypes = {name: weight.dtype for name, weight in unpacked.items()}
    dequantized = {name: weight.operand for name, weight in unpacked.items()}
    return QuantizedBase(
        operands=originals if choice == "original" else dequantized,
        shapes={name: weight.shape for name, weight in unpacked.items()},
        dtypes=dtypes | {name: plain.dtype for name, plain in originals.items()},
        hidden=bases.hidden,
        notes=tuple(_describe(facts, choice, assumed_nested=bases.assumed_nested)),
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
    norms = {}
    for name in (name for name in names if name in base.originals):
        total = 0.0
        for span in cut_blocks(math.prod(base.shapes[name])):
            change = reader.compute(base.dequantized[name], span).astype(np.float64)
            change -= reader.compute(base.originals[name], span)
            total += float(change @ change)
        norms[name] = math.sqrt(total)
    return norms


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
    if is_configured == (choice == "original"):
        return QuantizedBase()
    note = (
        "the configuration speaks of quantized weights, but none were saved: the adapter is"
        " merged onto the base as it is, which is not quite what it was trained on"
    )
    if choice == "original":
        note = (
            "--qlora-base original changes nothing here: no weight is packed, and the adapter is"
            " merged onto the base as it is"
        )
    return QuantizedBase(notes=(note,))


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


def _describe(
    facts: Mapping[str, Any], choice: QloraBase | None, *, assumed_nested: bool
) -> Iterator[str]:
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
    if assumed_nested:
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


def prove_packing(
    reader: ArrayReader,
    packed: Operand,
    original: Operand,
    shape: Shape,
    state: FourBitState | None,
    *,
    at_most: int | None = None,
) -> PackingProof:
    """Counts the codes into which the original would not be packed.

    A block of eight bits, which have no state, is a row. `at_most` limits the number of compared
    elements.
    """
    elements = math.prod(shape)
    if at_most is not None:
        elements = min(at_most, elements)
    blocksize = shape[1] if state is None else state.blocksize
    dtype = FLOAT16 if state is None else BY_NAME[state.dtype]
    codes_per_item = packed.dtype.itemsize * (1 if state is None else 2)
    tolerated = max(_TOLERATED_OF_BLOCK * blocksize, 1 if state is None else 0)
    differing, crowded, maxima = 0, False, []
    for span in cut_blocks(elements, blocksize):
        stored = Span(span.start // codes_per_item, -(-span.stop // codes_per_item))
        codes = reader.compute(packed, stored)
        blocks, scales = find_block_maxima(reader.compute(original, span), dtype, blocksize)
        if state is None:
            mismatches = count_row_mismatches(
                codes.view(np.int8).reshape(blocks.shape), blocks, scales
            )
        else:
            mismatches = count_mismatches(
                *(codes.view(np.uint8), blocks, scales, state.quant_type),
                elements=span.stop - span.start,
            )
            maxima.append(scales)
        differing += int(mismatches.sum())
        crowded |= bool(mismatches.max() > tolerated)
    mean = float(compute_float32_mean(np.concatenate(maxima))) if maxima else 0.0
    return PackingProof(differing, elements, crowded, mean)


def prove_same_bytes(
    reader: ArrayReader, first: TensorEntry, second: TensorEntry, origins: tuple[str, str]
) -> PackingProof:
    """Compares the codes of two packed weights, whatever types they are stored as."""
    size = first.size_bytes
    if second.size_bytes != size:
        return PackingProof(2 * size, 2 * size, crowded=True)
    differing = 0
    for span in cut_blocks(size):
        codes = []
        # A range begins and ends between stored elements.
        for entry, origin in zip((first, second), origins, strict=True):
            item = entry.dtype.itemsize
            part = Span(span.start // item, span.stop // item)
            codes.append(reader.read(entry.key, part, origin).view(np.uint8))
        differing += int(np.count_nonzero(codes[0] != codes[1]))
    return PackingProof(differing, 2 * size, crowded=differing > 0)


def cut_blocks(elements: int, blocksize: int = 1) -> Iterator[Span]:
    step = max(1, _BLOCK_ELEMENTS // blocksize) * blocksize
    for start in range(0, elements, step):
        yield Span(start, min(start + step, elements))


_TRIAL_ELEMENTS = 1 << 18
_Settings = tuple[FourBitType, BlockSize, PackedDType]
_LIKELY_BLOCKSIZES = tuple(sorted(BLOCKSIZES, key=lambda size: (size not in {64, 128}, size)))


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
    for quant_type, blocksize, dtype in list_likely_settings(known, packed.dtype, original.dtype):
        state = FourBitState(quant_type, blocksize, dtype, shape, nested)
        proof = prove_packing(reader, packed, original, shape, state, at_most=_TRIAL_ELEMENTS)
        tried.append((state, proof))
        if not proof.differing:
            break
    return min(tried, key=lambda trial: (trial[1].crowded, trial[1].differing))


def list_likely_settings(
    known: FourBitSettings, storage: DType, original: DType
) -> Iterator[_Settings]:
    """Yields the types, block sizes and element types that a packing may have, the likeliest first.

    FSDP takes parameters of one type only, so a float type of storage is that of the model.
    """
    types = dict.fromkeys(QUANT_TYPES[t] for t in filter(None, (known.quant_type, *QUANT_TYPES)))
    sizes = dict.fromkeys(filter(None, (known.blocksize, *_LIKELY_BLOCKSIZES)))
    near = [dtype for name in (storage.name, original.name) for dtype in DTYPES if dtype == name]
    dtypes = dict.fromkeys(filter(None, (known.dtype, *near, *DTYPES)))
    for size, dtype, quant_type in itertools.product(sizes, dtypes, types):
        yield quant_type, size, dtype


_MATRIX = 2


def find_packings(
    holder: ModelWeights,
    packed: Mapping[str, PackedWeight],
    configured: FourBitSettings,
    crcs: Mapping[str, int],
) -> tuple[Packing, ...]:
    """Finds how the weights of a checkpoint were packed; only their states are read.

    Nothing where one of them was packed in a way that is not modelled, or has a damaged state: the
    base is no part of the adapter.
    """
    reader = ArrayReader(holder.origin)
    groups: dict[tuple[FourBitSettings | None, str], dict[str, PackedRecord]] = {}
    for name, weight in packed.items():
        settings, offset = (configured if weight.bits == FOUR_BITS else None), None
        if weight.state is not None and weight.bits == FOUR_BITS:
            try:
                state = holder.read_state(weight.state, reader)
            except InputError:
                return ()
            if state.nested_blocksize not in {0, NESTED_BLOCKSIZE}:
                return ()
            nested = bool(state.nested_blocksize)
            settings = FourBitSettings(state.quant_type, nested, state.blocksize, state.dtype)
            offset = state.nested_offset if nested else None
        group = groups.setdefault((settings, weight.packed.dtype.name), {})
        group[name] = PackedRecord(weight.packed.size_bytes, offset, crcs.get(name))
    # Weights without companions may be packed too, which only the plain base shows.
    bare = {weight.bits for weight in packed.values() if not weight.is_whole}
    for name, entry in holder.entries.items():
        if name in packed or not name.endswith(".weight") or len(entry.shape) != _MATRIX:
            continue
        is_column = entry.shape[1] == 1
        is_bytes = entry.dtype.name == "int8" and not is_column
        if (is_column and FOUR_BITS in bare) or (is_bytes and EIGHT_BITS in bare):
            key = configured if is_column else None, entry.dtype.name
            groups.setdefault(key, {})[name] = PackedRecord(entry.size_bytes)
    return tuple(Packing(*key, weights) for key, weights in groups.items())


_ORIGINAL = "pass --qlora-base original to merge onto the weights as they were before"


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
    unpacked: dict[str, UnpackedWeight] = {}
    counts = Counter[bool]()  # weights whose recorded checksum of packed bytes is right, or wrong
    try:
        for packing in packings:
            names = list(_list_packed(packing, base))
            found, compared = _unpack_again(packing, base, names, nested=nested, workers=workers)
            unpacked |= found
            counts += compared
    except RefusedError as error:
        raise error.located(where) from error
    operands = {name: weight.operand for name, weight in unpacked.items()}
    originals = {name: base.stored(base.entries[name]) for name in unpacked}
    facts = collect_facts(unpacked)
    proven, differing = counts[True], counts[False]
    note = (
        f"{len(operands):,} weights of --base are packed and dequantized again"
        f" ({', '.join(facts['kinds'])}), as they were in training"
    )
    if proven and not differing:
        note += (
            "; --base is the model that they were packed from, proven by the packed bytes of"
            f" {proven:,}"
        )
    unlike = (
        f"{differing:,} of {differing + proven:,} weights have other"
        " packed bytes than in training: a GPU rounds a few elements differently, another"
        " model differs in nearly all; a merge from the checkpoint itself is exact"
    )
    return QuantizedBase(
        operands=operands,
        shapes={name: weight.shape for name, weight in unpacked.items()},
        dtypes={name: original.dtype for name, original in originals.items()},
        hidden=frozenset(operands),
        notes=(note, unlike) if differing else (note,),
        dequantized=operands,
        originals=originals,
        facts={**facts, "proven": proven, "unlike": differing},
    )


def _list_packed(packing: Packing, base: ModelWeights) -> Iterator[str]:
    """Yields the weights of a base that were packed in training; refuses another base."""
    for name, record in packing.weights.items():
        entry = base.entries.get(name)
        wrong = "is not in it as a plain weight"
        if entry is not None and entry.dtype.kind == "float":
            taken = entry.elements if packing.settings is None else -(-entry.elements // 2)
            if record.size_bytes == taken:
                yield name
                continue
            # What is as large in the base was not packed.
            if record.size_bytes == entry.elements * BY_NAME[packing.storage].itemsize:
                continue
            wrong = f"takes {taken:,} bytes packed, expected {record.size_bytes:,}"
        raise RefusedError(
            f"weight {name!r}, which was packed in training, {wrong}",
            where=base.location,
            hint=_RIGHT_BASE,
        )


def _unpack_again(
    packing: Packing, base: ModelWeights, names: Sequence[str], *, nested: bool | None, workers: int
) -> tuple[dict[str, UnpackedWeight], Counter[bool]]:
    """Packs and unpacks weights, and compares the checksums of packed bytes where recorded."""
    unpacked: dict[str, UnpackedWeight] = {}
    counts = Counter[bool]()
    known = packing.settings
    if known is None:
        for name in names:
            entry = base.entries[name]
            operand = RequantizedEightBit(base.stored(entry), entry.shape[-1])
            unpacked[name] = UnpackedWeight(operand, entry.shape, entry.dtype, derived=True)
        return unpacked, counts
    if known.nested is None:
        known = replace(known, nested=nested)
    if known.nested is None:
        raise RefusedError(
            "the record of the adapter does not say whether the scales of its packed base"
            " were quantized too",
            hint=f"pass --double-quant or --no-double-quant; or {_ORIGINAL}",
        )
    is_nested = known.nested
    first = ArrayReader(base.origin)

    def pack(
        name: str, quant_type: FourBitType, blocksize: BlockSize, dtype: PackedDType
    ) -> RequantizedFourBit:
        entry = base.entries[name]
        return RequantizedFourBit(
            base.stored(entry), BY_NAME[dtype], blocksize, entry.elements, quant_type=quant_type
        )

    settings = _find_recorded(packing, known, base, names, pack, first)
    for name in names:
        record = packing.weights[name]
        if record.crc32 is not None:
            counts[_has_checksum(pack(name, *settings), record.crc32, first)] += 1

    def work(batch: Iterator[str]) -> None:
        reader = ArrayReader(base.origin)
        for name in batch:
            operand, offset = pack(name, *settings), packing.weights[name].offset
            if is_nested and offset is None:
                maxima = [
                    operand.maxima(span, [reader.compute(operand.original, span)])
                    for span in cut_blocks(operand.elements)
                ]
                offset = float(compute_float32_mean(np.concatenate(maxima)))
            shape = base.entries[name].shape
            size = NESTED_BLOCKSIZE if is_nested else 0
            state = FourBitState(*settings, shape, size, offset or 0.0)
            operand = replace(operand, offset=offset if is_nested else None)
            unpacked[name] = UnpackedWeight(operand, shape, operand.dtype, state, derived=True)

    run_crew(workers, iter(names), work)
    return {name: unpacked[name] for name in names}, counts


def _find_recorded(
    packing: Packing,
    known: FourBitSettings,
    base: ModelWeights,
    names: Sequence[str],
    pack: Callable[[str, FourBitType, BlockSize, PackedDType], RequantizedFourBit],
    reader: ArrayReader,
) -> _Settings:
    """Returns settings that are recorded, or that a checksum of packed bytes proves."""
    if known.quant_type is not None and known.blocksize is not None and known.dtype is not None:
        return known.quant_type, known.blocksize, known.dtype
    recorded = [name for name in names if packing.weights[name].crc32 is not None]
    smallest = min(recorded, key=lambda name: base.entries[name].elements, default=None)
    if smallest is not None:
        storage, crc = BY_NAME[packing.storage], packing.weights[smallest].crc32
        for likely in list_likely_settings(known, storage, base.entries[smallest].dtype):
            if _has_checksum(pack(smallest, *likely), crc, reader):
                return likely
    options = {"type": known.quant_type, "block size": known.blocksize, "dtype": known.dtype}
    missing = ", ".join(name for name, value in options.items() if value is None)
    raise RefusedError(
        f"the record of the adapter does not have the {missing} of its packed base"
        f" ({known.quant_type or '4 bits'}), and no checksum of packed bytes agrees with this"
        " one",
        hint=f"merge from the checkpoint itself, which holds packed weights; or {_ORIGINAL}",
    )


def _has_checksum(operand: RequantizedFourBit, expected: int | None, reader: ArrayReader) -> bool:
    """Returns whether packing a weight gives bytes with a checksum, on a processor or a GPU."""
    crcs = dict.fromkeys((False, True) if operand.quant_type == "fp4" else (False,), 0)
    for span in cut_blocks(operand.elements):
        inputs = [reader.compute(operand.original, span)]
        for on_gpu, crc in crcs.items():
            crcs[on_gpu] = crc32(operand.packed(span, inputs, on_gpu=on_gpu).data, crc)
    return expected in crcs.values()
