"""Dataloaders: each rank has its own state, and the number of ranks may have changed since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptkit.core.errors import ResumeError
from ckptkit.formats.dcp import BlobRef
from ckptkit.training.bound import shown_name
from ckptkit.training.state import BoundObject, BoundState
from ckptkit.training.stored_step import StoredStep

logger = logging.getLogger(__name__)


def loaders_alike(stored: StoredStep, bound: BoundState) -> dict[str, bool]:
    """Tells of each dataloader whether all ranks that saved it were at the same place.

    Called on one rank, for all: it reads what every rank had saved, or the checksums of it.

    Args:
        stored: The step.
        bound: The state, with its places in the step.

    Returns:
        By the names of the entries; empty where as many ranks resume as saved.

    Raises:
        ResumeError: If one was not saved.
        InputError: If it is damaged.
    """
    world = stored.world_size or bound.world_size
    if world == bound.world_size:
        return {}
    return {
        _name(other): _is_alike(stored, other, world)
        for other in bound.others
        if other.kind == "dataloader"
    }


def loader_changes(
    stored: StoredStep, bound: BoundState, other: BoundObject, alike: Mapping[str, bool]
) -> Iterator[Callable[[], object]]:
    """Reads this rank's state of a dataloader, or under other ranks the one that all had.

    Args:
        stored: The step.
        bound: The state.
        other: The dataloader in it.
        alike: What `loaders_alike` returned to rank 0.

    Yields:
        What puts it in place.

    Raises:
        ResumeError: If it was not saved, or holds more than plain values.
        InputError: If it is damaged.
    """
    world = stored.world_size or bound.world_size
    if world == bound.world_size:
        state = _state(stored, other, bound.rank)
    elif alike.get(_name(other), False):
        state = _state(stored, other, 0)
    else:
        if bound.rank == 0:
            logger.warning(
                "%s: it was saved by %d ranks that were at different places, and %d ranks resume:"
                " the dataloader starts afresh",
                _name(other),
                world,
                bound.world_size,
            )
        return
    yield lambda: other.target.load_state_dict(state)


def _name(other: BoundObject) -> str:
    return shown_name(other.key, other.position)


def _file(other: BoundObject, rank: int) -> str:
    stem, _, _ = other.file.rpartition("_rank_")
    return f"{stem}_rank_{rank}.bin"


def _state(stored: StoredStep, other: BoundObject, rank: int) -> Any:
    if other.file:
        return stored.file(_file(other, rank))
    return stored.value(other.unit, _path(stored, other, rank))


def _path(stored: StoredStep, other: BoundObject, rank: int) -> tuple[str | int, ...]:
    path = (*other.path, str(rank))
    if not stored.has_value(other.unit, path):
        raise ResumeError("was not saved with this step", where=_name(other))
    return path


def _is_alike(stored: StoredStep, other: BoundObject, world: int) -> bool:
    if other.file:
        digests = {stored.digest(_file(other, rank)) for rank in range(world)}
        if None not in digests:
            return len(digests) == 1
    first = _bytes(stored, other, 0)
    return all(_bytes(stored, other, rank) == first for rank in range(1, world))


def _bytes(stored: StoredStep, other: BoundObject, rank: int) -> bytes:
    source = stored.source
    if other.file:
        path = _file(other, rank)
        return source.read(path, 0, source.stat(path).size_bytes)
    blob: BlobRef = stored.index(other.unit).values[_path(stored, other, rank)]
    return source.read(blob.path, blob.start, blob.stop)
