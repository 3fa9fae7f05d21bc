"""What this rank holds of an optimizer's state, by parameter name, without communicating.

torch's `get_optimizer_state_dict` gathers for FSDP1, and steps an optimizer that has no state
yet; here neither happens, and the keys are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.training.dtensors import DTensor, Meshes, local_part
from ckptkit.training.flatten import flatten, out_of_reach
from ckptkit.training.modules import ModelView
from ckptkit.training.pieces import ObjectValue, Piece
from ckptkit.training.slots import Slot, whole_slot
from ckptkit.training.stamps import Stamp


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
        self._kept: dict[int, _Kept] = {}

    def look(
        self, views: Sequence[ModelView], *, keep: bool = False
    ) -> tuple[list[Piece], list[ObjectValue]]:
        """Returns the tensors on this rank, and the objects that it has to write.

        Args:
            views: The models in which its parameters are.
            keep: Whether to keep the pieces, with their hold on the tensors, and to return them
                again as long as all tensors stay where they are.

        Raises:
            UsageError: If a parameter belongs to none of the models, or two have the same name.
            UnsupportedError: If some state cannot be placed in the full tensor.
        """
        kept = self._kept if keep else {}
        walk = _Walk(self._optimizer.state, views, self._unit, self._path, kept)
        for index, group in enumerate(self._optimizer.param_groups):
            walk.take_group(index, group)
        walk.take_unbound()
        return walk.pieces, walk.objects


@dataclass(frozen=True, slots=True)
class _Kept:
    """The pieces of one parameter's state, as long as its slots and tensors are the same."""

    slots: tuple[Slot, ...]
    stamp: Stamp
    pieces: tuple[Piece, ...]

    def still_holds(self, slots: tuple[Slot, ...], values: Sequence[Any]) -> bool:
        same = slots is self.slots and all(isinstance(value, torch.Tensor) for value in values)
        return same and self.stamp.still_holds(values)


class _Walk:
    """One walk over an optimizer."""

    def __init__(
        self,
        state: Mapping[Any, Any],
        views: Sequence[ModelView],
        unit: str,
        path: KeyPath,
        kept: dict[int, _Kept],
    ) -> None:
        self.pieces: list[Piece] = []
        self.objects: list[ObjectValue] = []
        self._state = state
        self._views = views
        self._unit = unit
        self._path = path
        self._kept = kept
        self._names: set[str] = set()

    def take_group(self, index: int, group: Mapping[str, Any]) -> None:
        names: list[str] = []
        view = self._views[0]
        for parameter in group["params"]:
            view, slots = self._find(parameter)
            names += [slot.fqn for slot in slots]
            state = self._state.get(parameter)
            if state:
                self._take_state(parameter, state, slots, view.meshes)
        path = (*self._path, "param_groups", index)
        for key, value in group.items():
            shared = names if key == "params" else value
            self._take_shared((*path, key), shared, view)

    def take_unbound(self) -> None:
        """Takes what an optimizer keeps beside the states of its parameters."""
        for key, value in self._state.items():
            if not isinstance(key, torch.Tensor):
                self._take_shared((*self._path, "state", str(key)), value, self._views[0])

    def _find(self, parameter: torch.Tensor) -> tuple[ModelView, tuple[Slot, ...]]:
        for view in self._views:
            slots = view.slots.get(id(parameter))
            if slots is not None:
                self._note([slot.fqn for slot in slots])
                return view, slots
        raise UsageError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no"
            " model in the state",
            where=".".join(map(str, self._path)),
            hint="put the model that it belongs to into the mapping, and make the optimizer"
            " after the model was wrapped",
        )

    def _note(self, names: Sequence[str]) -> None:
        twice = self._names.intersection(names)
        if twice:
            raise UsageError(
                f"the optimizer has two parameters called {min(twice)!r}",
                where=".".join(map(str, self._path)),
                hint="use an optimizer per model",
            )
        self._names.update(names)

    def _take_state(
        self,
        parameter: torch.Tensor,
        state: Mapping[str, Any],
        slots: tuple[Slot, ...],
        meshes: Meshes,
    ) -> None:
        values = list(state.values())
        kept = self._kept.get(id(parameter))
        if kept is None or not kept.still_holds(slots, values):
            leaves = list(flatten(state))
            pieces = tuple(self._state_pieces(leaves, slots, meshes))
            self._take_values(leaves, slots)
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            kept = self._kept[id(parameter)] = _Kept(slots, Stamp.of(tensors), pieces)
        self.pieces += kept.pieces

    def _state_pieces(
        self, leaves: Sequence[tuple[KeyPath, object]], slots: Sequence[Slot], meshes: Meshes
    ) -> Iterator[Piece]:
        for slot in slots:
            start: KeyPath = (*self._path, "state", slot.fqn)
            for names, value in leaves:
                if isinstance(value, torch.Tensor):
                    path = (*start, *names)
                    placed = _slot_of_state(value, slot, meshes, path)
                    yield from placed.pieces(self._unit, path, local_part(value))

    def _take_values(self, leaves: Sequence[tuple[KeyPath, object]], slots: Sequence[Slot]) -> None:
        for slot in slots:
            for names, value in leaves:
                if slot.values.own == 0 and not isinstance(value, torch.Tensor):
                    path = (*self._path, "state", slot.fqn, *names)
                    self.objects.append(ObjectValue(self._unit, path, out_of_reach(value)))

    def _take_shared(self, path: KeyPath, value: object, view: ModelView) -> None:
        for names, leaf in flatten(value, path):
            if isinstance(leaf, torch.Tensor):
                self.pieces += _shared_pieces(self._unit, names, leaf, view)
            elif view.values.own == 0:
                self.objects.append(ObjectValue(self._unit, names, out_of_reach(leaf)))


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
