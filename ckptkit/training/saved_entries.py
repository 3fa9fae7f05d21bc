"""Which entry of the mapping lies where in a step, by the names that it was saved under."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptkit.core.errors import FormatError, ResumeError
from ckptkit.core.index import KeyPath
from ckptkit.training.bound import index_of, shown_name
from ckptkit.training.dtensors import Copies
from ckptkit.training.loading import first_few
from ckptkit.training.modules import ModelWalk
from ckptkit.training.optimizers import OptimizerWalk
from ckptkit.training.places import TensorPlaces, adapter_names
from ckptkit.training.state import BoundModel, BoundObject, BoundOptimizer, BoundState

logger = logging.getLogger(__name__)

Bound = BoundModel | BoundOptimizer | BoundObject
_APART = frozenset({"model", "optimizer", "dataloader"})  # all others have a file alike


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """An entry of the mapping that a step was saved from.

    Attributes:
        key: Its key.
        position: In the list under that key; None without a list.
        kind: What it was.
        unit: The DCP directory of what it holds in one; see `BoundModel` and the others.
        file: The file of its state, empty where it has none; that of rank 0 where each has one.
        made_by: The class of an optimizer, empty where that is not known.
        base_unit: Of a model whose adapter was saved apart, the directory of all other tensors.
        stages: Whether it is all stages of a pipeline together, which a list held.
    """

    key: str
    position: int | None
    kind: str
    unit: str
    file: str
    made_by: str = ""
    base_unit: str = ""
    stages: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return shown_name(self.key, self.position)


class SavedFacts(NamedTuple):
    """What a step says of itself.

    Attributes:
        entries: Of the mapping that it was saved from, None where the step was saved before they
            were written down.
        has_structures: Whether it says how nested values are put together, see `structures`.
    """

    entries: tuple[SavedEntry, ...] | None = None
    has_structures: bool = False


def parse_facts(data: bytes, *, where: str) -> SavedFacts:
    """Returns what the facts of a run tell of its steps.

    Args:
        data: The file of the facts.
        where: It, for messages.

    Raises:
        FormatError: If the file is damaged.
    """
    try:
        document = json.loads(data)
        found = document.get("entries")
        entries = None if found is None else tuple(_entry(entry) for entry in found)
        return SavedFacts(entries, bool(document.get("structures")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError("does not name what the step holds", where=where) from error


def _entry(document: Mapping[str, Any]) -> SavedEntry:
    key, position = document["key"], document["position"]
    texts = [document["kind"], document["unit"], document["file"], document.get("class") or ""]
    texts.append(document.get("base_unit") or "")
    if not all(isinstance(text, str) for text in [key, *texts]):
        raise TypeError(key)
    if position is not None and type(position) is not int:
        raise TypeError(position)
    entry = SavedEntry(key, position, *texts)
    return dataclasses.replace(entry, stages=document.get("stages") is True)


def matched(bound: BoundState, entries: Sequence[SavedEntry], *, where: str) -> BoundState:
    """Returns the same state with the places that its entries have in a step.

    Args:
        bound: In the layout of the step.
        entries: What the step holds.
        where: The step, for messages.

    Raises:
        ResumeError: If something was not saved under its name, or was something else.
    """
    saved = {(entry.key, entry.position): entry for entry in entries}
    mine: list[Bound] = [*bound.models, *bound.optimizers, *bound.others]
    missing = [_name(one) for one in mine if _of(one, saved) is None]
    if missing:
        raise ResumeError(
            f"{first_few(missing)} was not saved with this step, which holds"
            f" {_listed(entry.name for entry in entries)}",
            where=where,
            hint="resume with the names that the state was saved under",
        )
    _tell_left(entries, mine, rank=bound.rank)
    places = {_name(one): _fitting(one, entry) for one in mine if (entry := _of(one, saved))}
    return _moved(bound, places)


def _of(one: Bound, saved: Mapping[tuple[str, int | None], SavedEntry]) -> SavedEntry | None:
    """Returns what an entry was saved as; a list may have been one of stages, or be one now."""
    together = saved.get((one.key, None))
    if together is not None and together.stages:
        return together
    return saved.get(one.saved_as) or saved.get((one.key, one.position))


def _name(one: Bound) -> str:
    return shown_name(one.key, one.position)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names))) or "nothing"


def _tell_left(entries: Sequence[SavedEntry], mine: Sequence[Bound], *, rank: int) -> None:
    saved = {(entry.key, entry.position): entry for entry in entries}
    wanted = [_of(one, saved) for one in mine]
    left = [entry.name for entry in entries if entry not in wanted]
    if left and rank == 0:
        is_meant = all(isinstance(one, BoundModel) for one in mine)  # who loads a model alone
        level = logging.INFO if is_meant else logging.WARNING
        logger.log(level, "the step also holds %s, which the state does not have", _listed(left))


def _fitting(one: Bound, saved: SavedEntry) -> SavedEntry:
    kind = _kind(one)
    if kind != saved.kind and {kind, saved.kind} & _APART:
        raise ResumeError(
            f"a {saved.kind} was saved under this name, and the state has a {kind} there",
            where=_name(one),
            hint="resume with the names that the state was saved under",
        )
    return saved


def _kind(one: Bound) -> str:
    if isinstance(one, BoundObject):
        return one.kind
    return "model" if isinstance(one, BoundModel) else "optimizer"


def _model_at(model: BoundModel, saved: SavedEntry) -> BoundModel:
    """Returns a model with the places that its tensors have in a step, split or not."""
    adapter = adapter_names(model.module) if saved.base_unit else None
    base_unit = saved.base_unit if adapter else ""
    places = TensorPlaces(saved.unit, _path(model, saved), adapter, base_unit)
    return dataclasses.replace(model, places=places)


def _path(one: BoundModel | BoundOptimizer, saved: SavedEntry) -> KeyPath:
    """Returns what key paths begin with, where one directory holds all: the name that was saved."""
    return one.path if saved.unit else (saved.key, *index_of(saved.position))


def _moved(bound: BoundState, places: Mapping[str, SavedEntry]) -> BoundState:
    world = Copies(bound.world_size, bound.rank)
    models = [_model_at(m, places[_name(m)]) for m in bound.models]
    optimizers = [
        dataclasses.replace(o, unit=places[_name(o)].unit, path=_path(o, places[_name(o)]))
        for o in bound.optimizers
    ]
    others = [
        dataclasses.replace(other, unit=places[_name(other)].unit, file=places[_name(other)].file)
        for other in bound.others
    ]
    return dataclasses.replace(
        bound,
        models=tuple(models),
        optimizers=tuple(optimizers),
        others=tuple(others),
        _walks=tuple(ModelWalk(m.module, m.places, world=world) for m in models),
        _optimizer_walks=tuple(
            OptimizerWalk(o.optimizer, o.unit, o.path, world=world) for o in optimizers
        ),
    )
