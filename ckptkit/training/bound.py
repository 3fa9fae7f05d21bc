"""The entries of the user's mapping, each with its place in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckptkit.core.index import KeyPath
from ckptkit.training import names
from ckptkit.training.kinds import Kind, Layout, entries_of, kind_of
from ckptkit.training.places import TensorPlaces, adapter_names


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model in the mapping.

    Attributes:
        key: Its key in the mapping.
        position: In the list under that key; None without a list.
        module: The model.
        places: Where its tensors lie in a step.
        stage: Whether it is one of the stages that a pipeline has in the list.
    """

    key: str
    position: int | None
    module: nn.Module
    places: TensorPlaces
    stage: bool = False

    @property
    def saved_as(self) -> tuple[str, int | None]:
        """The key and the position that it is found again by; stages are one entry together."""
        return self.key, None if self.stage else self.position

    @property
    def unit(self) -> str:
        """The DCP directory of its tensors, of those of the adapter where it is split."""
        return self.places.unit

    @property
    def path(self) -> KeyPath:
        """What comes before a tensor's name in its key path."""
        return self.places.path


@dataclass(frozen=True, slots=True)
class BoundOptimizer:
    """An optimizer in the mapping.

    Attributes:
        key: Its key in the mapping.
        position: In the list under that key; None without a list.
        optimizer: The optimizer.
        unit: The DCP directory of its state.
        path: What comes before `state` and `param_groups` in its key paths.
        stage: Whether it is that of a pipeline's stage, one of several in the list.
    """

    key: str
    position: int | None
    optimizer: Optimizer
    unit: str
    path: KeyPath
    stage: bool = False

    @property
    def saved_as(self) -> tuple[str, int | None]:
        """The key and the position that it is found again by; stages are one entry together."""
        return self.key, None if self.stage else self.position

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return shown_name(*self.saved_as)


@dataclass(frozen=True, slots=True)
class BoundObject:
    """Anything else in the mapping.

    Attributes:
        key: Its key in the mapping.
        position: In the list under that key; None without a list.
        target: The object, or the plain dict or list.
        kind: What it is.
        unit: The DCP directory of its values: always with the layout `dcp`, otherwise where it
            holds DTensors.
        path: What comes before the names in its state dict.
        file: The file of its state, relative to the step; empty with the layout `dcp`.
    """

    key: str
    position: int | None
    target: Any
    kind: Kind
    unit: str
    path: KeyPath
    file: str

    @property
    def saved_as(self) -> tuple[str, int | None]:
        """The key and the position that it is found again by."""
        return self.key, self.position

    @property
    def where(self) -> str:
        """Its path in the user's state, for messages."""
        return path_in_state(self.key, self.position)

    def state(self) -> Any:
        """Returns its state, which may still be shared with it."""
        return self.target if self.kind == "plain" else self.target.state_dict()


@dataclass(frozen=True, slots=True)
class Entries:
    """All entries of the mapping, by kind, each in the order of the mapping."""

    models: tuple[BoundModel, ...]
    optimizers: tuple[BoundOptimizer, ...]
    others: tuple[BoundObject, ...]


def place_entries(state: Mapping[str, object], layout: Layout, *, rank: int) -> Entries:
    """Gives each entry of the user's mapping a place in a step.

    Raises:
        UsageError: If a value is nothing that can be saved, or is there twice.
    """
    naming = _Naming(layout, rank)
    for key, position, value in entries_of(state, layout):
        naming.take(key, position, value)
    return Entries(tuple(naming.models), tuple(naming.optimizers), tuple(naming.others))


class _Naming:
    """Gives each entry its place, counting those of a kind."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.models: list[BoundModel] = []
        self.optimizers: list[BoundOptimizer] = []
        self.others: list[BoundObject] = []
        self._layout = layout
        self._plain = layout == "dcp"
        self._rank = rank
        self._counts: dict[str, int] = {}

    def take(self, key: str, position: int | None, value: Any) -> None:
        kind = kind_of(key, value)
        path: KeyPath = (key, *index_of(position))
        if kind == "model":
            self.models.append(BoundModel(key, position, value, self._places(path, value)))
        elif kind == "optimizer":
            unit = "" if self._plain else names.optimizer_unit(len(self.optimizers))
            start = path if self._plain else ("optimizer",)
            self.optimizers.append(BoundOptimizer(key, position, value, unit, start))
        else:
            unit = "" if self._plain else f"{key}_{position or 0}"
            start = path if self._plain else (key,)
            file = "" if self._plain else self._file(kind)
            self.others.append(BoundObject(key, position, value, kind, unit, start, file))

    def _places(self, path: KeyPath, model: nn.Module) -> TensorPlaces:
        if self._plain:
            return TensorPlaces("", path)
        number = len(self.models)
        unit, adapter = names.model_unit(number), None
        if self._layout == "trainer":
            adapter = adapter_names(model)
        return TensorPlaces(unit, ("model",), adapter, names.base_unit(number) if adapter else "")

    def _file(self, kind: Kind) -> str:
        counted = "custom" if kind in {"stateful", "plain"} else kind
        index = self._counts.get(counted, 0)
        self._counts[counted] = index + 1
        if counted == "scheduler":
            trainer = self._layout == "trainer"
            return names.trainer_scheduler_file(index) if trainer else names.scheduler_file(index)
        if counted == "scaler":
            return names.scaler_file(index)
        if counted == "dataloader":
            return names.dataloader_file(index, self._rank)
        return names.custom_file(index)


def index_of(position: int | None) -> tuple[int, ...]:
    """Returns the position in a list as the end of a key path, which is empty without a list."""
    return () if position is None else (position,)


def path_in_state(key: str, position: int | None) -> str:
    """Returns where an entry of the mapping stands in it.

    >>> path_in_state("critic", None), path_in_state("models", 1)
    ("state['critic']", "state['models'][1]")
    """
    return f"state[{key!r}]" if position is None else f"state[{key!r}][{position}]"


def shown_name(key: str, position: int | None) -> str:
    """Returns what an entry of the mapping is called in messages.

    >>> shown_name("critic", None), shown_name("models", 1)
    ('critic', 'models[1]')
    """
    return key if position is None else f"{key}[{position}]"
