"""Restores everything that is no tensor of a model: nested values, schedulers, dataloaders, RNGs.

All values are read first, and put in place only when every rank has read its own: so a damaged
file leaves the objects unchanged. `unflatten` restores a nested value whose leaves are in a DCP
directory. Each rank has its own state of a dataloader, and the number of ranks may have changed
since the save.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind
from ckptkit.formats.dcp.reader import BlobRef
from ckptkit.training import step_names
from ckptkit.training.resume.load_pieces import load_pieces
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state import objects as rng
from ckptkit.training.state.bound import shown_name
from ckptkit.training.state.collect import BoundObject, BoundState
from ckptkit.training.state.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.state.objects import flatten
from ckptkit.training.state.pieces import Piece, Replicas, whole_places
from ckptkit.training.state.structures import Nodes, adapt, assemble, leaf_paths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """Where a nested value is stored.

    Attributes:
        unit: The DCP directory.
        path: What its key paths begin with.
        name: What it is called in messages.
    """

    unit: str
    path: KeyPath
    name: str


class UnflattenedValue(NamedTuple):
    """A restored nested value.

    Attributes:
        value: The value, but for what sharded tensors hold.
        pieces: The sharded tensors in it, which are those of the live value, to be filled in place.
    """

    value: Any
    pieces: list[Piece]


def unflatten(
    stored: StoredStep,
    place: ValueLocation,
    live: Any,
    *,
    saved: bool,
    leaving: Collection[str] = (),
) -> UnflattenedValue:
    """Restores a value from the keys of a DCP directory.

    Steps without structures, which older versions and other tools write, do not have all types,
    and have nothing of empty mappings: then both are taken from the live value.

    Args:
        stored: The step.
        place: Of the value.
        live: The live value in its place.
        saved: Whether it is known to have been saved, so that it may have no leaves.
        leaving: Names on the first level that belong to something else.
    """
    nodes = stored.structure(place.unit, place.path)
    sharded = {path: leaf for path, leaf in flatten(live) if isinstance(leaf, DTensor)}
    leaves = dict(_read(stored, place, _paths(stored, place, nodes, leaving), sharded))
    keys = {entry.key_path for entry in stored.index(place.unit).tensors.values()}
    own = {path: leaf for path, leaf in sharded.items() if (*place.path, *path) in keys}
    leaves |= own
    if not leaves and nodes is None and not saved and next(flatten(live), None) is not None:
        raise ResumeError(
            "was not saved with this step",
            where=place.name,
            hint="resume without it, or leave it out of the state",
        )
    value: Any = []
    if leaves or nodes is not None or not isinstance(live, list):
        value = assemble(nodes, leaves, where=f"{stored.source.location}, {place.name}")
    if not stored.has_structures:
        value = adapt(value, live)
    return UnflattenedValue(value, list(_pieces_of(place, own)))


def _paths(
    stored: StoredStep, place: ValueLocation, nodes: Nodes | None, leaving: Collection[str]
) -> list[KeyPath]:
    """Returns the paths of the leaves below a place."""
    if nodes is not None:
        return leaf_paths(nodes, place.name)
    index, depth = stored.index(place.unit), len(place.path)
    keys = chain(index.values, (entry.key_path for entry in index.tensors.values()))
    paths = (key[depth:] for key in keys if key[:depth] == place.path)
    return [path for path in paths if not (path and str(path[0]) in leaving)]


def _read(
    stored: StoredStep, place: ValueLocation, paths: Iterable[KeyPath], skip: Container[KeyPath]
) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the leaves at some paths below a place, tensors read as a whole."""
    depth, tensors = len(place.path), []
    for path in paths:
        key = (*place.path, *path)
        if stored.has_value(place.unit, key):
            yield path, stored.value(place.unit, key)
        elif path not in skip:
            tensors.append(key)
    for key, tensor in read_tensors(stored, place.unit, tensors):
        yield key[depth:], tensor


def set_nested(target: Any, path: KeyPath, value: Any) -> None:
    """Sets a value in nested dictionaries and lists, keys meant as texts."""
    *outer, last = path
    for at, name in enumerate(outer):
        inner: Any = [] if isinstance(path[at + 1], int) else {}
        target = _entered(target, name, inner)
    if isinstance(target, list):
        _entered(target, last, None)
        target[int(last)] = value
    else:
        target[_own_key(target, last)] = value


def _entered(target: Any, name: str | int, inner: Any) -> Any:
    if isinstance(target, list):
        target += [None] * (int(name) + 1 - len(target))
        if target[int(name)] is None:
            target[int(name)] = inner
        return target[int(name)]
    return target.setdefault(_own_key(target, name), inner)


def _own_key(target: Mapping[Any, Any], name: str | int) -> Any:
    """Returns the key that has this text; DCP keeps texts only."""
    return name if name in target else next((k for k in target if str(k) == str(name)), name)


def read_tensors(
    stored: StoredStep, unit: str, paths: Iterable[KeyPath]
) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    """Yields the tensors under some key paths, each read as a whole."""
    index, wanted = stored.index(unit), frozenset(paths)
    entries = [entry for entry in index.tensors.values() if entry.key_path in wanted]
    pieces = []
    for entry in entries:
        local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
        places = whole_places(entry.shape)
        pieces.append(Piece(unit, entry.key_path, entry.shape, places, local))
    load_pieces(index, stored.source, pieces, threads=1)
    for piece in pieces:
        yield piece.key_path, piece.local


def _pieces_of(place: ValueLocation, tensors: Mapping[KeyPath, DTensor]) -> Iterator[Piece]:
    meshes = Meshes(Copies())
    meshes.learn(tensors.values())
    for path, tensor in tensors.items():
        key = (*place.path, *path)
        slot = meshes.slot(".".join(map(str, key)), tensor, Replicas())
        yield from slot.pieces(place.unit, key, local_part(tensor))


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
