"""A model before and after training, opened so that their tensors can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.adapters.base_names import placed_on_disk
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.execution.tensors import Origin
from ckptkit.pipeline.adapters.merge_base import BaseSource, open_base
from ckptkit.pipeline.adapters.tuned_changes import Pair
from ckptkit.pipeline.folders import SideFolders
from ckptkit.pipeline.naming import disk_names
from ckptkit.pipeline.opening import Opened, PathLike, opened
from ckptkit.pipeline.source_places import is_folder
from ckptkit.pipeline.ties_by_bytes import find_ties
from ckptkit.planning.coverage import error_of, find_problems
from ckptkit.planning.files import name_order
from ckptkit.planning.hub_names import HubNames
from ckptkit.planning.peft_names import find_adapter, own_adapters, title_of
from ckptkit.planning.plan import SOURCE
from ckptkit.planning.requests import ConsolidateRequest, matches
from ckptkit.planning.selection import PACKED_WEIGHT, looks_packed, select_model
from ckptkit.planning.ties import tied_names_absent
from ckptkit.storage.places import place_of

_Tensors = dict[Fqn, TensorEntry]


@dataclass(frozen=True, slots=True)
class Sides:
    """Two checkpoints of one model.

    Attributes:
        opened: The tuned one, and the base.
        tuned: The tuned one, for reading tensors.
        base: The base, for reading tensors.
        config: The model's configuration, or None.
        pairs: Every tensor that both have, in the order of the names; tied ones once.
        tied: From names that are tied, on the tuned side, to the tensor that holds their bytes.
        left_out: Names that cannot be compared, and that the user excluded.
        parts: Names on disk of tensors that are parts of larger ones in memory, where no adapter
            finds them.
        notes: What the user should know.
    """

    opened: tuple[Opened, Opened]
    tuned: Origin
    base: Origin
    config: Mapping[str, Any] | None
    pairs: Sequence[Pair]
    tied: Mapping[Fqn, Fqn]
    left_out: Sequence[Fqn]
    parts: frozenset[Fqn]
    notes: tuple[str, ...]


def open_sides(
    stack: ExitStack,
    tuned: PathLike,
    base: PathLike,
    select: str | None,
    exclude: tuple[str, ...],
) -> Sides:
    """Opens both checkpoints and pairs their tensors.

    Args:
        stack: Closes the files.
        tuned: The model after training: any checkpoint.
        base: The model before it.
        select: Which model of the tuned side to take where there are several, or None.
        exclude: Patterns of names that may be on one side only, or differ in shape.

    Raises:
        InputError: If a side is damaged or incomplete.
        RefusedError: If the two are not one model.
    """
    after = _open_tuned(stack, tuned, select)
    before = open_base(stack, base, None)
    for side in (after, before):
        _refuse_quantized(list(side.entries.values()), side.config, side.opened.path)
    config = after.config or before.config
    names = disk_names(config, None, base=place_of(base) if is_folder(base) else None)
    after, parts = _live_names(after, names.names)
    before, parts_before = _live_names(before, names.names)
    last, tied = _untied_names(after, config)
    first, _ = _untied_names(before, before.config or config)
    pairs, left_out = _paired(
        _with_tied_names(last, config, first),
        _with_tied_names(first, before.config or config, last),
        exclude,
        (after.opened.path, before.opened.path),
    )
    return Sides(
        opened=(after.opened, before.opened),
        tuned=after.origin,
        base=before.origin,
        config=config,
        pairs=pairs,
        tied={**tied_names_absent(config, last.keys()), **tied},
        left_out=left_out,
        parts=parts | parts_before,
        notes=names.notes,
    )


def _open_tuned(stack: ExitStack, path: PathLike, select: str | None) -> BaseSource:
    """Opens the trained model; of a run, its newest step."""
    found = stack.enter_context(opened(path, select=select))
    request = ConsolidateRequest(select=found.select)
    entries = select_model(found.index, request, location=found.path)
    problem = next(find_problems(found.index, entries), None)
    if problem is not None:
        raise error_of(problem, found.path)
    folders = SideFolders(stack, found, None)
    return BaseSource(
        found,
        Origin(SOURCE, found.source, found.index),
        {entry.name: entry for entry in entries},
        folders.config(folders.choose(allow_code=False)[0]),
        is_live=True,
    )


def _refuse_quantized(
    entries: Sequence[TensorEntry], config: Mapping[str, Any] | None, location: str
) -> None:
    sign = find_adapter((entry.name for entry in entries), own_adapters(config))
    found = None if sign is None else (sign.name, title_of(sign.method))
    for entry in entries if found is None else ():
        if looks_packed(entry.name, entry.shape, entry.dtype.name):
            found = entry.name, PACKED_WEIGHT
            break
    if found is not None:
        raise RefusedError(
            f"tensor {found[0]!r} belongs to {found[1]}, against the weights of a whole model",
            where=location,
            hint="name the model in the element type that it was trained in; an adapter of LoRA is"
            " taken out with `ckptkit adapter extract`, and `ckptkit adapter merge` makes a"
            " whole model of it",
        )
    if (config or {}).get("quantization_config"):
        raise RefusedError(
            "the configuration has a 'quantization_config': packed numbers have no difference that"
            " factors could hold",
            where=location,
            hint="name the model in the element type that it was trained in",
        )


def _live_names(side: BaseSource, hub: HubNames | None) -> tuple[BaseSource, frozenset[Fqn]]:
    """Gives a side's tensors the names that they have in memory, which adapters go by.

    Returns:
        The side, and names on disk of tensors that are only parts of one in memory.
    """
    names = side.entries.keys()
    if hub is None or sum(n in hub.tensors for n in names) < sum(n in hub.live for n in names):
        return side, frozenset()
    placed = placed_on_disk(names, hub)
    parts = frozenset(one.name for one in placed if one.part is not None)
    called = {
        one.name if one.part is not None else one.live[0]: side.entries[one.name] for one in placed
    }
    named = {name: replace(entry, name=name) for name, entry in called.items()}
    return replace(side, entries=named), parts


def _untied_names(
    side: BaseSource, config: Mapping[str, Any] | None
) -> tuple[_Tensors, Mapping[Fqn, Fqn]]:
    """Returns the tensors without names that hold another one's bytes, and those names."""
    # A reading of its own, so that what is compared here is proven when it is read for good.
    aside = Origin(side.origin.name, side.origin.source, side.origin.index)
    dropped = find_ties(config, list(side.entries.values()), aside).dropped
    return {name: one for name, one in side.entries.items() if name not in dropped}, dropped


def _with_tied_names(
    tensors: _Tensors, config: Mapping[str, Any] | None, other: Mapping[Fqn, TensorEntry]
) -> _Tensors:
    """Adds tied names that only the other side has apart."""
    absent = tied_names_absent(config, tensors.keys())
    return tensors | {t: tensors[s] for t, s in absent.items() if t in other}


def _paired(
    tuned: _Tensors, base: _Tensors, exclude: tuple[str, ...], places: tuple[str, str]
) -> tuple[list[Pair], list[Fqn]]:
    pairs, left_out = [], []
    for name in sorted(tuned.keys() | base.keys(), key=name_order):
        misfit = _misfit(tuned.get(name), base.get(name), places)
        if not misfit:
            pairs.append(Pair(name, tuned[name], base[name]))
        elif matches(name, exclude):
            left_out.append(name)
        else:
            raise RefusedError(
                misfit,
                where=f"tensor {name!r}",
                hint="name the model that was trained as --base, or leave the tensor out with"
                f" --exclude '{name}'; both sides in one form (`ckptkit consolidate` writes a model"
                " folder) have the same names",
            )
    return pairs, left_out


def _misfit(tuned: TensorEntry | None, base: TensorEntry | None, places: tuple[str, str]) -> str:
    if tuned is None or base is None:
        has, lacks = places if base is None else places[::-1]
        return f"is in {has} and not in {lacks}"
    if tuned.shape != base.shape:
        return f"has shape {list(tuned.shape)} after training and {list(base.shape)} before it"
    return ""
