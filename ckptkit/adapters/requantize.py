"""The weights that an adapter was trained on, derived from the plain base and its recorded packing.

An extracted adapter is stored without its packed base. The numbers of that base follow from the
weights before: they are packed and unpacked, block by block, as they are read. Settings that are
not recorded are found by the checksums of packed bytes, if there are any, or have to be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.packed_bases import (
    ModelWeights,
    PackedLocation,
    QuantizedBase,
    UnpackedWeight,
    collect_facts,
    cut_blocks,
    list_likely_settings,
)
from ckptkit.adapters.packed_operands import (
    NESTED_BLOCKSIZE,
    RequantizedEightBit,
    RequantizedFourBit,
    compute_float32_mean,
)
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.core.threads import run_crew
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.quantized import (
    FOUR_BITS,
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
    configured: FourBitSettings,
    crcs: Mapping[str, int],
) -> tuple[Packing, ...]:
    """Finds how the weights of a checkpoint were packed; only their states are read.

    Nothing where one of them was packed in a way that is not modelled, or has a damaged state: the
    base is no part of the adapter.
    """
    location = PackedLocation(origin.name, origin.source.location, ArrayReader(origin))
    groups: dict[tuple[FourBitSettings | None, str], dict[str, PackedRecord]] = {}
    for name, weight in packed.items():
        settings, offset = None, None
        if weight.bits == FOUR_BITS:
            settings = configured
            try:
                state = None if weight.state is None else location.state(weight.state)
            except InputError:
                return ()
            if state is not None and state.nested_blocksize not in {0, NESTED_BLOCKSIZE}:
                return ()
            if state is not None:
                nested = bool(state.nested_blocksize)
                settings = FourBitSettings(state.quant_type, nested, state.blocksize, state.dtype)
                offset = state.nested_offset if nested else None
        group = groups.setdefault((settings, weight.packed.dtype.name), {})
        group[name] = PackedRecord(weight.packed.size_bytes, offset, crcs.get(name))
    for key, names in _find_doubtful(base, packed, configured):
        groups.setdefault(key, {}).update(names)
    return tuple(Packing(*key, weights) for key, weights in groups.items())


def _find_doubtful(
    base: Mapping[Fqn, TensorEntry], packed: Mapping[str, PackedWeight], configured: FourBitSettings
) -> Iterator[tuple[tuple[FourBitSettings | None, str], dict[str, PackedRecord]]]:
    """Yields weights without companions that may be packed too, which only the plain base shows."""
    bare = {weight.bits for weight in packed.values() if not weight.is_whole}
    for name, entry in base.items():
        is_column = len(entry.shape) == _MATRIX and entry.shape[1] == 1
        is_bytes = len(entry.shape) == _MATRIX and entry.dtype.name == "int8" and not is_column
        if name in packed or not name.endswith(".weight"):
            continue
        if (is_column and FOUR_BITS in bare) or (is_bytes and bare - {FOUR_BITS}):
            settings = configured if is_column else None
            yield (settings, entry.dtype.name), {str(name): PackedRecord(entry.size_bytes)}


_ORIGINAL = "pass --qlora-base original to merge onto the weights as they were before"


class _Weight(Struct, frozen=True):
    """A weight of the base, and its record."""

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
    """Derives the weights of a base as training used them.

    `nested` says whether scales were quantized too, where that is not recorded.
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
            weights = list(self._find_weights(packing))
            originals |= {weight.name: weight.original for weight in weights}
            unpacked |= self._unpack(packing, weights)
        operands = {name: weight.operand for name, weight in unpacked.items()}
        facts = collect_facts(unpacked)
        return QuantizedBase(
            operands=operands,
            shapes={name: weight.shape for name, weight in unpacked.items()},
            dtypes={name: original.dtype for name, original in originals.items()},
            hidden=frozenset(operands),
            notes=tuple(self._notes(", ".join(facts["kinds"]), len(operands))),
            dequantized=operands,
            originals=originals,
            facts={**facts, "proven": self._proven, "unlike": self._differing},
        )

    def _find_weights(self, packing: Packing) -> Iterator[_Weight]:
        for name, record in packing.weights.items():
            entry = self._base.entries.get(name)
            if entry is None or entry.dtype.kind != "float":
                raise self._make_base_error(name, "is not in it as a plain weight")
            taken = entry.elements if packing.settings is None else -(-entry.elements // 2)
            if record.size_bytes == taken:
                stored = StoredOperand(self._base.origin.name, entry.key, entry.dtype)
                yield _Weight(name, stored, entry.shape, record)
            # What is as large in the base was not packed.
            elif record.size_bytes != entry.elements * BY_NAME[packing.storage].itemsize:
                raise self._make_base_error(
                    name, f"takes {taken:,} bytes packed, expected {record.size_bytes:,}"
                )

    def _make_base_error(self, name: str, what: str) -> RefusedError:
        return RefusedError(
            f"weight {name!r}, which was packed in training, {what}",
            where=self._base.location,
            hint="pass as --base the model, and the revision of it, that training started from",
        )

    def _unpack(self, packing: Packing, weights: Sequence[_Weight]) -> dict[str, UnpackedWeight]:
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
        settings = self._complete(packing, packing.settings, weights)
        unpacked: dict[str, UnpackedWeight] = {}

        def work(batch: Iterator[_Weight]) -> None:
            reader = ArrayReader(self._base.origin)
            for weight in batch:
                unpacked[weight.name] = self._unpack_four_bits(weight, settings, reader)

        run_crew(self._workers, iter(weights), work)
        return {weight.name: unpacked[weight.name] for weight in weights}

    def _unpack_four_bits(
        self, weight: _Weight, settings: FourBitSettings, reader: ArrayReader
    ) -> UnpackedWeight:
        operand = _make_operand(weight, settings)
        offset = weight.record.offset
        if settings.nested and offset is None:
            maxima = [
                operand.maxima(span, [reader.compute(weight.original, span)])
                for span in cut_blocks(weight.elements)
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
        operand = replace(operand, nested_offset=offset if settings.nested else None)
        return UnpackedWeight(operand, weight.shape, operand.dtype, state, derived=True)

    def _complete(
        self, packing: Packing, settings: FourBitSettings, weights: Sequence[_Weight]
    ) -> FourBitSettings:
        """Completes the recorded settings, and compares recorded checksums."""
        if settings.nested is None:
            settings = replace(settings, nested=self._nested)
        if settings.nested is None:
            raise RefusedError(
                "the record of the adapter does not say whether the scales of its packed base"
                " were quantized too",
                hint=f"pass --double-quant or --no-double-quant; or {_ORIGINAL}",
            )
        reader = ArrayReader(self._base.origin)
        settings = self._find_settings(packing, settings, weights, reader)
        for weight in weights:
            if weight.record.crc32 is not None:
                is_equal = _has_recorded_bytes(_make_operand(weight, settings), weight, reader)
                self._proven += is_equal
                self._differing += not is_equal
        return settings

    def _find_settings(
        self,
        packing: Packing,
        known: FourBitSettings,
        weights: Sequence[_Weight],
        reader: ArrayReader,
    ) -> FourBitSettings:
        if None not in {known.quant_type, known.blocksize, known.dtype}:
            return known
        recorded = [weight for weight in weights if weight.record.crc32 is not None]
        smallest = min(recorded, key=lambda weight: weight.elements, default=None)
        if smallest is not None:
            storage = BY_NAME[packing.storage]
            for likely in list_likely_settings(known, storage, smallest.original.dtype):
                trial = replace(likely, nested=known.nested)
                if _has_recorded_bytes(_make_operand(smallest, trial), smallest, reader):
                    return trial
        options = {"type": known.quant_type, "block size": known.blocksize, "dtype": known.dtype}
        missing = ", ".join(name for name, value in options.items() if value is None)
        raise RefusedError(
            f"the record of the adapter does not have the {missing} of its packed base"
            f" ({known.quant_type or '4 bits'}), and no checksum of packed bytes agrees with this"
            " one",
            hint=f"merge from the checkpoint itself, which holds packed weights; or {_ORIGINAL}",
        )

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
                " packed bytes than in training: a GPU rounds a few elements differently, another"
                " model differs in nearly all; a merge from the checkpoint itself is exact"
            )


def _make_operand(weight: _Weight, settings: FourBitSettings) -> RequantizedFourBit:
    if settings.quant_type is None or settings.blocksize is None or settings.dtype is None:
        raise RuntimeError("incomplete settings")
    return RequantizedFourBit(
        weight.original,
        settings.quant_type,
        settings.blocksize,
        weight.elements,
        BY_NAME[settings.dtype],
    )


def _has_recorded_bytes(operand: RequantizedFourBit, weight: _Weight, reader: ArrayReader) -> bool:
    """Returns whether packing a weight gives bytes with the recorded checksum."""
    crcs = dict.fromkeys((False, True) if operand.quant_type == "fp4" else (False,), 0)
    for span in cut_blocks(weight.elements):
        inputs = [reader.compute(weight.original, span)]
        for on_gpu, crc in crcs.items():
            crcs[on_gpu] = crc32(operand.packed(span, inputs, on_gpu=on_gpu).data, crc)
    return weight.record.crc32 in crcs.values()
