"""Makes the record of an adapter's base: checksums of a few frozen weights, and how it was packed.

The record itself, and what parses it, is in `ckptkit.lora.recorded_base`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckptkit.adapters.quantized.requantize import find_packings
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.places import make_absolute
from ckptkit.core.checksums import RangeChecksum
from ckptkit.core.crc import crc32
from ckptkit.core.errors import InputError
from ckptkit.core.index import Box, Fqn, Shape, Span, TensorEntry
from ckptkit.engine.locate import Locator
from ckptkit.engine.reader import RUN_BYTES, Origin, TensorReader
from ckptkit.lora.layers import build_table
from ckptkit.lora.quantized import (
    FOUR_BITS,
    FourBitSettings,
    PackedWeight,
    Packing,
    Quantization,
    find_packed_weights,
    read_settings,
)
from ckptkit.lora.recorded_base import BaseRecord, WeightDigest

if TYPE_CHECKING:
    from ckptkit.adapters.sources import OpenedAdapter


_MOST = 8  # weights: two models differ nearly everywhere
_KIND = "adapter"


def record_of(found: OpenedAdapter) -> BaseRecord:
    """Makes the record of an adapter's base; of its bytes, quantization states alone are read.

    Args:
        found: The adapter; where its folder has a record already, that is what is known.
    """
    earlier = BaseRecord() if found.base else read_record_of_base(found.opened)
    layers = [
        layer
        for layer in build_table(found.adapter.tensors).layers
        if not (layer.is_embedding or layer.is_convolution or layer.level)
    ]
    shapes = {f"{layer.module}.weight": layer.shape for layer in layers}
    packed = find_packed_weights({str(name): entry for name, entry in found.base.items()}, shapes)
    quantization = _quantization(found, packed, shapes)
    frozen = {
        name: found.base[Fqn(name)]
        for name in shapes
        if name in found.base and name not in packed and not found.adapter.settings.changes_base
    }
    if packed and not frozen:  # the embedding and the norms are left to tell the model by
        frozen = _beside(packed, found.base)
    digests = stored_digests(Origin(_KIND, found.opened.source, found.opened.index), frozen)
    return BaseRecord(digests or earlier.digests, quantization or earlier.quantization)


def _beside(
    packed: Mapping[str, PackedWeight], base: Mapping[Fqn, TensorEntry]
) -> dict[str, TensorEntry]:
    """Returns the weights that surely were left as they are where others were packed."""
    return {
        str(name): entry
        for name, entry in base.items()
        if name.endswith(".weight")  # biases may have been trained
        and name not in packed
        and entry.dtype.kind == "float"
        and entry.shape[1:] != (1,)  # which packed numbers may have
    }


def _quantization(
    found: OpenedAdapter, packed: Mapping[str, PackedWeight], shapes: Iterable[str]
) -> Quantization | None:
    config = found.folders.config(found.folders.choose(allow_code=False)[0])
    told = (config or {}).get("quantization_config")
    settings = told if isinstance(told, Mapping) else {}
    four_bits = read_settings({"quantization_config": settings}).quant_type or "4 bits"
    kinds = [_kind(weight, four_bits) for weight in packed.values()]
    checkpoint = make_absolute(found.opened.path)
    if kinds:
        packings = _packings(found, packed, read_settings(config))
        return Quantization(tuple(sorted(set(kinds))), len(kinds), checkpoint, packings)
    if not settings or settings.get("dequantize") or any(name in found.base for name in shapes):
        return None  # what lies there unpacked was trained on unpacked
    kind = str(settings.get("quant_method", "bitsandbytes"))
    kind = four_bits if settings.get("load_in_4bit") else kind
    kind = "int8" if settings.get("load_in_8bit") else kind
    return Quantization((kind,), 0, checkpoint)


def _packings(
    found: OpenedAdapter, packed: Mapping[str, PackedWeight], told: FourBitSettings
) -> tuple[Packing, ...]:
    origin = Origin(_KIND, found.opened.source, found.opened.index)
    entries = {name: weight.packed for name, weight in packed.items() if weight.bits == FOUR_BITS}
    crcs = {name: one.crc32 for name, one in stored_digests(origin, entries).items()}
    return find_packings(origin, found.base, packed, told, crcs)


def _kind(weight: PackedWeight, told: str) -> str:
    if weight.bits != FOUR_BITS:
        return "int8"
    states = [kind for kind in weight.companions if kind.startswith("quant_state.")]
    return states[0].rpartition("__")[2] if states else told


def stored_digests(origin: Origin, entries: Mapping[str, TensorEntry]) -> dict[str, WeightDigest]:
    """Returns digests of a few weights, made of the checksums that lie beside their bytes.

    Args:
        origin: Where they lie.
        entries: The weights; up to 8 are taken, spread over all of them.

    Returns:
        The digests by name; those of weights without checksums are left out.
    """
    locator = Locator(origin.source, origin.index)
    made = ((name, entry, _stored_crc32(locator, entry)) for name, entry in spread(entries))
    return {
        name: WeightDigest(entry.dtype.name, entry.shape, stored)
        for name, entry, stored in made
        if stored is not None
    }


def read_digests(origin: Origin, entries: Mapping[str, TensorEntry]) -> dict[str, WeightDigest]:
    """Returns digests of weights, made of their bytes."""
    reader = TensorReader(Origin(origin.name, origin.source, origin.index))
    return {
        name: WeightDigest(entry.dtype.name, entry.shape, _read_crc32(reader, entry))
        for name, entry in entries.items()
    }


def spread(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
    """Yields up to 8 of some tensors, spread over all of them from the first on."""
    names = list(entries)
    count = min(_MOST, len(names))
    for number in range(count):
        name = names[number * len(names) // count]
        yield name, entries[name]


def _stored_crc32(locator: Locator, entry: TensorEntry) -> int | None:
    """Joins the checksums of a tensor's chunks, where each is a run of it with a checksum."""
    if entry.rounded_from is not None:
        return None
    whole = RangeChecksum()
    seen = set()
    for row, chunk in enumerate(entry.chunks):
        run = _run_of(chunk.place, entry.shape)
        if run is None:
            return None
        start, length = (
            place * entry.dtype.itemsize for place in (run.start, run.stop - run.start)
        )
        if not length or (start, length) in seen:
            continue  # replicas hold the same
        seen.add((start, length))
        stored = _chunk_crc32(locator, entry, row, length)
        if stored is None:
            return None
        whole.add(start, length, stored)
    try:
        return whole.value(entry.size_bytes)
    except ValueError:  # overlapping chunks
        return None


def _chunk_crc32(locator: Locator, entry: TensorEntry, row: int, length: int) -> int | None:
    try:
        found = locator.locate(entry, entry.chunks, row)
    except InputError:
        return None  # a damaged base is no part of the adapter
    is_alone = found.origin == found.start and found.stop - found.start == length
    return found.crc32 if is_alone and found.strides is None else None


def _run_of(place: Box | Span, shape: Shape) -> Span | None:
    """Returns which elements a chunk holds, where they are consecutive: whole rows."""
    if isinstance(place, Span):
        return place
    if not shape:
        return Span(0, 1)
    if place.sizes[1:] != shape[1:]:
        return None
    row = 1
    for size in shape[1:]:
        row *= size
    return Span(place.offsets[0] * row, (place.offsets[0] + place.sizes[0]) * row)


def _read_crc32(reader: TensorReader, entry: TensorEntry) -> int:
    step = RUN_BYTES // entry.dtype.itemsize
    found = 0
    for start in range(0, entry.elements, step):
        stop = min(start + step, entry.elements)
        data = memoryview(bytearray((stop - start) * entry.dtype.itemsize))
        reader.fill(entry.key, Span(start, stop), data)
        found = crc32(data, found)
    return found
