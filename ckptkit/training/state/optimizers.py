"""What this rank holds of an optimizer's state, by parameter name, without communicating.

torch's `get_optimizer_state_dict` gathers for FSDP1, and steps an optimizer that has no state
yet; here neither happens, and the keys are the same. `state_types` says what an optimizer will keep
before it has stepped. A checkpoint holds the keys nested or flattened.

Nested, as torch's `get_optimizer_state_dict` returns it:

    (…, "state", "layers.0.weight", "exp_avg"), (…, "param_groups", 0, "lr")

Flattened, as it does with `flatten_optimizer_state_dict=True`, and as torchtitan saves it, every
parameter has hyperparameters of its own, so that the stages of a pipeline write different keys:

    (…, "state.layers.0.weight.exp_avg"), (…, "param_groups.layers.0.weight.lr")

ckptkit writes the same flat keys, as paths: (…, "param_groups", "layers.0.weight", "lr").

Source: `torch.distributed.checkpoint.state_dict._flatten_optim_state_dict` of torch 2.13.

Optimizer state that is only valid with one rank's own part of the parameters.

Low-bit optimizers quantise in blocks: the scales belong to runs of elements of the local part,
so that neither they nor the codes have a place in the full tensor. Such state is stored rank by
rank, in its inner plain tensors:

    (…, "rank_bound", "3", "layers.0.weight", "exp_avg", "codes")

and `(…, "rank_layout", "3", "layers.0.weight")` has in JSON which part of each parameter the rank
held, for one optimizer, named by the first of them: stages of a pipeline have several on a rank. It
is restored only on a rank that holds the same parts.

Where each rank has whole parameters, all have the same state, and its keys are under `state` like
those of any other, a composed tensor as its inner ones: (…, "state", "layers.0.weight", "exp_avg",
"codes"). Then `(…, "composed", "layers.0.weight")` has in JSON which class it was of.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from msgspec import Struct, field
from torch.optim import Optimizer

from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.training.save.file_layout import check_storable
from ckptkit.training.state.dtensors import (
    Copies,
    DTensor,
    Meshes,
    inner_tensors,
    is_composed,
    local_part,
    unwrap_dtensor,
)
from ckptkit.training.state.memory_changes import KeptPieces
from ckptkit.training.state.models import ModelView
from ckptkit.training.state.objects import flatten, make_object
from ckptkit.training.state.pieces import (
    ObjectValue,
    Piece,
    Replicas,
    ShardLayout,
    whole_layout,
    whole_places,
)
from ckptkit.training.state.structures import Leaf, Nodes, Structure, take_apart

RANK_STATES = "rank_bound"
RANK_LAYOUTS = "rank_layout"
COMPOSED = "composed"
_LOW_BITS = 8


class ParameterState(Struct, frozen=True):
    slots: Sequence[ShardLayout]
    leaves: Sequence[Leaf]  # the values in its state, each with the path of names to it
    nodes: Nodes | None = None  # their structure, where their paths do not show it

    @property
    def name(self) -> str:
        return self.slots[0].fqn

    @property
    def sharded(self) -> bool:
        return any(slot.sharded for slot in self.slots)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def class_of(optimizer: Optimizer) -> str:
    return type(unwrap_optimizer(optimizer)).__name__


def is_rank_bound(optimizer: Optimizer, held: Iterable[ParameterState]) -> bool:
    """Whether the state of an optimizer's sharded parameters has no place in full tensors.

    All ranks need the same answer, also one whose parts are too small to be quantised. So low-bit
    optimizers are recognised by their class, and others by any state that has no place.
    """
    return is_low_bit(optimizer) or any(
        isinstance(leaf.value, torch.Tensor) and not _has_place(leaf.value, slot)
        for parameter in held
        if parameter.sharded
        for leaf in parameter.leaves
        for slot in parameter.slots
    )


def is_low_bit(optimizer: Optimizer) -> bool:
    """Whether an optimizer quantises its state in blocks: those of bitsandbytes and torchao.

    Their libraries are not imported for that: their objects have attributes of their own.
    """
    optimizer = unwrap_optimizer(optimizer)
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    if "torchao" in packages:
        block: object = getattr(optimizer, "block_size", None)
        return isinstance(block, int)  # infinite where nothing is quantised
    if "bitsandbytes" in packages:
        return getattr(getattr(optimizer, "args", None), "optim_bits", 0) == _LOW_BITS
    return False


def is_paged(optimizer: Optimizer) -> bool:
    return bool(getattr(unwrap_optimizer(optimizer), "is_paged", False))


def _has_place(tensor: torch.Tensor, slot: ShardLayout) -> bool:
    """Whether the place of a state tensor in the full one follows from the parameter.

    A plain one has a place if it is cut like the parameter, is a single number, or belongs to a
    whole parameter.
    """
    if is_composed(tensor):
        return False
    if isinstance(tensor, DTensor):
        return True
    follows = bool(tensor.dim() and tuple(tensor.shape) == slot.held)
    return follows or tensor.numel() == 1 or (slot.whole and slot.start is None)


def layouts_of(
    held: Iterable[ParameterState], unit: str, path: KeyPath, world: Copies
) -> Iterator[ObjectValue]:
    """Yields a record that lists this rank's parts of sharded parameters and their state."""
    parameters: dict[str, Any] = {}
    for state in held:
        if state.sharded:
            tensors = [leaf for leaf in state.leaves if isinstance(leaf.value, torch.Tensor)]
            kinds = [(leaf.path, kind_of(leaf.value)) for leaf in tensors]
            placed = [
                (leaf.path, leaf.value.shape, list(map(repr, leaf.value.placements)))
                for leaf in tensors
                if isinstance(leaf.value, DTensor)
            ]
            parameters[state.name] = {**part_of(state.slots), "kinds": kinds, "placed": placed}
    if parameters:
        document = {"world_size": world.number, "parameters": parameters}
        key = (*path, RANK_LAYOUTS, str(world.own), next(iter(parameters)))
        yield ObjectValue(unit, key, json.dumps(document))


def composed_of(held: ParameterState, unit: str, path: KeyPath) -> Iterator[ObjectValue]:
    """Yields a record of the classes of the composed tensors in a whole parameter's state."""
    kinds = [
        (leaf.path, kind_of(leaf.value))
        for leaf in held.leaves
        if isinstance(leaf.value, torch.Tensor) and is_composed(leaf.value)
    ]
    if kinds and held.slots[0].values.own == 0:
        yield ObjectValue(unit, (*path, COMPOSED, held.name), json.dumps(kinds))


def part_of(slots: Sequence[ShardLayout]) -> dict[str, Any]:
    """Returns, as plain values, which elements of a parameter a rank holds and how."""
    return {
        "names": [slot.fqn for slot in slots],
        "sharded": any(slot.sharded for slot in slots),
        "held": list(slots[0].held),
        "places": [
            [[list(place.offsets), list(place.sizes)] for place in slot.places] for slot in slots
        ],
    }


def kind_of(tensor: torch.Tensor) -> str:
    """Returns what a state tensor is, such as `Tensor`, `DTensor` or `OptimState8bit`."""
    if is_composed(tensor):
        return type(unwrap_dtensor(tensor)).__name__
    return "DTensor" if isinstance(tensor, DTensor) else "Tensor"


def tensor_at(state: Any, names: KeyPath) -> torch.Tensor | None:
    """Returns the tensor at a place in a parameter's state, None where there is none."""
    for name in names:
        if isinstance(state, Mapping):
            state = next((value for key, value in state.items() if str(key) == str(name)), None)
        elif isinstance(state, list) and isinstance(name, int) and name < len(state):
            state = state[name]
        else:
            return None
    return state if isinstance(state, torch.Tensor) else None


STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"
_PROBE_SHAPE = (2, 2)


def below(paths: Iterable[KeyPath], start: KeyPath, part: str) -> Iterator[tuple[KeyPath, KeyPath]]:
    """Yields the key paths of one part of an optimizer, in front of each what follows the part.

    >>> paths = [("o", "state", "a.b", "step"), ("o", "state.a.b.step"), ("o", "states", "c")]
    >>> [rest for rest, _ in below(paths, ("o",), "state")]
    [('a.b', 'step'), ('a.b', 'step')]
    """
    depth = len(start)
    for path in paths:
        if len(path) <= depth or path[:depth] != start:
            continue
        first = path[depth]
        if first == part:
            yield path[depth + 1 :], path
        elif isinstance(first, str) and first.startswith(f"{part}."):
            name, _, last = first[len(part) + 1 :].rpartition(".")
            yield (name, last, *path[depth + 1 :]), path


logger = logging.getLogger(__name__)
_STATE_HINT = "use an optimizer that keeps tensors and plain values"


class OptimizerWalk:
    def __init__(
        self,
        optimizer: Optimizer,
        unit: str,
        path: KeyPath,
        *,
        world: Copies,
        where: str = "optimizer",
    ) -> None:
        self._optimizer = optimizer
        self._place = unit, path, world, where
        self._kept: tuple[_States, tuple[Any, ...], KeptPieces] | None = None

    def states(self, views: Sequence[ModelView]) -> list[Piece]:
        """Returns the tensors in the states of its parameters, which a resume fills in place.

        Nothing else is collected, as a resume replaces it.
        """
        walk = _Walk(views, self._place, for_save=False)
        if is_paged(self._optimizer):
            _wait_for_pages(_Inputs.of(self._optimizer, views).values)
        return list(walk.take_states(self._optimizer).pieces)

    def look(self, views: Sequence[ModelView], *, keep: bool = False) -> CollectedState:
        """Returns the tensors on this rank, and the objects that it has to write.

        The keys of hyperparameters are `param_groups` and the number of their group. Where
        parameters are on a part of the ranks only, as those of a pipeline's stage are, the keys
        are `param_groups` and each parameter's name instead, as torch's
        `get_optimizer_state_dict` has them with `flatten_optimizer_state_dict=True`: so the
        stages, which all have groups of their own, write different keys.
        """
        optimizer, walk = self._optimizer, _Walk(views, self._place, for_save=True)
        _check_optimizer(optimizer, self._place[-1])
        now = _Inputs.of(optimizer, views)
        if is_paged(optimizer):
            _wait_for_pages(now.values)
        states, pieces, kept = None, None, self._kept if keep else None
        if kept is not None and kept[1] == now.place:
            states, _, outline = kept
            pieces = outline.again(now.values)
        if states is None or pieces is None:
            states, self._kept = walk.take_states(optimizer), None
            pieces = list(states.pieces)
            if keep and all(isinstance(value, torch.Tensor) for value in now.values):
                bare = KeptPieces.of(pieces, now.values)
                if bare is not None:
                    self._kept = states._replace(pieces=()), now.place, bare
        states = states._replace(pieces=tuple(pieces))
        walk.collected.add(states)
        for index, group in enumerate(optimizer.param_groups):
            walk.take_group(index, group, states.groups[index])
        live: Mapping[Any, Any] = optimizer.state
        others = {key: v for key, v in live.items() if not isinstance(key, torch.Tensor)}
        if others:
            walk.take_unbound(others)
        return walk.collected


class _Group(NamedTuple):
    names: list[str]
    model: int


class _States(NamedTuple):
    """The states of all parameters on this rank, their structures, and the groups."""

    pieces: tuple[Piece, ...] = ()
    objects: tuple[ObjectValue, ...] = ()
    structures: tuple[Structure, ...] = ()
    groups: tuple[_Group, ...] = ()


class CollectedState(Struct):
    pieces: list[Piece] = field(default_factory=list)  # the tensors on this rank
    objects: list[ObjectValue] = field(default_factory=list)  # the values that it has to write
    # of nested values, where these do not follow from their leaves
    structures: list[Structure] = field(default_factory=list)

    def add(self, other: CollectedState | ModelView | _States) -> None:
        self.pieces += other.pieces
        self.objects += other.objects
        self.structures += other.structures


class _Inputs(NamedTuple):
    """What the pieces of an optimizer depend on."""

    # the identities of the looks at the models and of the parameters, those that have a state with
    # how much there is in it, and the names of the values
    place: tuple[Any, ...]
    values: list[Any]  # of the parameters' states, composed tensors taken apart

    @classmethod
    def of(cls, optimizer: Optimizer, views: Sequence[ModelView]) -> _Inputs:
        # The parameters of a look that is still the same are still there.
        identities = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        owners: list[tuple[int, int]] = []
        names: list[str] = []
        values: list[Any] = []
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                owners.append((id(parameter), len(state)))
                names += state
                values += state.values()
            else:
                owners.append((id(parameter), -1))
                values.append(state)
        plain: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor) and is_composed(value):
                plain += [inner for _, inner in inner_tensors(value)]
            else:
                plain.append(value)
        return cls(([view.origin for view in views], identities, owners, names), plain)


_WITHOUT_OWN_STATE = ("torch.optim.", "accelerate.", "bitsandbytes.", "torchao.", "transformers.")
"""Packages whose `state_dict` has nothing that is not in `state` and `param_groups`."""


def _check_optimizer(optimizer: Optimizer, where: str) -> None:
    """Refuses an optimizer that keeps its state in other optimizers.

    Warns if the class overrides `state_dict`, because a save reads only `state` and `param_groups`.
    """
    for name, value in vars(optimizer).items():
        members: Iterable[object] = (value,)
        if isinstance(value, dict):
            members = value.values()
        elif isinstance(value, list | tuple):
            members = value
        if any(isinstance(one, Optimizer) and one.state is not optimizer.state for one in members):
            raise UnsupportedError(
                f"a {type(optimizer).__name__} was found that keeps its state in other optimizers,"
                f" those of its attribute {name!r}",
                where=where,
                hint="pass these instead of it, several as a list",
            )
    owner = next(base for base in type(optimizer).__mro__ if "state_dict" in vars(base))
    if not owner.__module__.startswith(_WITHOUT_OWN_STATE):
        _warn_of_state_dict(owner.__name__)


@lru_cache  # once each, although a state is looked at in every save
def _warn_of_state_dict(name: str) -> None:
    logger.warning(
        "the state_dict() of %s is not called: what it has besides `state` and `param_groups`"
        " is neither saved nor resumed",
        name,
    )


def _wait_for_pages(values: Sequence[object]) -> None:
    """Waits for the devices that work on tensors of paged optimizers (bitsandbytes).

    These look like tensors on the CPU, which are copied at once, but devices write to them.
    """
    paged = [value for value in values if getattr(value, "is_paged", False)]
    for device in {getattr(value, "page_deviceid", None) for value in paged}:
        torch.cuda.synchronize(device)


class _Walk:
    def __init__(
        self,
        views: Sequence[ModelView],
        place: tuple[str, KeyPath, Copies, str],
        *,
        for_save: bool,
    ) -> None:
        self.collected = CollectedState()
        self._views = views
        self._for_save = for_save
        self._unit, self._path, self._world, self._where = place
        self._seen: set[str] = set()
        self._numbers: set[KeyPath] = set()  # below a state: tensors of one element, never a part

    def take_states(self, optimizer: Optimizer) -> _States:
        """Returns the tensors of all parameters' states, and adds the other values in them."""
        groups: list[_Group] = []
        held: list[tuple[ParameterState, Meshes]] = []
        for group in optimizer.param_groups:
            names: list[str] = []
            model = 0
            for parameter in group["params"]:
                model, slots = self._find(parameter)
                names += [slot.fqn for slot in slots]
                held.append((self._held(slots, optimizer, parameter), self._views[model].meshes))
            groups.append(_Group(names, model))
        all_held = [state for state, _ in held]
        bound = is_rank_bound(optimizer, all_held)
        self._numbers = _paths_of_numbers(all_held)
        pieces: list[Piece] = []
        objects: list[ObjectValue] = []
        if bound:
            objects += layouts_of(all_held, self._unit, self._path, self._world)
        for state, meshes in held:
            if bound and state.sharded:
                pieces += self._rank_bound_pieces(state)
            else:
                pieces += self._placed_pieces(state, meshes)
            if not state.sharded:
                objects += composed_of(state, self._unit, self._path)
        for piece in pieces:
            check_storable(piece.local, piece.key)
        collected = self.collected
        self.collected = CollectedState()
        objects += collected.objects
        return _States(tuple(pieces), tuple(objects), tuple(collected.structures), tuple(groups))

    def _held(
        self, slots: Sequence[ShardLayout], optimizer: Optimizer, parameter: torch.Tensor
    ) -> ParameterState:
        state: Any = optimizer.state.get(parameter, {})
        where = f"{self._where}.state[{slots[0].fqn!r}]"
        if type(state) is dict and not state:  # which looking for a state may leave
            return ParameterState(slots, ())
        if not self._for_save:
            return ParameterState(slots, [Leaf(path, leaf, where) for path, leaf in flatten(state)])
        with _of_optimizer():
            leaves, nodes = take_apart(state, where, any_tensor=True)
        for leaf in leaves:
            if type(leaf.value) is torch.Tensor:
                check_storable(leaf.value, leaf.where)
        return ParameterState(slots, leaves, nodes)

    def take_group(self, index: int, group: Mapping[str, Any], names: _Group) -> None:
        view, path = self._views[names.model], (*self._path, GROUPS)
        where = f"{self._where}.param_groups[{index}]"
        values = {key: value for key, value in group.items() if key != PARAMS}
        if view.values.count < self._world.number:
            for name in names.names:
                self._take_shared((*path, name), values, where, view.meshes, view.values)
            return
        self._take_shared((*path, index), values, where, view.meshes, view.values)
        if view.values.own == 0:
            key = (*path, index, PARAMS)
            self.collected.objects.append(ObjectValue(self._unit, key, names.names))

    def take_unbound(self, values: Mapping[Any, Any]) -> None:
        """Adds what an optimizer keeps besides the states of its parameters: that of rank 0."""
        path, where = (*self._path, STATE), f"{self._where}.state"
        ranks, meshes = Replicas(*self._world, spread=False), self._views[0].meshes
        self._take_shared(path, values, where, meshes, ranks, taken=self._seen)

    def _find(self, parameter: torch.Tensor) -> tuple[int, tuple[ShardLayout, ...]]:
        for number, view in enumerate(self._views):
            slots = view.slots.get(id(parameter))
            if slots is not None:
                names = [slot.fqn for slot in slots]
                twice = self._seen.intersection(names)
                if twice:
                    raise UsageError(
                        f"the optimizer has two parameters called {min(twice)!r}",
                        where=".".join(map(str, self._path)),
                        hint="use an optimizer per model",
                    )
                self._seen.update(names)
                return number, slots
        raise UsageError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no"
            " model in the state",
            where=".".join(map(str, self._path)),
            hint="create the optimizer after prepare(model), fully_shard(model) or whatever wraps"
            " the model, which may replace its parameters; and put the model into the state",
        )

    def _keep(self, path: KeyPath, leaf: Leaf) -> None:
        with _of_optimizer():
            self.collected.objects.append(make_object(self._unit, path, leaf.value, leaf.where))

    def _placed_pieces(self, held: ParameterState, meshes: Meshes) -> Iterator[Piece]:
        """Adds the values of a state under the names of parameters, and yields its tensors."""
        for slot in held.slots:
            start: KeyPath = (*self._path, STATE, slot.fqn)
            writes = self._for_save and not slot.values.own
            if writes and held.nodes is not None:
                self.collected.structures.append(Structure(self._unit, start, held.nodes))
            for leaf in held.leaves:
                path = (*start, *leaf.path)
                if isinstance(leaf.value, torch.Tensor):
                    is_number = leaf.path in self._numbers and leaf.value.numel() == 1
                    yield from self._pieces_of(leaf.value, slot, meshes, path, is_number=is_number)
                elif writes:
                    self._keep(path, leaf)

    def _rank_bound_pieces(self, held: ParameterState) -> Iterator[Piece]:
        """Adds the values of a state under the keys of this rank, and yields its inner tensors."""
        start = (*self._path, RANK_STATES, str(self._world.own), held.name)
        if held.nodes is not None:
            self.collected.structures.append(Structure(self._unit, start, held.nodes))
        for leaf in held.leaves:
            path = (*start, *leaf.path)
            if isinstance(leaf.value, torch.Tensor):
                for rest, inner in inner_tensors(leaf.value):
                    shape = tuple(inner.shape)
                    places = whole_places(shape)
                    yield Piece(self._unit, (*path, *rest), shape, places, inner.detach())
            elif self._for_save:
                self._keep(path, leaf)

    def _pieces_of(
        self,
        value: torch.Tensor,
        slot: ShardLayout,
        meshes: Meshes,
        path: KeyPath,
        *,
        is_number: bool,
    ) -> Iterator[Piece]:
        """Yields the pieces of a tensor in the state of a parameter, which `slot` describes."""
        if is_composed(value):
            for rest, inner in inner_tensors(value):
                part = whole_layout(slot.fqn, inner, slot.replicas, slot.values)
                yield from part.pieces(self._unit, (*path, *rest), local_part(inner))
            return
        is_whole = is_number or isinstance(value, DTensor) or not value.dim()
        if is_whole or tuple(value.shape) != slot.held:
            copies = slot.values if value.numel() == 1 else slot.replicas
            slot = meshes.slot(slot.fqn, value, slot.values, copies)
        yield from slot.pieces(self._unit, path, local_part(value))

    def _take_shared(
        self,
        path: KeyPath,
        value: object,
        where: str,
        meshes: Meshes,
        ranks: Replicas,
        *,
        taken: Collection[str] = (),
    ) -> None:
        with _of_optimizer():
            leaves, nodes = take_apart(value, where, taken=taken)
        if nodes is not None and ranks.own == 0:
            self.collected.structures.append(Structure(self._unit, path, nodes))
        for leaf in leaves:
            names = (*path, *leaf.path)
            if isinstance(leaf.value, torch.Tensor):
                slot = meshes.slot(".".join(map(str, names)), leaf.value, ranks)
                self.collected.pieces += slot.pieces(self._unit, names, local_part(leaf.value))
            elif ranks.own == 0:
                self._keep(names, leaf)


def _paths_of_numbers(held: Iterable[ParameterState]) -> set[KeyPath]:
    """Returns where parameters of several elements have plain tensors of one.

    Where a rank holds one element of a parameter, such a tensor looks like a part of a full one.
    """
    return {
        leaf.path
        for state in held
        for leaf in state.leaves
        if type(leaf.value) is torch.Tensor and leaf.value.numel() == 1
        if any(math.prod(slot.held) > 1 for slot in state.slots)
    }


@contextmanager
def _of_optimizer() -> Iterator[None]:
    """Turns a `UsageError` into an error that loses the optimizer only, not the save."""
    try:
        yield
    except UsageError as error:
        raise UnsupportedError(error.message, where=error.where, hint=_STATE_HINT) from error


def state_types(optimizer: Optimizer) -> tuple[torch.dtype, ...]:
    """Returns which tensors of a parameter's shape an optimizer will keep for it.

    A twin of torch's own optimizers takes one step on a parameter of four elements, without the
    hooks that the user may have put into all optimizers; the optimizer itself is not touched.
    Optimizers of other origin, which may do anything in a step, are taken for Adam, which
    has two; plain SGD has none.
    """
    kind = type(optimizer)
    dtype = next((p.dtype for group in optimizer.param_groups for p in group["params"]), None)
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=dtype))
    adam = (probe.dtype, probe.dtype)
    if not kind.__module__.startswith("torch.optim."):
        return adam
    probe.grad = torch.zeros_like(probe)
    try:
        with torch.random.fork_rng(devices=()):
            twin = kind([probe], **optimizer.defaults)
            step = type(twin).step
            getattr(step, "__wrapped__", step)(twin)  # what is around it calls the hooks
    except Exception:  # noqa: BLE001  such as that it wants a closure
        return adam
    return tuple(
        value.dtype
        for value in twin.state[probe].values()
        if isinstance(value, torch.Tensor) and value.shape == probe.shape
    )
