"""Everything that is no tensor of a model: schedulers, objects, random numbers.

Values are first read, all of them, and put in place only when every rank has read its own: so a
damaged file leaves the objects as they were.
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
from ckptkit.core.texts import a_kind
from ckptkit.training import names, rng
from ckptkit.training.bound import shown_name
from ckptkit.training.extra_state import without_extra
from ckptkit.training.loaders import loader_changes
from ckptkit.training.objects_in_units import Place, unflattened
from ckptkit.training.pieces import Piece
from ckptkit.training.state import BoundObject, BoundOptimizer, BoundState
from ckptkit.training.stored_step import StoredStep

logger = logging.getLogger(__name__)

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
        What puts each in place.

    Raises:
        ResumeError: If one was not saved, or holds more than plain values.
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
        place = Place(bound.unit, bound.path, name)
        saved = stored.entry(bound.key, bound.position) is not None
        made = unflattened(stored, place, bound.state(), saved=saved)
        pieces += made.pieces
        state = made.value
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

    With as many ranks as saved the step, each goes on with its own. Otherwise all generators are
    seeded from the save, the step and the rank, so that the same resume gives the same numbers.

    Yields:
        What puts them in place.
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
        path: KeyPath = (names.RNG, str(rank))
        found = stored.value("", path) if stored.has_value("", path) else {}
    else:
        files = names.random_states_files(rank, bound.world_size)
        found = next((stored.file(file) for file in files if stored.has_file(file)), {})
    if not found and bound.rank == 0:
        logger.warning("the step holds no states of random number generators: they go on as is")
    return dict(found)


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
