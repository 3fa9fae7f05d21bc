"""The weights that an adapter was trained on, made again from the plain base by its record.

An adapter that was taken out of a checkpoint has left its packed base behind. What those weights
stand for follows from the weights before: they are packed and unpacked, block by block, as they
are read. What the record does not tell is found by the checksums of packed bytes, where it has
them, and else has to be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptkit.adapters.quant_state import FourBitSettings, FourBitState
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Shape, Span, TensorEntry
from ckptkit.execution.crew import run_crew
from ckptkit.kernels.derived_scales import NESTED_BLOCKSIZE, float32_mean
from ckptkit.kernels.operands import Stored
from ckptkit.kernels.requantized import RequantizedEightBit, RequantizedFourBit
from ckptkit.pipeline.adapters.dequantizing import QuantizedBase, facts_of
from ckptkit.pipeline.adapters.packed_bases import Weights
from ckptkit.pipeline.adapters.packed_proof import PackedReader
from ckptkit.pipeline.adapters.packing_records import PackedRecord, Packing, kinds_of
from ckptkit.pipeline.adapters.unpacking import Unpacked, likely_settings

_PIECE_ELEMENTS = 1 << 20  # whole groups of blocks, whatever their size
_ORIGINAL = "pass --qlora-base original to merge onto the weights as they were before"


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of the base, and what is recorded of it."""

    name: str
    original: Stored
    shape: Shape
    record: PackedRecord

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape))


def requantized(
    packings: Sequence[Packing],
    base: Weights,
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

    Raises:
        RefusedError: If the record does not say enough, or is that of another model.
        InputError: If the base cannot be read.
    """
    try:
        return _Requantizing(base, nested=nested, workers=workers).run(packings)
    except RefusedError as error:
        raise error.located(where) from error


class _Requantizing:
    def __init__(self, base: Weights, *, nested: bool | None, workers: int) -> None:
        self._base = base
        self._nested = nested
        self._workers = workers
        self._proven = 0
        self._differing = 0

    def run(self, packings: Sequence[Packing]) -> QuantizedBase:
        unpacked: dict[str, Unpacked] = {}
        originals: dict[str, Stored] = {}
        for packing in packings:
            weights = list(self._weights(packing))
            originals |= {weight.name: weight.original for weight in weights}
            unpacked |= self._unpacked(packing, weights)
        operands = {name: one.operand for name, one in unpacked.items()}
        facts = facts_of(unpacked)
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
                stored = Stored(self._base.origin.name, entry.key, entry.dtype)
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

    def _unpacked(self, packing: Packing, weights: Sequence[_Weight]) -> dict[str, Unpacked]:
        if packing.settings is None:
            return {
                weight.name: Unpacked(
                    RequantizedEightBit(weight.original, weight.shape[-1]),
                    weight.shape,
                    weight.original.dtype,
                    derived=True,
                )
                for weight in weights
            }
        settings = self._settled(packing, packing.settings, weights)
        found: dict[str, Unpacked] = {}

        def work(some: Iterator[_Weight]) -> None:
            reader = self._reader()
            for weight in some:
                found[weight.name] = self._four_bits(weight, settings, reader)

        run_crew(self._workers, iter(weights), work)
        return {weight.name: found[weight.name] for weight in weights}

    def _four_bits(
        self, weight: _Weight, settings: FourBitSettings, reader: PackedReader
    ) -> Unpacked:
        operand = _operand(weight, settings)
        offset = weight.record.offset
        if settings.nested and offset is None:
            maxima = [
                operand.maxima(span, [reader.values(weight.original, span)])
                for span in _pieces(weight.elements)
            ]
            offset = float(float32_mean(np.concatenate(maxima)))
        state = FourBitState(
            operand.quant_type,
            operand.blocksize,
            operand.dtype.name,
            weight.shape,
            NESTED_BLOCKSIZE if settings.nested else 0,
            offset or 0.0,
        )
        made = replace(operand, nested_offset=offset if settings.nested else None)
        return Unpacked(made, weight.shape, operand.dtype, state, derived=True)

    def _settled(
        self, packing: Packing, told: FourBitSettings, weights: Sequence[_Weight]
    ) -> FourBitSettings:
        """Completes what is recorded, and compares checksums where there are some.

        Raises:
            RefusedError: If something stays open.
        """
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
            for likely in likely_settings(told, storage, smallest.original.dtype):
                tried = replace(likely, nested=told.nested)
                if _agrees(_operand(smallest, tried), smallest, reader):
                    return tried
        open_ones = {"type": told.quant_type, "block size": told.blocksize, "dtype": told.dtype}
        missing = ", ".join(name for name, value in open_ones.items() if value is None)
        raise RefusedError(
            f"the record of the adapter does not tell the {missing} of its packed base"
            f" ({kinds_of([packing])}), and no checksum of packed bytes agrees with this one",
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
