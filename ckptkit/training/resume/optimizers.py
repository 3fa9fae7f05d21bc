"""Checks that an optimizer on this rank fits the state in a step, and allocates it.

Restores the values of an optimizer: hyperparameters, states, and values of its own.

`load_pieces` fills the tensors of its parameters' states in place. Everything else is read first
and is set when every rank has read its own.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch.optim import Optimizer

from ckptkit.core.errors import FormatError, ResumeError
from ckptkit.core.index import KeyPath, Shape, TensorEntry, TensorIndex
from ckptkit.core.text import a_kind, list_first
from ckptkit.training.resume.changed_models import Comparison
from ckptkit.training.resume.restore import (
    Apply,
    read_tensors,
    unflatten,
)
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state.collect import BoundOptimizer
from ckptkit.training.state.dtensors import (
    Copies,
    DTensor,
    empty_like,
    local_part,
    make_dtensor,
    unwrap_dtensor,
)
from ckptkit.training.state.objects import is_same
from ckptkit.training.state.optimizers import (
    COMPOSED,
    GROUPS,
    PARAMS,
    RANK_LAYOUTS,
    RANK_STATES,
    STATE,
    below,
    class_of,
    is_low_bit,
    is_paged,
    kind_of,
    part_of,
    tensor_at,
    unwrap_optimizer,
)
from ckptkit.training.state.pieces import Entry, Piece, ShardLayout
from ckptkit.training.state.structures import Nodes, adapt, assemble, leaf_paths, leaves_by_key

logger = logging.getLogger(__name__)

Slots = Mapping[int, tuple[ShardLayout, ...]]
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
_FIRST_STEPS = 2  # in which an optimizer makes its state
_FLAGS = (bool, type(None))
_NUMBERS = (torch.Tensor, int, float)
_NAMES = "param_names"  # which torch keeps where a step has none
_DECOUPLED = "decoupled_weight_decay"  # the flag by which AdamW differs from Adam since torch 2.7


class StoredOptimizer:
    """What a step has for one optimizer: matched with it, and put in place."""

    def __init__(
        self,
        stored: StoredStep,
        bound: BoundOptimizer,
        slots: Slots,
        world: Copies,
        changed: Mapping[int, Comparison],
    ) -> None:
        self.optimizer = bound.optimizer
        self._stored = stored
        self._bound = bound
        self._slots = slots  # what the parameters of all optimizers hold on this rank
        self._world = world
        # parameters that the step has fewer rows of, by name the shape there, and that it lacks
        self.grown: dict[str, Shape] = {}
        self.new: set[str] = set()
        for parameter in self._parameters:
            one = changed[id(parameter)]
            names = {slot.fqn for slot in slots[id(parameter)]}
            self.grown |= {name: one.grown[name][0] for name in names & one.grown.keys()}
            self.new |= names & one.new.keys()

    def places(self, names: Iterable[str]) -> Iterator[Entry]:
        """Yields where the states of some parameters are in the step."""
        unit, path = self._bound.unit, self._bound.path
        for name in names:
            yield unit, (*path, STATE, name)
            yield unit, (*path, RANK_STATES, str(self._world.own), name)

    @cached_property
    def _index(self) -> TensorIndex:
        return self._stored.index(self._bound.unit)

    @cached_property
    def _tensors(self) -> dict[KeyPath, TensorEntry]:
        return {entry.key_path: entry for entry in self._index.tensors.values()}

    def _values_below(self, part: str) -> Iterator[tuple[KeyPath, KeyPath]]:
        return below(self._index.values, self._bound.path, part)

    def _tensors_below(self, part: str) -> Iterator[tuple[KeyPath, KeyPath]]:
        return below(self._tensors, self._bound.path, part)

    @cached_property
    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group[PARAMS]]

    @cached_property
    def _live(self) -> dict[str, torch.Tensor]:
        return {self._slots[id(p)][0].fqn: p for p in self._parameters}

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The stored groups: their hyperparameters, and the names of their parameters.

        Those of an optimizer of another kind are refused.
        """
        groups = self._read_groups()
        entry = self._stored.entry(*self._bound.saved_as)
        made_by = (entry and entry.made_by) or ""  # empty where that is not known
        own = class_of(self.optimizer)
        if made_by == own or not groups:
            return groups
        stored = {name for group in groups for name in group}
        # Wrappers may have none. Newer versions of torch add flags, which older steps lack.
        defaults: Mapping[str, Any] = getattr(unwrap_optimizer(self.optimizer), "defaults", {})
        needed = {name for name, value in defaults.items() if type(value) not in _FLAGS}
        lacking = sorted(needed - stored - _NEUTRAL)
        if made_by:
            live = {name for group in self.optimizer.param_groups for name in group}
            lacking += sorted(stored - live - _NEUTRAL)
        if not lacking and _DECOUPLED in defaults:
            decoupled = {group.get(_DECOUPLED) for group in groups} - {None}
            lacking = [_DECOUPLED] * (decoupled == {not defaults[_DECOUPLED]})
        if lacking:
            raise ResumeError(
                f"the state of another optimizer{made_by and f', {made_by},'} was found against"
                f" {own}; they differ in {list_first(lacking)}",
                where=self._bound.name,
                hint=_HINT,
            )
        if made_by:
            logger.warning(
                "%s: it was saved as %s and is resumed as %s", self._bound.name, made_by, own
            )
        return groups

    def _read_groups(self) -> list[dict[str, Any]]:
        """Of flattened groups, as many as there are parameters, those of this rank are read."""
        stored, bound = self._stored, self._bound
        own = {slot.fqn for p in self._parameters for slot in self._slots[id(p)]}
        leaves: dict[str | int, dict[KeyPath, Any]] = defaultdict(dict)
        for rest, path in self._values_below(GROUPS):
            if not rest:  # torch before 2.4 stores all groups as one value
                return list(self._renamed(stored.value(bound.unit, path)))
            if isinstance(rest[0], int) or rest[0] in own:
                leaves[rest[0]][rest[1:]] = stored.value(bound.unit, path)
        tensors = {path: rest for rest, path in self._tensors_below(GROUPS)}
        wanted = [
            path for path, rest in tensors.items() if isinstance(rest[0], int) or rest[0] in own
        ]
        for path, tensor in read_tensors(stored, bound.unit, wanted):
            leaves[tensors[path][0]][tensors[path][1:]] = tensor
        groups: list[dict[str, Any]] = []
        for key in sorted(leaves, key=str):  # the number of a group, or the name of one parameter
            values = leaves[key]
            names = values.pop((PARAMS,), None)
            nodes = stored.structure(bound.unit, (*bound.path, GROUPS, key))
            where = f"{bound.key}, group {key}"
            group = assemble(nodes, values, where=where) if values or nodes is not None else {}
            _check_mapping(group, where)
            group = dict(group)
            if isinstance(key, str):
                group[PARAMS] = [key]
            elif names is not None:
                group[PARAMS] = names
            if PARAMS in group:
                groups += [group] if isinstance(key, str) else self._renamed([group])
        return groups

    def _renamed(self, groups: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        renaming = self._stored.renaming
        return map(dict, groups) if renaming is None else renaming.groups(groups)

    def missing_groups(self, beside: Sequence[BoundOptimizer]) -> str:
        """Returns what a step has of groups that an optimizer does not have; empty if it has all.

        The other groups of a pipeline's stage are in the optimizers of other stages. Of flattened
        groups, each of one parameter, those without a state are left out: a parameter that is not
        trained may be in one. `beside` has all optimizers of the state, of which several may have
        been saved as one.
        """
        bound, groups = self._bound, self.groups
        place = bound.unit, bound.path
        together = [other.optimizer for other in beside if (other.unit, other.path) == place]
        own = [
            slot
            for each in together
            for group in each.param_groups
            for p in group[PARAMS]
            for slot in self._slots[id(p)]
        ]
        if bound.stage or any(slot.values.count < self._world.number for slot in own):
            return ""
        names = {slot.fqn for slot in own}
        keys = [*self._values_below(GROUPS), *self._tensors_below(GROUPS)]
        flat = {rest[0] for rest, _ in keys if rest}
        of_states = self._names_with_state()
        left = sorted(name for name in flat - names if isinstance(name, str) and name in of_states)
        if left:
            return f"the step has a state of {len(left):,} parameters more: {list_first(left)}"
        live = self.optimizer.param_groups
        lacking = [group for group in groups if group[PARAMS] and names.isdisjoint(group[PARAMS])]
        empty = sum(not group[PARAMS] for group in groups) - sum(
            not group[PARAMS] for group in live
        )
        if not lacking and empty <= 0:
            return ""
        of_lacking = [name for group in lacking for name in group[PARAMS]]
        what = f"the parameters {list_first(of_lacking)}" if lacking else "no parameters"
        return (
            f"the step has {len(groups):,}, and the optimizer {len(live):,}; what it lacks has"
            f" {what}"
        )

    def group_changes(self) -> Iterator[Apply]:
        """Finds the hyperparameters of an optimizer's groups.

        Groups are recognised by the names of their parameters, so that their order may differ. A
        stage of a pipeline has a part of a group, or groups that other stages do not have. Yields
        functions that put them in place.
        """
        groups = self.groups
        of_names = {name: group for group in groups for name in group[PARAMS]}
        defaults: Mapping[str, Any] = getattr(unwrap_optimizer(self.optimizer), "defaults", {})
        set_group = _set_exactly if self._stored.has_structures else _set_group
        saved_without = [group for group in groups if not group[PARAMS]]
        for number, group in enumerate(self.optimizer.param_groups):
            own = [slot for p in group[PARAMS] for slot in self._slots[id(p)]]
            if not own:
                if saved_without:
                    yield partial(set_group, group, saved_without.pop(0), defaults)
                continue
            staged = any(slot.values.count < self._world.number for slot in own)
            names = frozenset(slot.fqn for slot in own) - self.new
            if not names:
                continue
            values = _group_of(names, of_names, staged=staged)
            if values is None:
                raise ResumeError(
                    _no_group(number, names, groups),
                    where=self._bound.key,
                    hint="build the optimizer with the parameter groups that it was saved with",
                )
            yield partial(set_group, group, values, defaults)

    def check_state(self) -> None:
        """Refuses state that this rank could not continue from."""
        live = {name: self._slots[id(p)] for name, p in self._live.items()}
        layout = self._layout()
        if self.grown and (is_low_bit(self.optimizer) or layout is not None or self._composed):
            raise ResumeError(
                f"{class_of(self.optimizer)} quantises, or shapes, its state by the elements of a"
                f" parameter, and {min(self.grown)!r} has more of them than in the step",
                where=self._bound.name,
                hint=RESET_HINT,
            )
        if layout is None:
            # State of whole parameters would have to be quantised part by part.
            whole = self._names_with_state() & live.keys()
            if is_low_bit(self.optimizer) and any(_is_sharded(live[n]) for n in whole):
                raise ResumeError(
                    f"{class_of(self.optimizer)} quantises the state of each rank's own part,"
                    " and the step holds a state that was made without sharding, or by another"
                    " optimizer",
                    where=self._bound.name,
                    hint=RESET_HINT,
                )
            return
        on_ranks = {str(rest[1]) for rest, _ in self._tensors_below(RANK_STATES)}
        elsewhere = on_ranks - layout.keys()
        moved = [name for name in elsewhere & live.keys() if any(s.elements for s in live[name])]
        for name, saved in layout.items():
            if not saved["kinds"]:
                continue
            here = live.get(name)
            part = {} if here is None else part_of(here)
            if here is None or any(saved.get(key) != value for key, value in part.items()):
                moved.append(name)
        if moved:
            raise self._elsewhere(
                f"rank {self._world.own} holds another part of {min(moved)!r} now"
            )

    def allocate(self) -> None:
        """Gives an optimizer the state tensors that a step has for it, without content."""
        stored, bound, live, composed = self._stored, self._bound, self._live, self._composed
        states: MutableMapping[Any, Any] = self.optimizer.state
        for name, parameter in live.items():
            nodes = stored.structure(bound.unit, (*bound.path, STATE, name))
            # Tensors get the names that they have in the step, from which all else comes.
            before = None if nodes is None else states.pop(parameter, None)
            if nodes is not None and isinstance(before, Mapping):
                paths = leaves_by_key(nodes, name)
                tensors = {key: before[key] for key in paths if torch.is_tensor(before.get(key))}
                states[parameter] = {paths[key][0]: tensor for key, tensor in tensors.items()}
        layout = self._layout()
        own: dict[str, Kinds] = {name: held["kinds"] for name, held in (layout or {}).items()}
        placed = {
            (name, tuple(path)): (shape, placements)
            for name, held in (layout or {}).items()
            for path, shape, placements in held.get("placed", ())
        }
        kinds = [*composed.values(), *own.values()]
        # Tensors of classes of its own, or in memory of its own, are created by the optimizer.
        makable = {"Tensor", "DTensor"} if placed else {"Tensor"}
        has_own_classes = any(
            kind not in makable for of_parameter in kinds for _, kind in of_parameter
        )
        quantises = kinds and is_low_bit(self.optimizer)
        names = kinds or self._names_with_state()
        if has_own_classes or quantises or (names and is_paged(self.optimizer)):
            wanted = [(name, path) for of in (composed, own) for name in of for path, _ in of[name]]
            step_without_effect(
                self.optimizer,
                lambda: all(
                    tensor_at(states.get(live[name], {}), tuple(path)) is not None
                    for name, path in wanted
                    if name in live
                ),
                keeping=self._changed,
            )
        apart = {
            n for n, p in live.items() if layout is not None and _is_sharded(self._slots[id(p)])
        }
        leave = {id(live[name]) for name in apart}
        leave |= {id(p) for p in self._changed if self._is_new(p)}
        allocate_state(
            *(self.optimizer, self._slots, self._index, bound.path),
            leave=leave,
            grown=self.grown,
            keeping=self._changed,
        )
        start = (*bound.path, RANK_STATES, str(self._world.own))
        for name in apart:
            if own.get(name):
                saved = [(k, kind, self._tensors.get((*start, name, *k))) for k, kind in own[name]]
                self._fit_state(
                    live[name], saved, {k: v for (n, k), v in placed.items() if n == name}
                )
            else:
                states.pop(live[name], None)
        for name in composed.keys() & live.keys():
            self._check_kinds(states.get(live[name], {}), composed[name])

    @cached_property
    def _changed(self) -> list[torch.Tensor]:
        """The parameters that the step lacks, or has a part of."""
        names = self.new | self.grown.keys()
        return [p for p in self._parameters if any(s.fqn in names for s in self._slots[id(p)])]

    def _is_new(self, parameter: torch.Tensor) -> bool:
        return all(slot.fqn in self.new for slot in self._slots[id(parameter)])

    def _fit_state(
        self,
        parameter: torch.Tensor,
        saved: Sequence[tuple[Sequence[str | int], str, TensorEntry | None]],
        placed: Mapping[KeyPath, tuple[Sequence[int], Sequence[str]]],
    ) -> None:
        """Gives a parameter's state the tensors that this rank has saved.

        `saved` has the place of each in the state, its class, and where its elements are; `placed`
        shape and placements of DTensors, which steps of older versions do not have.
        """
        state = self.optimizer.state[parameter]
        for names, kind, entry in saved:
            path = tuple(names)
            if entry is None or tensor_at(state, path) is not None:
                continue
            dtype: torch.dtype = getattr(torch, entry.dtype.name)
            made: torch.Tensor | None = None
            if kind == "Tensor":
                made = torch.empty(entry.shape, dtype=dtype, device=parameter.device)
            elif kind == "DTensor" and isinstance(parameter, DTensor):
                as_parameter = parameter.shape, list(map(repr, parameter.placements))
                made = make_dtensor(parameter, *placed.get(path, as_parameter), dtype)
            if made is not None and unwrap_dtensor(made).shape == entry.shape:
                _set_nested(state, path, made)
        self._check_kinds(state, [(names, kind) for names, kind, _ in saved])

    def _check_kinds(self, state: Mapping[Any, Any], kinds: Kinds) -> None:
        for names, kind in kinds:
            tensor = tensor_at(state, tuple(names))
            here = None if tensor is None else kind_of(tensor)
            if here != kind:
                kept = f"a {here}" if here else "nothing"
                raise ResumeError(
                    f"{class_of(self.optimizer)} keeps {kept} as {'.'.join(map(str, names))!r}"
                    f" where a {kind} was saved",
                    where=self._bound.name,
                    hint=RESET_HINT,
                )

    @cached_property
    def _composed(self) -> dict[str, Kinds]:
        """What the composed tensors in the state of whole parameters were, by parameter."""
        keys = self._values_below(COMPOSED)
        return {".".join(map(str, rest)): self._parsed(path) for rest, path in keys}

    @cached_property
    def _composed_places(self) -> set[tuple[str, KeyPath]]:
        """Parameters and the places of composed tensors in their state."""
        composed = self._composed.items()
        return {(name, tuple(names)) for name, kinds in composed for names, _ in kinds}

    def leftovers(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yields pieces of the live state that the step lacks, as later steps have made them.

        An optimizer with other flags than were saved, such as `amsgrad`, has tensors that the step
        lacks for another reason.
        """
        defaults: Mapping[str, Any] = getattr(unwrap_optimizer(self.optimizer), "defaults", {})
        flags = {name: value for name, value in defaults.items() if isinstance(value, bool)}
        if any(
            g.get(name, value) is not value for g in self.groups for name, value in flags.items()
        ):
            return
        start = (*self._bound.path, STATE)
        composed = {(*start, name, *place) for name, place in self._composed_places}
        for piece in pieces:
            path = piece.key_path
            if piece.unit != self._bound.unit or path[: len(start)] != start:
                continue
            direct = len(path) == len(start) + 2  # the parameter, and a name
            inside = any(path[:end] in composed for end in range(len(start) + 2, len(path)))
            if not (direct or inside) or piece.key not in self._index.tensors:
                yield piece

    def _layout(self) -> dict[str, Mapping[str, Any]] | None:
        """Returns what this rank held of each parameter when its state was saved, by name.

        It is None where no state is bound to ranks. Parameters of other optimizers that this rank
        had in the same place, as a pipeline's stages have them, are left out: they share none with
        this one.
        """
        keys = list(self._values_below(RANK_LAYOUTS))
        if not keys:
            return None
        size = self._parsed(keys[0][1]).get("world_size")
        if size != self._world.number:
            raise self._elsewhere(f"{size} ranks saved it, and {self._world.number} resume")
        parameters: dict[str, Mapping[str, Any]] = {}
        for rest, path in keys:
            if rest[0] == str(self._world.own):
                held = self._parsed(path)["parameters"]
                parameters |= {} if held.keys().isdisjoint(self._live) else held
        return parameters

    def _parsed(self, path: KeyPath) -> Any:
        try:
            return json.loads(self._stored.value(self._bound.unit, path))
        except (ValueError, TypeError) as error:
            where = ".".join(map(str, path))
            raise FormatError(f"does not say what a rank held: {error}", where=where) from error

    def _names_with_state(self) -> set[str]:
        """Returns the parameters whose state has the keys of whole parameters."""
        keys = [*self._tensors_below(STATE), *self._values_below(STATE)]
        return {str(rest[0]) for rest, _ in keys if rest}

    def _elsewhere(self, what: str) -> ResumeError:
        return ResumeError(
            f"the state of {class_of(self.optimizer)} is quantised, or shaped, by the part of the"
            f" parameters that each rank holds, and goes back only to the same parts: {what}",
            where=self._bound.name,
            hint=RESET_HINT,
        )

    def value_changes(self) -> Iterator[Apply]:
        """Reads the parameters' states, without the tensors that are filled in place.

        Yields functions that put them in place.
        """
        stored, unit, path = self._stored, self._bound.unit, self._bound.path
        on_this_rank = (*path, RANK_STATES, str(self._world.own))
        is_rank_bound = next(self._values_below(RANK_LAYOUTS), None) is not None
        # By parameter: each place in its state, with the key path of a value that is no tensor.
        values_of: dict[str, dict[KeyPath, KeyPath]] = defaultdict(dict)
        for start in ((*path, STATE), on_this_rank):
            for rest, key in below(self._index.values, start[:-1], str(start[-1])):
                values_of[str(rest[0])][rest[1:]] = key
        filled_of: dict[str, list[KeyPath]] = defaultdict(list)
        nested_of: dict[str, dict[KeyPath, KeyPath]] = defaultdict(dict)
        composed = self._composed_places
        for name, place in composed:
            filled_of[name].append(place)
        for rest, key in self._tensors_below(STATE):
            name, place = str(rest[0]), rest[1:]
            if any((name, place[:end]) in composed for end in range(1, len(place))):
                continue
            if len(place) == 1:
                filled_of[name].append(place)
            else:
                nested_of[name][place] = key
        for parameter in self._parameters:
            own = self._slots[id(parameter)]
            if not own or not has_state(parameter, own):
                continue
            name = own[0].fqn
            nodes = stored.structure(unit, (*path, STATE, name))
            nodes = nodes or stored.structure(unit, (*on_this_rank, name))
            filled, nested = list(filled_of.get(name, ())), nested_of.get(name, {})
            unplaced = isinstance(parameter, DTensor) or not own[0].whole or name in self.grown
            if nested and unplaced:
                raise ResumeError(
                    f"the optimizer keeps tensors in {name!r}, whose place on each rank is not"
                    " known",
                    where=name,
                    hint="resume without sharding, with the model that was saved, or use an"
                    " optimizer whose state has the shape of the parameters",
                )
            leaves = {place: stored.value(unit, k) for place, k in values_of[name].items()}
            tensors = dict(read_tensors(stored, unit, nested.values())) if nested else {}
            leaves |= {place: tensors[key] for place, key in nested.items()}
            if nodes is not None:
                filled += [place for place in leaf_paths(nodes, name) if place not in leaves]
            if nodes is None and is_rank_bound:
                if leaves:  # next to quantised tensors, which the optimizer has created itself
                    yield partial(_add_to_state, self.optimizer, parameter, leaves)
            elif nodes is not None or leaves or filled:
                adapts = not stored.has_structures
                change = partial(_set_state, self.optimizer, parameter, leaves, filled, nodes, name)
                yield partial(change, adapts=adapts)

    def unbound_changes(self, pieces: list[Piece]) -> Iterator[Apply]:
        """Reads what an optimizer keeps under names of its own, not under parameters.

        `pieces` gets the sharded tensors in it, to be filled before.
        """
        bound, stored = self._bound, self._stored
        state: MutableMapping[Any, Any] = self.optimizer.state
        of_parameters = {name for group in self.groups for name in group[PARAMS]}
        # Of flattened groups, those of other ranks' parameters were not read.
        below_groups = (rest[:1] for rest, _ in self._values_below(GROUPS))
        of_parameters |= {name for key in below_groups for name in key if isinstance(name, str)}
        live = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        place = bound.unit, (*bound.path, STATE), bound.name
        values = unflatten(stored, *place, live, pieces, saved=True, leaving=of_parameters)
        _check_mapping(values, bound.name)
        exact = stored.has_structures

        def apply() -> None:
            live = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
            for key in live:
                if exact or key in values:
                    del state[key]
            for key, value in values.items():
                state[key] = _filled(live.get(key), value)

        yield apply


def allocate_state(
    optimizer: Optimizer,
    slots: Slots,
    index: TensorIndex,
    path: KeyPath,
    *,
    leave: Container[int] = (),
    grown: Mapping[str, Shape] | None = None,
    keeping: Sequence[torch.Tensor] = (),
) -> None:
    """Gives an optimizer the state tensors that a checkpoint has for it, without content.

    Tensors that are there stay, to be filled in place; state of parameters for which the checkpoint
    has none is removed. The state of parameters whose identities are in `leave` stays as it is.
    Parameters in `grown` have fewer elements in the checkpoint: their shapes there. What their
    state has besides is zero, unless the optimizer has made it already. `keeping` is as for
    `step_without_effect`.
    """
    before = grown or {}
    stored = _stored_states(index, path)
    parameters = [
        (parameter, bool(group.get("capturable") or group.get("fused")))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in leave
    ]
    # State of a sharded parameter that is neither a number nor of its shape.
    odd = [
        (parameter, name)
        for parameter, _ in parameters
        for slot in slots[id(parameter)]
        if isinstance(parameter, DTensor) or not slot.whole or slot.fqn in before
        for name, entry in stored.get(slot.fqn, {}).items()
        if entry.shape != before.get(slot.fqn, slot.shape) and entry.elements != 1
    ]
    if odd:
        step_without_effect(
            optimizer,
            lambda: all(name in optimizer.state.get(p, {}) for p, name in odd),
            keeping=keeping,
        )
    # Of a parameter of one element, a number looks like a part.
    numbers = {
        name
        for parameter, _ in parameters
        for slot in slots[id(parameter)]
        for name, entry in stored.get(slot.fqn, {}).items()
        if entry.elements == 1 and math.prod(before.get(slot.fqn, slot.shape)) > 1
    }
    for parameter, on_device in parameters:
        own = slots[id(parameter)]
        slot = next((slot for slot in own if slot.fqn in stored), None)
        if slot is None or not has_state(parameter, own):
            optimizer.state.pop(parameter, None)
            continue
        state: dict[str, Any] = optimizer.state[parameter]
        for name, entry in stored[slot.fqn].items():
            is_part = entry.shape == before.get(slot.fqn, slot.shape) and name not in numbers
            value, is_number = state.get(name), entry.elements == 1
            # What a later step has made of it, in a resume from an earlier one.
            is_other = (is_part or is_number) and (
                isinstance(value, torch.Tensor) and (value.numel() == 1) != is_number
            )
            if is_other or not isinstance(value, torch.Tensor):
                state[name] = _empty(
                    parameter, slot, name, entry, on_device=on_device, is_part=is_part
                )
                if slot.fqn in before:
                    unwrap_dtensor(state[name]).zero_()


def _stored_states(index: TensorIndex, path: KeyPath) -> dict[str, dict[str, TensorEntry]]:
    states: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    entries = {entry.key_path: entry for entry in index.tensors.values()}
    for rest, key_path in below(entries, path, STATE):
        if len(rest) == 2:  # noqa: PLR2004
            states[str(rest[0])][str(rest[1])] = entries[key_path]
    for rest, _ in below(index.values, path, STATE):
        if len(rest) > 1:
            states.setdefault(str(rest[0]), {})
    return dict(states)


def has_state(parameter: torch.Tensor, slots: Sequence[ShardLayout]) -> bool:
    """Whether an optimizer has state here; FSDP1's ranks without elements may have none.

    They have some of a flat parameter, which is padded, and of what is not sharded.
    """
    if isinstance(parameter, DTensor):
        return True
    return any(slot.elements or slot.start is not None or not slot.sharded for slot in slots)


def _empty(
    parameter: torch.Tensor,
    slot: ShardLayout,
    name: str,
    entry: TensorEntry,
    *,
    on_device: bool,
    is_part: bool,
) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype.name)
    if is_part and (entry.shape or name != "step"):
        if slot.start is not None:  # with padding, which no checkpoint holds
            return torch.zeros(slot.held, dtype=dtype, device=parameter.device)
        if isinstance(parameter, DTensor) or tuple(parameter.shape) == slot.held:
            return empty_like(parameter, dtype)
        return torch.empty(slot.held, dtype=dtype, device=parameter.device)
    # As torch's load_state_dict does: only counts of steps are not on the parameter's device.
    is_count = name == "step" and entry.elements == 1 and not on_device
    device = torch.device("cpu") if is_count else parameter.device
    return torch.empty(entry.shape, dtype=dtype, device=device)


def step_without_effect(
    optimizer: Optimizer, is_made: Callable[[], bool], *, keeping: Sequence[torch.Tensor] = ()
) -> None:
    """Lets an optimizer make its own state, by a step with gradients of zero, or by two.

    The parameters are loaded afterwards, but for those of `keeping`, which are put back, as
    gradients and hyperparameters are. An optimizer that has state already keeps it. What
    `torch.compile` does in its step is not worth while here, and left out. Some make a part of
    their state in the second step only, as `is_made` says.
    """
    if optimizer.state:
        return
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    kept = [(local_part(parameter), local_part(parameter).clone()) for parameter in keeping]
    gradients = [(p, p.grad) for g in optimizer.param_groups for p in g["params"]]
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group in optimizer.param_groups:
        lr = group["lr"]
        group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6 and later
    try:
        with nullcontext() if set_stance is None else set_stance("force_eager"):
            for _ in range(_FIRST_STEPS):
                unwrap_optimizer(optimizer).step()
                if is_made():
                    break
    except Exception as error:
        raise ResumeError(
            f"{type(optimizer).__name__} has state of other shapes than its parameters, and could"
            f" not make it by a step: {type(error).__name__}: {error}",
            hint="take a step with it before resuming, or resume without the optimizer",
        ) from error
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for parameter, content in kept:
            parameter.copy_(content)


def _is_sharded(slots: Sequence[ShardLayout]) -> bool:
    return any(slot.sharded for slot in slots)


def _group_of(
    own: frozenset[str], of_names: Mapping[str, Mapping[str, Any]], *, staged: bool
) -> Mapping[str, Any] | None:
    """Returns the hyperparameters that the parameters of a group were saved with.

    Groups of one parameter, as flattened ones are, make up a group if they are alike.
    """
    if not own <= of_names.keys():
        return None
    distinct = list({id(of_names[name]): of_names[name] for name in sorted(own)}.values())
    saved = frozenset(name for group in distinct for name in group[PARAMS])
    if saved != own and not staged:
        return None
    first = distinct[0]
    are_alike = all(
        len(group[PARAMS]) == 1
        and group.keys() == first.keys()
        and all(_are_equal(value, first[key]) for key, value in group.items() if key != PARAMS)
        for group in distinct
    )
    return first if len(distinct) == 1 or are_alike else None


def _are_equal(value: Any, other: Any) -> bool:
    dtype = next((side.dtype for side in (value, other) if isinstance(side, torch.Tensor)), None)
    if dtype is None or not all(isinstance(side, _NUMBERS) for side in (value, other)):
        return is_same(value, other)
    # The dtype of a number alone would be the default dtype of the process.
    return torch.as_tensor(value, dtype=dtype).equal(torch.as_tensor(other, dtype=dtype))


def _no_group(number: int, own: frozenset[str], groups: Sequence[Mapping[str, Any]]) -> str:
    if groups and all(len(group[PARAMS]) == 1 for group in groups):
        saved = {name for group in groups for name in group[PARAMS]}
        missing = sorted(own - saved)
        differ = "were saved with different hyperparameters"
        what = f"are not in the checkpoint: {list_first(missing)}" if missing else differ
        return f"the {len(own):,} parameters of group {number} {what}"
    nearest = max((set(g[PARAMS]) for g in groups), key=lambda g: len(g & own), default=set())
    differing = sorted(own ^ nearest)
    return (
        f"no group of the checkpoint's {len(groups):,} has the {len(own):,} parameters of group"
        f" {number}; the nearest differs in {list_first(differing)}"
    )


def _check_mapping(value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise FormatError(f"{a_kind(value)} was found where names were expected", where=where)


def _set_exactly(
    group: MutableMapping[Any, Any], values: Mapping[Any, Any], defaults: Mapping[str, Any]
) -> None:
    """Gives a group the hyperparameters that were saved, and no others.

    As with `Optimizer.load_state_dict`, what the class itself puts into every group stays: newer
    versions of torch have more of it than a step. A number goes into the tensor that the
    optimizer was built with in its place.
    """
    tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
    for key in [key for key in group if key not in {PARAMS, _NAMES, *defaults} or key in values]:
        if key != PARAMS:
            del group[key]
    for key, value in values.items():
        if key != PARAMS:
            built_as_tensor = isinstance(defaults.get(key), torch.Tensor) and key in tensors
            if built_as_tensor and type(value) in {int, float}:
                value = torch.as_tensor(value, dtype=tensors[key].dtype)  # noqa: PLW2901
            group[key] = _filled(tensors.get(key), value)


def _filled(live: Any, value: Any) -> Any:
    """Returns a value; a live tensor like it takes it up, as compiled code may have that one."""
    both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live is not value
    if both and (live.dtype, live.shape) == (value.dtype, value.shape):
        with torch.no_grad():
            return live.copy_(value)
    return value


def _set_group(
    group: MutableMapping[str, Any], values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Does what `_set_exactly` does with a step that does not have all types."""
    lacking = adapt({}, group)  # values without a leaf, such as empty mappings
    for name in [name for name in group if name not in {PARAMS, _NAMES, *defaults, *values}]:
        if name not in lacking:
            del group[name]
    for name, value in values.items():
        if name == PARAMS:
            continue
        live = group.get(name)
        if isinstance(live, torch.Tensor):
            # Of a number the default dtype would keep fewer digits than the live tensor has.
            live.copy_(torch.as_tensor(value, dtype=live.dtype))
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and name in group:
            group[name] = value.item()
        else:
            group[name] = adapt(value, live)


def _set_state(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    saved: Mapping[KeyPath, Any],
    filled: Sequence[KeyPath],
    nodes: Nodes | None,
    where: str,
    *,
    adapts: bool,
) -> None:
    """Gives an optimizer the state of a parameter, and no other.

    `saved` is what was read, by the rest of the key path; `filled` has the places of the tensors
    that were filled in place; with `adapts`, types are taken from the live state.
    """
    live: Any = optimizer.state.get(parameter)
    leaves = {
        path: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
        for path, value in saved.items()
    }
    for path in filled:
        tensor = tensor_at(live, path)
        if tensor is not None:
            leaves[path] = tensor
    value = assemble(nodes, leaves, where)
    if adapts:
        value = adapt(value, live)
    if nodes is None and isinstance(live, dict) and type(live) is type(value):
        kept = {(type(key), key) for key in value}
        for key in [key for key in live if (type(key), key) not in kept]:
            del live[key]
        live.update(value)
    else:
        optimizer.state[parameter] = value


def _add_to_state(
    optimizer: Optimizer, parameter: torch.Tensor, saved: Mapping[KeyPath, Any]
) -> None:
    for path, value in saved.items():
        _set_nested(optimizer.state[parameter], path, value)


def _set_nested(target: Any, path: KeyPath, value: Any) -> None:
    """Sets a value in nested dictionaries and lists, keys meant as texts; DCP keeps texts only."""
    name, *rest = path
    key: Any = name
    if isinstance(target, list):
        key = int(name)
        target += [None] * (key + 1 - len(target))
        inner = target[key]
    else:
        key = name if name in target else next((k for k in target if str(k) == str(name)), name)
        inner = target.get(key)
    if not rest:
        target[key] = value
        return
    if inner is None:
        inner = target[key] = [] if isinstance(rest[0], int) else {}
    _set_nested(inner, tuple(rest), value)
