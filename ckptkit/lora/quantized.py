"""Weights that bitsandbytes packed, and the record that an extracted adapter keeps of its base.

A packed weight has companions in most checkpoints, and none where FSDP made a plain parameter of
it. Companions are recognised by their names; without them the size of the weight decides, since the
factors of its LoRA or the original model give its shape. Embeddings and heads that are not packed
are not affected. `ckptkit.adapters.packed_bases` makes operands of packed weights.

An extracted adapter has left its base behind. Its manifest records checksums of a few frozen
weights, and how the base was packed, so that a merge can check the base that it is given. Names of
models prove little, since folders are renamed and copied; commits do. So another commit is a
contradiction, and so is another repository of the Hub; what is neither proven nor disproven is a
note, unless the weights themselves can be compared.

Source: bitsandbytes 0.50, `functional.py` (`QuantState.as_dict`), `utils.py`
(`pack_dict_to_tensor`): a JSON object as a tensor of bytes; `nn/modules.py`
(`Linear4bit._save_to_state_dict`, `Linear8bitLt._save_to_state_dict`). huggingface_hub's cache
(`models--org--name/snapshots/COMMIT`); transformers, which keeps `_commit_hash` and
`_name_or_path` in configurations of older versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from msgspec import Struct, convert, field, to_builtins
from msgspec.structs import asdict, replace

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import Shape, TensorEntry
from ckptkit.core.manifest import Manifest
from ckptkit.core.model_configs import parse_json_object
from ckptkit.lora.config import LoraSettings, is_dimension, is_finite

FourBitType = Literal["nf4", "fp4"]
QUANT_TYPES: Mapping[str, FourBitType] = {"nf4": "nf4", "fp4": "fp4"}
PackedDType = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[PackedDType, ...] = get_args(PackedDType)
"""Element types that bitsandbytes packs."""
BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
BLOCKSIZES: tuple[BlockSize, ...] = get_args(BlockSize)
MAX_STATE_BYTES = 1 << 16
_HINT = "the file is damaged; take another copy of it"


class FourBitSettings(Struct, frozen=True):
    """How weights were packed; None for what is unknown."""

    quant_type: FourBitType | None = None
    nested: bool | None = None  # the scales were quantized too ("double quantization")
    blocksize: BlockSize | None = None  # elements that share a scale
    dtype: PackedDType | None = None  # before packing


class FourBitState(Struct, frozen=True):
    quant_type: FourBitType
    blocksize: BlockSize  # elements that share a scale
    dtype: PackedDType  # before packing
    shape: Shape
    nested_blocksize: int = 0  # scales that share a scale; 0 where they were not quantized
    nested_offset: float = 0.0  # subtracted from the scales first

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> FourBitState:
        document = parse_json_object(data, where=where)
        quant_type = _parse_choice(document, "quant_type", tuple(QUANT_TYPES), where)
        blocksize = _parse_choice(document, "blocksize", BLOCKSIZES, where)
        dtype = _parse_choice(document, "dtype", DTYPES, where)
        shape = document.get("shape")
        whole = isinstance(shape, list) and all(map(is_dimension, shape))
        if not whole or not shape:
            raise FormatError(f"has {shape!r} for 'shape', expected sizes", where=where)
        nested = document.get("nested_blocksize", 0)
        offset: Any = 0.0
        if "nested_blocksize" in document:
            nested = _parse_choice(document, "nested_blocksize", BLOCKSIZES, where)
            offset = document.get("nested_offset")
            if not is_finite(offset):
                what = "for 'nested_offset', expected a number"
                raise FormatError(f"has {offset!r} {what}", where=where)
        kind = QUANT_TYPES[quant_type]
        return cls(kind, blocksize, dtype, tuple(shape), nested, float(offset))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _parse_choice(
    document: Mapping[str, Any], key: str, choices: tuple[Any, ...], where: str
) -> Any:
    value = document.get(key)
    if value not in choices:
        raise FormatError(f"has {value!r} for {key!r}, expected one of {choices}", where=where)
    return choices[choices.index(value)]  # 64 where a document says 64.0


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
# Tensors that are stored with or instead of a weight in GPTQ, AWQ, HQQ, compressed tensors, fp8
# and mxfp4.
_FOREIGN = re.compile(
    r".+(?:\.(?:qweight|qzeros|g_idx|W_q|weight_packed|weight_scale|weight_scale_inv|weight_scale_2)"
    r"|_(?:blocks|scale_inv))"
)


class PackedWeight(Struct, frozen=True):
    name: str
    bits: Bits  # of each element
    packed: TensorEntry
    # By bitsandbytes' names: `absmax`, `quant_map`, `quant_state.…`, `SCB`.
    companions: Mapping[str, TensorEntry]
    shape: Shape | None  # None where only its quantization state has it

    @property
    def state(self) -> TensorEntry | None:
        """The quantization state of four-bit numbers, None where it was not saved."""
        states = (e for kind, e in self.companions.items() if kind.startswith("quant_state."))
        return next(states, None)

    @property
    def is_whole(self) -> bool:
        """Whether the companions are enough for unpacking."""
        if self.bits == EIGHT_BITS:
            return SCALES_OF_ROWS in self.companions
        return self.state is not None and "absmax" in self.companions


def find_packed_weights(
    entries: Mapping[str, TensorEntry], shapes: Mapping[str, Shape]
) -> dict[str, PackedWeight]:
    """Returns the packed weights of a plain model by name, in the order of `entries`.

    `shapes` has the shapes of weights as the model computes with them, where they are known.
    """
    companions: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        four, eight = _FOUR.fullmatch(name), _EIGHT.fullmatch(name)
        if four is not None:
            companions.setdefault(four["weight"], {})[four["kind"]] = entry
        elif eight is not None:
            companions.setdefault(f"{eight['module']}.weight", {})[eight["kind"]] = entry
    weights = (
        _recognise(name, entry, companions.get(name, {}), shapes.get(name))
        for name, entry in entries.items()
    )
    return {weight.name: weight for weight in weights if weight is not None}


def list_companions(weight: PackedWeight) -> frozenset[str]:
    """Returns the names of the companions of a packed weight, in the plain model."""
    module = weight.name.rpartition(".")[0]
    four = weight.bits == FOUR_BITS
    return frozenset(f"{weight.name if four else module}.{kind}" for kind in weight.companions)


def _recognise(
    name: str, entry: TensorEntry, companions: Mapping[str, TensorEntry], shape: Shape | None
) -> PackedWeight | None:
    is_bytes = entry.dtype.name == "int8" and len(entry.shape) == _MATRIX
    if is_bytes and (SCALES_OF_ROWS in companions or entry.shape == shape):
        return PackedWeight(name, EIGHT_BITS, entry, companions, entry.shape)
    if "absmax" in companions or any(kind.startswith("quant_state.") for kind in companions):
        return PackedWeight(name, FOUR_BITS, entry, companions, shape)
    # Bitsandbytes writes a column of the storage type, two elements a byte.
    is_column = len(entry.shape) == _MATRIX and entry.shape[1] == 1
    if shape is None or not is_column or entry.shape == shape:
        return None
    is_packed = entry.size_bytes == -(-math.prod(shape) // 2)
    return PackedWeight(name, FOUR_BITS, entry, companions, shape) if is_packed else None


def read_settings(config: Mapping[str, Any] | None) -> FourBitSettings:
    """Returns the settings of the quantization in a model's configuration.

    Source: transformers 5.23, `BitsAndBytesConfig`.
    """
    options = (config or {}).get("quantization_config") or {}
    nested = options.get("bnb_4bit_use_double_quant")
    return FourBitSettings(
        quant_type=QUANT_TYPES.get(str(options.get("bnb_4bit_quant_type"))),
        nested=nested if isinstance(nested, bool) else None,
        dtype=read_dtype(config),
    )


def read_dtype(config: Mapping[str, Any] | None) -> PackedDType | None:
    """Returns the element type of the weights in a model's configuration, if it has one."""
    value = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    name = str(value).removeprefix("torch.")
    return next((dtype for dtype in DTYPES if dtype == name), None)


def refuse_unmodelled(
    entries: Mapping[str, TensorEntry], config: Mapping[str, Any] | None, *, location: str
) -> None:
    options = (config or {}).get("quantization_config") or {}
    is_parsed = isinstance(options, Mapping)
    method = options.get("quant_method", _BITSANDBYTES) if is_parsed else str(options)
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


class PackedRecord(Struct, frozen=True, array_like=True):
    """One weight that was packed, or may have been."""

    size_bytes: int  # packed
    offset: float | None = None  # the mean of its scales, where they were quantized too
    crc32: int | None = None  # of its packed bytes


class Packing(Struct, frozen=True):
    """Weights that were packed alike."""

    settings: FourBitSettings | None  # None for eight bits
    storage: str  # the element type that packed numbers were stored under
    weights: Mapping[str, PackedRecord] = field(default_factory=dict)  # by name in the plain model

    @property
    def is_known(self) -> bool:
        """Whether the settings are recorded, or can be found by checksums."""
        four = self.settings
        if four is None or None not in {four.quant_type, four.blocksize, four.dtype}:
            return True
        return any(weight.crc32 is not None for weight in self.weights.values())

    def to_json(self) -> dict[str, Any]:
        settings = {} if self.settings is None else asdict(self.settings)
        return {
            "bits": EIGHT_BITS if self.settings is None else FOUR_BITS,
            **settings,
            "storage": self.storage,
            "weights": to_builtins(self.weights),
        }


def _packing_from_json(document: Mapping[str, Any]) -> Packing:
    weights = convert(document["weights"], dict[str, PackedRecord])
    settings = None
    if document["bits"] == FOUR_BITS:
        stated = {name: document[name] for name in FourBitSettings.__struct_fields__}
        settings = convert(stated, FourBitSettings)
    return Packing(settings, str(document["storage"]), weights)


class Quantization(Struct, frozen=True):
    """How the base of an adapter was packed in training."""

    kinds: tuple[str, ...]  # such as nf4 and int8
    weights: int  # how many are packed; 0 where only the configuration says so
    checkpoint: str
    packings: tuple[Packing, ...] = ()  # empty where they are not known

    @property
    def can_be_repeated(self) -> bool:
        return bool(self.packings) and all(packing.is_known for packing in self.packings)

    @property
    def leaves_scales_open(self) -> bool:
        """Whether it does not say that scales were quantized too, or that they were not."""
        settings = (packing.settings for packing in self.packings)
        return any(four is not None and four.nested is None for four in settings)

    def to_json(self) -> dict[str, Any]:
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
    packings = tuple(_packing_from_json(packing) for packing in document.get("packings", ()))
    return replace(convert({**document, "packings": ()}, Quantization), packings=packings)


_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/([^/]+)")
_URL = re.compile(r"hf://(?!buckets/)([\w.-]+)/([\w.-]+)(?:@([0-9a-f]{40}))?(?:/|$)")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT_KEY = "_commit_hash"
# Fields of the source in the manifest of an extracted adapter.
_DIGESTS = "base_digests"
_QUANTIZATION = "base_quantization"


class BaseIdentity(Struct, frozen=True):
    """A base, as far as it can be identified; unknown facts are empty."""

    name: str = ""  # the repository or path that is recorded, or the path that was given
    commit: str = ""  # the full one
    repository: str = ""  # `org/name`, where the path that was given contains it


def parse_recorded_base(settings: LoraSettings) -> BaseIdentity:
    name = settings.base_model_name_or_path or ""
    cached = _CACHED.search(name)
    commit = settings.revision or ""
    if cached is not None:  # a run that was given a path of the Hub's cache
        name, commit = f"{cached[1]}/{cached[2]}", cached[3]
    return BaseIdentity(name, commit if _COMMIT.fullmatch(commit) else "")


def identify_base(path: str, config: Mapping[str, Any] | None) -> BaseIdentity:
    """Identifies a base by its path and its configuration.

    Links in `path` are resolved no further than the snapshot of the Hub's cache.
    """
    cached = _CACHED.search(path) or _URL.match(path)
    repository, commit = (f"{cached[1]}/{cached[2]}", cached[3] or "") if cached else ("", "")
    recorded = (config or {}).get(_COMMIT_KEY)
    if not commit and isinstance(recorded, str):
        commit = recorded
    return BaseIdentity(path, commit if _COMMIT.fullmatch(commit) else "", repository)


def compare_bases(expected: BaseIdentity, base: BaseIdentity) -> tuple[list[str], str]:
    """Compares the base that was trained on with the one that is given.

    Returns proofs that it is another one; and where nothing proves either, a note.
    """
    contradictions: list[str] = []
    is_same = bool(expected.commit) and expected.commit == base.commit
    if expected.commit and base.commit and not is_same:
        contradictions.append(f"found commit {base.commit}, expected {expected.commit}")
    is_repository = _REPOSITORY.fullmatch(expected.name) is not None
    if base.repository and is_repository and base.repository != expected.name:
        contradictions.append(f"found repository {base.repository}, expected {expected.name}")
    if contradictions or is_same or expected.name.rstrip("/") == base.name.rstrip("/") != "":
        return contradictions, ""
    if not expected.name:
        return [], f"the base that was trained on is not recorded; {base.name} is used unchecked"
    if base.repository == expected.name:
        return [], (
            f"the adapter records no commit of {expected.name}, so that nothing proves that"
            f" {base.name} has the same weights"
        )
    return [], (
        f"the adapter was trained on {expected.name}, and nothing proves that {base.name} has"
        " the same weights"
    )


class WeightDigest(Struct, frozen=True):
    """A frozen weight of the base, as it was in training."""

    dtype: str
    shape: Shape
    crc32: int  # of its bytes, row-major


class BaseRecord(Struct, frozen=True):
    # Of a few weights, by name in the plain model.
    digests: Mapping[str, WeightDigest] = field(default_factory=dict)
    quantization: Quantization | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the record as the source of a manifest holds it."""
        facts: dict[str, Any] = {}
        if self.digests:
            facts[_DIGESTS] = {
                name: {**asdict(digest), "shape": list(digest.shape)}
                for name, digest in self.digests.items()
            }
        if self.quantization is not None:
            facts[_QUANTIZATION] = self.quantization.to_json()
        return facts


def parse_base_record(manifest: Manifest, where: str) -> BaseRecord:
    """Parses what the manifest of an extracted adapter records of its base."""
    if manifest.kind != "adapter":
        return BaseRecord()
    try:
        digests = convert(manifest.source.get(_DIGESTS, {}), dict[str, WeightDigest])
        quantization = manifest.source.get(_QUANTIZATION)
        if quantization is None:
            return BaseRecord(digests)
        return BaseRecord(digests, quantization_from_json(quantization))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            "what the manifest says of the adapter's base is damaged",
            where=where,
            hint="extract the adapter again",
        ) from error
