"""Where the elements of tensors are stored: each once, as is proven first, and in which files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from ckptkit.core.errors import (
    ChecksumError,
    IncompleteCheckpointError,
    InputError,
    LimitError,
    MissingFileError,
    TruncatedFileError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.geometry import drop_replicas, find_defect
from ckptkit.core.index import Box, Ints, Key, Problem, Span, TensorEntry, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME

_ERRORS: dict[str, type[InputError]] = {
    error.code: error
    for error in (
        MissingFileError,
        TruncatedFileError,
        IncompleteCheckpointError,
        UnsupportedError,
        UnsafePickleError,
        LimitError,
        ChecksumError,
    )
}
_LABELS = ("rows", "columns")
_NAMED = 7  # further files that are missing
_HINTS = {
    MissingFileError.code: "copy the file back, name where other nodes keep theirs with --also, or"
    " take an earlier checkpoint",
    TruncatedFileError.code: "the copy or the save was cut short; compare its size with the origin",
    ChecksumError.code: f"it was damaged or edited after it was written: take {MANIFEST_NAME} from"
    " a copy, or remove it to read the folder without its proofs",
    IncompleteCheckpointError.code: "give the directory that holds the files of every rank",
}


def find_problems_by_key(
    index: TensorIndex, entries: Iterable[TensorEntry]
) -> Iterator[tuple[Key, Problem]]:
    """Yields why tensors cannot be read whole: their keys, each with one problem."""
    named = {problem.where: problem for problem in index.problems}
    sizes = np.array([file.size_bytes for file in index.files], np.int64)
    of_sources: dict[Key, Problem | None] = {}

    def find(entry: TensorEntry) -> Problem | None:
        if entry.derivation is None:
            return (
                named.get(entry.key)
                or _file_problem(index, entry, sizes)
                or _coverage_problem(index, entry)
            )
        for _, key in entry.derivation.reads:
            if key not in of_sources:  # many tensors can be made of one
                of_sources[key] = find(index.tensors[key])
        return next(filter(None, (of_sources[key] for _, key in entry.derivation.reads)), None)

    for entry in entries:
        problem = find(entry)
        if problem is not None:
            yield entry.key, problem


def error_of(problem: Problem, location: str) -> InputError:
    """Returns the error to raise for a problem of the checkpoint at `location`."""
    kind = _ERRORS.get(problem.code, InputError)
    return kind(
        f"{problem.where}: {problem.message}" if problem.where else problem.message,
        where=location,
        hint=problem.hint or _HINTS.get(problem.code, ""),
    )


def refuse_problems(index: TensorIndex, entries: Iterable[TensorEntry], location: str) -> None:
    """Refuses tensors of the checkpoint at `location` that cannot be read whole."""
    for _, problem in find_problems_by_key(index, entries):
        raise error_of(problem, location)


def _file_problem(index: TensorIndex, entry: TensorEntry, sizes: np.ndarray) -> Problem | None:
    records = index.records
    rows = entry.chunks.record
    files = records.file[rows]
    short = np.flatnonzero((records.stop[rows] > sizes[files]) & (entry.chunks.elements() > 0))
    if not len(short):
        return None
    row = int(short[0])
    file = index.files[int(files[row])]
    elements = f"{describe(entry.chunks[row].place)} of {entry.key!r}"
    if file.size_bytes < 0:
        # The names of data files say which rank wrote them.
        others = [int(number) for number in np.flatnonzero(sizes < 0) if number != files[row]]
        named = ", ".join(repr(index.files[number].path) for number in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        nor = f", nor {'is' if len(others) == 1 else 'are'} {named}{more}" if others else ""
        return Problem(MissingFileError.code, file.path, f"is not there{nor}; it holds {elements}")
    return Problem(
        TruncatedFileError.code,
        file.path,
        f"{elements} end at byte {int(records.stop[rows[row]]):,} but the file ends at byte"
        f" {file.size_bytes:,}",
    )


def _coverage_problem(index: TensorIndex, entry: TensorEntry) -> Problem | None:
    where = f"tensor {entry.key!r}"
    try:
        defect = find_defect(drop_replicas(entry.chunks), entry.shape)
    except LimitError as error:
        return Problem(error.code, where, error.message)
    if defect is None:
        return None
    text = f"{describe(defect.place)} of shape {list(entry.shape)} are"
    if defect.copies == 0:
        return Problem(IncompleteCheckpointError.code, where, f"{text} in no file")
    rows = np.flatnonzero(entry.chunks.elements() > 0)
    touched = {index.path_of(int(entry.chunks.record[row])) for row in rows[:64]}
    text = f"{text} stored {defect.copies} times, in {', '.join(sorted(touched)[:4])}"
    return Problem(IncompleteCheckpointError.code, where, text)


def describe(place: Box | Span) -> str:
    """Describes a range of elements, such as `rows [0, 8), columns [2, 4)`."""
    if isinstance(place, Span):
        return f"elements [{place.start:,}, {place.stop:,})"
    labels = _LABELS if len(place.offsets) <= len(_LABELS) else ()
    parts = [
        f"{labels[axis] if axis < len(labels) else f'dimension {axis}'} [{low}, {low + size})"
        for axis, (low, size) in enumerate(zip(place.offsets, place.sizes, strict=True))
    ]
    return ", ".join(parts) or "the value"


# Which ranks wrote the bytes of each tensor, and which files hold them; from headers alone.

Shares = tuple[tuple[int, int, int], ...]
"""Runs of neighbours with equal shares: the first, the one after the last, the bytes of each."""

_MOST_RUNS = 64  # of one tensor; beyond, neighbours are shown together


class ShardMap(Struct, frozen=True):
    """How the tensors of an inspection are distributed.

    Attributes:
        files: The path and the size of each file that holds tensors, -1 where it is missing, and
            the size that it needs at least.
        by_rank: What each rank wrote of each tensor, in the order of the inspection; empty for a
            tensor whose writers are unknown.
        by_file: What each file holds of each tensor, by positions in `files`.
        unreadable: The positions of the tensors that cannot be read whole.
    """

    files: tuple[tuple[str, int, int], ...]
    by_rank: tuple[Shares, ...]
    by_file: tuple[Shares, ...]
    unreadable: tuple[int, ...]


def map_shards(
    index: TensorIndex, entries: Sequence[TensorEntry], unreadable: frozenset[str]
) -> ShardMap:
    """Describes where tensors are stored.

    Args:
        index: The index of the checkpoint.
        entries: Its tensors that are described.
        unreadable: The keys of those that cannot be read whole.
    """
    records = index.records
    needed = np.full(len(index.files), -1, np.int64)  # of files without these tensors
    for entry in entries:
        held = entry.chunks.record
        np.maximum.at(needed, records.file[held], records.stop[held])
    numbers = np.cumsum(needed >= 0) - 1
    by_rank, by_file = [], []
    for entry in entries:
        sizes = entry.chunks.elements() * entry.stored_dtype.itemsize
        by_rank.append(_share(entry.chunks.rank, sizes))
        by_file.append(_share(numbers[records.file[entry.chunks.record]], sizes))
    return ShardMap(
        files=tuple(
            (index.files[n].path, index.files[n].size_bytes, int(needed[n]))
            for n in np.flatnonzero(needed >= 0).tolist()
        ),
        by_rank=tuple(by_rank),
        by_file=tuple(by_file),
        unreadable=tuple(n for n, entry in enumerate(entries) if entry.key in unreadable),
    )


def _share(owners: Ints, sizes: Ints) -> Shares:
    """Adds up sizes by owner, unknown ones left out, and joins neighbours with the same size."""
    known = (owners >= 0) & (sizes > 0)
    if not known.any():
        return ()
    numbers, positions = np.unique(owners[known], return_inverse=True)
    totals = np.zeros(len(numbers), np.int64)
    np.add.at(totals, positions.reshape(-1), sizes[known])
    breaks = (np.diff(numbers) != 1) | (np.diff(totals) != 0)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    stops = np.concatenate((starts[1:], [len(numbers)]))
    if len(starts) > _MOST_RUNS:
        return _share_roughly(numbers, totals)
    return tuple(
        (int(numbers[start]), int(numbers[stop - 1]) + 1, int(totals[start]))
        for start, stop in zip(starts, stops, strict=True)
    )


def _share_roughly(numbers: Ints, totals: Ints) -> Shares:
    """Joins neighbours with different sizes, each with the mean."""
    edges = np.linspace(0, len(numbers), _MOST_RUNS + 1).astype(np.int64)
    return tuple(
        (
            int(numbers[start]),
            int(numbers[stop - 1]) + 1,
            int(totals[start:stop].sum() // (numbers[stop - 1] + 1 - numbers[start])),
        )
        for start, stop in pairwise(edges)
        if stop > start
    )
