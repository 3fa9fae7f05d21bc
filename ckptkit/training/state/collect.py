"""Binds the mapping that the user passes, and collects what this rank holds of it.

The stages of a pipeline, which are several models in a list, share one place in a step. A binding
is kept for as long as the same objects are passed. `expected_state_bytes` says how much optimizers
that have never stepped will add, so that memory is ready.

Sorts the state that `save` and `resume` get: models, optimizers, others; names their files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ckptkit.core.errors import CkptkitError, ResumeError, SaveError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind
from ckptkit.core.threads import few_collections
from ckptkit.training import step_names
from ckptkit.training.sidecar import checked_files
from ckptkit.training.state import objects as rng
from ckptkit.training.state.dtensors import Copies, DTensor, Meshes
from ckptkit.training.state.models import ModelView, ModelWalk
from ckptkit.training.state.objects import (
    check_nesting,
    flatten,
    make_object,
    serialise_or_refuse,
    torch_archive,
)
from ckptkit.training.state.optimizers import OptimizerWalk, class_of, state_types
from ckptkit.training.state.pieces import Holdings, ObjectValue, Piece, Replicas, select_owned
from ckptkit.training.state.structures import VERSION, Collected, tables_of
from ckptkit.training.step_names import RNG, TensorPlaces, adapter_names
from ckptkit.writer.messages import Inline

logger = logging.getLogger(__name__)
_BLOB_BYTES = 2_048  # headers and padding around one stored tensor, rounded up

Layout = Literal["accelerate", "dcp", "trainer"]
Kind = Literal[
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "dataloader",
    "generator",
    "stateful",
    "plain",
]
PER_RANK = frozenset({"dataloader", "generator"})
"""Kinds of which each rank has a state of its own."""

Unfit = Literal["error", "reset"]
MissingGroups = Literal["error", "drop"]
_RESERVED = frozenset({RNG})
_LOADER_HINT = "use torchdata's StatefulDataLoader, or leave the dataloader out"
_PLAIN_HINT = "put values such as counters into a dict, which is saved and restored in place"


def leaves(
    state: Mapping[str, object], layout: Layout
) -> tuple[tuple[str, int | None, object], ...]:
    """Returns the values of the mapping, those of lists one by one with their positions.

    Two states with the same objects are the same state. To compare them by identity, keep them
    alive: identities are reused.
    """
    seen: dict[int, str] = {}
    entries: list[tuple[str, int | None, object]] = []
    mapping: Mapping[Any, Any] = state  # the keys are the user's
    for key, value in mapping.items():
        if not isinstance(key, str) or not key or "/" in key or key.startswith("."):
            raise UsageError(
                f"the state has the key {key!r} where a name was expected",
                hint="use keys such as 'model' and 'optimizer'",
            )
        if layout == "dcp" and key in _RESERVED:
            raise UsageError(
                "this key is taken by the random number generators, which are always saved",
                where=key,
                hint="use another key",
            )
        is_list = isinstance(value, list | tuple) and bool(value)
        several = is_list and all(
            _has(entry, "state_dict", "load_state_dict") or isinstance(entry, Generator)
            for entry in value
        )
        for position, entry in enumerate(value) if several else ((None, value),):
            name = shown_name(key, position)
            if id(entry) in seen:
                raise UsageError(
                    f"the same object was found under {seen[id(entry)]!r}",
                    where=name,
                    hint="name each model, optimizer and other object once",
                )
            seen[id(entry)] = name
            entries.append((key, position, entry))
    return tuple(entries)


def kind_of(key: str, value: object) -> Kind:
    """Returns what a value of the mapping is.

    Wrappers are known by what they can do, because accelerate's scheduler, for one, is no
    `LRScheduler`. What is iterated over and has a state is a dataloader: each rank has its own.
    """
    if isinstance(value, nn.Module):
        return "model"
    # By its name, as importing its module takes long and warns.
    if "ZeroRedundancyOptimizer" in {base.__name__ for base in type(value).__mro__}:
        raise UsageError(
            "a ZeroRedundancyOptimizer was found, whose ranks hold parts that cannot be placed",
            where=key,
            hint="use fully_shard, which shards the optimizer's state as well",
        )
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, dict | list):
        return "plain"
    if isinstance(value, Generator):
        return "generator"
    if not _has(value, "state_dict", "load_state_dict"):
        raise UsageError(
            f"a {type(value).__name__} has no state_dict() and load_state_dict()",
            where=key,
            hint=_LOADER_HINT if isinstance(value, DataLoader) else _PLAIN_HINT,
        )
    if isinstance(value, LRScheduler) or _has(value, "get_last_lr"):
        return "scheduler"
    if _has(value, "get_scale", "unscale_"):
        return "scaler"
    return "dataloader" if _has(value, "__iter__") else "stateful"


def split_batches_of(loader: Any, world_size: int) -> bool | None:
    """Returns `split_batches` of a loader of accelerate that shares one order among all ranks.

    None of others, and of one rank, for which accelerate keeps nothing of it.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches).__name__ != "BatchSamplerShard" or batches.num_processes != world_size:
        return None
    return bool(batches.split_batches)


def kind_of_state_dict(value: object) -> Literal["model", "optimizer"] | None:
    """Returns the kind of object whose state dict, or list of such, a plain value is.

    What `Module.state_dict` returns has a mark of torch's own; other mappings of nothing but
    tensors are taken for the same.
    """
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, Mapping):
            continue
        if set(entry) == {"state", "param_groups"}:
            return "optimizer"
        tensors = [isinstance(leaf, Tensor) for leaf in entry.values()]
        if any(tensors) and (hasattr(entry, "_metadata") or all(tensors)):
            return "model"
    return None


def _has(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


class _BoundEntry:
    """What all entries of the mapping have."""

    __slots__ = ()
    key: str
    position: int | None
    stage: bool

    @property
    def saved_as(self) -> tuple[str, int | None]:
        """The key and the position that it is found again by; stages are one entry together."""
        return self.key, None if self.stage else self.position

    @property
    def where(self) -> str:
        """Its path in the mapping, such as `state['models'][1]`."""
        return f"state[{self.key!r}]" + ("" if self.position is None else f"[{self.position}]")


class BoundModel(_BoundEntry, Struct, frozen=True):
    key: str
    position: int | None  # in the list under that key; None without a list
    module: nn.Module
    places: TensorPlaces  # the keys of its tensors in a step
    stage: bool = False  # whether it is one of the stages that a pipeline has in the list

    @property
    def unit(self) -> str:
        return self.places.unit

    @property
    def path(self) -> KeyPath:
        """What comes before a tensor's name in its key path."""
        return self.places.path


class BoundOptimizer(_BoundEntry, Struct, frozen=True):
    key: str
    position: int | None  # in the list under that key; None without a list
    optimizer: Optimizer
    unit: str  # the DCP directory of its state
    path: KeyPath  # what comes before `state` and `param_groups` in its key paths
    stage: bool = False  # whether it is that of a pipeline's stage, one of several in the list

    @property
    def name(self) -> str:
        return shown_name(*self.saved_as)


class BoundObject(_BoundEntry, Struct, frozen=True):
    key: str
    position: int | None  # in the list under that key; None without a list
    target: Any
    kind: Kind
    # the DCP directory of its values: always with the layout `dcp`, otherwise where it holds
    # DTensors
    unit: str
    path: KeyPath  # what comes before the names in its state dict
    file: str  # the file of its state, relative to the step; empty with the layout `dcp`
    stage: bool = False  # never: pipelines split models and optimizers only

    def state(self) -> Any:
        if self.kind == "plain":
            return self.target
        if self.kind == "generator":
            return self.target.get_state()
        with of_the_object(self.where, "state_dict()"):
            return self.target.state_dict()

    def set_state(self, state: Any) -> None:
        """Passes a state to `load_state_dict`; replaces the content of a plain dict or list."""
        if self.kind == "generator":
            with of_the_object(self.where, "set_state()", ResumeError):
                self.target.set_state(state)
        elif self.kind != "plain":
            with of_the_object(self.where, "load_state_dict()", ResumeError):
                self.target.load_state_dict(state)
        elif isinstance(self.target, dict):
            self.target.clear()
            self.target.update(state)
        else:
            self.target[:] = state


@contextmanager
def of_the_object(
    where: str, call: str, kind: type[SaveError | ResumeError | UsageError] = SaveError
) -> Iterator[None]:
    """Wraps an exception of the user's own code in an error that names the object."""
    try:
        yield
    except CkptkitError:
        raise
    except Exception as error:
        raise kind(
            f"its {call} raised {type(error).__name__}: {error}"[:2_000],
            where=where,
            hint="this is code of the object itself; call it without ckptkit to look for the cause",
        ) from error


def place_entries(
    state: Mapping[str, object], layout: Layout, *, rank: int
) -> tuple[tuple[BoundModel, ...], tuple[BoundOptimizer, ...], tuple[BoundObject, ...]]:
    """Gives each entry of the user's mapping a place in a step, by kind, in the mapping's order."""
    models: list[BoundModel] = []
    optimizers: list[BoundOptimizer] = []
    others: list[BoundObject] = []
    counts: Counter[str] = Counter()
    is_plain = layout == "dcp"
    for key, position, value in leaves(state, layout):
        kind = kind_of(key, value)
        path: KeyPath = (key, *index_of(position))
        if isinstance(value, nn.Module):
            places = TensorPlaces("", path)
            if not is_plain:
                number = len(models)
                adapter = adapter_names(value) if layout == "trainer" else None
                base = step_names.base_unit(number) if adapter else ""
                places = TensorPlaces(step_names.model_unit(number), ("model",), adapter, base)
            models.append(BoundModel(key, position, value, places))
        elif isinstance(value, Optimizer):
            unit = "" if is_plain else step_names.optimizer_unit(len(optimizers))
            start = path if is_plain else ("optimizer",)
            optimizers.append(BoundOptimizer(key, position, value, unit, start))
        else:
            unit = "" if is_plain else f"{key}_{position or 0}"
            start = path if is_plain else (key,)
            counted = "custom" if kind in {"stateful", "plain"} else kind
            file = "" if is_plain else _file_of(counted, counts[counted], layout, rank)
            counts[counted] += 1
            others.append(BoundObject(key, position, value, kind, unit, start, file))
    return tuple(models), tuple(optimizers), tuple(others)


def _file_of(kind: str, index: int, layout: Layout, rank: int) -> str:
    if kind == "scheduler" and layout == "trainer":
        return step_names.trainer_scheduler_file(index)
    if kind == "scheduler":
        return step_names.scheduler_file(index)
    if kind == "scaler":
        return step_names.scaler_file(index)
    if kind in PER_RANK:
        return step_names.rank_file(kind, index, rank)
    return step_names.custom_file(index)


def index_of(position: int | None) -> tuple[int, ...]:
    """Returns the position in a list as the end of a key path, which is empty without a list."""
    return () if position is None else (position,)


def shown_name(key: str, position: int | None) -> str:
    """Returns what an entry of the mapping is called in messages.

    >>> shown_name("critic", None), shown_name("models", 1)
    ('critic', 'models[1]')
    """
    return key if position is None else f"{key}[{position}]"


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
    # of tensors that may have more rows than in the step, or be missing there: patterns of names
    grow: tuple[str, ...] = ()
    # what names of the step begin with, and the models have instead; None for what was dropped
    renamed: Mapping[str, str | None] = msgspec.field(default_factory=dict)

    def with_files(self, files: Mapping[str, bytes] | None) -> BoundState:
        if not files:
            return self
        own = [name for other in self.others for name in (other.unit, other.file)]
        return replace(self, _files=checked_files(files, own))

    def resuming(
        self,
        unfit_optimizer: Unfit,
        missing_groups: MissingGroups,
        grow: object = (),
        renamed: object = None,
    ) -> BoundState:
        """Returns the same state, with what to do where it does not fit the step."""
        patterns = grow if isinstance(grow, list | tuple) else [None]
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise UsageError(
                f"{grow!r:.200} was found where a list of patterns was expected",
                where="grow",
                hint="pass patterns of names in the model, such as ['lm_head.*', '*.embed.weight']",
            )
        names = {} if renamed is None else renamed
        if not isinstance(names, Mapping) or not all(
            isinstance(old, str) and isinstance(new, str | None) for old, new in names.items()
        ):
            raise UsageError(
                f"{renamed!r:.200} was found where names and their successors were expected",
                where="renamed",
                hint="pass names of the step with those of the model, None for what was dropped,"
                " such as {'model.old': 'model.new', 'head': None}",
            )
        return replace(
            self,
            unfit_optimizer=unfit_optimizer,
            missing_groups=missing_groups,
            grow=tuple(patterns),
            renamed=dict(names),
        )

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
            if isinstance(bound, BoundObject) and kind == "dataloader":
                entry["split_batches"] = split_batches_of(bound.target, self.world_size)
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
        origin = kind_of_state_dict(other.target)
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
    ) -> Collected:
        """Returns what this rank holds of the models and optimizers.

        With `keep`, the pieces are remembered, so that the next time is faster. `sparing` gets the
        optimizers, and what is wrong with them, as `Holdings.dispensable` has them; one whose state
        cannot be stored is then left out. With None, that is raised.
        """
        views: list[ModelView] = [walk.look(keep=keep) for walk in self._walks]
        collected = Collected()
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

    def _take_other(self, bound: BoundObject, collected: Collected, files: list[Inline]) -> None:
        state = bound.state()
        check_nesting(state, bound.where)
        if bound.kind in PER_RANK and self.layout == "dcp":
            path = (*bound.path, str(self.rank))
            collected.objects.append(make_object(bound.unit, path, state, bound.where))
        elif bound.kind not in PER_RANK and self._in_dcp(state):
            meshes = Meshes(Copies())
            meshes.learn(leaf for _, leaf in flatten(state))
            ranks = Replicas(self.world_size, self.rank, spread=False)
            collected.take(
                *(bound.unit, bound.path, state, bound.where),
                lambda name, tensor: meshes.slot(name, tensor, ranks),
                writes=self.rank == 0,
            )
        elif bound.kind in PER_RANK or self.rank == 0:
            files.append(Inline(bound.file, serialise_or_refuse(state, bound.where)))


class WholeState(Struct, frozen=True):
    """Files that the library of the training loop makes, and the models that they are of."""

    models: tuple[BoundModel, ...]  # described in the sidecar, without places in the step
    captured: Holdings
    optimizers: tuple[BoundOptimizer, ...] = ()
    others: tuple[BoundObject, ...] = ()

    def holdings(self, _step: int) -> Holdings:
        return self.captured

    def facts(self) -> dict[str, Any]:
        return {"torch_version": str(torch.__version__)}


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
