"""Which weights of a model were packed by bitsandbytes, and what lies beside each.

A packed weight has companions in most checkpoints, and none where FSDP made a plain parameter of
it. With companions their names tell; without, the size of the weight does, since the factors of
its LoRA or the original model say what shape it has in truth. What is not packed is nobody's
business here: an embedding or a head is what it is, also in a model of packed weights.

`ckptkit.adapters.quantized` turns what is found here into operands.

Source: bitsandbytes 0.50, `functional.py` (`QuantState.as_dict`), `nn/modules.py`
(`Linear4bit._save_to_state_dict`, `Linear8bitLt._save_to_state_dict`).

How weights of four bits were packed: what bitsandbytes writes beside each of them.

Source: bitsandbytes 0.50, `functional.py` (`QuantState.as_dict`), `utils.py`
(`pack_dict_to_tensor`): a JSON object as a tensor of bytes.

`Quantization` is the record that the manifest of an extracted adapter keeps of its packed base, so
that the weights that training computed with can be made again from the plain base.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import Shape, TensorEntry

FourBitType = Literal["nf4", "fp4"]
QUANT_TYPES: Mapping[str, FourBitType] = {"nf4": "nf4", "fp4": "fp4"}
DTYPES = ("bfloat16", "float16", "float32")
"""What bitsandbytes packs."""
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE_BYTES = 1 << 16
_HINT = "the file is damaged; take another copy of it"


@dataclass(frozen=True, slots=True)
class FourBitSettings:
    """How weights were packed, as far as it is known.

    Attributes:
        quant_type: What the codes stand for, or None.
        nested: Whether the scales were quantized too ("double quantization"), or None.
        blocksize: How many elements share a scale, or None.
        dtype: What the weights were before, or None.
    """

    quant_type: FourBitType | None = None
    nested: bool | None = None
    blocksize: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class FourBitState:
    """How one weight was packed.

    Attributes:
        quant_type: What the codes stand for.
        blocksize: How many elements share a scale.
        dtype: What the weight was before.
        shape: Its shape.
        nested_blocksize: How many scales share a scale; 0 where scales were not quantized.
        nested_offset: What was taken off the scales before.
    """

    quant_type: FourBitType
    blocksize: int
    dtype: str
    shape: Shape
    nested_blocksize: int = 0
    nested_offset: float = 0.0

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> FourBitState:
        """Reads the bytes of a `quant_state` tensor."""
        document = _object(data, where)
        nested = "nested_blocksize" in document
        return cls(
            quant_type=QUANT_TYPES[_among(document, "quant_type", tuple(QUANT_TYPES), where)],
            blocksize=_among(document, "blocksize", BLOCKSIZES, where),
            dtype=_among(document, "dtype", DTYPES, where),
            shape=_shape(document, where),
            nested_blocksize=_positive(document, "nested_blocksize", where) if nested else 0,
            nested_offset=_number(document, "nested_offset", where) if nested else 0.0,
        )

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _object(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise FormatError(f"is not JSON: {error}", where=where, hint=_HINT) from error
    if not isinstance(document, dict):
        raise FormatError("is no JSON object", where=where, hint=_HINT)
    return document


def _among(document: Mapping[str, Any], key: str, known: tuple[Any, ...], where: str) -> Any:
    value = document.get(key)
    if value not in known:
        raise FormatError(f"has {value!r} for {key!r} against one of {known}", where=where)
    return value


def _positive(document: Mapping[str, Any], key: str, where: str) -> int:
    value = document.get(key)
    if not isinstance(value, int) or value <= 0:
        raise FormatError(f"has {value!r} for {key!r}, where a count was expected", where=where)
    return value


def _number(document: Mapping[str, Any], key: str, where: str) -> float:
    value = document.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError(f"has {value!r} for {key!r}, where a number was expected", where=where)
    return float(value)


def _shape(document: Mapping[str, Any], where: str) -> Shape:
    value = document.get("shape")
    whole = isinstance(value, list) and all(isinstance(size, int) and size > 0 for size in value)
    if not whole or not value:
        raise FormatError(f"has {value!r} for 'shape', where sizes were expected", where=where)
    return tuple(value)


Bits = Literal[4, 8]

_FOUR = re.compile(
    r"(?P<weight>.+)\."
    r"(?P<kind>(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)"
)
_EIGHT = re.compile(r"(?P<module>.+)\.(?P<kind>SCB|weight_format)")
SCALES_OF_ROWS = "SCB"
FOUR_BITS: Bits = 4
EIGHT_BITS: Bits = 8
_MATRIX = 2
_BITSANDBYTES = "bitsandbytes"
# What stands beside or for a weight in GPTQ, AWQ, HQQ, compressed tensors, fp8 and mxfp4.
_FOREIGN = re.compile(
    r".+(?:\.(?:qweight|qzeros|g_idx|W_q|weight_packed|weight_scale|weight_scale_inv|weight_scale_2)"
    r"|_(?:blocks|scale_inv))"
)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of which bitsandbytes wrote packed numbers.

    Attributes:
        name: Its name in the model.
        bits: How many bits each of its elements takes.
        packed: The tensor with the packed numbers.
        companions: What lies beside it, by bitsandbytes' names: `absmax`, `quant_map`,
            `nested_absmax`, `nested_quant_map`, `quant_state.bitsandbytes__nf4`, `SCB`, …
        shape: The shape of the weight itself, None where only its quantization state tells.
    """

    name: str
    bits: Bits
    packed: TensorEntry
    companions: Mapping[str, TensorEntry]
    shape: Shape | None

    @property
    def state(self) -> TensorEntry | None:
        """What says how four-bit numbers were packed, None where it was not saved."""
        found = (e for kind, e in self.companions.items() if kind.startswith("quant_state."))
        return next(found, None)

    @property
    def is_whole(self) -> bool:
        """Whether everything lies beside it that unpacking takes."""
        if self.bits == EIGHT_BITS:
            return SCALES_OF_ROWS in self.companions
        return self.state is not None and "absmax" in self.companions


def packed_weights(
    entries: Mapping[str, TensorEntry], shapes: Mapping[str, Shape]
) -> dict[str, PackedWeight]:
    """Finds the packed weights of a plain model.

    Args:
        entries: Its tensors, by their names in the model.
        shapes: Shapes of weights as the model computes with them, where they are known.

    Returns:
        The packed weights by name, in the order of `entries`.
    """
    beside: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        four, eight = _FOUR.fullmatch(name), _EIGHT.fullmatch(name)
        if four is not None:
            beside.setdefault(four["weight"], {})[four["kind"]] = entry
        elif eight is not None:
            beside.setdefault(f"{eight['module']}.weight", {})[eight["kind"]] = entry
    found = (
        _packed(name, entry, beside.get(name, {}), shapes.get(name))
        for name, entry in entries.items()
    )
    return {weight.name: weight for weight in found if weight is not None}


def names_beside(weight: PackedWeight) -> frozenset[str]:
    """Returns the names of the companions of a packed weight, in the plain model."""
    module = weight.name.rpartition(".")[0]
    four = weight.bits == FOUR_BITS
    return frozenset(f"{weight.name if four else module}.{kind}" for kind in weight.companions)


def is_packed_size(entry: TensorEntry, shape: Shape) -> bool:
    """Tells whether a tensor has the size of a weight of that shape in four bits.

    Bitsandbytes writes a column of the type that was chosen as storage, two elements a byte.
    """
    column = len(entry.shape) == _MATRIX and entry.shape[1] == 1
    return column and entry.size_bytes == -(-math.prod(shape) // 2) and entry.shape != shape


def _packed(
    name: str, entry: TensorEntry, companions: Mapping[str, TensorEntry], shape: Shape | None
) -> PackedWeight | None:
    if entry.dtype.name == "int8" and len(entry.shape) == _MATRIX:
        beside = SCALES_OF_ROWS in companions
        if beside or entry.shape == shape:
            return PackedWeight(name, EIGHT_BITS, entry, companions, entry.shape)
    if set(companions) & {"absmax"} or any(kind.startswith("quant_state.") for kind in companions):
        return PackedWeight(name, FOUR_BITS, entry, companions, shape)
    if shape is not None and is_packed_size(entry, shape):
        return PackedWeight(name, FOUR_BITS, entry, companions, shape)
    return None


def settings_told(config: Mapping[str, Any] | None) -> FourBitSettings:
    """Returns what a model's configuration says of its quantization, None for what it does not.

    Source: transformers 5.23, `BitsAndBytesConfig`.
    """
    told = (config or {}).get("quantization_config") or {}
    quant_type = told.get("bnb_4bit_quant_type")
    nested = told.get("bnb_4bit_use_double_quant")
    known: dict[Any, FourBitType] = {"nf4": "nf4", "fp4": "fp4"}
    return FourBitSettings(
        quant_type=known.get(quant_type),
        nested=nested if isinstance(nested, bool) else None,
        dtype=dtype_told(config),
    )


def dtype_told(config: Mapping[str, Any] | None) -> str | None:
    """Returns the type of a model's weights that its configuration states, if it does."""
    told = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    name = str(told).removeprefix("torch.")
    return name if name in DTYPES else None


def refuse_unmodelled(
    entries: Mapping[str, TensorEntry], config: Mapping[str, Any] | None, *, location: str
) -> None:
    """Refuses weights that are packed in a way that is not modelled."""
    told = (config or {}).get("quantization_config") or {}
    method = told.get("quant_method", _BITSANDBYTES) if isinstance(told, Mapping) else str(told)
    foreign = next((name for name in entries if _FOREIGN.fullmatch(name)), None)
    tiny = next((n for n, e in entries.items() if e.dtype.name.startswith("float8")), None)
    what = ""
    if method != _BITSANDBYTES:
        what = f"the base is quantized with {method!r}"
    elif foreign or tiny:
        what = f"tensor {foreign or tiny!r} of the base is part of a quantized weight"
    if what:
        raise UnsupportedError(
            f"{what}, which is not modelled; bitsandbytes' 4-bit and 8-bit weights are",
            where=location,
            hint="pass the original model, or a dequantized copy, as --base",
        )


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One weight that was packed, or may have been.

    Attributes:
        size_bytes: What it took packed.
        offset: The mean of its scales, where they were quantized too and that was saved.
        crc32: Checksum of its packed bytes; None where it is not known.
    """

    size_bytes: int
    offset: float | None = None
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Packing:
    """Weights that were packed alike.

    Attributes:
        settings: How, as far as the checkpoint shows; None for eight bits.
        storage: The element type that packed numbers were stored under.
        weights: The weights, by their names in the plain model.
    """

    settings: FourBitSettings | None
    storage: str
    weights: Mapping[str, PackedRecord] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the settings are recorded, or can be found by checksums."""
        four = self.settings
        if four is None or None not in {four.quant_type, four.blocksize, four.dtype}:
            return True
        return any(weight.crc32 is not None for weight in self.weights.values())

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        four = self.settings
        settings = {} if four is None else {
            "quant_type": four.quant_type,
            "blocksize": four.blocksize,
            "dtype": four.dtype,
            "nested": four.nested,
        }  # fmt: skip
        return {
            "bits": 8 if four is None else 4,
            **settings,
            "storage": self.storage,
            "weights": {
                name: [weight.size_bytes, weight.offset, weight.crc32]
                for name, weight in self.weights.items()
            },
        }


def _packing_from_json(document: Mapping[str, Any]) -> Packing:
    weights = {str(name): PackedRecord(*row) for name, row in document["weights"].items()}
    storage = str(document["storage"])
    if document["bits"] != FOUR_BITS:
        return Packing(None, storage, weights)
    settings = FourBitSettings(
        quant_type=_recorded(document["quant_type"], QUANT_TYPES),
        nested=_recorded(document["nested"], (True, False)),
        blocksize=_recorded(document["blocksize"], BLOCKSIZES),
        dtype=_recorded(document["dtype"], DTYPES),
    )
    return Packing(settings, storage, weights)


def _recorded(value: Any, choices: Any) -> Any:
    if value is not None and value not in choices:
        raise ValueError(f"{value!r} is none of {tuple(choices)}")
    return value


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the base of an adapter was packed in training.

    Attributes:
        kinds: Such as `nf4` and `int8`.
        weights: How many weights are packed in the checkpoint; 0 where only its configuration
            says so.
        checkpoint: The path of the checkpoint.
        packings: Which weights they are, and how they were packed; none where that is not known.
    """

    kinds: tuple[str, ...]
    weights: int
    checkpoint: str
    packings: tuple[Packing, ...] = ()

    @property
    def can_be_repeated(self) -> bool:
        return bool(self.packings) and all(packing.is_known for packing in self.packings)

    @property
    def leaves_scales_open(self) -> bool:
        """Whether it does not say that scales were quantized too, or that they were not."""
        settings = (packing.settings for packing in self.packings)
        return any(four is not None and four.nested is None for four in settings)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        document: dict[str, Any] = {
            "kinds": list(self.kinds),
            "weights": self.weights,
            "checkpoint": self.checkpoint,
        }
        if self.packings:
            document["packings"] = [packing.to_json() for packing in self.packings]
        return document


def quantization_from_json(document: Mapping[str, Any]) -> Quantization:
    """Returns what plain values hold; errors are those of missing keys and wrong types."""
    kinds = tuple(str(kind) for kind in document["kinds"])
    packings = tuple(_packing_from_json(packing) for packing in document.get("packings", ()))
    weights, checkpoint = int(document["weights"]), str(document["checkpoint"])
    return Quantization(kinds, weights, checkpoint, packings)
