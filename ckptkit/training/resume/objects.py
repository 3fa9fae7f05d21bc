"""Restores nested values whose leaves are in a DCP directory."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Box, KeyPath, TensorEntry
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.resume.tensors import load_pieces
from ckptkit.training.state.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.state.objects import flatten
from ckptkit.training.state.pieces import Piece, Replicas
from ckptkit.training.state.structures import Nodes, adapt, leaf_paths, put_together


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
        value = put_together(nodes, leaves, where=f"{stored.source.location}, {place.name}")
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
    pieces = [_whole_piece(unit, entry) for entry in entries]
    load_pieces(index, stored.source, pieces, threads=1)
    for piece in pieces:
        yield piece.key_path, piece.local


def _whole_piece(unit: str, entry: TensorEntry) -> Piece:
    local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
    places = (Box((0,) * len(entry.shape), entry.shape),) if entry.elements else ()
    return Piece(unit, entry.key_path, entry.shape, places, local)


def _pieces_of(place: ValueLocation, tensors: Mapping[KeyPath, DTensor]) -> Iterator[Piece]:
    meshes = Meshes(Copies())
    meshes.learn(tensors.values())
    for path, tensor in tensors.items():
        key = (*place.path, *path)
        slot = meshes.slot(".".join(map(str, key)), tensor, Replicas())
        yield from slot.pieces(place.unit, key, local_part(tensor))
