"""The packed weights of a checkpoint and of a base model, and the way to the elements of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.adapters.quant_state import FourBitState
from ckptkit.adapters.quantized import (
    EIGHT_BITS,
    PackedWeight,
    dtype_told,
    names_beside,
    packed_weights,
    settings_told,
)
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.index import Shape, TensorEntry
from ckptkit.execution.tensors import Origin
from ckptkit.kernels.operands import Stored
from ckptkit.pipeline.adapters.packed_proof import (
    PackedReader,
    Proof,
    prove_eight_bits,
    prove_same_bytes,
)
from ckptkit.pipeline.adapters.unpacking import (
    FLOAT16,
    Place,
    Unpacked,
    eight_bits_by_companions,
    eight_bits_by_original,
    four_bits_by_companions,
    four_bits_by_original,
    proof_of_four_bits,
    settled,
)
from ckptkit.planning.selection import looks_packed

_RIGHT_BASE = "pass as --base the model, and the revision of it, that training started from"


@dataclass(frozen=True, slots=True)
class Weights:
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
        trained: Weights | None,
        original: Weights | None,
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
        self._in_original = packed_weights(given, shapes)
        known = {n: entry.shape for n, entry in given.items() if entry.dtype.kind == "float"}
        known |= self._shapes_in_states() | dict(shapes)
        self._in_trained = packed_weights(held, known)
        told = settings_told(trained.config if trained is not None else None)
        self._told = told if nested is None else replace(told, nested=nested)
        self._state: FourBitState | None = None
        self.names = list(dict.fromkeys([*self._in_trained, *self._in_original]))
        found = (*self._in_trained.values(), *self._in_original.values())
        self.hidden = frozenset(self.names).union(*(names_beside(weight) for weight in found))
        self.assumed_nested = False
        written = original if original is not None else trained
        if written is not None:
            self._refuse_unknown_columns(written, known)

    def reader(self) -> PackedReader:
        """Returns a reader of both sides, for one thread."""
        return PackedReader(self._origins)

    def plain(self, name: str) -> Stored | None:
        """Returns the original of a packed weight, where the base model holds it unpacked."""
        if self._original is None or name in self._in_original or name not in self._in_trained:
            return None
        entry = self._original.entries.get(name)
        if entry is None or entry.dtype.kind != "float":
            return None
        return Stored(self._original.origin.name, entry.key, entry.dtype)

    def unpacked(self, name: str, reader: PackedReader) -> Unpacked:
        """Finds the way to the elements of a weight, and proves it where the original is there.

        Raises:
            RefusedError: If there is none, or if the original is another model.
            FormatError: If what lies beside the weight is damaged.
        """  # noqa: DOC501  made by `_no_state` and `_wrong_base`
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

    def _of(self, holder: Weights | None, weight: PackedWeight, reader: PackedReader) -> Unpacked:
        """Returns a weight by what lies beside it."""
        place = self._place(holder, reader)
        if not weight.is_whole:
            raise _no_state(weight, place.location)
        if weight.state is not None:
            return four_bits_by_companions(weight, place, place.state(weight.state))
        return eight_bits_by_companions(weight, place, _dtype_before(holder))

    def _beside_packed_original(
        self, weight: PackedWeight, beside: PackedWeight, reader: PackedReader
    ) -> Unpacked:
        """Returns a weight that the base model holds packed as well, by the state of either."""
        if weight.is_whole:
            unpacked = self._of(self._trained, weight, reader)
        else:
            unpacked = self._of(self._original, beside, reader)
        held = (self._place(self._trained, reader).origin, weight.packed)
        there = (self._place(self._original, reader).origin, beside.packed)
        proof = prove_same_bytes(reader, held, there)
        return replace(unpacked, proof=self._checked(weight.name, proof))

    def _by_original(self, weight: PackedWeight, plain: Stored, place: Place) -> Unpacked:
        if weight.bits == EIGHT_BITS:
            unpacked = eight_bits_by_original(weight, place, plain)
            return self._proven(weight, unpacked, plain, place.reader)
        self._check_shape(weight.name, weight.shape or ())
        packed = place.stored(weight.packed)
        state = self._settled(weight, packed, plain, place.reader)
        proof = self._checked(weight.name, proof_of_four_bits(packed, plain, state, place.reader))
        if state.nested_blocksize:
            state = replace(state, nested_offset=proof.mean)
        return replace(four_bits_by_original(weight, place, plain, state), proof=proof)

    def _settled(
        self, weight: PackedWeight, packed: Stored, plain: Stored, reader: PackedReader
    ) -> FourBitState:
        """Returns how weights without a state were packed; the first that comes settles it."""
        shape = weight.shape or ()
        if self._state is None:
            state, proof = settled(packed, plain, shape, self._told, reader)
            self._checked(weight.name, proof)
            self.assumed_nested = self._told.nested is None
            self._state = state
        return replace(self._state, shape=shape)

    def _proven(
        self, weight: PackedWeight, unpacked: Unpacked, plain: Stored, reader: PackedReader
    ) -> Unpacked:
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

    def _checked(self, name: str, proof: Proof) -> Proof:
        if not proof.holds:
            where = "" if self._original is None else self._original.location
            raise _wrong_base(name, proof, where)
        return proof

    def _refuse_unknown_columns(self, weights: Weights, known: Mapping[str, Shape]) -> None:
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

    def _place(self, weights: Weights | None, reader: PackedReader) -> Place:
        if weights is None:
            raise RuntimeError("a weight was found where there are none")
        return Place(weights.origin.name, weights.location, reader)


def _dtype_before(weights: Weights | None) -> DType:
    """Returns what 8-bit weights were before: what is told, or what most others still are."""
    config = weights.config if weights is not None else None
    told = dtype_told(config)
    if told is not None:
        return BY_NAME[told]
    entries = weights.entries.values() if weights is not None else ()
    others = Counter(e.dtype for e in entries if e.dtype.kind == "float" and len(e.shape) > 1)
    return max(others, key=lambda dtype: others[dtype], default=FLOAT16)


def _no_state(
    weight: PackedWeight, location: str, *, looked_for: Weights | None = None
) -> CkptkitError:
    beside = "" if looked_for is None else f", nor is the weight in {looked_for.location}"
    return RefusedError(
        f"weight {weight.name!r} is packed in {weight.bits} bits without its quantization state,"
        f" so that nothing here says what the numbers stand for{beside}",
        where=location,
        hint="pass the model that was quantized for training as --base: the state follows from it",
    )


def _wrong_base(name: str, proof: Proof, location: str) -> CkptkitError:
    share = proof.differing / max(1, proof.elements)
    return RefusedError(
        f"is not the model that was quantized: {proof.differing:,} of {proof.elements:,} packed"
        f" values of {name!r} ({share:.2%}) are not those of its weights",
        where=location,
        hint=_RIGHT_BASE,
    )
