"""What this rank holds of a model, whatever it is wrapped in, found without communicating."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ckptkit.core.index import KeyPath
from ckptkit.training.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.flatten import flatten, out_of_reach
from ckptkit.training.fsdp1 import (
    FlatUnit,
    flat_shards,
    flat_units,
    has_flat_parameters,
    layout_facts,
    managed_parameters,
    strategy_of,
)
from ckptkit.training.names import clean_fqn, parallel_prefixes, wrapper_names
from ckptkit.training.pieces import ObjectValue, Piece, Replicas
from ckptkit.training.slots import Slot, whole_slot
from ckptkit.training.stamps import Stamp


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as it lies on this rank at one moment.

    Attributes:
        pieces: Parameters and persistent buffers.
        objects: What modules save beside tensors, on the rank that writes it.
        slots: By the identity of the object that an optimizer has as a parameter: the original
            parameters that it stands for, several for a flat parameter of FSDP1.
        meshes: The device meshes of the model.
        values: Which ranks hold what there is once per model.
        managed: The identities of the parameters that flat ones of FSDP1 stand for.
    """

    pieces: tuple[Piece, ...]
    objects: tuple[ObjectValue, ...]
    slots: Mapping[int, tuple[Slot, ...]]
    meshes: Meshes
    values: Replicas
    managed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """What stays the same from one walk to the next.

    Attributes:
        unit: The DCP directory that the tensors belong to.
        path: What comes before a tensor's name in its key path.
        world: The number of ranks of the job, and this one.
        group: The ranks of the data parallel wrapper, if any.
        equal: The identities of the parameters that it keeps equal.
        meshes: Of the DTensors found so far.
    """

    unit: str
    path: KeyPath
    world: Copies
    group: Copies | None
    equal: frozenset[int]
    meshes: Meshes


class ModelWalk:
    """Walks one model, again for each save; what does not change in between is kept."""

    def __init__(self, model: nn.Module, unit: str, path: KeyPath, *, world: Copies) -> None:
        """Notes how the model is wrapped; wrap it before.

        Args:
            model: The outermost module.
            unit: The DCP directory that its tensors belong to.
            path: What comes before a tensor's name in its key path.
            world: The number of ranks of the job, and this one.
        """
        group, equal = _data_parallel(model)
        self._model = model
        self._wrapping = _Wrapping(unit, path, world, group, equal, Meshes(group or Copies()))
        self._parallel = parallel_prefixes(model)
        self._flat = has_flat_parameters(model)
        self._reshards = tuple(_reshards(model))
        self._modules = tuple(model.modules())
        self._unsaved: tuple[str, ...] | None = None
        self._kept: tuple[Stamp, ModelView] | None = None

    def look(self, *, keep: bool = False) -> ModelView:
        """Returns what of the model lies on this rank now.

        Args:
            keep: Whether to keep the answer, with its hold on the tensors, and to return it again
                as long as all tensors stay where they are.
        """
        for reshard in self._reshards:  # after an evaluation, root parameters may be whole
            reshard()
        if keep and self._kept is not None:
            stamp, view = self._kept
            if stamp.still_holds(self._tensors(view.managed)):
                return view
        view, known = self._fresh()
        self._kept = None
        tensors = self._tensors(view.managed)
        # Hooks may have made values only for this state dict, so that the next one may differ.
        if keep and known <= {id(tensor) for tensor in tensors}:
            self._kept = Stamp.of(tensors), view
        return view

    def _fresh(self) -> tuple[ModelView, set[int]]:
        units = self._units()
        entries = list(self._named(units))
        look = _Look.of(self._wrapping, units, entries)
        for fqn, parameter in self._unsaved_parameters(look.slots):
            look.take_unsaved(fqn, parameter)
        return look.view(managed_parameters(units)), {id(value) for _, value in entries}

    def _tensors(self, managed: frozenset[int]) -> list[torch.Tensor]:
        """Returns all tensors that the model is made of."""
        tensors = [
            tensor
            for module in self._modules
            for members in (module._parameters, module._buffers)  # noqa: SLF001 - the public iterators take ten times as long
            for tensor in members.values()
            if tensor is not None and id(tensor) not in managed
        ]
        return tensors + (flat_shards(self._model) if self._flat else [])

    def facts(self) -> dict[str, Any]:
        """Returns how the model is wrapped and split, as plain values."""
        view, mesh = self.look(), self._wrapping.meshes.largest
        start = len(self._wrapping.path)
        tied = [
            [".".join(map(str, path[start:])) for path in (piece.key_path, *piece.aliases)]
            for piece in view.pieces
            if piece.aliases
        ]
        return {
            "strategy": self._strategy(),
            "wrappers": wrapper_names(self._model),
            "mesh": None if mesh is None else _mesh_facts(mesh),
            "tied": tied,
            "flat_parameters": layout_facts(self._units()),
        }

    def _strategy(self) -> str:
        if self._flat:
            return f"fsdp1:{strategy_of(self._model)}"
        if self._reshards:
            return "fsdp2"
        if self._wrapping.meshes.largest is not None:
            return "dtensor"
        return "plain" if self._wrapping.group is None else "ddp"

    def _units(self) -> tuple[FlatUnit, ...]:
        return flat_units(self._model, self._parallel) if self._flat else ()

    def _named(self, units: tuple[FlatUnit, ...]) -> Iterator[tuple[str, object]]:
        if not self._flat:
            # The parameters themselves: detaching each DTensor would take most of the time.
            for name, value in self._model.state_dict(keep_vars=True).items():
                yield clean_fqn(name, self._parallel), value
            return
        managed = managed_parameters(units)  # FSDP1's own state_dict() would gather these
        for raw, module in self._model.named_modules(remove_duplicate=False):
            own: dict[str, object] = {}
            prefix = clean_fqn(raw, self._parallel)
            # This is what state_dict() calls for each module, without FSDP1's hooks.
            module._save_to_state_dict(own, f"{prefix}." if prefix else "", keep_vars=True)  # noqa: SLF001
            yield from ((name, value) for name, value in own.items() if id(value) not in managed)

    def _unsaved_parameters(
        self, known: Mapping[int, object]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that state_dict() leaves out, but an optimizer may have."""
        if self._unsaved is None:
            named = self._model.named_parameters()
            self._unsaved = tuple(raw for raw, value in named if id(value) not in known)
        for raw in self._unsaved:
            yield clean_fqn(raw, self._parallel), self._model.get_parameter(raw)


@dataclass(frozen=True, slots=True)
class _Look:
    """One walk over a model."""

    wrapping: _Wrapping
    copies: Replicas
    values: Replicas
    slots: dict[int, tuple[Slot, ...]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    objects: list[ObjectValue] = field(default_factory=list)

    @classmethod
    def of(
        cls, wrapping: _Wrapping, units: tuple[FlatUnit, ...], entries: list[tuple[str, object]]
    ) -> _Look:
        wrapping.meshes.learn(value for _, value in entries)
        group = wrapping.group
        extent = units[0].extent if units else wrapping.meshes.extent() or group or wrapping.world
        copies, values = Replicas(*(group or extent)), Replicas(*extent, spread=False)
        look = cls(wrapping, copies, values)
        for unit in units:
            look.take_unit(unit)
        for names, tensor in _without_ties(entries):
            look.take_tensor(names, tensor)
        for name, value in entries:
            if not isinstance(value, torch.Tensor):
                look.take_other(name, value)
        return look

    def view(self, managed: frozenset[int]) -> ModelView:
        pieces, objects = tuple(self.pieces), tuple(self.objects)
        return ModelView(pieces, objects, self.slots, self.wrapping.meshes, self.values, managed)

    def take_unit(self, unit: FlatUnit) -> None:
        self.slots[id(unit.parameter)] = tuple(part.in_shard for part in unit.parts)
        for part in unit.parts:
            self._add(part.in_shard, self._path(part.fqn), unit.shard, part.aliases)
            if part.parameter is not None and part.on_its_own is not None:
                self.slots[id(part.parameter)] = (part.on_its_own,)

    def take_tensor(self, names: list[str], tensor: torch.Tensor) -> None:
        slot = self._slot(names[0], tensor)
        self.slots[id(tensor)] = (slot,)
        self._add(slot, self._path(names[0]), local_part(tensor), names[1:])

    def take_other(self, name: str, value: object) -> None:
        for path, leaf in flatten(value, self._path(name)):
            if isinstance(leaf, torch.Tensor):
                slot = self._slot(".".join(map(str, path)), leaf)
                self._add(slot, path, local_part(leaf), ())
            elif self.values.own == 0:
                self.objects.append(ObjectValue(self.wrapping.unit, path, out_of_reach(leaf)))

    def take_unsaved(self, fqn: str, parameter: nn.Parameter) -> None:
        self.slots[id(parameter)] = (self._slot(fqn, parameter),)

    def _add(self, slot: Slot, path: KeyPath, local: torch.Tensor, aliases: Sequence[str]) -> None:
        known = [self._path(alias) for alias in aliases]
        self.pieces.extend(slot.pieces(self.wrapping.unit, path, local, known))

    def _path(self, fqn: str) -> KeyPath:
        return (*self.wrapping.path, fqn)

    def _slot(self, fqn: str, tensor: torch.Tensor) -> Slot:
        if isinstance(tensor, DTensor):
            return self.wrapping.meshes.slot(fqn, tensor, self.values)
        equal = id(tensor) in self.wrapping.equal
        return whole_slot(fqn, tensor, self.copies if equal else self.values, self.values)


def parameter_fqns(model: nn.Module) -> dict[int, str]:
    """Returns the clean names of a model's parameters by the identities of the parameters.

    The parameters are those that an optimizer may have; a flat parameter of FSDP1 stands for
    several names and is left out, but the original ones are there with `use_orig_params=True`.
    """
    slots = ModelWalk(model, "", (), world=Copies()).look().slots
    return {identity: found[0].fqn for identity, found in slots.items() if found[0].start is None}


def _without_ties(
    entries: Iterable[tuple[str, object]],
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yields each tensor once, with all its names."""
    names: dict[Hashable, list[str]] = {}
    first: list[tuple[list[str], torch.Tensor]] = []
    for name, value in entries:
        if isinstance(value, torch.Tensor):
            key = _identity(value)
            if key not in names:
                names[key] = []
                first.append((names[key], value))
            names[key].append(name)
    yield from first


def _identity(tensor: torch.Tensor) -> Hashable:
    """Returns what two tensors have in common only if they are one; the same on all ranks."""
    plain = type(tensor) in {torch.Tensor, nn.Parameter}
    if not plain or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _data_parallel(model: nn.Module) -> tuple[Copies | None, frozenset[int]]:
    """Returns the ranks of the data parallel wrapper, and the parameters that it keeps equal."""
    group, equal = None, set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = module.process_group
            group = Copies(dist.get_world_size(ranks), dist.get_rank(ranks))
            ignored = module.parameters_to_ignore
            named = module.module.named_parameters()
            equal |= {id(value) for name, value in named if name not in ignored}
    return group, frozenset(equal)


def _reshards(model: nn.Module) -> Iterator[Callable[[], None]]:
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # FSDPModule moved between torch versions
        if callable(reshard) and callable(getattr(module, "unshard", None)):
            yield reshard


def _mesh_facts(mesh: DeviceMesh) -> dict[str, Any]:
    return {"shape": list(mesh.mesh.shape), "names": list(mesh.mesh_dim_names or ())}
