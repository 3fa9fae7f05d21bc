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
from ckptkit.training.bound import shown_name
from ckptkit.training.dtensors import Copies, DTensor
from ckptkit.training.extra_state import without_extra
from ckptkit.training.loaders import loader_changes
from ckptkit.training.loading import first_few
from ckptkit.training.materialising import Slots, has_state
from ckptkit.training.objects_in_units import (
    Place,
    put,
    read_tensors,
    unflattened,
    whole_tensors,
)
from ckptkit.training.optimizer_keys import GROUPS, STATE, below
from ckptkit.training.optimizer_memory import composed_places, state_values
from ckptkit.training.pieces import Piece
from ckptkit.training.slots import Slot
from ckptkit.training.state import BoundObject, BoundOptimizer, BoundState
from ckptkit.training.stored_step import StoredStep

logger = logging.getLogger(__name__)

Apply = Callable[[], object]
_PARAMS = "params"


def group_changes(
    bound: BoundOptimizer, slots: Slots, groups: Sequence[Mapping[str, Any]], world: Copies
) -> Iterator[Apply]:
    """Finds the hyperparameters of an optimizer's groups.

    Groups are recognised by the names of their parameters, so that their order may differ. A
    stage of a pipeline has a part of a group, or one of its own of which other stages have more.

    Args:
        bound: The optimizer.
        slots: What its parameters hold on this rank.
        groups: What `stored_groups` returned.
        world: The number of ranks, and this one.

    Yields:
        What puts them in place.

    Raises:
        ResumeError: If a group has no counterpart in the checkpoint.
    """
    of_names = {name: group for group in groups for name in group[_PARAMS]}
    for number, group in enumerate(bound.optimizer.param_groups):
        own = [slot for p in group[_PARAMS] for slot in slots[id(p)]]
        staged = any(slot.values.count < world.number for slot in own)
        names = frozenset(slot.fqn for slot in own)
        found = _group_of(names, of_names, staged=staged)
        if found is None:
            raise ResumeError(
                _no_group(number, names, groups),
                where=bound.key,
                hint="build the optimizer with the parameter groups that it was saved with",
            )
        yield lambda group=group, found=found: _set_group(group, found)  # type: ignore[misc]


def _group_of(
    own: frozenset[str], of_names: Mapping[str, Mapping[str, Any]], *, staged: bool
) -> Mapping[str, Any] | None:
    """Returns the hyperparameters that the parameters of a group were saved with.

    Groups of one parameter, as flattened ones are, make up a group if they are alike.
    """
    if not own:
        return {}
    if not own <= of_names.keys():
        return None
    found = list({id(of_names[name]): of_names[name] for name in sorted(own)}.values())
    saved = frozenset(name for group in found for name in group[_PARAMS])
    if saved != own and not staged:
        return None
    single = all(len(group[_PARAMS]) == 1 for group in found)
    alike = single and all(_are_alike(group, found[0]) for group in found)
    return found[0] if len(found) == 1 or alike else None


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        _are_equal(value, other[key]) for key, value in one.items() if key != _PARAMS
    )


def _are_equal(one: Any, other: Any) -> bool:
    dtype = next((side.dtype for side in (one, other) if isinstance(side, torch.Tensor)), None)
    if dtype is None:
        return bool(one == other)
    # The dtype of a number alone would be the default dtype of the process.
    return torch.as_tensor(one, dtype=dtype).equal(torch.as_tensor(other, dtype=dtype))


def _no_group(number: int, own: frozenset[str], groups: Sequence[Mapping[str, Any]]) -> str:
    if groups and all(len(group[_PARAMS]) == 1 for group in groups):
        saved = {name for group in groups for name in group[_PARAMS]}
        missing = sorted(own - saved)
        differ = "were saved with different hyperparameters"
        what = f"are not in the checkpoint: {first_few(missing)}" if missing else differ
        return f"the {len(own):,} parameters of group {number} {what}"
    nearest = max((set(g[_PARAMS]) for g in groups), key=lambda g: len(g & own), default=set())
    differing = sorted(own ^ nearest)
    return (
        f"no group of the checkpoint's {len(groups):,} has the {len(own):,} parameters of group"
        f" {number}; the nearest differs in {first_few(differing)}"
    )


def stored_groups(stored: StoredStep, bound: BoundOptimizer, slots: Slots) -> list[dict[str, Any]]:
    """Returns the hyperparameters of an optimizer's groups, and the names of their parameters.

    Of flattened ones, which are as many as there are parameters, those of this rank are read,
    each as a group of one.

    Args:
        stored: The step.
        bound: The optimizer.
        slots: What its parameters hold on this rank.

    Raises:
        ResumeError: If they hold more than plain values.
        InputError: If they are damaged.
    """
    index = stored.index(bound.unit)
    own = {slot.fqn for p in _parameters(bound.optimizer) for slot in slots[id(p)]}
    groups: dict[str | int, dict[str, Any]] = defaultdict(dict)
    for rest, path in below(index.values, bound.path, GROUPS):
        if not rest:  # torch before 2.4 stores all groups as one value
            return [dict(group) for group in stored.value(bound.unit, path)]
        if isinstance(rest[0], int) or rest[0] in own:
            put(groups[rest[0]], rest[1:], stored.value(bound.unit, path))
    keys = (entry.key_path for entry in index.tensors.values())
    tensors = {path: rest for rest, path in below(keys, bound.path, GROUPS)}
    wanted = [path for path, rest in tensors.items() if isinstance(rest[0], int) or rest[0] in own]
    for path, tensor in read_tensors(stored, bound.unit, wanted):
        put(groups[tensors[path][0]], tensors[path][1:], tensor)
    for name, group in groups.items():
        if isinstance(name, str):
            group[_PARAMS] = [name]
    return [groups[key] for key in sorted(groups, key=str) if _PARAMS in groups[key]]


def _set_group(group: MutableMapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name == _PARAMS:
            continue
        live = group.get(name)
        if isinstance(live, torch.Tensor):
            # Of a number the default dtype would keep fewer digits than the live tensor has.
            live.copy_(torch.as_tensor(value, dtype=live.dtype))
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and name in group:
            group[name] = value.item()
        else:
            group[name] = value


def value_changes(
    stored: StoredStep, bound: BoundOptimizer, slots: Slots, world: Copies
) -> Iterator[Apply]:
    """Reads what an optimizer's state holds beside the tensors that are filled in place.

    Args:
        stored: The step.
        bound: The optimizer.
        slots: What its parameters hold on this rank.
        world: The number of ranks, and this one.

    Yields:
        What puts them in place.

    Raises:
        ResumeError: If a tensor's place on this rank cannot be told.
    """
    state = bound.optimizer.state
    values = state_values(stored.index(bound.unit), bound.path, world.own)
    nested = _nested_tensors(stored, bound)
    for parameter in _parameters(bound.optimizer):
        own = slots[id(parameter)]
        for slot in own[:1] if has_state(parameter, own) else ():
            for rest, path in values.get(slot.fqn, ()):
                value = stored.value(bound.unit, path)
                yield lambda p=parameter, rest=rest, value=value: put(state[p], rest, value)  # type: ignore[misc]
            for rest, tensor in nested.get(slot.fqn, {}).items():
                _check_placeable(parameter, slot, rest)
                value = tensor.to(parameter.device)
                yield lambda p=parameter, rest=rest, value=value: put(state[p], rest, value)  # type: ignore[misc]


def unbound_changes(
    stored: StoredStep, bound: BoundOptimizer, groups: Sequence[Mapping[str, Any]]
) -> Iterator[Apply]:
    """Reads what an optimizer keeps beside the states of its parameters, under names of its own.

    Args:
        stored: The step.
        bound: The optimizer.
        groups: What `stored_groups` returned.

    Yields:
        What puts it in place.

    Raises:
        ResumeError: If it holds more than plain values.
        InputError: If it is damaged.
    """
    index, start = stored.index(bound.unit), (*bound.path, STATE)
    of_parameters = {name for group in groups for name in group[_PARAMS]}
    # Of flattened groups, those of other ranks' parameters were not read.
    below_groups = (rest[:1] for rest, _ in below(index.values, bound.path, GROUPS))
    of_parameters |= {name for key in below_groups for name in key if isinstance(name, str)}

    def is_unbound(path: KeyPath) -> bool:
        inside = len(path) > len(start) and path[: len(start)] == start
        return inside and str(path[len(start)]) not in of_parameters

    found = [(path, stored.value(bound.unit, path)) for path in index.values if is_unbound(path)]
    tensors = [e.key_path for e in index.tensors.values() if is_unbound(e.key_path)]
    found += read_tensors(stored, bound.unit, tensors)
    for path, value in found:
        rest = path[len(start) :]
        yield lambda rest=rest, value=value: _put_unbound(bound.optimizer.state, rest, value)  # type: ignore[misc]


def _put_unbound(state: MutableMapping[Any, Any], rest: KeyPath, value: Any) -> None:
    names = {str(key): key for key in state if not isinstance(key, torch.Tensor)}
    key = names.get(str(rest[0]), rest[0])
    if len(rest) > 1:
        inner: Any = [] if isinstance(rest[1], int) else {}
        put(state[key] if key in state else state.setdefault(key, inner), rest[1:], value)
    elif not isinstance(state.get(key), torch.Tensor):  # or it has been filled in place
        state[key] = value


def _nested_tensors(
    stored: StoredStep, bound: BoundOptimizer
) -> dict[str, dict[KeyPath, torch.Tensor]]:
    """Reads tensors in lists and mappings, as LBFGS keeps them, of each parameter's state."""
    found: dict[str, dict[KeyPath, torch.Tensor]] = defaultdict(dict)
    start = (*bound.path, STATE)
    filled = {(*start, name, *names) for name, names in composed_places(stored, bound)}
    depth = len(start)
    in_place = frozenset(
        path
        for path in (entry.key_path for entry in stored.index(bound.unit).tensors.values())
        # The parameter, and a name; or that of a composed tensor, and names in it.
        if len(path) <= depth + 2
        or any(path[:end] in filled for end in range(depth + 2, len(path)))
    )
    for rest, tensor in whole_tensors(stored, bound.unit, start, in_place):
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

    Left out are tensors among hyperparameters, because groups may have another order on disk,
    and those of other objects and of modules' extra states, which get them through
    `load_state_dict` and `set_extra_state`.

    Args:
        bound: The state.
        fresh: Optimizers that are left out too.
    """
    groups = [(o.unit, (*o.path, GROUPS)) for o in bound.optimizers]
    apart = [(o.unit, o.path) for o in bound.others] + [(o.unit, o.path) for o in fresh]
    pieces = [piece for piece in bound.pieces() if not _is_below(piece, [*groups, *apart])]
    for model in bound.models:
        pieces = without_extra(pieces, model)
    return pieces


def _is_below(piece: Piece, starts: Iterable[tuple[str, KeyPath]]) -> bool:
    return any(
        piece.unit == unit and piece.key_path[: len(start)] == start for unit, start in starts
    )
