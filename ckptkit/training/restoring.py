"""Everything that is no tensor of a model: hyperparameters, schedulers, objects, random numbers.

Values are first read, all of them, and put in place only when every rank has read its own: so a
damaged file leaves the objects as they were.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Box, KeyPath, TensorEntry
from ckptkit.formats.dcp import BlobRef
from ckptkit.training import names, rng
from ckptkit.training.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.flatten import flatten
from ckptkit.training.loading import first_few, load_pieces
from ckptkit.training.materialising import Slots, stored_values
from ckptkit.training.pieces import Piece, Replicas
from ckptkit.training.state import BoundObject, BoundOptimizer, BoundState
from ckptkit.training.stored_step import StoredStep

logger = logging.getLogger(__name__)

Apply = Callable[[], object]
_PARAMS = "params"


def group_changes(stored: StoredStep, bound: BoundOptimizer, slots: Slots) -> Iterator[Apply]:
    """Reads the hyperparameters and the plain state values of an optimizer.

    Groups are recognised by the names of their parameters, so that their order may differ.

    Yields:
        What puts them in place.

    Raises:
        ResumeError: If a group has no counterpart in the checkpoint.
    """
    optimizer = bound.optimizer
    groups = _stored_groups(stored, bound)
    by_names = {frozenset(group[_PARAMS]): group for group in groups}
    for number, group in enumerate(optimizer.param_groups):
        own = frozenset(slot.fqn for p in group[_PARAMS] for slot in slots[id(p)])
        found = by_names.get(own)
        if found is None:
            raise ResumeError(
                _no_group(number, own, groups),
                where=bound.key,
                hint="build the optimizer with the parameter groups that it was saved with",
            )
        yield lambda group=group, found=found: _set_group(group, found)  # type: ignore[misc]
    yield from _value_changes(stored, bound, slots)


def _no_group(number: int, own: frozenset[str], groups: list[dict[str, Any]]) -> str:
    nearest = max((set(g[_PARAMS]) for g in groups), key=lambda g: len(g & own), default=set())
    differing = sorted(own ^ nearest)
    return (
        f"no group of the checkpoint's {len(groups):,} has the {len(own):,} parameters of group"
        f" {number}; the nearest differs in {first_few(differing)}"
    )


def _stored_groups(stored: StoredStep, bound: BoundOptimizer) -> list[dict[str, Any]]:
    start = (*bound.path, "param_groups")
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for rest, value in stored.values(bound.unit, start):
        if not rest:  # torch before 2.4 stores all groups as one value
            return [dict(group) for group in value]
        _put(groups[int(rest[0])], rest[1:], value)
    for rest, tensor in _whole_tensors(stored, bound.unit, start):
        _put(groups[int(rest[0])], rest[1:], tensor)
    return [groups[number] for number in sorted(groups) if _PARAMS in groups[number]]


def _set_group(group: MutableMapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name == _PARAMS:
            continue
        live = group.get(name)
        if isinstance(live, torch.Tensor):
            live.fill_(float(value))
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            group[name] = value.item()
        else:
            group[name] = value


def _value_changes(stored: StoredStep, bound: BoundOptimizer, slots: Slots) -> Iterator[Apply]:
    state = bound.optimizer.state
    values = stored_values(stored.index(bound.unit), bound.path)
    depth = len(bound.path) + 2
    for parameter in _parameters(bound.optimizer):
        for slot in slots[id(parameter)][:1]:
            for path in values.get(slot.fqn, ()):
                value = stored.value(bound.unit, path)
                yield lambda p=parameter, rest=path[depth:], value=value: _put(  # type: ignore[misc]
                    state[p], rest, value
                )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group[_PARAMS]


def _put(target: Any, path: KeyPath, value: Any) -> None:
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


def _whole_tensors(
    stored: StoredStep, unit: str, start: KeyPath, skip: frozenset[KeyPath] = frozenset()
) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    """Yields the tensors below a key path, each read as a whole."""
    index = stored.index(unit)
    entries = [
        entry
        for entry in index.tensors.values()
        if entry.key_path[: len(start)] == start and entry.key_path not in skip
    ]
    pieces = [_whole_piece(unit, entry) for entry in entries]
    load_pieces(index, stored.source, pieces, threads=1)
    for piece in pieces:
        yield piece.key_path[len(start) :], piece.local


def _whole_piece(unit: str, entry: TensorEntry) -> Piece:
    local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
    places = (Box((0,) * len(entry.shape), entry.shape),) if entry.elements else ()
    return Piece(unit, entry.key_path, entry.shape, places, local)


def object_changes(stored: StoredStep, bound: BoundState) -> Iterator[Apply]:
    """Reads schedulers, scalers, dataloaders and all other objects.

    Yields:
        What puts each in place.

    Raises:
        ResumeError: If one was not saved, or holds more than plain values.
    """
    for other in bound.others:
        if other.kind == "dataloader":
            yield from _dataloader_changes(stored, bound, other)
        else:
            state = _state_of(stored, other)
            yield lambda other=other, state=state: _set_object(other, state)  # type: ignore[misc]


def _set_object(bound: BoundObject, state: Any) -> None:
    if bound.kind != "plain":
        bound.target.load_state_dict(state)
    elif isinstance(bound.target, dict):
        bound.target.clear()
        bound.target.update(state)
    else:
        bound.target[:] = state


def _state_of(stored: StoredStep, bound: BoundObject) -> Any:
    if bound.file and stored.has_file(bound.file):
        return stored.file(bound.file)
    return _unflattened(stored, bound)


def _unflattened(stored: StoredStep, bound: BoundObject) -> Any:
    """Puts an object's state together from the keys of a DCP directory.

    Sharded tensors are the object's own, filled in place; what DCP does not store (empty
    mappings) is taken from the object.

    Raises:
        ResumeError: If nothing was saved under its name.
    """
    live = bound.state()
    own = {path: leaf for path, leaf in flatten(live, bound.path) if isinstance(leaf, DTensor)}
    state: Any = [] if isinstance(live, list) else _empty_mappings(live)
    _fill_sharded(stored, bound, own)
    found: list[tuple[KeyPath, Any]] = [(path[len(bound.path) :], own[path]) for path in own]
    found += stored.values(bound.unit, bound.path)
    found += _whole_tensors(stored, bound.unit, bound.path, frozenset(own))
    if not found and live:
        raise ResumeError(
            "was not saved with this step",
            where=bound.key,
            hint="resume without it, or leave it out of the state",
        )
    for rest, value in sorted(found, key=lambda item: _order(item[0])):
        if not rest:
            return value
        _put(state, _own_path(live, rest), value)
    return state


def _own_path(live: Any, path: KeyPath) -> KeyPath:
    """Returns the path with the object's own keys, as far as it has them; DCP has texts."""
    found: list[Any] = []
    for name in path:
        own = _own_key(live, name) if isinstance(live, Mapping) else name
        live = live.get(own) if isinstance(live, Mapping) else None
        found.append(own)
    return tuple(found)


def _fill_sharded(
    stored: StoredStep, bound: BoundObject, tensors: Mapping[KeyPath, DTensor]
) -> None:
    meshes = Meshes(Copies())
    meshes.learn(tensors.values())
    pieces = [
        piece
        for path, tensor in tensors.items()
        for piece in meshes.slot(".".join(map(str, path)), tensor, Replicas()).pieces(
            bound.unit, path, local_part(tensor)
        )
    ]
    if pieces:
        load_pieces(stored.index(bound.unit), stored.source, pieces)


def _order(path: KeyPath) -> list[tuple[bool, int, str]]:
    return [(isinstance(p, str), p if isinstance(p, int) else 0, str(p)) for p in path]


def _empty_mappings(value: Any) -> dict[Any, Any]:
    return {
        key: _empty_mappings(inner)
        for key, inner in (value.items() if isinstance(value, Mapping) else ())
        if isinstance(inner, Mapping)
    }


def _dataloader_changes(
    stored: StoredStep, bound: BoundState, other: BoundObject
) -> Iterator[Apply]:
    """Each rank has its own state; under another number of ranks only if all of them are equal."""
    world = stored.world_size or bound.world_size
    if world == bound.world_size:
        state = _loader_state(stored, other, bound.rank)
    elif len({_loader_bytes(stored, other, rank) for rank in range(world)}) == 1:
        state = _loader_state(stored, other, 0)
    else:
        if bound.rank == 0:
            logger.warning(
                "%s: it was saved by %d ranks that were at different places, and %d ranks resume:"
                " the dataloader starts afresh",
                other.key,
                world,
                bound.world_size,
            )
        return
    yield lambda: other.target.load_state_dict(state)


def _loader_file(other: BoundObject, rank: int) -> str:
    stem, _, _ = other.file.rpartition("_rank_")
    return f"{stem}_rank_{rank}.bin"


def _loader_state(stored: StoredStep, other: BoundObject, rank: int) -> Any:
    if other.file:
        return stored.file(_loader_file(other, rank))
    path = (*other.path, str(rank))
    if not stored.has_value(other.unit, path):
        raise ResumeError("was not saved with this step", where=other.key)
    return stored.value(other.unit, path)


def _loader_bytes(stored: StoredStep, other: BoundObject, rank: int) -> bytes:
    source = stored.source
    if other.file:
        path = _loader_file(other, rank)
        return source.read(path, 0, source.stat(path).size_bytes)
    blob: BlobRef = stored.index(other.unit).values[*other.path, str(rank)]
    return source.read(blob.path, blob.start, blob.stop)


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
        path: KeyPath = ("rng", str(rank))
        found = stored.value("", path) if stored.has_value("", path) else {}
    else:
        file = names.random_states_file(rank)
        found = stored.file(file) if stored.has_file(file) else {}
    if not found and bound.rank == 0:
        logger.warning("the step holds no states of random number generators: they go on as is")
    return dict(found)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def tensor_pieces(bound: BoundState) -> list[Piece]:
    """Returns the pieces of models and optimizers, which are filled in place.

    Left out are tensors among hyperparameters, because groups may have another order on disk,
    and those of other objects, which get them through `load_state_dict`.
    """
    groups = [(o.unit, (*o.path, "param_groups")) for o in bound.optimizers]
    objects = [(o.unit, o.path) for o in bound.others]
    return [piece for piece in bound.pieces() if not _is_below(piece, [*groups, *objects])]


def _is_below(piece: Piece, starts: Iterable[tuple[str, KeyPath]]) -> bool:
    return any(
        piece.unit == unit and piece.key_path[: len(start)] == start for unit, start in starts
    )
