"""Makes the record of an adapter's base: checksums of a few frozen weights, and how it was packed.

The record itself, and what parses it, is in `ckptkit.lora.recorded_base`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.quantized.requantize import find_packings
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.open import make_absolute
from ckptkit.core.checksums import RangeChecksum
from ckptkit.core.crc import crc32
from ckptkit.core.errors import InputError
from ckptkit.core.index import Box, Fqn, Shape, Span, TensorEntry
from ckptkit.engine.locate import Locator
from ckptkit.engine.reader import Origin
from ckptkit.lora.layers import find_linear_shapes
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


def make_base_record(found: OpenedAdapter) -> BaseRecord:
    """Makes the record of an adapter's base; of its bytes, only quantization states are read.

    Where the adapter's folder has a record of a base that it does not hold, that one is kept.
    """
    earlier = BaseRecord() if found.base else read_record_of_base(found.opened)
    shapes = find_linear_shapes(found.adapter)
    packed = find_packed_weights({str(name): entry for name, entry in found.base.items()}, shapes)
    quantization = _find_quantization(found, packed, shapes)
    frozen = {
        name: found.base[Fqn(name)]
        for name in shapes
        if name in found.base and name not in packed and not found.adapter.settings.changes_base
    }
    if packed and not frozen:  # the embedding and the norms still identify the model
        frozen = _find_unpacked(packed, found.base)
    digests = collect_digests(Origin(_KIND, found.opened.source, found.opened.index), frozen)
    return BaseRecord(digests or earlier.digests, quantization or earlier.quantization)


def _find_unpacked(
    packed: Mapping[str, PackedWeight], base: Mapping[Fqn, TensorEntry]
) -> dict[str, TensorEntry]:
    """Returns the weights that were certainly neither packed nor trained."""
    return {
        str(name): entry
        for name, entry in base.items()
        if name.endswith(".weight")  # biases may have been trained
        and name not in packed
        and entry.dtype.kind == "float"
        and entry.shape[1:] != (1,)  # which packed numbers may have
    }


def _find_quantization(
    found: OpenedAdapter, packed: Mapping[str, PackedWeight], shapes: Iterable[str]
) -> Quantization | None:
    config = found.folders.config(found.folders.choose(allow_code=False)[0])
    options = (config or {}).get("quantization_config")
    options = options if isinstance(options, Mapping) else {}
    four_bits = read_settings({"quantization_config": options}).quant_type or "4 bits"
    kinds = [_find_kind(weight, four_bits) for weight in packed.values()]
    checkpoint = make_absolute(found.opened.path)
    if kinds:
        packings = _find_packings(found, packed, read_settings(config))
        return Quantization(tuple(sorted(set(kinds))), len(kinds), checkpoint, packings)
    if not options or options.get("dequantize") or any(name in found.base for name in shapes):
        return None  # weights that were saved unpacked were used unpacked
    kind = str(options.get("quant_method", "bitsandbytes"))
    kind = four_bits if options.get("load_in_4bit") else kind
    kind = "int8" if options.get("load_in_8bit") else kind
    return Quantization((kind,), 0, checkpoint)


def _find_packings(
    found: OpenedAdapter, packed: Mapping[str, PackedWeight], configured: FourBitSettings
) -> tuple[Packing, ...]:
    origin = Origin(_KIND, found.opened.source, found.opened.index)
    entries = {name: weight.packed for name, weight in packed.items() if weight.bits == FOUR_BITS}
    crcs = {name: digest.crc32 for name, digest in collect_digests(origin, entries).items()}
    return find_packings(origin, found.base, packed, configured, crcs)


def _find_kind(weight: PackedWeight, four_bits: str) -> str:
    if weight.bits != FOUR_BITS:
        return "int8"
    states = [kind for kind in weight.companions if kind.startswith("quant_state.")]
    return states[0].rpartition("__")[2] if states else four_bits


def collect_digests(origin: Origin, entries: Mapping[str, TensorEntry]) -> dict[str, WeightDigest]:
    """Returns digests of up to 8 weights, from the checksums that are stored with their bytes.

    Weights without checksums are left out.
    """
    locator = Locator(origin.source, origin.index)
    digests = {}
    for name, entry in select_evenly(entries):
        crc = _join_crc32(locator, entry)
        if crc is not None:
            digests[name] = WeightDigest(entry.dtype.name, entry.shape, crc)
    return digests


def read_digests(origin: Origin, entries: Mapping[str, TensorEntry]) -> dict[str, WeightDigest]:
    """Returns digests of weights, computed from their bytes."""
    reader = ArrayReader(origin)
    digests = {}
    for name, entry in entries.items():
        crc = 0
        for block in reader.read_blocks(origin.name, entry):
            crc = crc32(block.view(np.uint8).data, crc)
        digests[name] = WeightDigest(entry.dtype.name, entry.shape, crc)
    return digests


def select_evenly(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
    """Yields up to 8 of some tensors, at even distances."""
    names = list(entries)
    count = min(_MOST, len(names))
    for number in range(count):
        name = names[number * len(names) // count]
        yield name, entries[name]


def _join_crc32(locator: Locator, entry: TensorEntry) -> int | None:
    """Joins the checksums of a tensor's chunks, if each is a run of elements with a checksum."""
    if entry.rounded_from is not None:
        return None
    whole = RangeChecksum()
    seen = set()
    for row, chunk in enumerate(entry.chunks):
        run = _find_run(chunk.place, entry.shape)
        if run is None:
            return None
        start, length = (
            place * entry.dtype.itemsize for place in (run.start, run.stop - run.start)
        )
        if not length or (start, length) in seen:
            continue  # a replica
        seen.add((start, length))
        crc = _find_chunk_crc32(locator, entry, row, length)
        if crc is None:
            return None
        whole.add(start, length, crc)
    try:
        return whole.value(entry.size_bytes)
    except ValueError:  # overlapping chunks
        return None


def _find_chunk_crc32(locator: Locator, entry: TensorEntry, row: int, length: int) -> int | None:
    try:
        location = locator.locate(entry, entry.chunks, row)
    except InputError:
        return None  # a damaged base is no part of the adapter
    is_alone = location.origin == location.start and location.stop - location.start == length
    return location.crc32 if is_alone and location.strides is None else None


def _find_run(place: Box | Span, shape: Shape) -> Span | None:
    """Returns the elements of a chunk, if they are consecutive: whole rows."""
    if isinstance(place, Span):
        return place
    if not shape:
        return Span(0, 1)
    if place.sizes[1:] != shape[1:]:
        return None
    row = math.prod(shape[1:])
    return Span(place.offsets[0] * row, (place.offsets[0] + place.sizes[0]) * row)
