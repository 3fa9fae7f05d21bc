"""Fills the live tensors of a rank from a checkpoint, reading only the byte ranges it needs.

The engine reads each range straight into the tensors' memory where both are one run of bytes, and
through a bounded buffer otherwise. Every byte that is read is checked against the checksum stored
for it: records that are read whole at once, others as far as the ranks together read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Box, Key, TensorEntry, TensorIndex
from ckptkit.engine.box_reads import plan_chunk_reads, read_chunks
from ckptkit.engine.checksum_tracker import NumberedRecord
from ckptkit.engine.reader import ArrayMemory, BoxMemory, Origin, byte_type, slices_of
from ckptkit.storage.base import Source
from ckptkit.training.state.pieces import Piece

# Of one record; matrices split by columns have thousands of parts, and stay unproven.
_MOST_PARTS = 256
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class FillReport:
    """What filling the pieces took, and what was proven of the bytes.

    Attributes:
        bytes_read: From data files, headers and trailers of records included.
        bytes_needed: What the pieces hold.
        seconds: From the first byte to the last.
        unverified: Keys of tensors of which bytes were read that had no checksum stored.
        partial: By number, the records of which this rank needed parts only; `cross_check`
            proves them.
    """

    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0
    unverified: tuple[Key, ...] = ()
    partial: tuple[NumberedRecord, ...] = ()


def load_pieces(
    index: TensorIndex, source: Source, pieces: Sequence[Piece], *, threads: int = 0
) -> FillReport:
    """Fills the live tensors of pieces from a checkpoint.

    Args:
        index: Of the DCP directory that holds them.
        source: Its files.
        pieces: What to fill; one without elements only has to be in the checkpoint.
        threads: As for `read_chunks`.

    Returns:
        What was read, and what is left to be proven.
    """
    start = time.perf_counter()
    entries = match_entries(index, pieces)
    wanted = (
        (entry, place, memory)
        for piece, entry in zip(pieces, entries, strict=True)
        for place, memory in _memories_of(piece)
    )
    origin = Origin("step", source, index, most_pieces=_MOST_PARTS)
    report = read_chunks(origin, plan_chunk_reads(wanted), threads=threads)
    return FillReport(
        bytes_read=report.bytes_read,
        bytes_needed=sum(piece.size_bytes for piece in pieces),
        seconds=time.perf_counter() - start,
        unverified=tuple(sorted(origin.unverified)),
        partial=report.partial,
    )


def _memories_of(piece: Piece) -> Iterator[tuple[Box, BoxMemory]]:
    """Yields each place of a piece, and its memory."""
    if not piece.elements:
        return
    local = piece.local
    if local.device.type == "meta":
        problem = "is still on the meta device, so there is nothing to load into"
        raise ResumeError(problem, where=piece.key)
    if local.numel() != piece.elements:
        raise ResumeError(
            f"{local.numel():,} elements are on this rank against {piece.elements:,} in its places",
            where=piece.key,
        )
    for place, elements in piece.boxes():
        yield place, _memory_of(elements.detach().view(place.sizes))


def _memory_of(tensor: torch.Tensor) -> BoxMemory:
    # Of a lazily conjugated or negated tensor the bytes are not the values.
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type != "cpu" or lazy:
        return DeviceMemory(tensor)
    # numpy has neither bfloat16 nor the 8-bit floats, so the array is made from the storage.
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    itemsize = tensor.element_size()
    array = np.ndarray(
        tuple(tensor.shape),
        byte_type(itemsize),
        buffer=storage.numpy().data,
        offset=tensor.storage_offset() * itemsize,
        strides=[stride * itemsize for stride in tensor.stride()],
    )
    return ArrayMemory(array)


class DeviceMemory:
    """A tensor that is not in host memory, or whose bytes are not its values."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def direct(self, _box: Box) -> memoryview | None:
        return None

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        flat = torch.from_numpy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))
        values = flat.view(self._tensor.dtype).reshape(box.sizes)
        self._tensor[slices_of(box)].copy_(values)


def match_entries(index: TensorIndex, pieces: Sequence[Piece]) -> list[TensorEntry]:
    """Returns the stored tensor of each piece, and checks its shape and element type."""
    candidates = [_entry(index, piece) for piece in pieces]
    missing = [piece.key for piece, entry in zip(pieces, candidates, strict=True) if entry is None]
    if missing:
        raise ResumeError(
            f"{len(missing):,} of {len(pieces):,} tensors are not in the checkpoint: "
            + list_first(missing),
            hint="it was saved from another model or optimizer, or under other names",
        )
    entries = [entry for entry in candidates if entry is not None]
    for piece, entry in zip(pieces, entries, strict=True):
        _check_fit(piece, entry)
    return entries


def unexpected_keys(index: TensorIndex, pieces: Sequence[Piece]) -> list[Key]:
    """Returns the stored tensors, sorted, that no piece has under any of its names."""
    wanted = {name for piece in pieces for name in names_of(piece)}
    return sorted(key for key in index.tensors if key not in wanted)


def list_first(names: Sequence[str]) -> str:
    """Lists the first names, and says how many more there are."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (f" and {more:,} more" if more > 0 else "")


def names_of(piece: Piece) -> Iterator[Key]:
    yield Key(piece.key)
    yield from (Key(".".join(map(str, path))) for path in piece.aliases)


def _entry(index: TensorIndex, piece: Piece) -> TensorEntry | None:
    return next((index.tensors[name] for name in names_of(piece) if name in index.tensors), None)


def _check_fit(piece: Piece, entry: TensorEntry) -> None:
    expected = dtype_named(str(piece.local.dtype), where=piece.key)
    if entry.shape != piece.shape:
        raise ResumeError(
            f"shape {list(entry.shape)} was found in the checkpoint against"
            f" {list(piece.shape)} in the model",
            where=piece.key,
            hint="build the model with the configuration that the checkpoint was saved with",
        )
    if entry.dtype != expected:
        raise ResumeError(
            f"dtype {entry.dtype.name} was found in the checkpoint against {expected.name} in the"
            " model",
            where=piece.key,
            hint=f"build the model in {entry.dtype.name}, or convert the checkpoint with"
            f" `ckptkit convert --dtype {expected.name}`; a resume never casts",
        )
