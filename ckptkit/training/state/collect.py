"""Binds the mapping that the user passes, and collects what this rank holds of it.

The stages of a pipeline, which are several models in a list, share one place in a step. A binding
is kept for as long as the same objects are passed. `expected_state_bytes` says how much optimizers
that have never stepped will add, so that memory is ready.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind
from ckptkit.training import step_names
from ckptkit.training.sidecar import checked_files
from ckptkit.training.state import objects as rng
from ckptkit.training.state.bound import (
    PER_RANK,
    BoundModel,
    BoundObject,
    BoundOptimizer,
    Layout,
    MissingGroups,
    Unfit,
    class_of,
    index_of,
    kind_of,
    leaves,
    place_entries,
    taken_from,
)
from ckptkit.training.state.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.state.models import ModelView, ModelWalk
from ckptkit.training.state.objects import (
    check_nesting,
    flatten,
    make_object,
    serialise_or_refuse,
    torch_archive,
)
from ckptkit.training.state.optimizers import CollectedState, OptimizerWalk, state_types
from ckptkit.training.state.pieces import (
    Holdings,
    ObjectValue,
    Piece,
    Replicas,
    select_owned,
)
from ckptkit.training.state.structures import VERSION, Structure, tables_of, take_apart
from ckptkit.writer.merge import few_collections
from ckptkit.writer.messages import Inline

__all__ = ["BoundModel", "BoundObject", "BoundOptimizer", "BoundState", "Layout", "bind"]

logger = logging.getLogger(__name__)


_BLOB_BYTES = 2_048  # headers and padding around one stored tensor, rounded up


class BoundState(Struct, frozen=True):
    """The user's state, checked and with a place on disk for everything.

    Gradients are no part of it: a save between two micro-batches keeps the parameters and the
    optimizer as the last `optimizer.step()` left them, and a resume starts the accumulation
    anew. Save after a step to lose no work.
    """

    layout: Layout  # what the step's directory looks like
    rank: int
    world_size: int
    models: tuple[BoundModel, ...]
    optimizers: tuple[BoundOptimizer, ...]
    others: tuple[BoundObject, ...]
    _walks: tuple[ModelWalk, ...]
    _optimizer_walks: tuple[OptimizerWalk, ...]
    _files: tuple[Inline, ...] = ()
    # what a resume does with an optimizer that does not fit the step
    unfit_optimizer: Unfit = "error"
    # what it does with groups of the step that an optimizer does not have
    missing_groups: MissingGroups = "error"

    def with_files(self, files: Mapping[str, bytes] | None) -> BoundState:
        if not files:
            return self
        own = [name for other in self.others for name in (other.unit, other.file)]
        return replace(self, _files=checked_files(files, own))

    def resuming(self, unfit_optimizer: Unfit, missing_groups: MissingGroups) -> BoundState:
        """Returns the same state, with what to do with an optimizer that does not fit the step."""
        return replace(self, unfit_optimizer=unfit_optimizer, missing_groups=missing_groups)

    def holdings(self, step: int) -> Holdings:
        """Returns all that this rank holds, without any communication.

        The pieces are the very objects of the call before where nothing moved in memory. Their
        tensors are those of training, and objects may be shared with it: both have to be copied
        before training continues. Files are copies already.
        """
        dispensable: list[dict[str, Any]] = []
        with few_collections():  # of what the same thread frees again
            collected = self.tensors(keep=True, sparing=dispensable)
        files = [*self._files]
        for other in self.others:
            self._take_other(other, collected, files)
        states = rng.capture()
        if self.layout == "dcp":
            path = (step_names.RNG, str(self.rank))
            collected.objects.append(ObjectValue("", path, {"step": step, **states}))
        elif self.layout == "accelerate":
            file = step_names.random_states_file(self.rank)
            if file not in {given.path for given in self._files}:  # accelerate counts otherwise
                files.append(Inline(file, torch_archive({"step": step, **states})))
        elif self.optimizers:  # a model alone is not trained on, says the Trainer
            file = step_names.trainer_random_states_file(self.rank, self.world_size)
            files.append(Inline(file, torch_archive(rng.under_trainer_keys(states))))
        if self.layout == "dcp" and any("." in entry["key"] for entry in self._entries()):
            check_keys(collected.pieces, collected.objects)
        if collected.structures:
            data = torch_archive(tables_of(collected.structures))
            files.append(Inline(step_names.values_file(self.rank), data))
        return Holdings(
            tuple(collected.pieces),
            tuple(collected.objects),
            tuple(files),
            tuple(dispensable),
            tuple({other.key: None for other in self.others if other.kind not in PER_RANK}),
        )

    def pieces(self) -> tuple[Piece, ...]:
        views = [walk.look() for walk in self._walks]
        states = [walk.states(views) for walk in self._optimizer_walks]
        return tuple(chain(*(view.pieces for view in views), *states))

    def facts(self) -> dict[str, Any]:
        """Returns what readers of the checkpoint need to know of the run, as plain values."""
        models = {
            ".".join(map(str, (model.key, *index_of(model.position)))): walk.facts()
            for model, walk in zip(self.models, self._walks, strict=True)
        }
        return {
            "torch_version": str(torch.__version__),
            "world_size": self.world_size,
            "layout": self.layout,
            "models": models,
            "entries": self._entries(),
            "structures": VERSION,
        }

    def _entries(self) -> list[dict[str, Any]]:
        """Returns where each entry of the mapping is stored, for a resume."""
        kinds: list[tuple[str, BoundModel | BoundOptimizer | BoundObject]] = [
            *(("model", model) for model in self.models),
            *(("optimizer", optimizer) for optimizer in self.optimizers),
            *((other.kind, other) for other in self.others),
        ]
        entries: dict[tuple[str, int | None], dict[str, Any]] = {}
        for kind, bound in kinds:
            entry = {
                "key": bound.key,
                "position": bound.saved_as[1],
                "kind": kind,
                "class": class_of(bound.optimizer) if isinstance(bound, BoundOptimizer) else "",
                "unit": bound.unit,
                "base_unit": bound.places.base_unit if isinstance(bound, BoundModel) else "",
                "file": bound.file if isinstance(bound, BoundObject) else "",
                "stages": bound.stage,
            }
            first = entries.setdefault(bound.saved_as, entry)
            if first["class"] != entry["class"]:
                first["class"] = ""
        return list(entries.values())

    def _in_dcp(self, value: object) -> bool:
        return self.layout == "dcp" or any(isinstance(leaf, DTensor) for _, leaf in flatten(value))

    def check_plain(self, other: BoundObject) -> None:
        """Refuses tensors that would be in a file of Python objects, which no other tool reads.

        With a model in the state, the state dict of another one, such as an average, is any value.
        """
        origin = taken_from(other.target)
        if origin is None or (origin == "model" and self.models):
            return
        if self._in_dcp(other.target):
            return
        raise UsageError(
            f"the state dict of {'an' if origin == 'optimizer' else 'a'} {origin} was found, which"
            " would be stored as a Python object that no other tool looks into",
            where=other.key,
            hint=f"pass the {origin} itself, without state_dict()",
        )

    def tensors(
        self, *, keep: bool = False, sparing: list[dict[str, Any]] | None = None
    ) -> CollectedState:
        """Returns what this rank holds of the models and optimizers.

        With `keep`, the pieces are remembered, so that the next time is faster. `sparing` gets the
        optimizers, and what is wrong with them, as `Holdings.dispensable` has them; one whose state
        cannot be stored is then left out. With None, that is raised.
        """
        views: list[ModelView] = [walk.look(keep=keep) for walk in self._walks]
        collected = CollectedState()
        for view in views:
            collected.add(view)
        for bound, walk in zip(self.optimizers, self._optimizer_walks, strict=True):
            problem = ""
            try:
                collected.add(walk.look(views, keep=keep))
            except UsageError:  # such as a parameter of no model, which the user can put right
                raise
            except Exception as error:
                if sparing is None:
                    raise
                expected = isinstance(error, CkptkitError)
                problem = str(error) if expected else f"{type(error).__name__}: {error}"
                logger.warning(
                    "%s: the state of %s cannot be saved: %s",
                    bound.name,
                    class_of(bound.optimizer),
                    problem,
                    exc_info=not expected,
                )
                problem = problem[:2_000]
            if sparing is not None:
                entry = {"name": bound.name, "unit": bound.unit, "path": list(bound.path)}
                sparing.append({**entry, "problem": problem})
        return collected

    def trained_by(self, optimizer: BoundOptimizer) -> frozenset[tuple[str, KeyPath]]:
        """Returns the units and key paths of the parameters that an optimizer changes."""
        groups = optimizer.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        return frozenset(
            model.places.of(slot.fqn)
            for model, walk in zip(self.models, self._walks, strict=True)
            for identity, slots in walk.look(keep=True).slots.items()
            if identity in trained
            for slot in slots
        )

    def _take_other(
        self, bound: BoundObject, collected: CollectedState, files: list[Inline]
    ) -> None:
        state = bound.state()
        check_nesting(state, bound.where)
        if bound.kind in PER_RANK and self.layout == "dcp":
            path = (*bound.path, str(self.rank))
            collected.objects.append(make_object(bound.unit, path, state, bound.where))
        elif bound.kind not in PER_RANK and self._in_dcp(state):
            self._take_leaves(bound, state, collected)
        elif bound.kind in PER_RANK or self.rank == 0:
            files.append(Inline(bound.file, serialise_or_refuse(state, bound.where)))

    def _take_leaves(self, bound: BoundObject, state: object, collected: CollectedState) -> None:
        parts, nodes = take_apart(state, bound.where)
        if nodes is not None and self.rank == 0:
            collected.structures.append(Structure(bound.unit, bound.path, nodes))
        meshes = Meshes(Copies())
        meshes.learn(leaf.value for leaf in parts)
        values = Replicas(self.world_size, self.rank, spread=False)
        for leaf in parts:
            path = (*bound.path, *leaf.path)
            if isinstance(leaf.value, torch.Tensor):
                slot = meshes.slot(".".join(map(str, path)), leaf.value, values)
                collected.pieces += slot.pieces(bound.unit, path, local_part(leaf.value))
            elif self.rank == 0:
                collected.objects.append(make_object(bound.unit, path, leaf.value, leaf.where))


def check_keys(pieces: Iterable[Piece], objects: Iterable[ObjectValue]) -> None:
    """Refuses two values whose names in the mapping give one key."""
    taken: dict[tuple[str, str], KeyPath] = {}
    items: Iterable[Piece | ObjectValue] = chain(pieces, objects)
    for item in items:
        key = item.unit, ".".join(map(str, item.key_path))
        if taken.setdefault(key, item.key_path) != item.key_path:
            raise UsageError(
                f"{'/'.join(map(str, item.key_path))} and {'/'.join(map(str, taken[key]))} would be"
                " stored under one key",
                where=key[1],
                hint="use keys without dots",
            )


def bind(state: Mapping[str, object], *, layout: Layout, rank: int, world_size: int) -> BoundState:
    """Checks the user's mapping, and gives everything in it a place on disk."""
    world = Copies(world_size, rank)
    models, optimizers, others = place_entries(state, layout, rank=rank)
    if any(m.position is not None for m in models) or any(
        o.position is not None for o in optimizers
    ):
        models, optimizers = _merge_stages(models, optimizers, world)
    if optimizers and not models:
        raise UsageError(
            "an optimizer was found but no model",
            where=optimizers[0].key,
            hint="put the model into the mapping too: the optimizer's state is saved by its names",
        )
    walks = [ModelWalk(m.module, m.places, world=world, where=m.where) for m in models]
    optimizer_walks = [
        OptimizerWalk(o.optimizer, o.unit, o.path, world=world, where=o.where) for o in optimizers
    ]
    bound = BoundState(
        layout,
        rank,
        world_size,
        models,
        optimizers,
        others,
        tuple(walks),
        tuple(optimizer_walks),
    )
    bound.tensors(sparing=[])
    for other in others:
        if other.kind == "plain":
            bound.check_plain(other)
    return bound


def _merge_stages(
    models: Sequence[BoundModel], optimizers: Sequence[BoundOptimizer], world: Copies
) -> tuple[tuple[BoundModel, ...], tuple[BoundOptimizer, ...]]:
    """Puts the members of a list that are stages of a pipeline into one DCP directory.

    A rank may have several stages, and another rank another number of them. A stage is a model
    that is on a part of the ranks only. The tensors of the stages have different names, so that
    all of them together are the model that a resume without the pipeline has.
    """
    stages = [
        model.module
        for model in models
        if ModelWalk(model.module, model.places, world=world).look().values.count < world.number
    ]
    if not stages:
        return tuple(models), tuple(optimizers)
    staged = {id(module) for module in stages}
    trained = {id(parameter) for module in stages for parameter in module.parameters()}
    seen: dict[tuple[str, int | None], int] = {}
    merged: list[BoundModel] = []
    for bound in models:
        is_stage = bound.position is not None and id(bound.module) in staged
        model = replace(bound, stage=is_stage)
        number = seen.setdefault(model.saved_as, len(seen))
        places = model.places
        if not places.unit:  # all in one directory, with different key paths
            key, position = model.saved_as
            places = replace(places, path=(key, *index_of(position)))
        else:
            base = step_names.base_unit(number) if places.base_unit else ""
            places = replace(places, unit=step_names.model_unit(number), base_unit=base)
        merged.append(replace(model, places=places))
    seen.clear()
    merged_optimizers: list[BoundOptimizer] = []
    for entry in optimizers:
        own = {id(p) for group in entry.optimizer.param_groups for p in group["params"]}
        optimizer = replace(entry, stage=entry.position is not None and own <= trained)
        number = seen.setdefault(optimizer.saved_as, len(seen))
        key, position = optimizer.saved_as
        merged_optimizers.append(
            replace(optimizer, unit=step_names.optimizer_unit(number))
            if optimizer.unit
            else replace(optimizer, path=(key, *index_of(position)))
        )
    return tuple(merged), tuple(merged_optimizers)


def expected_state_bytes(bound: BoundState, pieces: Sequence[Piece], owners: Sequence[bool]) -> int:
    """Estimates what optimizers that have never stepped will add to this rank's part of a save.

    With the headers around every tensor; 0 where no optimizer is without state.
    """
    further: list[Piece] = []
    counts = 0  # of steps, one number per parameter
    for optimizer in bound.optimizers:
        try:
            has_state = bool(optimizer.optimizer.state)
        except Exception:  # noqa: BLE001  the save reports a state that cannot be read
            has_state = True
        if not has_state:
            keys = bound.trained_by(optimizer)
            trained = [piece for piece in pieces if (piece.unit, piece.key_path) in keys]
            like = [torch.empty(0, dtype=kind) for kind in state_types(optimizer.optimizer)]
            further += [piece.holding(local, piece.watched) for piece in trained for local in like]
            counts += len(trained) if like else 0
    # State is dealt out together with the weights, which may thereby go to other ranks.
    later = [*pieces, *further]
    before, after = (
        sum(piece.size_bytes + _BLOB_BYTES for piece in compress(held, owned))
        for held, owned in ((pieces, owners), (later, select_owned(later)))
    )
    return max(0, after - before) + counts * _BLOB_BYTES


_Leaves = tuple[tuple[str, int | None, object], ...]


class Binding:
    """Binds the state of each call; mostly it is the same as in the previous call.

    Objects are compared by identity, and kept alive, since identities are reused. Plain dicts and
    lists may be new ones each time, as in `save(step, {..., "extra": {"epoch": 3}})`.
    """

    def __init__(self, layout: Layout, *, rank: int, world_size: int) -> None:
        self._layout: Layout = layout
        self._rank = rank
        self._world_size = world_size
        self._state: Mapping[str, object] | None = None
        self._leaves: _Leaves = ()
        self._bound: BoundState | None = None

    def of(self, state: Mapping[str, object]) -> BoundState:
        """Returns the state with a place on disk for each of its values."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"expected a mapping, got {a_kind(state)}",
                where="state",
                hint='name the objects, such as {"model": model, "optimizer": optimizer}',
            )
        self._state = state
        before, now = self._leaves, leaves(state, self._layout)
        bound, self._bound = self._bound, None
        is_same = len(before) == len(now) and all(
            old[:2] == new[:2]
            and (old[2] is new[2] or all(kind_of(key, v) == "plain" for key, _, v in (old, new)))
            for old, new in zip(before, now, strict=True)
        )
        if bound is None or not is_same:
            bound = bind(state, layout=self._layout, rank=self._rank, world_size=self._world_size)
        values = {(key, position): value for key, position, value in now}
        if any(values[o.key, o.position] is not o.target for o in bound.others):
            others = [replace(o, target=values[o.key, o.position]) for o in bound.others]
            bound = replace(bound, others=tuple(others))
        self._leaves, self._bound = now, bound
        return bound

    def again(self, state: Mapping[str, object] | None) -> BoundState:
        """Returns a state as `of` does; without one, that of the previous call."""
        state = self._state if state is None else state
        if state is None:
            raise UsageError(
                "missing, and no earlier call of save, prepare or resume had one",
                where="state",
                hint='pass state={"model": model}',
            )
        return self.of(state)

    def forget(self) -> None:
        self._leaves, self._bound = (), None
