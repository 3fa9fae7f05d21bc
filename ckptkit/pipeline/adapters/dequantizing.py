"""From packed weights to operands: what a 4-bit or 8-bit base is merged into.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.adapters.quantized import refuse_unmodelled
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Shape
from ckptkit.execution.crew import run_crew
from ckptkit.execution.tensors import Origin
from ckptkit.kernels.operands import Operand, Stored
from ckptkit.pipeline.adapters.packed_bases import PackedBases, Weights
from ckptkit.pipeline.adapters.packed_proof import PackedReader, change_norm
from ckptkit.pipeline.adapters.unpacking import Unpacked

__all__ = [
    "QuantizedBase",
    "Weights",
    "plan_quantized",
    "quantization_norms",
]
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
    trained: Weights | None,
    original: Weights | None,
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

    Raises:
        RefusedError: If a packed weight has no state and no original was given, if the original
            is another model, or if what was chosen cannot be had.
        UnsupportedError: If the base is quantized in a way that is not modelled.
        FormatError: If a quantization state is damaged.
    """
    for weights in filter(None, (trained, original)):
        refuse_unmodelled(weights.entries, weights.config, location=weights.location)
    bases = PackedBases(trained, original, shapes, nested=nested)
    if not bases.names:
        return _of_nothing(trained, original, choice)
    return _of_bases(bases, choice, workers)


def quantization_norms(
    base: QuantizedBase, names: Iterable[str], origins: Mapping[str, Origin]
) -> dict[str, float]:
    """Measures what quantizing changed in weights: the Frobenius norms of dequantized - original.

    Against the norms of the adapter's updates, they tell how much the choice of the base weighs.

    Args:
        base: What `plan_quantized` returned.
        names: The weights; those of which there is no original are left out.
        origins: The opened sources, by name.

    Raises:
        InputError: If a source cannot be read.
    """
    reader = PackedReader(origins)
    return {
        name: change_norm(reader, base.originals[name], base.dequantized[name], base.shapes[name])
        for name in names
        if name in base.originals
    }


def _of_bases(bases: PackedBases, choice: QloraBase | None, workers: int) -> QuantizedBase:
    originals = {name: plain for name in bases.names if (plain := bases.plain(name)) is not None}
    if choice == "original":
        _refuse_without_original(bases.names, originals)
    unpacked = _unpack(bases, workers)
    facts = facts_of(unpacked)
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
    trained: Weights | None, original: Weights | None, choice: QloraBase | None
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


def _refuse_without_original(names: Sequence[str], originals: Mapping[str, Stored]) -> None:
    without = next((name for name in names if name not in originals), None)
    if without is not None:
        raise RefusedError(
            f"the original of the packed weight {without!r} is not there",
            where="--qlora-base original",
            hint="pass the model that was quantized for training as --base",
        )


def _unpack(bases: PackedBases, workers: int) -> dict[str, Unpacked]:
    """Finds the way to the elements of each weight; the first settles what nothing tells."""
    unpacked: dict[str, Unpacked] = {}

    def work(names: Iterator[str]) -> None:
        reader = bases.reader()
        for name in names:
            unpacked[name] = bases.unpacked(name, reader)

    work(iter(bases.names[:1]))
    run_crew(workers, iter(bases.names[1:]), work)
    return {name: unpacked[name] for name in bases.names}


def facts_of(unpacked: Mapping[str, Unpacked]) -> dict[str, Any]:
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


def _kind(one: Unpacked) -> str:
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
