"""Sorts the state that `save` and `resume` get: models, optimizers, others; names their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from msgspec import Struct
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ckptkit.core.errors import CkptkitError, ResumeError, SaveError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.training import step_names
from ckptkit.training.step_names import RNG, TensorPlaces, adapter_names

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


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def class_of(optimizer: Optimizer) -> str:
    return type(unwrap_optimizer(optimizer)).__name__


def taken_from(value: object) -> Literal["model", "optimizer"] | None:
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
    stage: bool = False  # always: pipelines split models and optimizers only

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
    where: str, call: str, kind: type[SaveError | ResumeError] = SaveError
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
