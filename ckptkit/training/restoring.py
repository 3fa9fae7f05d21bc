"""Everything that is no tensor of a model: hyperparameters, schedulers, objects, random numbers.

Values are first read, all of them, and put in place only when every rank has read its own: so a
damaged file leaves the objects as they were.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import KeyPath
from ckptkit.training import names, rng
from ckptkit.training.dtensors import DTensor
from ckptkit.training.extra_state import without_extra
from ckptkit.training.loaders import loader_changes
from ckptkit.training.loading import first_few
from ckptkit.training.materialising import Slots, stored_values
from ckptkit.training.objects_in_units import Place, put, unflattened, whole_tensors
from ckptkit.training.pieces import Piece
from ckptkit.training.saved_entries import shown_name
from ckptkit.training.slots import Slot
from ckptkit.training.state import BoundObject, BoundOptimizer, BoundState
from ckptkit.training.stored_step import StoredStep

logger = logging.getLogger(__name__)

Apply = Callable[[], object]
_PARAMS = "params"


def group_changes(
    stored: StoredStep,
    bound: BoundOptimizer,
    slots: Slots,
    groups: Sequence[Mapping[str, Any]],
) -> Iterator[Apply]:
    """Reads the hyperparameters and the plain state values of an optimizer.

    Groups are recognised by the names of their parameters, so that their order may differ.

    Args:
        stored: The step.
        bound: The optimizer.
        slots: What its parameters hold on this rank.
        groups: What `stored_groups` returned.

    Yields:
        What puts them in place.

    Raises:
        ResumeError: If a group has no counterpart in the checkpoint.
    """
    optimizer = bound.optimizer
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


def _no_group(number: int, own: frozenset[str], groups: Sequence[Mapping[str, Any]]) -> str:
    nearest = max((set(g[_PARAMS]) for g in groups), key=lambda g: len(g & own), default=set())
    differing = sorted(own ^ nearest)
    return (
        f"no group of the checkpoint's {len(groups):,} has the {len(own):,} parameters of group"
        f" {number}; the nearest differs in {first_few(differing)}"
    )


def stored_groups(stored: StoredStep, bound: BoundOptimizer) -> list[dict[str, Any]]:
    """Returns the hyperparameters of an optimizer's groups, and the names of their parameters.

    Raises:
        ResumeError: If they hold more than plain values.
        InputError: If they are damaged.
    """
    start = (*bound.path, "param_groups")
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for rest, value in stored.values(bound.unit, start):
        if not rest:  # torch before 2.4 stores all groups as one value
            return [dict(group) for group in value]
        put(groups[int(rest[0])], rest[1:], value)
    for rest, tensor in whole_tensors(stored, bound.unit, start):
        put(groups[int(rest[0])], rest[1:], tensor)
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
    nested = _nested_tensors(stored, bound)
    depth = len(bound.path) + 2
    for parameter in _parameters(bound.optimizer):
        for slot in slots[id(parameter)][:1]:
            for path in values.get(slot.fqn, ()):
                value = stored.value(bound.unit, path)
                yield lambda p=parameter, rest=path[depth:], value=value: put(  # type: ignore[misc]
                    state[p], rest, value
                )
            for rest, tensor in nested.get(slot.fqn, {}).items():
                _check_placeable(parameter, slot, rest)
                value = tensor.to(parameter.device)
                yield lambda p=parameter, rest=rest, value=value: put(state[p], rest, value)  # type: ignore[misc]


def _nested_tensors(
    stored: StoredStep, bound: BoundOptimizer
) -> dict[str, dict[KeyPath, torch.Tensor]]:
    """Reads tensors in lists and mappings, as LBFGS keeps them, of each parameter's state."""
    found: dict[str, dict[KeyPath, torch.Tensor]] = defaultdict(dict)
    start = (*bound.path, "state")
    index = stored.index(bound.unit)
    flat = frozenset(
        entry.key_path
        for entry in index.tensors.values()
        if len(entry.key_path) <= len(start) + 2  # the parameter, and a name
    )
    for rest, tensor in whole_tensors(stored, bound.unit, start, flat):
        found[str(rest[0])][rest[1:]] = tensor
    return found


def _check_placeable(parameter: torch.Tensor, slot: Slot, rest: KeyPath) -> None:
    if isinstance(parameter, DTensor) or not slot.whole:
        raise ResumeError(
            f"the optimizer keeps tensors in {rest[0]!r}, whose place on each rank is not known",
            where=slot.fqn,
            hint="resume without sharding, or use an optimizer whose state has the shape of the"
            " parameters",
        )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group[_PARAMS]


def object_changes(
    stored: StoredStep, bound: BoundState, alike: Mapping[str, bool]
) -> Iterator[Apply]:
    """Reads schedulers, scalers, dataloaders and all other objects.

    Args:
        stored: The step.
        bound: The state.
        alike: What `loaders_alike` returned to rank 0.

    Yields:
        What puts each in place.

    Raises:
        ResumeError: If one was not saved, or holds more than plain values.
    """
    for other in bound.others:
        if other.kind == "dataloader":
            yield from loader_changes(stored, bound, other, alike)
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
    place = Place(bound.unit, bound.path, shown_name(bound.key, bound.position))
    saved = stored.entry(bound.key, bound.position) is not None
    return unflattened(stored, place, bound.state(), saved=saved)


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
    and those of other objects and of modules' extra states, which get them through
    `load_state_dict` and `set_extra_state`.
    """
    groups = [(o.unit, (*o.path, "param_groups")) for o in bound.optimizers]
    objects = [(o.unit, o.path) for o in bound.others]
    pieces = [piece for piece in bound.pieces() if not _is_below(piece, [*groups, *objects])]
    for model in bound.models:
        pieces = without_extra(pieces, model)
    return pieces


def _is_below(piece: Piece, starts: Iterable[tuple[str, KeyPath]]) -> bool:
    return any(
        piece.unit == unit and piece.key_path[: len(start)] == start for unit, start in starts
    )
