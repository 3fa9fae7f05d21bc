"""The weights that an adapter was trained on, made again from the plain base by its record.

An adapter that was taken out of a checkpoint has left its packed base behind. What those weights
stand for follows from the weights before: they are packed and unpacked, block by block, as they
are read. What the record does not tell is found by the checksums of packed bytes, where it has
them, and else has to be given.

What a folder with an extracted adapter records of how its base was packed in training.

With it the weights that training computed with can be made again from the plain base: which
weights were packed, in which way, and, as far as checksums lie beside the packed bytes, which
bytes that gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptkit.adapters.quantized.bases import ModelWeights, QuantizedBase, collect_facts
from ckptkit.adapters.quantized.scales import (
    NESTED_BLOCKSIZE,
    RequantizedEightBit,
    RequantizedFourBit,
    compute_float32_mean,
)
from ckptkit.adapters.quantized.unpack import PackedReader, UnpackedWeight, list_likely_settings
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError, InputError, RefusedError
from ckptkit.core.index import Fqn, Shape, Span, TensorEntry
from ckptkit.core.threads import run_crew
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.quantized import (
    FOUR_BITS,
    MAX_STATE_BYTES,
    FourBitSettings,
    FourBitState,
    PackedRecord,
    PackedWeight,
    Packing,
)

_MATRIX = 2


def find_packings(
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


def describe_kinds(packings: Sequence[Packing]) -> str:
    """Names the ways of packing, in words."""
    return ", ".join(
        "int8" if one.settings is None else one.settings.quant_type or "4 bits" for one in packings
    )


_PIECE_ELEMENTS = 1 << 20  # whole groups of blocks, whatever their size
_ORIGINAL = "pass --qlora-base original to merge onto the weights as they were before"


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of the base, and what is recorded of it."""

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
    """Returns the weights of a base as training knew them.

    Args:
        packings: How they were packed.
        base: The base before, by the names of the plain model.
        nested: Whether scales were quantized too, where the record does not tell; None where
            nobody said.
        where: What to call the adapter in errors.
        workers: How many threads may read at once.
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
            weights = list(self._weights(packing))
            originals |= {weight.name: weight.original for weight in weights}
            unpacked |= self._unpacked(packing, weights)
        operands = {name: one.operand for name, one in unpacked.items()}
        facts = collect_facts(unpacked)
        return QuantizedBase(
            operands=operands,
            shapes={name: one.shape for name, one in unpacked.items()},
            dtypes={name: original.dtype for name, original in originals.items()},
            hidden=frozenset(operands),
            notes=tuple(self._notes(", ".join(facts["kinds"]), len(operands))),
            dequantized=operands,
            originals=originals,
            facts={**facts, "proven": self._proven, "unlike": self._differing},
        )

    def _weights(self, packing: Packing) -> Iterator[_Weight]:
        for name, record in packing.weights.items():
            entry = self._base.entries.get(name)
            if entry is None or entry.dtype.kind != "float":
                raise self._other_base(name, "is not there as a plain weight")
            taken = entry.elements if packing.settings is None else -(-entry.elements // 2)
            if record.size_bytes == taken:
                stored = StoredOperand(self._base.origin.name, entry.key, entry.dtype)
                yield _Weight(name, stored, entry.shape, record)
            elif not _is_plain(entry, packing, record):
                raise self._other_base(
                    name, f"takes {taken:,} bytes packed against {record.size_bytes:,} in training"
                )

    def _other_base(self, name: str, what: str) -> RefusedError:
        return RefusedError(
            f"weight {name!r}, which was packed in training, {what}",
            where=self._base.location,
            hint="pass as --base the model, and the revision of it, that training started from",
        )

    def _unpacked(self, packing: Packing, weights: Sequence[_Weight]) -> dict[str, UnpackedWeight]:
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
        settings = self._settled(packing, packing.settings, weights)
        found: dict[str, UnpackedWeight] = {}

        def work(some: Iterator[_Weight]) -> None:
            reader = self._reader()
            for weight in some:
                found[weight.name] = self._four_bits(weight, settings, reader)

        run_crew(self._workers, iter(weights), work)
        return {weight.name: found[weight.name] for weight in weights}

    def _four_bits(
        self, weight: _Weight, settings: FourBitSettings, reader: PackedReader
    ) -> UnpackedWeight:
        operand = _operand(weight, settings)
        offset = weight.record.offset
        if settings.nested and offset is None:
            maxima = [
                operand.maxima(span, [reader.values(weight.original, span)])
                for span in _pieces(weight.elements)
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
        made = replace(operand, nested_offset=offset if settings.nested else None)
        return UnpackedWeight(made, weight.shape, operand.dtype, state, derived=True)

    def _settled(
        self, packing: Packing, told: FourBitSettings, weights: Sequence[_Weight]
    ) -> FourBitSettings:
        """Completes what is recorded, and compares checksums where there are some."""
        if told.nested is None:
            told = replace(told, nested=self._nested)
        if told.nested is None:
            raise RefusedError(
                "the record of the adapter does not tell whether the scales of its packed base"
                " were quantized too",
                hint=f"pass --double-quant or --no-double-quant; or {_ORIGINAL}",
            )
        told = self._found(packing, told, weights)
        reader = self._reader()
        for weight in weights:
            if weight.record.crc32 is not None:
                agrees = _agrees(_operand(weight, told), weight, reader)
                self._proven += agrees
                self._differing += not agrees
        return told

    def _found(
        self, packing: Packing, told: FourBitSettings, weights: Sequence[_Weight]
    ) -> FourBitSettings:
        if None not in {told.quant_type, told.blocksize, told.dtype}:
            return told
        known = [weight for weight in weights if weight.record.crc32 is not None]
        smallest = min(known, key=lambda weight: weight.elements, default=None)
        if smallest is not None:
            reader = self._reader()
            storage = BY_NAME[packing.storage]
            for likely in list_likely_settings(told, storage, smallest.original.dtype):
                tried = replace(likely, nested=told.nested)
                if _agrees(_operand(smallest, tried), smallest, reader):
                    return tried
        open_ones = {"type": told.quant_type, "block size": told.blocksize, "dtype": told.dtype}
        missing = ", ".join(name for name, value in open_ones.items() if value is None)
        raise RefusedError(
            f"the record of the adapter does not tell the {missing} of its packed base"
            f" ({describe_kinds([packing])}), and no checksum of packed bytes agrees with this one",
            hint=f"merge from the checkpoint itself, which holds packed weights; or {_ORIGINAL}",
        )

    def _reader(self) -> PackedReader:
        return PackedReader({self._base.origin.name: self._base.origin})

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
                " packed bytes than in training: a GPU rounds a few elements otherwise, and another"
                " model nearly all; a merge from the checkpoint itself is exact"
            )


def _operand(weight: _Weight, settings: FourBitSettings) -> RequantizedFourBit:
    if settings.quant_type is None or settings.blocksize is None or settings.dtype is None:
        raise RuntimeError("what was settled is open")
    return RequantizedFourBit(
        weight.original,
        settings.quant_type,
        settings.blocksize,
        weight.elements,
        BY_NAME[settings.dtype],
    )


def _agrees(operand: RequantizedFourBit, weight: _Weight, reader: PackedReader) -> bool:
    """Tells whether packing a weight gives the bytes that were recorded."""
    found = dict.fromkeys((False, True) if operand.quant_type == "fp4" else (False,), 0)
    for span in _pieces(weight.elements):
        inputs = [reader.values(weight.original, span)]
        for on_gpu, crc in found.items():
            found[on_gpu] = crc32(operand.packed(span, inputs, on_gpu=on_gpu).data, crc)
    return weight.record.crc32 in found.values()


def _is_plain(entry: TensorEntry, packing: Packing, record: PackedRecord) -> bool:
    """Tells whether what may have been packed is as large in the base, and so was not."""
    return record.size_bytes == entry.elements * BY_NAME[packing.storage].itemsize


def _pieces(elements: int) -> Iterator[Span]:
    for start in range(0, elements, _PIECE_ELEMENTS):
        yield Span(start, min(start + _PIECE_ELEMENTS, elements))
