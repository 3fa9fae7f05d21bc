"""The packed weights of a checkpoint and of a base model, and the way to the elements of each.

From packed weights to operands: what a 4-bit or 8-bit base is merged into.

What a merge calls::

    quantized = plan_quantized(trained, original, shapes=shapes, choice=None)
    quantized.operands["model.layers.0.self_attn.q_proj.weight"]   # -> Operand, a kernel's base

`trained` are the weights that the adapter was trained on, as the checkpoint holds them; `original`
are those of `--base`. Either may be packed, or be absent. Names are those of the plain model on
both sides. Where nothing is packed, the result is empty and costs nothing; everything that it
does not name is merged and written as if this module were not there.

Every name in `quantized.hidden` (packed weights and what lies beside them) must not be written as
it is; what stands for a packed weight is the operand of the same name, with `shapes` and `dtypes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptkit.adapters.quantized.unpack import (
    FLOAT16,
    PackedLocation,
    PackedReader,
    PackingProof,
    UnpackedWeight,
    derive_eight_bits,
    derive_four_bits,
    find_settings,
    measure_change,
    proof_of_four_bits,
    prove_eight_bits,
    prove_same_bytes,
    unpack_eight_bits,
    unpack_four_bits,
)
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.index import Shape, TensorEntry
from ckptkit.core.threads import run_crew
from ckptkit.engine.kernels import Operand, StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.quantized import (
    EIGHT_BITS,
    FourBitState,
    PackedWeight,
    find_packed_weights,
    list_companions,
    read_dtype,
    read_settings,
    refuse_unmodelled,
)
from ckptkit.plan.packed_weights import looks_packed

_RIGHT_BASE = "pass as --base the model, and the revision of it, that training started from"


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of a plain model, wherever they lie.

    Attributes:
        origin: The opened source; its `name` is the origin of operands and demands.
        entries: The tensors by their names in the plain model, what lies beside packed weights
            included (`model.….q_proj.weight.absmax`, `model.….q_proj.SCB`).
        config: The `config.json` that lies beside them, if any.
        location: What messages call the source.
    """

    origin: Origin
    entries: Mapping[str, TensorEntry]
    config: Mapping[str, Any] | None = None
    location: str = ""


class PackedBases:
    """The packed weights on both sides.

    Attributes:
        names: Of all of them.
        hidden: Names of everything that is packed, or lies beside it.
        assumed_nested: Whether nothing told that scales were quantized too, and it was assumed.
    """

    def __init__(
        self,
        trained: ModelWeights | None,
        original: ModelWeights | None,
        shapes: Mapping[str, Shape],
        *,
        nested: bool | None = None,
    ) -> None:
        """Finds them; of their data only quantization states are read.

        Args:
            trained: The weights in the adapter's own checkpoint.
            original: The weights of the base model.
            shapes: Shapes of weights that the adapter tells.
            nested: Whether scales were quantized too, or None where nobody said.
        """
        self._trained, self._original = trained, original
        sides = [weights for weights in (trained, original) if weights is not None]
        self._origins = {weights.origin.name: weights.origin for weights in sides}
        given = original.entries if original is not None else {}
        held = trained.entries if trained is not None else {}
        self._in_original = find_packed_weights(given, shapes)
        known = {n: entry.shape for n, entry in given.items() if entry.dtype.kind == "float"}
        known |= self._shapes_in_states() | dict(shapes)
        self._in_trained = find_packed_weights(held, known)
        told = read_settings(trained.config if trained is not None else None)
        self._told = told if nested is None else replace(told, nested=nested)
        self._state: FourBitState | None = None
        self.names = list(dict.fromkeys([*self._in_trained, *self._in_original]))
        found = (*self._in_trained.values(), *self._in_original.values())
        self.hidden = frozenset(self.names).union(*(list_companions(weight) for weight in found))
        self.assumed_nested = False
        written = original if original is not None else trained
        if written is not None:
            self._refuse_unknown_columns(written, known)

    def reader(self) -> PackedReader:
        """Returns a reader of both sides, for one thread."""
        return PackedReader(self._origins)

    def plain(self, name: str) -> StoredOperand | None:
        """Returns the original of a packed weight, where the base model holds it unpacked."""
        if self._original is None or name in self._in_original or name not in self._in_trained:
            return None
        entry = self._original.entries.get(name)
        if entry is None or entry.dtype.kind != "float":
            return None
        return StoredOperand(self._original.origin.name, entry.key, entry.dtype)

    def unpacked(self, name: str, reader: PackedReader) -> UnpackedWeight:
        """Finds the way to the elements of a weight, and proves it where the original is there."""
        beside = self._in_original.get(name)
        if name not in self._in_trained:
            return self._of(self._original, self._in_original[name], reader)
        weight, plain = self._in_trained[name], self.plain(name)
        if beside is not None:
            return self._beside_packed_original(weight, beside, reader)
        if weight.is_whole:
            unpacked = self._of(self._trained, weight, reader)
            return unpacked if plain is None else self._proven(weight, unpacked, plain, reader)
        place = self._place(self._trained, reader)
        if plain is None:
            raise _no_state(weight, place.location, looked_for=self._original)
        return self._by_original(weight, plain, place)

    def _of(
        self, holder: ModelWeights | None, weight: PackedWeight, reader: PackedReader
    ) -> UnpackedWeight:
        """Returns a weight by what lies beside it."""
        place = self._place(holder, reader)
        if not weight.is_whole:
            raise _no_state(weight, place.location)
        if weight.state is not None:
            return unpack_four_bits(weight, place, place.state(weight.state))
        return unpack_eight_bits(weight, place, _dtype_before(holder))

    def _beside_packed_original(
        self, weight: PackedWeight, beside: PackedWeight, reader: PackedReader
    ) -> UnpackedWeight:
        """Returns a weight that the base model holds packed as well, by the state of either."""
        if weight.is_whole:
            unpacked = self._of(self._trained, weight, reader)
        else:
            unpacked = self._of(self._original, beside, reader)
        held = (self._place(self._trained, reader).origin, weight.packed)
        there = (self._place(self._original, reader).origin, beside.packed)
        proof = prove_same_bytes(reader, held, there)
        return replace(unpacked, proof=self._checked(weight.name, proof))

    def _by_original(
        self, weight: PackedWeight, plain: StoredOperand, place: PackedLocation
    ) -> UnpackedWeight:
        if weight.bits == EIGHT_BITS:
            unpacked = derive_eight_bits(weight, place, plain)
            return self._proven(weight, unpacked, plain, place.reader)
        self._check_shape(weight.name, weight.shape or ())
        packed = place.stored(weight.packed)
        state = self._settled(weight, packed, plain, place.reader)
        proof = self._checked(weight.name, proof_of_four_bits(packed, plain, state, place.reader))
        if state.nested_blocksize:
            state = replace(state, nested_offset=proof.mean)
        return replace(derive_four_bits(weight, place, plain, state), proof=proof)

    def _settled(
        self,
        weight: PackedWeight,
        packed: StoredOperand,
        plain: StoredOperand,
        reader: PackedReader,
    ) -> FourBitState:
        """Returns how weights without a state were packed; the first that comes settles it."""
        shape = weight.shape or ()
        if self._state is None:
            state, proof = find_settings(packed, plain, shape, self._told, reader)
            self._checked(weight.name, proof)
            self.assumed_nested = self._told.nested is None
            self._state = state
        return replace(self._state, shape=shape)

    def _proven(
        self,
        weight: PackedWeight,
        unpacked: UnpackedWeight,
        plain: StoredOperand,
        reader: PackedReader,
    ) -> UnpackedWeight:
        """Compares a weight with its original."""
        self._check_shape(weight.name, unpacked.shape)
        packed = self._place(self._trained, reader).stored(weight.packed)
        if unpacked.state is None:
            proof = prove_eight_bits(reader, packed, plain, unpacked.shape)
        else:
            proof = proof_of_four_bits(packed, plain, unpacked.state, reader)
        return replace(unpacked, proof=self._checked(weight.name, proof))

    def _check_shape(self, name: str, shape: Shape) -> None:
        original = self._original
        found = original.entries[name].shape if original is not None else shape
        if original is not None and found != shape:
            raise RefusedError(
                f"is not the model that was quantized: {name!r} has shape {found} against {shape}",
                where=original.location,
                hint=_RIGHT_BASE,
            )

    def _checked(self, name: str, proof: PackingProof) -> PackingProof:
        if not proof.holds:
            where = "" if self._original is None else self._original.location
            raise _wrong_base(name, proof, where)
        return proof

    def _refuse_unknown_columns(self, weights: ModelWeights, known: Mapping[str, Shape]) -> None:
        """Refuses what looks packed, and of which nothing says so, before it is written as is."""
        for name, entry in weights.entries.items():
            kept = name in self.hidden or (weights is self._trained and known.get(name))
            if not kept and looks_packed(name, entry.shape, entry.dtype.name):
                raise RefusedError(
                    f"tensor {entry.name!r} of shape {entry.shape} looks like a part of a packed"
                    " weight, but nothing tells of which shape",
                    where=weights.location,
                    hint="pass the model that was quantized for training as --base",
                )

    def _shapes_in_states(self) -> dict[str, Shape]:
        """Returns the shapes that the states of packed weights in the base model tell."""
        if not self._in_original:
            return {}
        place = self._place(self._original, self.reader())
        states = {name: weight.state for name, weight in self._in_original.items()}
        return {name: place.state(state).shape for name, state in states.items() if state}

    def _place(self, weights: ModelWeights | None, reader: PackedReader) -> PackedLocation:
        if weights is None:
            raise RuntimeError("a weight was found where there are none")
        return PackedLocation(weights.origin.name, weights.location, reader)


def _dtype_before(weights: ModelWeights | None) -> DType:
    """Returns what 8-bit weights were before: what is told, or what most others still are."""
    config = weights.config if weights is not None else None
    told = read_dtype(config)
    if told is not None:
        return BY_NAME[told]
    entries = weights.entries.values() if weights is not None else ()
    others = Counter(e.dtype for e in entries if e.dtype.kind == "float" and len(e.shape) > 1)
    return max(others, key=lambda dtype: others[dtype], default=FLOAT16)


def _no_state(
    weight: PackedWeight, location: str, *, looked_for: ModelWeights | None = None
) -> CkptkitError:
    beside = "" if looked_for is None else f", nor is the weight in {looked_for.location}"
    return RefusedError(
        f"weight {weight.name!r} is packed in {weight.bits} bits without its quantization state,"
        f" so that nothing here says what the numbers stand for{beside}",
        where=location,
        hint="pass the model that was quantized for training as --base: the state follows from it",
    )


def _wrong_base(name: str, proof: PackingProof, location: str) -> CkptkitError:
    share = proof.differing / max(1, proof.elements)
    return RefusedError(
        f"is not the model that was quantized: {proof.differing:,} of {proof.elements:,} packed"
        f" values of {name!r} ({share:.2%}) are not those of its weights",
        where=location,
        hint=_RIGHT_BASE,
    )


QloraBase = Literal["dequantized", "original"]
_EIGHT = "8 bits"


@dataclass(frozen=True, slots=True)
class QuantizedBase:
    """The packed weights of a base model, as operands.

    Attributes:
        operands: What stands for each of them, by the name of the weight.
        shapes: The shapes of those weights.
        dtypes: The element types in which to write them: those of the original model where it
            was given, else what they were before they were packed.
        hidden: Names of everything that is packed, or lies beside it.
        notes: What the user should know.
        dequantized: The same weights dequantized, whatever was chosen.
        originals: The same weights in the original model, where it was given.
        facts: What the manifest says: settings of the quantization, what the proof found.
    """

    operands: Mapping[str, Operand] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    dequantized: Mapping[str, Operand] = field(default_factory=dict)
    originals: Mapping[str, Operand] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        """Whether packed bytes prove that the original model is the one that was packed."""
        told = self.facts
        return bool(told.get("compared") or (told.get("proven") and not told.get("unlike")))


def plan_quantized(
    trained: ModelWeights | None,
    original: ModelWeights | None,
    *,
    shapes: Mapping[str, Shape],
    choice: QloraBase | None = None,
    nested: bool | None = None,
    workers: int = 1,
) -> QuantizedBase:
    """Finds packed weights and the way to each of their elements.

    Quantization states are read where they lie beside the weights. Where they do not, they are
    derived again from `original`, block by block. Wherever packed weights and their original are
    both there, the packed bytes prove that they belong together: the original is read once.

    Args:
        trained: The base weights in the adapter's own checkpoint; None where it holds none.
        original: The weights of `--base`; None where it was not given.
        shapes: Shapes `(out, in)` of weights that the adapter's factors tell, by weight name.
        choice: `--qlora-base`, None where the user did not say.
        nested: Whether scales were quantized too, where no quantization state tells; None where
            the user did not say.
        workers: How many threads may read at once, about 40 MB each.
    """
    for weights in filter(None, (trained, original)):
        refuse_unmodelled(weights.entries, weights.config, location=weights.location)
    bases = PackedBases(trained, original, shapes, nested=nested)
    if not bases.names:
        return _of_nothing(trained, original, choice)
    return _of_bases(bases, choice, workers)


def measure_quantization(
    base: QuantizedBase, names: Iterable[str], origins: Mapping[str, Origin]
) -> dict[str, float]:
    """Measures what quantizing changed in weights: the Frobenius norms of dequantized - original.

    Against the norms of the adapter's updates, they tell how much the choice of the base weighs.

    Args:
        base: What `plan_quantized` returned.
        names: The weights; those of which there is no original are left out.
        origins: The opened sources, by name.
    """
    reader = PackedReader(origins)
    return {
        name: measure_change(
            reader, base.originals[name], base.dequantized[name], base.shapes[name]
        )
        for name in names
        if name in base.originals
    }


def _of_bases(bases: PackedBases, choice: QloraBase | None, workers: int) -> QuantizedBase:
    originals = {name: plain for name in bases.names if (plain := bases.plain(name)) is not None}
    if choice == "original":
        _refuse_without_original(bases.names, originals)
    unpacked = _unpack(bases, workers)
    facts = collect_facts(unpacked)
    dtypes = {name: one.dtype for name, one in unpacked.items()}
    dequantized = {name: one.operand for name, one in unpacked.items()}
    return QuantizedBase(
        operands=originals if choice == "original" else dequantized,
        shapes={name: one.shape for name, one in unpacked.items()},
        dtypes=dtypes | {name: plain.dtype for name, plain in originals.items()},
        hidden=bases.hidden,
        notes=tuple(_notes(bases, facts, choice)),
        dequantized=dequantized,
        originals=originals,
        facts=facts,
    )


def _of_nothing(
    trained: ModelWeights | None, original: ModelWeights | None, choice: QloraBase | None
) -> QuantizedBase:
    """Returns what there is to say where nothing is packed."""
    sides = [weights for weights in (trained, original) if weights is not None]
    told = any((weights.config or {}).get("quantization_config") for weights in sides)
    if choice == "dequantized":
        raise RefusedError(
            "no weight is packed here, so there is no dequantized base to merge onto",
            where="--qlora-base dequantized",
            hint="leave the option out to merge onto the base as it is; for the function that was"
            " trained, pass the checkpoint of the run, or the base as it was saved in 4 bits",
        )
    if choice == "original" and not told:
        note = (
            "--qlora-base original changes nothing here: no weight is packed, and the adapter is"
            " merged onto the base as it is"
        )
        return QuantizedBase(notes=(note,))
    if not told or choice == "original":
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
    """Finds the way to the elements of each weight; the first settles what nothing tells."""
    unpacked: dict[str, UnpackedWeight] = {}

    def work(names: Iterator[str]) -> None:
        reader = bases.reader()
        for name in names:
            unpacked[name] = bases.unpacked(name, reader)

    work(iter(bases.names[:1]))
    run_crew(workers, iter(bases.names[1:]), work)
    return {name: unpacked[name] for name in bases.names}


def collect_facts(unpacked: Mapping[str, UnpackedWeight]) -> dict[str, Any]:
    """Returns what the manifest says of packed weights."""
    kinds = sorted({_kind(one) for one in unpacked.values()})
    proofs = [one.proof for one in unpacked.values() if one.proof is not None]
    return {
        "weights": len(unpacked),
        "kinds": kinds,
        "derived": sum(one.derived for one in unpacked.values()),
        "compared": sum(proof.elements for proof in proofs),
        "differing": sum(proof.differing for proof in proofs),
    }


def _kind(one: UnpackedWeight) -> str:
    """Names a way of packing, in words."""
    if one.state is None:
        return _EIGHT
    nested = " with double quantization" if one.state.nested_blocksize else ""
    return f"{one.state.quant_type} in blocks of {one.state.blocksize} of {one.state.dtype}{nested}"


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
            "8-bit layers round their inputs too, which merged weights cannot do: the merged model"
            " computes what was trained but for that, and DoRA's norms are those of the weights"
            " as they were packed"
        )
    if bases.assumed_nested:
        yield (
            "nothing tells whether the scales were quantized too, which packed bytes cannot show:"
            " double quantization was assumed, as in PEFT's recipes for FSDP; --double-quant or"
            " --no-double-quant settles it"
        )
