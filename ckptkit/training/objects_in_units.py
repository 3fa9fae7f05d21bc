"""Nested values that lie in a DCP directory leaf by leaf, put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Box, KeyPath, TensorEntry
from ckptkit.training.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.flatten import flatten
from ckptkit.training.loading import load_pieces
from ckptkit.training.pieces import Piece, Replicas
from ckptkit.training.stored_step import StoredStep


@dataclass(frozen=True, slots=True)
class Place:
    """Where a nested value lies.

    Attributes:
        unit: The DCP directory.
        path: What its key paths begin with.
        name: What it is called in messages.
    """

    unit: str
    path: KeyPath
    name: str


def unflattened(stored: StoredStep, place: Place, live: Any, *, saved: bool) -> Any:
    """Puts a value together from the keys of a DCP directory.

    Sharded tensors are the live value's own, filled in place; what DCP does not store (empty
    mappings) is taken from it.

    Args:
        stored: The step.
        place: Of the value.
        live: What is there now in its stead.
        saved: Whether it is known to have been saved, so that it may have no leaves.

    Raises:
        ResumeError: If nothing was saved there.
        InputError: If it is damaged.
    """
    leaves = dict(flatten(live, place.path))
    own = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, DTensor)}
    state: Any = [] if isinstance(live, list) else _empty_mappings(live)
    _fill_sharded(stored, place.unit, own)
    found: list[tuple[KeyPath, Any]] = [(path[len(place.path) :], own[path]) for path in own]
    found += stored.values(place.unit, place.path)
    found += whole_tensors(stored, place.unit, place.path, frozenset(own))
    if not found and leaves and not saved:
        raise ResumeError(
            "was not saved with this step",
            where=place.name,
            hint="resume without it, or leave it out of the state",
        )
    for rest, value in sorted(found, key=lambda item: _order(item[0])):
        if not rest:
            return value
        put(state, _own_path(live, rest), value)
    return state


def put(target: Any, path: KeyPath, value: Any) -> None:
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


def whole_tensors(
    stored: StoredStep, unit: str, start: KeyPath, skip: frozenset[KeyPath] = frozenset()
) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    """Yields the tensors below a key path, each read as a whole."""
    paths = [entry.key_path for entry in stored.index(unit).tensors.values()]
    wanted = [path for path in paths if path[: len(start)] == start and path not in skip]
    for path, tensor in read_tensors(stored, unit, wanted):
        yield path[len(start) :], tensor


def read_tensors(
    stored: StoredStep, unit: str, paths: Iterable[KeyPath]
) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    """Yields the tensors under some key paths, each read as a whole."""
    index, wanted = stored.index(unit), frozenset(paths)
    entries = [entry for entry in index.tensors.values() if entry.key_path in wanted]
    pieces = [_whole_piece(unit, entry) for entry in entries]
    load_pieces(index, stored.source, pieces, threads=1)
    for piece in pieces:
        yield piece.key_path, piece.local


def _whole_piece(unit: str, entry: TensorEntry) -> Piece:
    local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
    places = (Box((0,) * len(entry.shape), entry.shape),) if entry.elements else ()
    return Piece(unit, entry.key_path, entry.shape, places, local)


def _own_path(live: Any, path: KeyPath) -> KeyPath:
    """Returns the path with the object's own keys, as far as it has them; DCP has texts."""
    found: list[Any] = []
    for name in path:
        own = _own_key(live, name) if isinstance(live, Mapping) else name
        live = live.get(own) if isinstance(live, Mapping) else None
        found.append(own)
    return tuple(found)


def _fill_sharded(stored: StoredStep, unit: str, tensors: Mapping[KeyPath, DTensor]) -> None:
    meshes = Meshes(Copies())
    meshes.learn(tensors.values())
    pieces = [
        piece
        for path, tensor in tensors.items()
        for piece in meshes.slot(".".join(map(str, path)), tensor, Replicas()).pieces(
            unit, path, local_part(tensor)
        )
    ]
    if pieces:
        load_pieces(stored.index(unit), stored.source, pieces)


def _order(path: KeyPath) -> list[tuple[bool, int, str]]:
    return [(isinstance(p, str), p if isinstance(p, int) else 0, str(p)) for p in path]


def _empty_mappings(value: Any) -> dict[Any, Any]:
    return {
        key: _empty_mappings(inner)
        for key, inner in (value.items() if isinstance(value, Mapping) else ())
        if isinstance(inner, Mapping)
    }
