"""What this rank holds of an optimizer's state, by parameter name, without communicating.

torch's `get_optimizer_state_dict` gathers for FSDP1, and steps an optimizer that has no state
yet; here neither happens, and the keys are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.training.dtensors import DTensor, Meshes, local_part
from ckptkit.training.flatten import flatten
from ckptkit.training.modules import ModelView
from ckptkit.training.pieces import ObjectValue, Piece
from ckptkit.training.slots import Slot, whole_slot
from ckptkit.training.stamps import Stamp, apart


class OptimizerWalk:
    """Walks one optimizer, again for each save; what does not change in between is kept."""

    def __init__(self, optimizer: Optimizer, unit: str, path: KeyPath) -> None:
        """Notes the optimizer.

        Args:
            optimizer: Of parameters in one or more models.
            unit: The DCP directory.
            path: What comes before `state` and `param_groups` in the key paths.
        """
        self._optimizer = optimizer
        self._unit = unit
        self._path = path
        self._kept = _Kept(_States((), ()), ())

    def look(
        self, views: Sequence[ModelView], *, keep: bool = False
    ) -> tuple[list[Piece], list[ObjectValue]]:
        """Returns the tensors on this rank, and the objects that it has to write.

        Args:
            views: The models in which its parameters are.
            keep: Whether to keep the pieces, and to return them again as long as all tensors
                stay where they are.

        Raises:
            UsageError: If a parameter belongs to none of the models, or two have the same name.
            UnsupportedError: If some state cannot be placed in the full tensor.
        """
        optimizer, walk = self._optimizer, _Walk(views, self._unit, self._path)
        now = _Now.of(optimizer, views)
        kept = self._kept
        if not keep or not kept.still_holds(now):
            kept = _Kept(walk.take_states(optimizer), now.place)
            if keep and all(isinstance(value, torch.Tensor) for value in now.values):
                kept.stamp = Stamp.of(now.values, forget=kept.forget)
                self._kept = kept
        walk.pieces += kept.states.pieces
        for index, group in enumerate(optimizer.param_groups):
            walk.take_group(index, group, kept.states.groups[index])
        walk.take_unbound(optimizer.state)
        return walk.pieces, walk.objects

    def models_of(self, views: Sequence[ModelView]) -> list[ModelView]:
        """Returns the models that its parameters are in."""
        own = {id(parameter) for g in self._optimizer.param_groups for parameter in g["params"]}
        return [view for view in views if not own.isdisjoint(view.slots)]


class _Group(NamedTuple):
    """The names of a group's parameters, and which of the models they are in."""

    names: list[str]
    model: int


class _States(NamedTuple):
    """The states of all parameters on this rank, and their groups."""

    pieces: tuple[Piece, ...]
    groups: tuple[_Group, ...]


class _Now(NamedTuple):
    """What the pieces of an optimizer follow from.

    Attributes:
        place: The identities of the looks at the models and of the parameters, and the names of
            the values.
        values: Of the parameters' states.
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
        return cls((tuple(map(weakref.ref, views)), identities, names), values)


@dataclass(slots=True, weakref_slot=True)
class _Kept:
    """The pieces of an optimizer, as long as the models and its tensors are the same."""

    states: _States
    place: tuple[Any, ...]
    stamp: Stamp | None = None

    def forget(self) -> None:
        """Lets go of the tensors' memory, as the optimizer has done."""
        self.states, self.stamp = _States((), ()), None

    def still_holds(self, now: _Now) -> bool:
        stamp = self.stamp
        return stamp is not None and self.place == now.place and stamp.still_holds(now.values)


class _Walk:
    """One walk over an optimizer."""

    def __init__(self, views: Sequence[ModelView], unit: str, path: KeyPath) -> None:
        self.pieces: list[Piece] = []
        self.objects: list[ObjectValue] = []
        self._views = views
        self._unit = unit
        self._path = path
        self._seen: set[str] = set()

    def take_states(self, optimizer: Optimizer) -> _States:
        """Returns the tensors of all parameters' states, and takes what else is in them."""
        pieces: list[Piece] = []
        groups: list[_Group] = []
        for group in optimizer.param_groups:
            names: list[str] = []
            model = 0
            for parameter in group["params"]:
                model, slots = self._find(parameter)
                names += [slot.fqn for slot in slots]
                leaves = list(flatten(optimizer.state.get(parameter, {})))
                pieces += self._state_pieces(leaves, slots, self._views[model].meshes)
                self._take_values(leaves, slots)
            groups.append(_Group(names, model))
        return _States(tuple(pieces), tuple(groups))

    def take_group(self, index: int, group: Mapping[str, Any], known: _Group) -> None:
        path = (*self._path, "param_groups", index)
        for key, value in group.items():
            shared = known.names if key == "params" else value
            self._take_shared((*path, key), shared, self._views[known.model])

    def take_unbound(self, state: Mapping[Any, Any]) -> None:
        """Takes what an optimizer keeps beside the states of its parameters."""
        for key, value in state.items():
            if not isinstance(key, torch.Tensor):
                self._take_shared((*self._path, "state", str(key)), value, self._views[0])

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

    def _state_pieces(
        self, leaves: Sequence[tuple[KeyPath, object]], slots: Sequence[Slot], meshes: Meshes
    ) -> Iterator[Piece]:
        for slot in slots:
            start: KeyPath = (*self._path, "state", slot.fqn)
            for names, value in leaves:
                if isinstance(value, torch.Tensor):
                    path = (*start, *names)
                    placed = _slot_of_state(value, slot, meshes, path)
                    yield from placed.pieces(self._unit, path, apart(value))

    def _take_values(self, leaves: Sequence[tuple[KeyPath, object]], slots: Sequence[Slot]) -> None:
        for slot in slots:
            for names, value in leaves:
                if slot.values.own == 0 and not isinstance(value, torch.Tensor):
                    path = (*self._path, "state", slot.fqn, *names)
                    self.objects.append(ObjectValue(self._unit, path, value))

    def _take_shared(self, path: KeyPath, value: object, view: ModelView) -> None:
        for names, leaf in flatten(value, path):
            if isinstance(leaf, torch.Tensor):
                self.pieces += _shared_pieces(self._unit, names, leaf, view)
            elif view.values.own == 0:
                self.objects.append(ObjectValue(self._unit, names, leaf))


def _shared_pieces(
    unit: str, path: KeyPath, tensor: torch.Tensor, view: ModelView
) -> Iterator[Piece]:
    name = ".".join(map(str, path))
    if isinstance(tensor, DTensor):
        slot = view.meshes.slot(name, tensor, view.values)
    else:
        slot = whole_slot(name, tensor, view.values, view.values)
    return slot.pieces(unit, path, local_part(tensor))


def _slot_of_state(tensor: torch.Tensor, slot: Slot, meshes: Meshes, path: KeyPath) -> Slot:
    if isinstance(tensor, DTensor):
        return meshes.slot(slot.fqn, tensor, slot.values)
    if tensor.dim() and slot.follows(tensor):
        return slot
    if tensor.numel() == 1:
        return whole_slot(slot.fqn, tensor, slot.values, slot.values)
    if not slot.whole or slot.start is not None:
        raise UnsupportedError(
            f"a state of shape {tuple(tensor.shape)} was found where the parameter's part on this"
            f" rank has the shape {slot.held}, so that its place is not known",
            where=".".join(map(str, path)),
            hint="use an optimizer whose state has the shape of the parameter, or keeps DTensors",
        )
    return whole_slot(slot.fqn, tensor, slot.replicas, slot.values)
