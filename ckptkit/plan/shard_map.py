"""Which ranks wrote the bytes of each tensor, and which files hold them; from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from ckptkit.core.index import Ints, TensorEntry, TensorIndex

Shares = tuple[tuple[int, int, int], ...]
"""Runs of neighbours with equal shares: the first, the one after the last, the bytes of each."""

_MOST_RUNS = 64  # of one tensor; beyond, neighbours are shown together


class ShardMap(Struct, frozen=True):
    """How the tensors of an inspection are distributed."""

    # The path and the size of each file that holds tensors, -1 where it is missing, and the size
    # that it needs at least.
    files: tuple[tuple[str, int, int], ...]
    # What each rank wrote of each tensor, in the order of the inspection; empty for a tensor whose
    # writers are unknown.
    by_rank: tuple[Shares, ...]
    by_file: tuple[Shares, ...]  # what each file holds of each tensor, by positions in `files`
    unreadable: tuple[int, ...]  # the positions of the tensors that cannot be read whole


def map_shards(
    index: TensorIndex, entries: Sequence[TensorEntry], unreadable: frozenset[str]
) -> ShardMap:
    """Describes where tensors are stored.

    `index`: the index of the checkpoint. `entries`: its tensors that are described. `unreadable`:
    the keys of those that cannot be read whole.
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
