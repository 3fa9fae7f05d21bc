"""Parts of one model in a list, as the stages of a pipeline are, in one place of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptkit.core.index import KeyPath
from ckptkit.training import names
from ckptkit.training.bound import BoundModel, BoundOptimizer, Entries
from ckptkit.training.dtensors import Copies
from ckptkit.training.modules import ModelWalk


def united(entries: Entries, world: Copies) -> Entries:
    """Puts the members of a list that are stages of a pipeline into one DCP directory.

    A rank may have several stages, and another rank another number of them; they are known by
    lying on a part of the ranks. Their tensors have different names, so that all of them
    together are the model that a resume without the pipeline has.

    Args:
        entries: Each with a place of its own.
        world: The number of ranks, and this one.
    """
    positions = {one.position for one in entries.models} | {o.position for o in entries.optimizers}
    if positions <= {None}:
        return entries
    modules = [model.module for model in entries.models if _is_stage(model, world)]
    if not modules:
        return entries
    staged = {id(module) for module in modules}
    trained = {id(parameter) for module in modules for parameter in module.parameters()}
    return replace(
        entries,
        models=tuple(_models(entries.models, staged)),
        optimizers=tuple(_optimizers(entries.optimizers, trained)),
    )


def _is_stage(model: BoundModel, world: Copies) -> bool:
    view = ModelWalk(model.module, model.places, world=world).look()
    return view.values.count < world.number


def _models(models: Iterable[BoundModel], staged: set[int]) -> Iterator[BoundModel]:
    seen: dict[tuple[str, int | None], int] = {}
    for model in models:
        one = replace(model, stage=model.position is not None and id(model.module) in staged)
        number = seen.setdefault(one.saved_as, len(seen))
        places = one.places
        if not places.unit:  # all in one directory, apart by their key paths
            places = replace(places, path=_path(one))
        else:
            base = names.base_unit(number) if places.base_unit else ""
            places = replace(places, unit=names.model_unit(number), base_unit=base)
        yield replace(one, places=places)


def _optimizers(
    optimizers: Iterable[BoundOptimizer], trained: set[int]
) -> Iterator[BoundOptimizer]:
    seen: dict[tuple[str, int | None], int] = {}
    for optimizer in optimizers:
        own = {id(p) for group in optimizer.optimizer.param_groups for p in group["params"]}
        one = replace(optimizer, stage=optimizer.position is not None and own <= trained)
        number = seen.setdefault(one.saved_as, len(seen))
        if one.unit:
            yield replace(one, unit=names.optimizer_unit(number))
        else:
            yield replace(one, path=_path(one))


def _path(one: BoundModel | BoundOptimizer) -> KeyPath:
    key, position = one.saved_as
    return (key,) if position is None else (key, position)
