"""Checks that an optimizer on this rank fits the state in a step, and allocates it."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ckptkit.core.errors import FormatError, ResumeError
from ckptkit.core.index import KeyPath, TensorEntry
from ckptkit.core.text import list_first
from ckptkit.training.resume.materialise import Slots, allocate_state, step_without_effect
from ckptkit.training.resume.restore import set_nested
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state import rank_bound
from ckptkit.training.state.bound import BoundOptimizer, class_of, unwrap_optimizer
from ckptkit.training.state.dtensors import Copies, DTensor, make_dtensor, unwrap_dtensor
from ckptkit.training.state.optimizers import STATE, below
from ckptkit.training.state.pieces import ShardLayout
from ckptkit.training.state.structures import leaves_by_key

logger = logging.getLogger(__name__)

Kinds = Sequence[tuple[Sequence[str | int], str]]
"""The tensors in a parameter's state: the place of each in it, and its class."""


RESET_HINT = (
    "resume with the ranks, the sharding and the optimizer that it was saved with, or start the"
    " optimizer anew with Checkpointer(..., unfit_optimizer='reset')"
)
LOST_HINT = (
    "resume from an older step, or start the optimizer anew with"
    " Checkpointer(..., unfit_optimizer='reset')"
)
_HINT = "resume with the class of optimizer that was saved, or without the optimizer"
# Ways to compute the same, and what schedulers and newer versions of torch add to every group.
_NEUTRAL = frozenset(
    (
        "params",
        "param_names",
        "initial_lr",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
        "decoupled_weight_decay",
    )
)
_FLAGS = (bool, type(None))
_DECOUPLED = "decoupled_weight_decay"  # the flag by which AdamW differs from Adam since torch 2.7


def check_optimizer(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], *, made_by: str, where: str
) -> None:
    """Compares an optimizer's class and the names of its hyperparameters with the stored ones.

    `made_by` is the class that was saved; empty where that is not known.
    """
    own = class_of(optimizer)
    if made_by == own or not groups:
        return
    stored = {name for group in groups for name in group}
    # Wrappers may have none. Newer versions of torch add flags, which an older one's steps lack.
    defaults: Mapping[str, Any] = getattr(unwrap_optimizer(optimizer), "defaults", {})
    needed = {name for name, value in defaults.items() if type(value) not in _FLAGS}
    lacking = sorted(needed - stored - _NEUTRAL)
    if made_by:
        live = {name for group in optimizer.param_groups for name in group}
        lacking += sorted(stored - live - _NEUTRAL)
    if not lacking and _DECOUPLED in defaults:
        decoupled = {group.get(_DECOUPLED) for group in groups} - {None}
        lacking = [_DECOUPLED] * (decoupled == {not defaults[_DECOUPLED]})
    if lacking:
        raise ResumeError(
            f"the state of another optimizer{made_by and f', {made_by},'} was found against {own};"
            f" they differ in {list_first(lacking)}",
            where=where,
            hint=_HINT,
        )
    if made_by:
        logger.warning("%s: it was saved as %s and is resumed as %s", where, made_by, own)


def check_state(stored: StoredStep, bound: BoundOptimizer, slots: Slots, world: Copies) -> None:
    """Refuses state that this rank could not continue from."""
    live = {name: slots[id(p)] for name, p in _parameters(bound, slots).items()}
    layout = _layout(stored, bound, live.keys(), world)
    if layout is None:
        # State of whole parameters would have to be quantised part by part.
        whole = _names_with_state(stored, bound) & live.keys()
        if rank_bound.is_low_bit(bound.optimizer) and any(_is_sharded(live[n]) for n in whole):
            raise ResumeError(
                f"{class_of(bound.optimizer)} quantises the state of each rank's own part, and the"
                " step holds a state that was made without sharding, or by another optimizer",
                where=bound.name,
                hint=RESET_HINT,
            )
        return
    keys = [entry.key_path for entry in stored.index(bound.unit).tensors.values()]
    on_ranks = {str(rest[1]) for rest, _ in below(keys, bound.path, rank_bound.STATES)}
    elsewhere = on_ranks - layout.keys()
    moved = [name for name in elsewhere & live.keys() if any(s.elements for s in live[name])]
    for name, saved in layout.items():
        if not saved["kinds"]:
            continue
        here = live.get(name)
        part = {} if here is None else rank_bound.part_of(here)
        if here is None or any(saved.get(key) != value for key, value in part.items()):
            moved.append(name)
    if moved:
        raise _elsewhere(bound, f"rank {world.own} holds another part of {min(moved)!r} now")


def allocate(stored: StoredStep, bound: BoundOptimizer, slots: Slots, world: Copies) -> None:
    """Gives an optimizer the state tensors that a step has for it, without content."""
    live, composed = _parameters(bound, slots), composed_kinds(stored, bound)
    states: MutableMapping[Any, Any] = bound.optimizer.state
    for name, parameter in live.items():
        nodes = stored.structure(bound.unit, (*bound.path, STATE, name))
        # Tensors get the names that they have in the step, from which all else comes.
        before = None if nodes is None else states.pop(parameter, None)
        if nodes is not None and isinstance(before, Mapping):
            paths = leaves_by_key(nodes, name)
            tensors = {key: before[key] for key in paths if torch.is_tensor(before.get(key))}
            states[parameter] = {paths[key][0]: tensor for key, tensor in tensors.items()}
    layout = _layout(stored, bound, live.keys(), world)
    own: dict[str, Kinds] = {name: held["kinds"] for name, held in (layout or {}).items()}
    placed = {
        (name, tuple(path)): (shape, placements)
        for name, held in (layout or {}).items()
        for path, shape, placements in held.get("placed", ())
    }
    kinds = [*composed.values(), *own.values()]
    # Tensors of classes of its own, or in memory of its own, are created by the optimizer.
    makable = {"Tensor", "DTensor"} if placed else {"Tensor"}
    has_own_classes = any(kind not in makable for of_parameter in kinds for _, kind in of_parameter)
    is_low_bit = kinds and rank_bound.is_low_bit(bound.optimizer)
    names = kinds or _names_with_state(stored, bound)
    if has_own_classes or is_low_bit or (names and rank_bound.is_paged(bound.optimizer)):
        wanted = [(name, path) for of in (composed, own) for name in of for path, _ in of[name]]
        step_without_effect(
            bound.optimizer,
            lambda: all(
                rank_bound.tensor_at(states.get(live[name], {}), tuple(path)) is not None
                for name, path in wanted
                if name in live
            ),
        )
    apart = {n for n, p in live.items() if layout is not None and _is_sharded(slots[id(p)])}
    index = stored.index(bound.unit)
    identities = {id(live[name]) for name in apart}
    allocate_state(bound.optimizer, slots, index, bound.path, leave=identities)
    entries = {entry.key_path: entry for entry in index.tensors.values()} if apart else {}
    start = (*bound.path, rank_bound.STATES, str(world.own))
    for name in apart:
        if own.get(name):
            saved = [(k, kind, entries.get((*start, name, *k))) for k, kind in own[name]]
            _fit_state(
                bound, live[name], saved, {k: v for (n, k), v in placed.items() if n == name}
            )
        else:
            states.pop(live[name], None)
    for name in composed.keys() & live.keys():
        _check_kinds(bound, states.get(live[name], {}), composed[name])


def composed_kinds(stored: StoredStep, bound: BoundOptimizer) -> dict[str, Kinds]:
    """Returns what the composed tensors in the state of whole parameters were, by parameter."""
    index = stored.index(bound.unit)
    return {
        ".".join(map(str, rest)): _parsed(stored, bound, path)
        for rest, path in below(index.values, bound.path, rank_bound.COMPOSED)
    }


def composed_places(stored: StoredStep, bound: BoundOptimizer) -> Iterator[tuple[str, KeyPath]]:
    """Yields parameters and the places of composed tensors in their state."""
    for name, kinds in composed_kinds(stored, bound).items():
        for names, _ in kinds:
            yield name, tuple(names)


def _parameters(bound: BoundOptimizer, slots: Slots) -> dict[str, torch.Tensor]:
    parameters = [p for group in bound.optimizer.param_groups for p in group["params"]]
    return {slots[id(p)][0].fqn: p for p in parameters}


def _is_sharded(slots: Sequence[ShardLayout]) -> bool:
    return any(slot.sharded for slot in slots)


def _layout(
    stored: StoredStep, bound: BoundOptimizer, live: Collection[str], world: Copies
) -> dict[str, Mapping[str, Any]] | None:
    """Returns what this rank held of each parameter when its state was saved, by name.

    It is None where no state is bound to ranks. Parameters of other optimizers that this rank had
    in the same place, as a pipeline's stages have them, are left out: they share none with this
    one.
    """
    keys = list(below(stored.index(bound.unit).values, bound.path, rank_bound.LAYOUTS))
    if not keys:
        return None
    size = _parsed(stored, bound, keys[0][1]).get("world_size")
    if size != world.number:
        raise _elsewhere(bound, f"{size} ranks saved it, and {world.number} resume")
    parameters: dict[str, Mapping[str, Any]] = {}
    for rest, path in keys:
        if rest[0] == str(world.own):
            held = _parsed(stored, bound, path)["parameters"]
            parameters |= {} if held.keys().isdisjoint(live) else held
    return parameters


def _parsed(stored: StoredStep, bound: BoundOptimizer, path: KeyPath) -> Any:
    try:
        return json.loads(stored.value(bound.unit, path))
    except (ValueError, TypeError) as error:
        where = ".".join(map(str, path))
        raise FormatError(f"does not say what a rank held: {error}", where=where) from error


def _names_with_state(stored: StoredStep, bound: BoundOptimizer) -> set[str]:
    """Returns the parameters whose state has the keys of whole parameters."""
    index = stored.index(bound.unit)
    keys = [entry.key_path for entry in index.tensors.values()]
    return {str(rest[0]) for rest, _ in below([*keys, *index.values], bound.path, STATE) if rest}


def _elsewhere(bound: BoundOptimizer, what: str) -> ResumeError:
    return ResumeError(
        f"the state of {class_of(bound.optimizer)} is quantised, or shaped, by the part of the"
        f" parameters that each rank holds, and goes back only to the same parts: {what}",
        where=bound.name,
        hint=RESET_HINT,
    )


def _fit_state(
    bound: BoundOptimizer,
    parameter: torch.Tensor,
    saved: Sequence[tuple[Sequence[str | int], str, TensorEntry | None]],
    placed: Mapping[KeyPath, tuple[Sequence[int], Sequence[str]]],
) -> None:
    """Gives a parameter's state the tensors that this rank has saved.

    `saved` has the place of each in the state, its class, and where its elements are; `placed`
    shape and placements of DTensors, which steps of older versions do not have.
    """
    state = bound.optimizer.state[parameter]
    for names, kind, entry in saved:
        path = tuple(names)
        if entry is None or rank_bound.tensor_at(state, path) is not None:
            continue
        dtype: torch.dtype = getattr(torch, entry.dtype.name)
        made: torch.Tensor | None = None
        if kind == "Tensor":
            made = torch.empty(entry.shape, dtype=dtype, device=parameter.device)
        elif kind == "DTensor" and isinstance(parameter, DTensor):
            as_parameter = parameter.shape, list(map(repr, parameter.placements))
            made = make_dtensor(parameter, *placed.get(path, as_parameter), dtype)
        if made is not None and unwrap_dtensor(made).shape == entry.shape:
            set_nested(state, path, made)
    _check_kinds(bound, state, [(names, kind) for names, kind, _ in saved])


def _check_kinds(bound: BoundOptimizer, state: Mapping[Any, Any], kinds: Kinds) -> None:
    for names, kind in kinds:
        tensor = rank_bound.tensor_at(state, tuple(names))
        here = None if tensor is None else rank_bound.kind_of(tensor)
        if here != kind:
            kept = f"a {here}" if here else "nothing"
            raise ResumeError(
                f"{class_of(bound.optimizer)} keeps {kept} as {'.'.join(map(str, names))!r} where"
                f" a {kind} was saved",
                where=bound.name,
                hint=RESET_HINT,
            )
