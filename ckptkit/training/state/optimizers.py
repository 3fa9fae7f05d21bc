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

Some state is valid with one rank's own part of the parameters only. Low-bit optimizers quantise in
blocks: the scales belong to runs of elements of the local part, so that neither they nor the codes
have a place in the full tensor. Such state is stored rank by rank, in its inner plain tensors:

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
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from msgspec import Struct
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
from ckptkit.training.state.structures import Collected, Leaf, Nodes, take_apart

logger = logging.getLogger(__name__)
STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"
RANK_STATES = "rank_bound"
RANK_LAYOUTS = "rank_layout"
COMPOSED = "composed"
_LOW_BITS = 8
_PROBE_SHAPE = (2, 2)
_STATE_HINT = "use an optimizer that keeps tensors and plain values"


class ParameterState(Struct, frozen=True):
    slots: Sequence[ShardLayout]
    meshes: Meshes  # of the model
    leaves: Sequence[Leaf] = ()
    nodes: Nodes | None = None  # the structure, where the paths of the leaves do not show it

    def tensors(self) -> Iterator[tuple[KeyPath, torch.Tensor]]:
        for path, value, _ in self.leaves:
            if isinstance(value, torch.Tensor):
                yield path, value

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
        not _has_place(tensor, slot)
        for parameter in held
        if parameter.sharded
        for _, tensor in parameter.tensors()
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
            kinds = [(path, kind_of(tensor)) for path, tensor in state.tensors()]
            placed = [
                (path, tensor.shape, list(map(repr, tensor.placements)))
                for path, tensor in state.tensors()
                if isinstance(tensor, DTensor)
            ]
            parameters[state.name] = {**part_of(state.slots), "kinds": kinds, "placed": placed}
    if parameters:
        document = {"world_size": world.number, "parameters": parameters}
        key = (*path, RANK_LAYOUTS, str(world.own), next(iter(parameters)))
        yield ObjectValue(unit, key, json.dumps(document))


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


class OptimizerWalk:
    """Walks one optimizer, again for each save; what does not change in between is kept."""

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
        # What a walk has found of the parameters' states, without tensors, the groups, and of what.
        self._kept: tuple[Collected, list[_Group], tuple[Any, ...], KeptPieces] | None = None

    def states(self, views: Sequence[ModelView]) -> list[Piece]:
        """Returns the tensors in the states of its parameters, which a resume fills in place.

        Nothing else is collected, as a resume replaces it.
        """
        walk = _Walk(views, self._place, for_save=False)
        if is_paged(self._optimizer):
            _wait_for_pages(_inputs(self._optimizer, views)[1])
        walk.take_states(self._optimizer)
        return walk.pieces

    def look(self, views: Sequence[ModelView], *, keep: bool = False) -> Collected:
        """Returns the tensors on this rank, and the objects that it has to write.

        The keys of hyperparameters are `param_groups` and the number of their group. Where
        parameters are on a part of the ranks only, as those of a pipeline's stage are, the keys
        are `param_groups` and each parameter's name instead, as torch's
        `get_optimizer_state_dict` has them with `flatten_optimizer_state_dict=True`: so the
        stages, which all have groups of their own, write different keys.
        """
        optimizer, walk = self._optimizer, _Walk(views, self._place, for_save=True)
        _check_optimizer(optimizer, self._place[-1])
        place, values = _inputs(optimizer, views)
        if is_paged(optimizer):
            _wait_for_pages(values)
        groups, kept = None, self._kept if keep else None
        if kept is not None and kept[2] == place:
            pieces = kept[3].again(values)
            if pieces is not None:
                walk.add(kept[0])
                walk.pieces, groups = pieces, kept[1]
        if groups is None:
            self._kept = None
            groups = walk.take_states(optimizer)
            if keep and all(isinstance(value, torch.Tensor) for value in values):
                bare = KeptPieces.of(walk.pieces, values)
                if bare is not None:
                    found = Collected()
                    found.add(walk)
                    found.pieces.clear()
                    self._kept = found, groups, place, bare
        walk.take_shared(optimizer, groups)
        return walk


_Group = tuple[list[str], int]
"""The names of a group's parameters, and which of the models they are in."""


def _inputs(optimizer: Optimizer, views: Sequence[ModelView]) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns what the pieces of an optimizer depend on.

    First the identities of the looks at the models and of the parameters, those that have a state
    with how much there is in it, and the names of the values. Then these values, composed tensors
    taken apart.
    """
    # The parameters of a look that is still the same are still there.
    identities = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    owners: list[tuple[int, int]] = []
    names: list[str] = []
    values: list[Any] = []
    for parameter, state in optimizer.state.items():
        is_dict = isinstance(state, dict)
        owners.append((id(parameter), len(state) if is_dict else -1))
        names += state if is_dict else ()
        for value in state.values() if is_dict else (state,):
            if isinstance(value, torch.Tensor) and is_composed(value):
                values += [inner for _, inner in inner_tensors(value)]
            else:
                values.append(value)
    return ([view.origin for view in views], identities, owners, names), values


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


class _Walk(Collected):
    """One walk over an optimizer."""

    def __init__(
        self,
        views: Sequence[ModelView],
        place: tuple[str, KeyPath, Copies, str],
        *,
        for_save: bool,
    ) -> None:
        super().__init__()
        self._views = views
        self._for_save = for_save
        self._unit, self._path, self._world, self._where = place

    def take_states(self, optimizer: Optimizer) -> list[_Group]:
        """Adds the states of all parameters, and returns the groups of these."""
        groups: list[_Group] = []
        held: list[ParameterState] = []
        seen: set[str] = set()
        for group in optimizer.param_groups:
            names: list[str] = []
            model = 0
            for parameter in group["params"]:
                model, slots = self._find(parameter)
                own = [slot.fqn for slot in slots]
                if twice := seen.intersection(own):
                    raise UsageError(
                        f"the optimizer has two parameters called {min(twice)!r}",
                        where=".".join(map(str, self._path)),
                        hint="use an optimizer per model",
                    )
                seen.update(own)
                names += own
                state = optimizer.state.get(parameter, {})
                held.append(self._held(slots, self._views[model].meshes, state))
            groups.append((names, model))
        if bound := is_rank_bound(optimizer, held):
            self.objects += layouts_of(held, self._unit, self._path, self._world)
        for of_parameter in held:
            tensors = () if of_parameter.sharded else of_parameter.tensors()
            kinds = [(path, kind_of(tensor)) for path, tensor in tensors if is_composed(tensor)]
            if kinds and of_parameter.slots[0].values.own == 0:
                key = (*self._path, COMPOSED, of_parameter.name)
                self.objects.append(ObjectValue(self._unit, key, json.dumps(kinds)))
        numbers = _paths_of_numbers(held)
        for of_parameter in held:
            if bound and of_parameter.sharded:
                self._take_rank_bound(of_parameter)
            else:
                self._take_placed(of_parameter, numbers)
        for piece in self.pieces:
            check_storable(piece.local, piece.key)
        return groups

    def take_shared(self, optimizer: Optimizer, groups: Sequence[_Group]) -> None:
        """Adds hyperparameters, and what an optimizer keeps besides the states of parameters."""
        for index, (group, (names, model)) in enumerate(
            zip(optimizer.param_groups, groups, strict=True)
        ):
            view, path = self._views[model], (*self._path, GROUPS)
            values = {key: value for key, value in group.items() if key != PARAMS}
            is_stage = view.values.count < self._world.number
            for key in names if is_stage else [index]:
                where = f"{self._where}.param_groups[{index}]"
                self._take((*path, key), values, where, view.meshes, view.values)
            if not is_stage and view.values.own == 0:
                self.objects.append(ObjectValue(self._unit, (*path, index, PARAMS), names))
        live: Mapping[Any, Any] = optimizer.state
        others = {key: v for key, v in live.items() if not isinstance(key, torch.Tensor)}
        if others:
            ranks, meshes = Replicas(*self._world, spread=False), self._views[0].meshes
            taken = {name for names, _ in groups for name in names}
            path, where = (*self._path, STATE), f"{self._where}.state"
            self._take(path, others, where, meshes, ranks, taken)

    def _take(
        self,
        path: KeyPath,
        value: object,
        where: str,
        meshes: Meshes,
        ranks: Replicas,
        taken: Collection[str] = (),
    ) -> None:
        with _of_optimizer():
            self.take(
                *(self._unit, path, value, where),
                lambda name, tensor: meshes.slot(name, tensor, ranks),
                writes=ranks.own == 0,
                taken=taken,
            )

    def _find(self, parameter: torch.Tensor) -> tuple[int, tuple[ShardLayout, ...]]:
        for number, view in enumerate(self._views):
            slots = view.slots.get(id(parameter))
            if slots is not None:
                return number, slots
        raise UsageError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no"
            " model in the state",
            where=".".join(map(str, self._path)),
            hint="create the optimizer after prepare(model), fully_shard(model) or whatever wraps"
            " the model, which may replace its parameters; and put the model into the state",
        )

    def _held(self, slots: Sequence[ShardLayout], meshes: Meshes, state: Any) -> ParameterState:
        if type(state) is dict and not state:  # which looking for a state may leave
            return ParameterState(slots, meshes)
        where = f"{self._where}.state[{slots[0].fqn!r}]"
        if not self._for_save:
            return ParameterState(slots, meshes, [(*leaf, where) for leaf in flatten(state)])
        with _of_optimizer():
            leaves, nodes = take_apart(state, where, any_tensor=True)
        for _, value, inner in leaves:
            if type(value) is torch.Tensor:
                check_storable(value, inner)
        return ParameterState(slots, meshes, leaves, nodes)

    def _take_placed(self, held: ParameterState, numbers: Container[KeyPath]) -> None:
        """Adds a state under the names of parameters."""
        for slot in held.slots:
            start: KeyPath = (*self._path, STATE, slot.fqn)
            if self._for_save and not slot.values.own:
                self._take_values(start, held)
            for rest, tensor in held.tensors():
                path = (*start, *rest)
                if is_composed(tensor):
                    for name, inner in inner_tensors(tensor):
                        part = whole_layout(slot.fqn, inner, slot.replicas, slot.values)
                        self.pieces += part.pieces(self._unit, (*path, *name), local_part(inner))
                    continue
                layout, is_number = slot, tensor.numel() == 1
                is_whole = isinstance(tensor, DTensor) or not tensor.dim()
                is_whole = is_whole or (is_number and rest in numbers)
                if is_whole or tuple(tensor.shape) != slot.held:
                    copies = slot.values if is_number else slot.replicas
                    layout = held.meshes.slot(slot.fqn, tensor, slot.values, copies)
                self.pieces += layout.pieces(self._unit, path, local_part(tensor))

    def _take_rank_bound(self, held: ParameterState) -> None:
        """Adds a state under the keys of this rank, its tensors as their inner ones."""
        start = (*self._path, RANK_STATES, str(self._world.own), held.name)
        if self._for_save:
            self._take_values(start, held)
        for rest, tensor in held.tensors():
            for name, inner in inner_tensors(tensor):
                shape = tuple(inner.shape)
                path = (*start, *rest, *name)
                places = whole_places(shape)
                self.pieces.append(Piece(self._unit, path, shape, places, inner.detach()))

    def _take_values(self, start: KeyPath, held: ParameterState) -> None:
        if held.nodes is not None:
            self.structures.append((self._unit, start, held.nodes))
        for rest, value, where in held.leaves:
            if not isinstance(value, torch.Tensor):
                with _of_optimizer():
                    self.objects.append(make_object(self._unit, (*start, *rest), value, where))


def _paths_of_numbers(held: Iterable[ParameterState]) -> set[KeyPath]:
    """Returns where parameters of several elements have plain tensors of one.

    Where a rank holds one element of a parameter, such a tensor looks like a part of a full one.
    """
    return {
        path
        for state in held
        for path, tensor in state.tensors()
        if type(tensor) is torch.Tensor and tensor.numel() == 1
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
