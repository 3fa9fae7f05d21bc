"""What this rank holds of an optimizer's state, by parameter name, without communicating.

torch's `get_optimizer_state_dict` gathers for FSDP1, and steps an optimizer that has no state
yet; here neither happens, and the keys are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.training import rank_bound
from ckptkit.training.dtensors import (
    Copies,
    DTensor,
    Meshes,
    inner_tensors,
    is_composed,
    local_part,
)
from ckptkit.training.flatten import flatten
from ckptkit.training.layout import storable_dtype
from ckptkit.training.modules import ModelView
from ckptkit.training.pieces import ObjectValue, Piece, Replicas
from ckptkit.training.rank_bound import Held
from ckptkit.training.serialising import is_plain, serialised
from ckptkit.training.slots import Slot, whole_slot
from ckptkit.training.stamps import Stamp, apart

_STATE_HINT = "use an optimizer that keeps tensors and plain values"


class OptimizerWalk:
    """Walks one optimizer, again for each save; what does not change in between is kept."""

    def __init__(self, optimizer: Optimizer, unit: str, path: KeyPath, *, world: Copies) -> None:
        """Notes the optimizer.

        Args:
            optimizer: Of parameters in one or more models.
            unit: The DCP directory.
            path: What comes before `state` and `param_groups` in the key paths.
            world: The number of ranks of the job, and this one.
        """
        self._optimizer = optimizer
        self._place = _Place(unit, path, world)
        self._kept = _Kept(_States((), (), ()), ())

    def look(
        self, views: Sequence[ModelView], *, keep: bool = False
    ) -> tuple[list[Piece], list[ObjectValue]]:
        """Returns the tensors on this rank, and the objects that it has to write.

        Hyperparameters lie under `param_groups` and the number of their group. Where parameters
        lie on a part of the ranks only, as those of a pipeline's stage do, they lie under
        `param_groups` and each parameter's name instead, as torch's `get_optimizer_state_dict`
        has them with `flatten_optimizer_state_dict=True`: so the stages, which all have groups of
        their own, write different keys.

        Args:
            views: The models in which its parameters are.
            keep: Whether to keep the pieces, and to return them again as long as all tensors
                stay where they are.

        Raises:
            UsageError: If a parameter belongs to none of the models, or two have the same name.
            UnsupportedError: If some state cannot be stored.
        """
        optimizer, walk = self._optimizer, _Walk(views, self._place)
        now = _Now.of(optimizer, views)
        if rank_bound.is_paged(optimizer):
            _wait_for_pages(now.values)
        kept = self._kept
        if not keep or not kept.still_holds(now):
            kept = _Kept(walk.take_states(optimizer), now.place)
            if keep and all(isinstance(value, torch.Tensor) for value in now.values):
                kept.stamp = Stamp.of(now.values, forget=kept.forget)
                self._kept = kept
        walk.pieces += kept.states.pieces
        walk.objects += kept.states.objects
        for index, group in enumerate(optimizer.param_groups):
            walk.take_group(index, group, kept.states.groups[index])
        walk.take_unbound(optimizer.state)
        for value in walk.objects:
            _check_storable(value)
        return walk.pieces, walk.objects


class _Place(NamedTuple):
    """Where the state of an optimizer lies in a step, and who writes it."""

    unit: str
    path: KeyPath
    world: Copies


class _Group(NamedTuple):
    """The names of a group's parameters, and which of the models they are in."""

    names: list[str]
    model: int


class _States(NamedTuple):
    """The states of all parameters on this rank, what says how they lie, and the groups."""

    pieces: tuple[Piece, ...]
    objects: tuple[ObjectValue, ...]
    groups: tuple[_Group, ...]


class _Now(NamedTuple):
    """What the pieces of an optimizer follow from.

    Attributes:
        place: The identities of the looks at the models and of the parameters, and the names of
            the values.
        values: Of the parameters' states, composed tensors taken apart.
    """

    place: tuple[Any, ...]
    values: list[Any]

    @classmethod
    def of(cls, optimizer: Optimizer, views: Sequence[ModelView]) -> _Now:
        # The parameters of a look that is still the same are still there.
        identities = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        names: list[str] = []
        values: list[Any] = []
        for state in optimizer.state.values():
            if isinstance(state, dict):
                names += state
                values += state.values()
            else:
                values.append(state)
        plain = [part for value in values for part in _parts_of(value)]
        return cls((tuple(map(weakref.ref, views)), identities, names), plain)


def _wait_for_pages(values: Sequence[object]) -> None:
    """Waits for the devices that work on tensors of paged optimizers (bitsandbytes).

    These look like tensors on the CPU, which are copied at once, but devices write to them.
    """
    paged = [value for value in values if getattr(value, "is_paged", False)]
    for device in {getattr(value, "page_deviceid", None) for value in paged}:
        torch.cuda.synchronize(device)


def _parts_of(value: object) -> Iterable[object]:
    if isinstance(value, torch.Tensor) and is_composed(value):
        return [inner for _, inner in inner_tensors(value)]
    return (value,)


@dataclass(slots=True, weakref_slot=True)
class _Kept:
    """The pieces of an optimizer, as long as the models and its tensors are the same."""

    states: _States
    place: tuple[Any, ...]
    stamp: Stamp | None = None

    def forget(self) -> None:
        """Lets go of the tensors' memory, as the optimizer has done."""
        self.states, self.stamp = _States((), (), ()), None

    def still_holds(self, now: _Now) -> bool:
        stamp = self.stamp
        return stamp is not None and self.place == now.place and stamp.still_holds(now.values)


class _Walk:
    """One walk over an optimizer."""

    def __init__(self, views: Sequence[ModelView], place: _Place) -> None:
        self.pieces: list[Piece] = []
        self.objects: list[ObjectValue] = []
        self._views = views
        self._unit, self._path, self._world = place
        self._seen: set[str] = set()

    def take_states(self, optimizer: Optimizer) -> _States:
        """Returns the tensors of all parameters' states, and takes what else is in them."""
        groups: list[_Group] = []
        held: list[tuple[Held, Meshes]] = []
        for group in optimizer.param_groups:
            names: list[str] = []
            model = 0
            for parameter in group["params"]:
                model, slots = self._find(parameter)
                names += [slot.fqn for slot in slots]
                leaves = list(flatten(optimizer.state.get(parameter, {})))
                held.append((Held(slots, leaves), self._views[model].meshes))
            groups.append(_Group(names, model))
        all_held = [one for one, _ in held]
        bound = rank_bound.is_rank_bound(optimizer, all_held)
        pieces: list[Piece] = []
        objects: list[ObjectValue] = []
        if bound:
            objects += rank_bound.layouts_of(all_held, self._unit, self._path, self._world)
        for one, meshes in held:
            pieces += self._states_of(one, meshes, bound=bound)
            if not one.sharded:
                objects += rank_bound.composed_of(one, self._unit, self._path)
        for piece in pieces:
            storable_dtype(piece)
        return _States(tuple(pieces), tuple(objects), tuple(groups))

    def take_group(self, index: int, group: Mapping[str, Any], known: _Group) -> None:
        view, path = self._views[known.model], (*self._path, "param_groups")
        if view.values.count < self._world.number:
            for name in known.names:
                for key, value in group.items():
                    if key != "params":
                        self._take_shared((*path, name, key), value, view)
            return
        for key, value in group.items():
            shared = known.names if key == "params" else value
            self._take_shared((*path, index, key), shared, view)

    def take_unbound(self, state: Mapping[Any, Any]) -> None:
        """Takes what an optimizer keeps beside the states of its parameters: that of rank 0."""
        for key, value in state.items():
            if not isinstance(key, torch.Tensor):
                view = replace(self._views[0], values=Replicas(*self._world, spread=False))
                self._take_shared((*self._path, "state", str(key)), value, view)

    def _find(self, parameter: torch.Tensor) -> tuple[int, tuple[Slot, ...]]:
        for number, view in enumerate(self._views):
            slots = view.slots.get(id(parameter))
            if slots is not None:
                self._note([slot.fqn for slot in slots])
                return number, slots
        raise UsageError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no"
            " model in the state",
            where=".".join(map(str, self._path)),
            hint="put the model that it belongs to into the mapping, and make the optimizer"
            " after the model was wrapped",
        )

    def _note(self, names: Sequence[str]) -> None:
        twice = self._seen.intersection(names)
        if twice:
            raise UsageError(
                f"the optimizer has two parameters called {min(twice)!r}",
                where=".".join(map(str, self._path)),
                hint="use an optimizer per model",
            )
        self._seen.update(names)

    def _states_of(self, held: Held, meshes: Meshes, *, bound: bool) -> Iterator[Piece]:
        if bound and held.sharded:
            self.objects += rank_bound.objects_of(held, self._unit, self._path, self._world.own)
            return rank_bound.pieces_of(held, self._unit, self._path, self._world.own)
        self._take_values(held)
        return self._placed_pieces(held, meshes)

    def _placed_pieces(self, held: Held, meshes: Meshes) -> Iterator[Piece]:
        for slot in held.slots:
            start: KeyPath = (*self._path, "state", slot.fqn)
            for names, value in held.leaves:
                if isinstance(value, torch.Tensor):
                    yield from self._pieces_of(value, slot, meshes, (*start, *names))

    def _pieces_of(
        self, value: torch.Tensor, slot: Slot, meshes: Meshes, path: KeyPath
    ) -> Iterator[Piece]:
        if not is_composed(value):
            placed = _slot_of_state(value, slot, meshes)
            yield from placed.pieces(self._unit, path, apart(value))
            return
        for rest, inner in inner_tensors(value):
            part = whole_slot(slot.fqn, inner, slot.replicas, slot.values)
            yield from part.pieces(self._unit, (*path, *rest), apart(inner))

    def _take_values(self, held: Held) -> None:
        for slot in held.slots:
            for names, value in held.leaves:
                if slot.values.own == 0 and not isinstance(value, torch.Tensor):
                    path = (*self._path, "state", slot.fqn, *names)
                    self.objects.append(ObjectValue(self._unit, path, value))

    def _take_shared(self, path: KeyPath, value: object, view: ModelView) -> None:
        for names, leaf in flatten(value, path):
            if isinstance(leaf, torch.Tensor):
                pieces = list(_shared_pieces(self._unit, names, leaf, view))
                list(map(storable_dtype, pieces))
                self.pieces += pieces
            elif view.values.own == 0:
                self.objects.append(ObjectValue(self._unit, names, leaf))


def _check_storable(item: ObjectValue) -> None:
    if is_plain(item.value):
        return
    try:
        serialised(item.value, ".".join(map(str, item.key_path)))
    except UsageError as error:  # which blames the user's own objects
        raise UnsupportedError(error.message, where=error.where, hint=_STATE_HINT) from error


def _shared_pieces(
    unit: str, path: KeyPath, tensor: torch.Tensor, view: ModelView
) -> Iterator[Piece]:
    name = ".".join(map(str, path))
    if isinstance(tensor, DTensor):
        slot = view.meshes.slot(name, tensor, view.values)
    else:
        slot = whole_slot(name, tensor, view.values, view.values)
    return slot.pieces(unit, path, local_part(tensor))


def _slot_of_state(tensor: torch.Tensor, slot: Slot, meshes: Meshes) -> Slot:
    """Returns where a plain state tensor or DTensor belongs, which is known to have a place."""
    if isinstance(tensor, DTensor):
        return meshes.slot(slot.fqn, tensor, slot.values)
    if tensor.dim() and slot.follows(tensor):
        return slot
    if tensor.numel() == 1:
        return whole_slot(slot.fqn, tensor, slot.values, slot.values)
    return whole_slot(slot.fqn, tensor, slot.replicas, slot.values)
