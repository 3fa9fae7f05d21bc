"""Filling the live tensors of a rank from the chunks of a checkpoint, reading only what it needs.

Elements go straight from the files into the tensors' memory where both are one run of bytes, and
through a bounded buffer otherwise. Every byte that is read is checked against the checksum
stored for it: blobs that are read whole at once, others as far as the ranks together read them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import (
    IncompleteCheckpointError,
    ResumeError,
    UnsupportedError,
)
from ckptkit.core.geometry import find_defect, without_replicas
from ckptkit.core.index import Box, ChunkTable, Key, Shape, TensorEntry, TensorIndex
from ckptkit.execution.boxes import Overlap, overlaps
from ckptkit.execution.crew import run_crew
from ckptkit.storage.base import Source, distant
from ckptkit.storage.machine import usable_cores
from ckptkit.training.blobs import Blob, BlobReader, PartialBlob, Wish
from ckptkit.training.pieces import Piece
from ckptkit.training.target_memory import TargetMemory, memories_of

_MOST_THREADS = 2
_DISTANT_THREADS = 8  # which mostly wait for a store to answer
_SHOWN_NAMES = 5
# Blobs up to this size are read whole, headers included, together with their neighbours.
_SMALL_BYTES = 64 << 10
_GROUP_BYTES = 1 << 20
_GROUP_GAP_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What filling the pieces took, and what was proven of the bytes.

    Attributes:
        bytes_read: From data files, headers and trailers of blobs included.
        bytes_needed: What the pieces hold.
        seconds: From the first byte to the last.
        unverified: Keys of tensors of which bytes were read that had no checksum stored.
        partial: Blobs of which this rank read parts only; `cross_check` proves them.
    """

    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0
    unverified: tuple[Key, ...] = ()
    partial: tuple[PartialBlob, ...] = ()


@dataclass(slots=True)
class _Work:
    """What the threads found, each with its own reader."""

    readers: list[BlobReader] = field(default_factory=list)


def load_pieces(
    index: TensorIndex, source: Source, pieces: Sequence[Piece], *, threads: int = 0
) -> LoadReport:
    """Fills the live tensors of pieces from a checkpoint.

    Args:
        index: Of the DCP directory that holds them.
        source: Where its files lie.
        pieces: What to fill; one without elements only has to be in the checkpoint.
        threads: How many read at once; 0 for two, or one where there is one core, and for more
            where the files lie in an object store.

    Returns:
        What was read, and what is left to be proven.

    Raises:
        ResumeError: If the checkpoint lacks a tensor, or has another shape or dtype for it.
        InputError: If it is damaged or incomplete.
    """
    start = time.perf_counter()
    entries = match_entries(index, pieces)
    blobs = _blobs(index, pieces, entries)
    work = _Work()

    def read(groups: Iterator[Sequence[Blob]]) -> None:
        reader = BlobReader(source, index)
        work.readers.append(reader)
        for group in groups:
            reader.read(group)

    near = min(_MOST_THREADS, usable_cores())
    count = threads or (near if distant(source) is None else _DISTANT_THREADS)
    run_crew(count, iter(list(_groups(blobs))), read)
    return LoadReport(
        bytes_read=sum(reader.bytes_read for reader in work.readers),
        bytes_needed=sum(piece.size_bytes for piece in pieces),
        seconds=time.perf_counter() - start,
        unverified=tuple(sorted({key for reader in work.readers for key in reader.unverified})),
        partial=tuple(part for reader in work.readers for part in reader.partial),
    )


def match_entries(index: TensorIndex, pieces: Sequence[Piece]) -> list[TensorEntry]:
    """Finds the stored tensor of each piece.

    Returns:
        One for each piece, in order.

    Raises:
        ResumeError: If one is missing, or does not fit.
    """
    found = [_entry(index, piece) for piece in pieces]
    missing = [piece.key for piece, entry in zip(pieces, found, strict=True) if entry is None]
    if missing:
        raise ResumeError(
            f"{len(missing):,} of {len(pieces):,} tensors are not in the checkpoint: "
            + first_few(missing),
            hint="it was saved from another model or optimizer, or under other names",
        )
    entries = [entry for entry in found if entry is not None]
    for piece, entry in zip(pieces, entries, strict=True):
        _check_fit(piece, entry)
    return entries


def unexpected_keys(index: TensorIndex, pieces: Sequence[Piece]) -> list[Key]:
    """Returns the stored tensors, sorted, that no piece asks for under any of its names."""
    wanted = {name for piece in pieces for name in names_of(piece)}
    return sorted(key for key in index.tensors if key not in wanted)


def first_few(names: Sequence[str]) -> str:
    """Lists the first names, and says how many more there are."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (f" and {more:,} more" if more > 0 else "")


def names_of(piece: Piece) -> Iterator[Key]:
    """Yields the keys that a piece may have in a checkpoint."""
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


def _blobs(
    index: TensorIndex, pieces: Sequence[Piece], entries: Sequence[TensorEntry]
) -> Iterator[Blob]:
    """Yields every blob that something is wanted from, once."""
    cuts, tables = _Cuts(), dict[Key, _Cut]()
    wishes: dict[tuple[Key, int], list[Wish]] = defaultdict(list)
    for piece, entry in zip(pieces, entries, strict=True):
        if piece.elements:
            if entry.key not in tables:
                tables[entry.key] = cuts.proven(entry)
            for place, memory in zip(piece.places, _memories(piece), strict=True):
                for overlap in cuts.overlaps(tables[entry.key], place):
                    wishes[entry.key, overlap.row].append(Wish(overlap, memory))
    for (key, row), wanted in wishes.items():
        number = int(tables[key].chunks.record[row])
        yield Blob(index.tensors[key], number, index.records[number], tuple(wanted))


def _memories(piece: Piece) -> list[TargetMemory]:
    try:
        return memories_of(piece)
    except ResumeError as error:
        raise error.located(piece.key) from error


@dataclass(frozen=True, slots=True)
class _Cut:
    """The chunks of one tensor, each element in exactly one of them, and what says where."""

    chunks: ChunkTable
    layout: tuple[Shape, bytes, bytes]


class _Cuts:
    """Ways to cut tensors into chunks; tensors of one shape are mostly cut alike."""

    def __init__(self) -> None:
        self._proven: set[tuple[Shape, bytes, bytes]] = set()
        self._overlaps: dict[tuple[tuple[Shape, bytes, bytes], Box], tuple[Overlap, ...]] = {}

    def proven(self, entry: TensorEntry) -> _Cut:
        """Returns the chunks that hold a tensor."""
        chunks = entry.chunks
        if chunks.flat:
            raise UnsupportedError("is stored in spans, not in boxes", where=entry.key)
        layout = (entry.shape, chunks.offsets.tobytes(), chunks.sizes.tobytes())
        if layout in self._proven:
            return _Cut(chunks, layout)
        distinct = without_replicas(chunks)
        defect = find_defect(distinct, entry.shape)
        if defect is not None:
            raise IncompleteCheckpointError(
                f"elements {defect.place} are stored {defect.copies} times", where=entry.key
            )
        if distinct is chunks:
            self._proven.add(layout)
        return _Cut(distinct, layout)

    def overlaps(self, cut: _Cut, place: Box) -> tuple[Overlap, ...]:
        """Returns what each chunk holds of a box."""
        found = self._overlaps.get((cut.layout, place))
        if found is None:
            found = self._overlaps[cut.layout, place] = tuple(overlaps(cut.chunks, place))
        return found


def _groups(blobs: Iterable[Blob]) -> Iterator[Sequence[Blob]]:
    """Yields what to read together: small neighbours of one file, or one blob alone."""
    group: list[Blob] = []
    for blob in sorted(blobs, key=lambda blob: (blob.record.file, blob.record.start)):
        if group and not _joins(group, blob):
            yield group
            group = []
        group.append(blob)
    if group:
        yield group


def _joins(group: Sequence[Blob], blob: Blob) -> bool:
    first, last = group[0].record, group[-1].record
    return (
        last.file == blob.record.file
        and _is_small(group[-1])
        and _is_small(blob)
        and 0 <= blob.record.start - last.stop <= _GROUP_GAP_BYTES
        and blob.record.stop - first.start <= _GROUP_BYTES
    )


def _is_small(blob: Blob) -> bool:
    """Whether so much of a small blob is wanted that it is best read from end to end."""
    return blob.size_bytes <= _SMALL_BYTES and (
        blob.size_bytes <= _GROUP_GAP_BYTES or 2 * blob.wanted_bytes > blob.size_bytes
    )
