"""What a folder with an extracted adapter records of how its base was packed in training.

With it the weights that training computed with can be made again from the plain base: which
weights were packed, in which way, and, as far as checksums lie beside the packed bytes, which
bytes that gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.adapters.quant_state import (
    BLOCKSIZES,
    DTYPES,
    MAX_STATE_BYTES,
    QUANT_TYPES,
    FourBitSettings,
    FourBitState,
)
from ckptkit.adapters.quantized import FOUR_BITS, PackedWeight
from ckptkit.core.errors import FormatError, InputError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.execution.tensors import Origin
from ckptkit.kernels.derived_scales import NESTED_BLOCKSIZE
from ckptkit.pipeline.adapters.packed_proof import PackedReader

_MATRIX = 2


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
        settings: How, as far as the checkpoint tells; None for eight bits.
        storage: The element type that packed numbers were stored under.
        weights: The weights, by their names in the plain model.
    """

    settings: FourBitSettings | None
    storage: str
    weights: Mapping[str, PackedRecord] = field(default_factory=dict)

    @property
    def is_told(self) -> bool:
        """Whether the settings are known, or checksums may tell them."""
        told = self.settings
        if told is None or None not in {told.quant_type, told.blocksize, told.dtype}:
            return True
        return any(weight.crc32 is not None for weight in self.weights.values())

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        told = self.settings
        four = {} if told is None else {
            "quant_type": told.quant_type,
            "blocksize": told.blocksize,
            "dtype": told.dtype,
            "nested": told.nested,
        }  # fmt: skip
        return {
            "bits": 8 if told is None else 4,
            **four,
            "storage": self.storage,
            "weights": {
                name: [one.size_bytes, one.offset, one.crc32] for name, one in self.weights.items()
            },
        }


def packing_from_json(document: Mapping[str, Any]) -> Packing:
    """Returns what plain values hold.

    Raises:
        ValueError: If they are damaged.
        KeyError: Likewise.
        TypeError: Likewise.
    """
    weights = {str(name): PackedRecord(*row) for name, row in document["weights"].items()}
    storage = str(document["storage"])
    if document["bits"] != FOUR_BITS:
        return Packing(None, storage, weights)
    settings = FourBitSettings(
        quant_type=_among(document["quant_type"], QUANT_TYPES),
        nested=_among(document["nested"], (True, False)),
        blocksize=_among(document["blocksize"], BLOCKSIZES),
        dtype=_among(document["dtype"], DTYPES),
    )
    return Packing(settings, storage, weights)


def _among(value: Any, known: Any) -> Any:
    if value is not None and value not in known:
        raise ValueError(f"{value!r} is none of {tuple(known)}")
    return value


def packings_of(
    origin: Origin,
    base: Mapping[Fqn, TensorEntry],
    packed: Mapping[str, PackedWeight],
    told: FourBitSettings,
    crcs: Mapping[str, int],
) -> tuple[Packing, ...]:
    """Finds out how the weights of a checkpoint were packed; of them, states alone are read.

    Args:
        origin: Where they lie.
        base: All tensors of the base, by their names in the plain model.
        packed: The packed weights among them.
        told: What the checkpoint's configuration says of weights that have no state.
        crcs: Checksums of packed bytes, by name of the weight, as far as they are known.

    Returns:
        The weights, those together that were packed alike; none where one of them was packed
        in a way that is not modelled, or its state is damaged: the base is no part of the adapter.
    """
    try:
        return _packings(origin, base, packed, told, crcs)
    except InputError:
        return ()


def _packings(
    origin: Origin,
    base: Mapping[Fqn, TensorEntry],
    packed: Mapping[str, PackedWeight],
    told: FourBitSettings,
    crcs: Mapping[str, int],
) -> tuple[Packing, ...]:
    reader = PackedReader({origin.name: origin})
    groups: dict[tuple[FourBitSettings | None, str], dict[str, PackedRecord]] = {}
    for name, weight in packed.items():
        settings, offset = None, None
        if weight.bits == FOUR_BITS:
            state = None if weight.state is None else _state(reader, origin, weight.state)
            if state is not None and state.nested_blocksize not in {0, NESTED_BLOCKSIZE}:
                return ()
            settings = told if state is None else _settings_of(state)
            offset = state.nested_offset if state is not None and settings.nested else None
        group = groups.setdefault((settings, weight.packed.dtype.name), {})
        group[name] = PackedRecord(weight.packed.size_bytes, offset, crcs.get(name))
    for key, names in _doubtful(base, packed, told):
        groups.setdefault(key, {}).update(names)
    return tuple(Packing(*key, weights) for key, weights in groups.items())


def _doubtful(
    base: Mapping[Fqn, TensorEntry], packed: Mapping[str, PackedWeight], told: FourBitSettings
) -> Iterator[tuple[tuple[FourBitSettings | None, str], dict[str, PackedRecord]]]:
    """Yields what may be packed too: only the plain base tells, where nothing lies beside it."""
    bare = {weight.bits for weight in packed.values() if not weight.is_whole}
    for name, entry in base.items():
        is_column = len(entry.shape) == _MATRIX and entry.shape[1] == 1
        is_bytes = len(entry.shape) == _MATRIX and entry.dtype.name == "int8" and not is_column
        if name in packed or not name.endswith(".weight"):
            continue
        if (is_column and FOUR_BITS in bare) or (is_bytes and bare - {FOUR_BITS}):
            settings = told if is_column else None
            yield (settings, entry.dtype.name), {str(name): PackedRecord(entry.size_bytes)}


def _state(reader: PackedReader, origin: Origin, entry: TensorEntry) -> FourBitState:
    where = f"{origin.source.location}, tensor {entry.name!r}"
    if entry.size_bytes > MAX_STATE_BYTES:
        raise FormatError(f"has {entry.size_bytes:,} bytes, too many for a state", where=where)
    return FourBitState.parse(reader.whole(origin.name, entry).tobytes(), where=where)


def _settings_of(state: FourBitState) -> FourBitSettings:
    return FourBitSettings(
        state.quant_type, bool(state.nested_blocksize), state.blocksize, state.dtype
    )


def kinds_of(packings: Sequence[Packing]) -> str:
    """Names the ways of packing, in words."""
    return ", ".join(
        "int8" if one.settings is None else one.settings.quant_type or "4 bits" for one in packings
    )
