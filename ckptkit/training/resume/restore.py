"""Restores everything that is no tensor of a model: schedulers, dataloaders, RNGs, extra states.

All values are read first, and put in place only when every rank has read its own: so a damaged
file leaves the objects unchanged. `unflatten` restores a nested value whose leaves are in a DCP
directory. Each rank has its own state of a dataloader, and the number of ranks may have changed
since the save. Extra states are what modules return from `get_extra_state`.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind, list_first
from ckptkit.formats.dcp.reader import BlobRef
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.training import step_names
from ckptkit.training.load.load_pieces import load_pieces
from ckptkit.training.resume.loaders import (
    Mergeable,
    describe_afresh,
    describe_restored,
    mergeable,
)
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state import objects as rng
from ckptkit.training.state.collect import (
    PER_RANK,
    BoundModel,
    BoundObject,
    BoundState,
    of_the_object,
    shown_name,
)
from ckptkit.training.state.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.state.objects import flatten, is_same, object_from_bytes, read_blob, serialise
from ckptkit.training.state.pieces import Piece, Replicas, whole_places
from ckptkit.training.state.structures import adapt, assemble, leaf_paths
from ckptkit.training.step_names import clean_fqn, parallel_prefixes

logger = logging.getLogger(__name__)

Apply = Callable[[], object]


def unflatten(
    stored: StoredStep,
    unit: str,
    start: KeyPath,
    name: str,
    live: Any,
    pieces: list[Piece],
    *,
    saved: bool,
    leaving: Collection[str] = (),
) -> Any:
    """Restores a value from the keys of a DCP directory that begin with `start`.

    Steps without structures, which older versions and other tools write, do not have all types, and
    have nothing of empty mappings: then both are taken from the live value. `pieces` gets the
    sharded tensors of the live value, to be filled in place. With `saved`, it is known to have been
    saved, so that it may have no leaves. `leaving` has names on the first level that belong to
    something else.
    """
    nodes = stored.structure(unit, start)
    index, depth = stored.index(unit), len(start)
    keys = {entry.key_path for entry in index.tensors.values()}
    sharded = {path: leaf for path, leaf in flatten(live) if isinstance(leaf, DTensor)}
    if nodes is not None:
        paths = leaf_paths(nodes, name)
    else:
        below = (key[depth:] for key in chain(index.values, keys) if key[:depth] == start)
        paths = [path for path in below if not (path and str(path[0]) in leaving)]
    # Tensors are read as a whole, but for sharded ones.
    leaves: dict[KeyPath, Any] = {}
    tensors: list[KeyPath] = []
    for path in paths:
        key = (*start, *path)
        if stored.has_value(unit, key):
            leaves[path] = stored.value(unit, key)
        elif path not in sharded:
            tensors.append(key)
    for key, tensor in read_tensors(stored, unit, tensors):
        leaves[key[depth:]] = tensor
    own = {path: leaf for path, leaf in sharded.items() if (*start, *path) in keys}
    leaves |= own
    if not leaves and nodes is None and not saved and next(flatten(live), None) is not None:
        raise ResumeError(
            "was not saved with this step",
            where=name,
            hint="resume without it, or leave it out of the state",
        )
    value: Any = []
    if leaves or nodes is not None or not isinstance(live, list):
        value = assemble(nodes, leaves, where=f"{stored.source.location}, {name}")
    if not stored.has_structures:
        value = adapt(value, live)
    meshes = Meshes(Copies())
    meshes.learn(own.values())
    for path, leaf in own.items():
        key = (*start, *path)
        slot = meshes.slot(".".join(map(str, key)), leaf, Replicas())
        pieces += slot.pieces(unit, key, local_part(leaf))
    return value


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


def loaders_alike(stored: StoredStep, bound: BoundState) -> dict[str, bool]:
    """Returns for each dataloader, or generator, whether all ranks saved it at the same place.

    Called on one rank, for all: it reads what every rank had saved, or the checksums of it. Seeds
    of workers, which each rank may have drawn for itself, are no part of the place. By the names of
    the entries; empty where as many ranks resume as saved.
    """
    alike: dict[str, bool] = {}
    world = stored.world_size or bound.world_size
    for other in bound.others if world != bound.world_size else ():
        if other.kind in PER_RANK:
            files = [_file(other, rank) for rank in range(world)] if other.file else []
            digests = {stored.digest(file) for file in files}
            if files and None not in digests and len(digests) == 1:
                alike[_name(other)] = True
                continue
            first = _bytes(stored, other, 0)
            place = _without_seeds(object_from_bytes(first, where=_name(other)))
            others = (_bytes(stored, other, rank) for rank in range(1, world))
            alike[_name(other)] = all(
                data == first
                or is_same(_without_seeds(object_from_bytes(data, where=_name(other))), place)
                for data in others
            )
    return alike


def merge_loaders(stored: StoredStep, bound: BoundState) -> dict[str, str]:
    """Returns the states of dataloaders that other ranks can share, as texts; see `loaders`.

    Called on one rank, for all, where `loaders_alike` has read what every rank had saved.
    """
    merged: dict[str, str] = {}
    world = stored.world_size or bound.world_size
    for other in bound.others if world != bound.world_size else ():
        offered = _mergeable(stored, bound, other) if other.kind == "dataloader" else None
        if offered is None:
            continue
        with of_the_object(other.where, "merge_states()", ResumeError):
            state = offered.merge_states(_states(stored, other, world))
        if state is not None:
            merged[_name(other)] = base64.b64encode(serialise(state, _name(other))).decode()
    return merged


def _mergeable(stored: StoredStep, bound: BoundState, other: BoundObject) -> Mergeable | None:
    entry = stored.entry(other.key, other.position)
    was_split = entry.split_batches if entry is not None else None
    was_split = False if stored.world_size == 1 else was_split
    return mergeable(other.target, bound.world_size, was_split=was_split)


def _states(stored: StoredStep, other: BoundObject, world: int) -> list[Any]:
    data = (_bytes(stored, other, rank) for rank in range(world))
    return [object_from_bytes(one, where=_name(other)) for one in data]


_SEEDS = frozenset(("_base_seed", "_shared_seed"))


def _without_seeds(state: Any) -> Any:
    """Returns the state of a dataloader without what its workers are seeded with.

    Source: `torchdata.stateful_dataloader.stateful_dataloader` of torchdata 0.11.
    """
    if type(state) is dict:
        return {key: _without_seeds(item) for key, item in state.items() if key not in _SEEDS}
    return [_without_seeds(item) for item in state] if type(state) is list else state


def _name(other: BoundObject) -> str:
    return shown_name(other.key, other.position)


def _file(other: BoundObject, rank: int) -> str:
    stem, _, _ = other.file.rpartition("_rank_")
    return f"{stem}_rank_{rank}.bin"


def _path(stored: StoredStep, other: BoundObject, rank: int) -> tuple[str | int, ...]:
    path = (*other.path, str(rank))
    if not stored.has_value(other.unit, path):
        raise ResumeError("was not saved with this step", where=_name(other))
    return path


def _bytes(stored: StoredStep, other: BoundObject, rank: int) -> bytes:
    source = stored.source
    if other.file:
        path = _file(other, rank)
        return source.read(path, 0, source.stat(path).size_bytes)
    blob: BlobRef = stored.index(other.unit).values[_path(stored, other, rank)]
    return read_blob(source, blob, where=_name(other))


def object_changes(
    stored: StoredStep, bound: BoundState, alike: Mapping[str, bool | str], pieces: list[Piece]
) -> Iterator[Apply]:
    """Reads schedulers, scalers, dataloaders and all other objects.

    `pieces` gets the sharded tensors in them, to be filled before.
    """
    world = stored.world_size or bound.world_size
    for other in bound.others:
        if other.kind not in PER_RANK:
            yield partial(other.set_state, _state_of(stored, other, pieces))
        elif isinstance(merged := alike.get(_name(other)), str):
            state = object_from_bytes(base64.b64decode(merged), where=_name(other))
            offered = _mergeable(stored, bound, other)
            assert offered is not None  # noqa: S101  it has merged them
            with of_the_object(other.where, "split_state()", ResumeError):
                state = offered.split_state(state, bound.rank, bound.world_size)
            yield partial(other.set_state, state)
        elif world == bound.world_size or alike.get(_name(other), False):
            # This rank's own state, or under other ranks one that all had, but for its seeds.
            rank = bound.rank % world
            if other.file:
                state = stored.file(_file(other, rank))
            else:
                state = stored.value(other.unit, _path(stored, other, rank))
            note = describe_restored(state, world, bound.world_size)
            if note and bound.rank == 0:
                logger.warning("%s: %s", _name(other), note)
            yield partial(other.set_state, state)
        elif bound.rank == 0:
            logger.warning(
                "%s: it was saved by %d ranks that were at different places, or in orders of their"
                " own, and %d ranks resume: the %s %s",
                *(_name(other), world, bound.world_size, other.kind),
                f"starts afresh{describe_afresh(_states(stored, other, world))}"
                if other.kind == "dataloader"
                else "stays as it is",
            )


def _state_of(stored: StoredStep, bound: BoundObject, pieces: list[Piece]) -> Any:
    if bound.file and stored.has_file(bound.file):
        state = stored.file(bound.file)
    else:
        place = bound.unit, bound.path, _name(bound)
        saved = stored.entry(bound.key, bound.position) is not None
        state = unflatten(stored, *place, bound.state(), pieces, saved=saved)
    if bound.kind == "plain" and isinstance(bound.target, dict) is not isinstance(state, Mapping):
        raise ResumeError(
            f"{a_kind(state)} was saved under this name, and the state has {a_kind(bound.target)}"
            " there",
            where=_name(bound),
            hint="resume with what was saved",
        )
    return state


def random_changes(stored: StoredStep, bound: BoundState, step: int) -> Iterator[Apply]:
    """Reads this rank's random number generators, or seeds them anew.

    With as many ranks as saved the step, each restores its own. Otherwise all generators are
    seeded from the save, the step and the rank, so that the same resume gives the same numbers.
    """
    world = stored.world_size or bound.world_size
    if world == bound.world_size:
        states: Mapping[str, Any] = {}
        if bound.layout == "dcp":
            path: KeyPath = (step_names.RNG, str(bound.rank))
            states = stored.value("", path) if stored.has_value("", path) else {}
        else:
            files = step_names.random_states_files(bound.rank, world)
            states = next((stored.file(file) for file in files if stored.has_file(file)), {})
        if not states and bound.rank == 0:
            logger.warning(
                "the step holds no states of random number generators: they stay as they are"
            )
        yield partial(rng.restore, dict(states))
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
    yield partial(random.seed, seed)
    yield partial(np.random.seed, seed)
    yield partial(torch.manual_seed, seed)


def extra_state_changes(
    stored: StoredStep, model: BoundModel, pieces: list[Piece], *, rank: int
) -> Iterator[Apply]:
    """Reads the extra state of a model's modules.

    `pieces` gets the sharded tensors in it, to be filled before.
    """
    index, depth = stored.index(model.unit), len(model.path)
    left = {path for path in index.values if path[:depth] == model.path}
    keys = (entry.key_path for entry in index.tensors.values())
    left |= {path for path in keys if is_extra(path, model.path)}
    missing: list[str] = []
    parallel = parallel_prefixes(model.module)
    for raw, module in model.module.named_modules(remove_duplicate=False):
        kind: Any = type(module)
        if kind.get_extra_state is nn.Module.get_extra_state:
            continue
        if kind.set_extra_state is nn.Module.set_extra_state:
            continue
        prefix = clean_fqn(raw, parallel)
        name = f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE
        path = (*model.path, name)
        stored_paths = {other for other in left if other[: len(path)] == path}
        left -= stored_paths
        live = module.get_extra_state()
        if stored_paths or stored.structure(model.unit, path) is not None:
            place = model.unit, path, f"{model.key}, {name}"
            yield partial(
                module.set_extra_state, unflatten(stored, *place, live, pieces, saved=True)
            )
        elif list(flatten(live)) != [((), None)]:
            missing.append(name)
    unread = sorted(".".join(map(str, path)) for path in left)
    for names, what in (
        (missing, "was not saved with the step, and stays as it is"),
        (unread, "was saved, and no module of the model takes it"),
    ):
        if names and rank == 0:
            logger.warning("%s: the extra state %s %s", model.key, list_first(names), what)


def is_extra(path: KeyPath, model: KeyPath) -> bool:
    """Whether a key path of a model is that of an extra state, or of something in it."""
    if path[: len(model)] != model or len(path) == len(model):
        return False
    return str(path[len(model)]).rpartition(".")[2] == EXTRA_STATE
