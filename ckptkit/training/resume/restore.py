"""Restores everything that is no tensor of a model: schedulers, dataloaders, random numbers.

All values are read first, and put in place only when every rank has read its own: so a damaged
file leaves the objects unchanged. Each rank has its own state of a dataloader, and the number of
ranks may have changed since the save.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind
from ckptkit.formats.dcp.reader import BlobRef
from ckptkit.training import step_names
from ckptkit.training.resume.extra_state import without_extra
from ckptkit.training.resume.objects import ValueLocation, unflatten
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state import objects as rng
from ckptkit.training.state.bound import shown_name
from ckptkit.training.state.collect import BoundObject, BoundOptimizer, BoundState
from ckptkit.training.state.pieces import Piece

logger = logging.getLogger(__name__)


def loaders_alike(stored: StoredStep, bound: BoundState) -> dict[str, bool]:
    """Returns for each dataloader whether all ranks that saved it were at the same place.

    Called on one rank, for all: it reads what every rank had saved, or the checksums of it.

    Args:
        stored: The step.
        bound: The state, with its places in the step.

    Returns:
        By the names of the entries; empty where as many ranks resume as saved.
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
        A function that restores it.
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


Apply = Callable[[], object]


def object_changes(
    stored: StoredStep, bound: BoundState, alike: Mapping[str, bool], pieces: list[Piece]
) -> Iterator[Apply]:
    """Reads schedulers, scalers, dataloaders and all other objects.

    Args:
        stored: The step.
        bound: The state.
        alike: What `loaders_alike` returned to rank 0.
        pieces: Gets the sharded tensors in them, to be filled before.

    Yields:
        Functions that restore them.
    """
    for other in bound.others:
        if other.kind == "dataloader":
            yield from loader_changes(stored, bound, other, alike)
        else:
            state = _state_of(stored, other, pieces)
            yield lambda other=other, state=state: _set_object(other, state)  # type: ignore[misc]


def _set_object(bound: BoundObject, state: Any) -> None:
    if bound.kind != "plain":
        bound.target.load_state_dict(state)
    elif isinstance(bound.target, dict):
        bound.target.clear()
        bound.target.update(state)
    else:
        bound.target[:] = state


def _state_of(stored: StoredStep, bound: BoundObject, pieces: list[Piece]) -> Any:
    name = shown_name(bound.key, bound.position)
    if bound.file and stored.has_file(bound.file):
        state = stored.file(bound.file)
    else:
        place = ValueLocation(bound.unit, bound.path, name)
        saved = stored.entry(bound.key, bound.position) is not None
        restored = unflatten(stored, place, bound.state(), saved=saved)
        pieces += restored.pieces
        state = restored.value
    if bound.kind == "plain" and isinstance(bound.target, dict) is not isinstance(state, Mapping):
        raise ResumeError(
            f"{a_kind(state)} was saved under this name, and the state has {a_kind(bound.target)}"
            " there",
            where=name,
            hint="resume with what was saved",
        )
    return state


def random_changes(stored: StoredStep, bound: BoundState, step: int) -> Iterator[Apply]:
    """Reads this rank's random number generators, or seeds them anew.

    With as many ranks as saved the step, each restores its own. Otherwise all generators are
    seeded from the save, the step and the rank, so that the same resume gives the same numbers.

    Yields:
        A function that restores them.
    """
    world = stored.world_size or bound.world_size
    if world == bound.world_size:
        states = _random_states(stored, bound, bound.rank)
        yield lambda: rng.restore(states)
        return
    text = f"{stored.attempt}/{step}/{bound.rank}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    if bound.rank == 0:
        logger.warning(
            "step %d was saved by %d ranks and %d resume: random numbers are seeded anew, from"
            " the save, the step and the rank",
            step,
            world,
            bound.world_size,
        )
    yield lambda: _seed(seed)


def _random_states(stored: StoredStep, bound: BoundState, rank: int) -> Mapping[str, Any]:
    if bound.layout == "dcp":
        path: KeyPath = (step_names.RNG, str(rank))
        states = stored.value("", path) if stored.has_value("", path) else {}
    else:
        files = step_names.random_states_files(rank, bound.world_size)
        states = next((stored.file(file) for file in files if stored.has_file(file)), {})
    if not states and bound.rank == 0:
        logger.warning(
            "the step holds no states of random number generators: they stay as they are"
        )
    return dict(states)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def tensor_pieces(bound: BoundState, fresh: Sequence[BoundOptimizer] = ()) -> list[Piece]:
    """Returns the pieces of models and optimizers, which are filled in place.

    Left out are those of other objects and of modules' extra states, which get them through
    `load_state_dict` and `set_extra_state`.

    Args:
        bound: The state.
        fresh: Optimizers that are left out too.
    """
    apart = [(o.unit, o.path) for o in fresh]
    pieces = [piece for piece in bound.pieces() if not _is_below(piece, apart)]
    for model in bound.models:
        pieces = without_extra(pieces, model)
    return pieces


def _is_below(piece: Piece, starts: Iterable[tuple[str, KeyPath]]) -> bool:
    return any(
        piece.unit == unit and piece.key_path[: len(start)] == start for unit, start in starts
    )
