"""Loads a step on one rank: checks that it fits, allocates, reads tensors, restores all else."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Key, TensorEntry, TensorIndex
from ckptkit.core.text import list_first
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.storage.places import Place
from ckptkit.training.resume.load_pieces import (
    FillReport,
    load_pieces,
    match_entries,
    names_of,
    unexpected_keys,
)
from ckptkit.training.resume.materialise import materialise
from ckptkit.training.resume.optimizer_state import (
    LOST_HINT,
    allocate,
    check_optimizer,
    check_state,
    composed_places,
)
from ckptkit.training.resume.optimizer_values import (
    group_changes,
    missing_groups,
    stored_groups,
    unbound_changes,
    value_changes,
)
from ckptkit.training.resume.restore import (
    Apply,
    copied_changes,
    extra_state_changes,
    is_extra,
    loaders_alike,
    object_changes,
    random_changes,
)
from ckptkit.training.resume.stored_step import StoredStep, bind_to_step
from ckptkit.training.state.bound import unwrap_optimizer
from ckptkit.training.state.collect import BoundModel, BoundOptimizer, BoundState, bind
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.fsdp import cast_buffers
from ckptkit.training.state.models import ModelView, ModelWalk
from ckptkit.training.state.optimizers import STATE
from ckptkit.training.state.pieces import Entry, Piece, ShardLayout
from ckptkit.training.state.quant_states import (
    StoredScale,
    is_made_anew,
    plan_scales,
    scale_names,
)
from ckptkit.training.state.rank_bound import is_scale, packed_weights
from ckptkit.training.step_names import parallel_prefixes

logger = logging.getLogger(__name__)
_COMPARED = 1 << 20  # elements at once, so that little memory is needed


Untied = dict[str, tuple[str, float]]
"""By the name of a tensor that is left out, because the model holds it as one with another: that
one's name, and the largest absolute difference on this rank.
"""


class StepLoader:
    """Loads a step into the state of this rank; its directory is opened on first use."""

    def __init__(self, folder: Path | Place, bound: BoundState) -> None:
        self._folder = folder
        self._given = bound
        self._stored: StoredStep | None = None

    @property
    def stored(self) -> StoredStep:
        if self._stored is None:
            self._stored = StoredStep.open(self._folder)
        return self._stored

    @cached_property
    def bound(self) -> BoundState:
        """The state, with the places that it has in this step."""
        bound, layout = self._given, self.stored.layout
        if layout not in {None, bound.layout}:
            state: dict[str, Any] = {}
            for key, position, value in (
                *((model.key, model.position, model.module) for model in bound.models),
                *((entry.key, entry.position, entry.optimizer) for entry in bound.optimizers),
                *((other.key, other.position, other.target) for other in bound.others),
            ):
                if position is None:
                    state[key] = value
                else:
                    state.setdefault(key, []).append(value)
            bound = bind(state, layout=layout, rank=bound.rank, world_size=bound.world_size)
        if self.stored.entries is not None:
            bound = bind_to_step(bound, self.stored.entries, where=str(self._folder))
        return bound

    def loaders_alike(self) -> dict[str, bool]:
        return loaders_alike(self.stored, self.bound)

    def unfit_optimizers(self) -> dict[str, str]:
        """Returns the optimizers that do not fit this step, by name, and why."""
        problems: dict[str, str] = {}
        for optimizer in self.bound.optimizers:
            try:
                self._checked_groups(optimizer, [])
                # It also has to have, or be able to create, state like that in the step.
                allocate(self.stored, optimizer, self._slots, self._world)
                depth = len(optimizer.path)
                pieces = [
                    piece
                    for piece in self._stored_pieces()
                    if piece.unit == optimizer.unit and piece.key_path[:depth] == optimizer.path
                ]
                match_entries(self.stored.index(optimizer.unit), pieces)
                list(value_changes(self.stored, optimizer, self._slots, self._world))
            except ResumeError as error:
                problems[optimizer.name] = str(error)
        return problems

    def prepare(
        self, step: int, alike: Mapping[str, bool], anew: Collection[str] = frozenset()
    ) -> tuple[dict[str, list[Piece]], list[Apply]]:
        """Reads everything but the tensors, and checks that these fit; overwrites none of them.

        Returns the tensors to fill, by DCP directory, and functions that put everything else in
        place. The state of the optimizers that `anew` names is cleared, not loaded.
        """
        stored, bound, slots = self.stored, self.bound, self._slots
        fresh = [o for o in bound.optimizers if o.name in anew]
        resumed = [o for o in bound.optimizers if o not in fresh]
        further: list[Piece] = []
        changes = [
            change for optimizer in resumed for change in self._checked_groups(optimizer, further)
        ]
        for optimizer in resumed:
            changes += value_changes(stored, optimizer, slots, self._world)
        for optimizer in fresh:
            changes.append(optimizer.optimizer.state.clear)
            try:
                groups = self._groups_of(optimizer)
                changes += list(group_changes(stored, optimizer, slots, groups, self._world))
            except ResumeError as error:
                logger.debug("hyperparameters stay as they are: %s", error)
        for model in bound.models:
            changes += extra_state_changes(stored, model, further, rank=bound.rank)
        changes += object_changes(stored, bound, alike, further)
        # Last, as loading a state dict may draw numbers.
        changes += random_changes(stored, bound, step)
        for optimizer in resumed:
            allocate(stored, optimizer, slots, self._world)
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in self._stored_pieces(fresh):
            pieces[piece.unit].append(piece)
        self._check_models(pieces)
        changes += [c for model in bound.models for c in self._scale_changes(model, pieces)]
        changes += [c for model in bound.models for c in self._uncast_buffers(model, pieces)]
        for model in bound.models:
            changes += copied_changes(model, pieces)
        for piece in further:
            pieces[piece.unit].append(piece)
        for unit, of_unit in pieces.items():
            match_entries(stored.index(unit), of_unit)
        return pieces, changes

    def fill(self, pieces: Mapping[str, Sequence[Piece]]) -> tuple[dict[str, FillReport], Untied]:
        reports = {
            unit: load_pieces(self.stored.index(unit), self.stored.source, of_unit)
            for unit, of_unit in pieces.items()
        }
        # What the model holds as one tensor and the step as several, as far as it was read.
        differing: Untied = {}
        starts = {unit: len(m.path) for m in self.bound.models for unit in m.places.units}
        for unit, depth in starts.items():
            for piece in pieces.get(unit, ()):
                if piece.aliases and piece.elements:
                    for name, kept, difference in self._differing(unit, piece, depth):
                        before = differing.get(name, (kept, 0.0))[1]
                        differing[name] = kept, max(before, difference)
        return reports, differing

    def _differing(self, unit: str, piece: Piece, depth: int) -> Iterator[tuple[str, str, float]]:
        index = self.stored.index(unit)
        stored = [index.tensors.get(Key(key)) for key in names_of(piece)]
        kept, *further = (entry for entry in stored if entry is not None)
        for entry in further:
            if _records_of(index, entry) == _records_of(index, kept):
                continue
            difference = float("inf")
            if entry.shape == kept.shape and entry.dtype == kept.dtype:
                read = torch.empty_like(piece.local)
                other = dataclasses.replace(piece, key_path=entry.key_path, aliases=(), local=read)
                load_pieces(index, self.stored.source, [other])
                difference = _largest_difference(piece.local, read)
            if difference:
                name, of_kept = (".".join(map(str, e.key_path[depth:])) for e in (entry, kept))
                yield name, of_kept, difference

    def _stored_pieces(self, fresh: Sequence[BoundOptimizer] = ()) -> list[Piece]:
        """Returns the pieces to fill: not what an optimizer has beyond the step."""
        dropped: set[int] = set()
        starts = [(optimizer.unit, optimizer.path) for optimizer in fresh]
        pieces = [
            p
            for p in self.bound.pieces()
            if p.unit not in self._absent
            and not any(p.unit == unit and p.key_path[: len(path)] == path for unit, path in starts)
        ]
        for model in self.bound.models:  # modules get their extra states through `set_extra_state`
            unit, path = model.unit, model.path
            pieces = [p for p in pieces if p.unit != unit or not is_extra(p.key_path, path)]
        for optimizer in self.bound.optimizers:
            if optimizer in fresh or self._is_built_otherwise(optimizer):
                continue
            start = (*optimizer.path, STATE)
            composed = {(*start, n, *names) for n, names in composed_places(self.stored, optimizer)}
            keys = self.stored.index(optimizer.unit).tensors
            for piece in pieces:
                path = piece.key_path
                if piece.unit != optimizer.unit or path[: len(start)] != start:
                    continue
                direct = len(path) == len(start) + 2  # the parameter, and a name
                inside = any(path[:end] in composed for end in range(len(start) + 2, len(path)))
                if not (direct or inside) or piece.key not in keys:
                    dropped.add(id(piece))
        return [piece for piece in pieces if id(piece) not in dropped]

    def _uncast_buffers(self, model: BoundModel, pieces: dict[str, list[Piece]]) -> Iterator[Apply]:
        """Replaces pieces of buffers that FSDP1 casts by ones in the dtype of the step.

        Steps hold them as they were before the cast, or as they were after it; so do models,
        before and after their first forward pass. Yields functions that cast them.
        """
        dtypes = cast_buffers(model.module, parallel_prefixes(model.module))
        places = {model.places.of(name): pair for name, pair in dtypes.items()}
        for unit in model.places.units if places else ():
            stored = self.stored.index(unit).tensors if unit in pieces else {}
            for number, piece in enumerate(pieces.get(unit, ())):
                entry, own = stored.get(Key(piece.key)), piece.local
                both = places.get(piece.entry, ())
                kept = [d for d in both if entry and str(d) == f"torch.{entry.dtype.name}"]
                if kept and own.dtype in both and own.dtype not in kept:
                    read = torch.empty_like(own, dtype=kept[0])
                    pieces[unit][number] = dataclasses.replace(piece, local=read)
                    yield partial(own.copy_, read)

    def _scale_changes(self, model: BoundModel, pieces: dict[str, list[Piece]]) -> list[Apply]:
        """Takes out pieces of scales that are made anew, and returns what puts scales in place."""
        packed = packed_weights(model.module, parallel_prefixes(model.module))
        units = [unit for unit in model.places.units if packed and unit in pieces]
        present = {piece.entry for unit in units for piece in pieces[unit]}
        stored: dict[str, StoredScale] = {}
        apart: set[Entry] = set()
        for weight, key in scale_names(packed):
            unit, path = place = model.places.of(f"{weight}.{key}")
            if unit in self._absent or (place in present and not is_made_anew(key)):
                continue
            index = self.stored.index(unit)
            entry = index.tensors.get(Key(".".join(map(str, path))))
            if entry is not None:
                stored[f"{weight}.{key}"] = index, self.stored.source, entry
                apart.add(place)
        for unit in units:
            pieces[unit] = [piece for piece in pieces[unit] if piece.entry not in apart]
        plan = plan_scales(packed, stored)
        if plan.problems:
            raise ResumeError(
                f"packed weights of the checkpoint are not those of the model: {plan.problems[0]}",
                where=model.key,
                hint="quantize the base as the run did",
            )
        return plan.changes

    @cached_property
    def _absent(self) -> frozenset[str]:
        """The directories of base models that the step does not have.

        Stock Trainer saves the adapter alone: the base is as the user loaded it.
        """
        bases = {model.places.base_unit for model in self.bound.models} - {""}
        missing = [unit for unit in bases if not self.stored.has_file(f"{unit}/{METADATA}")]
        absent = frozenset(missing)
        if absent and self.bound.rank == 0:
            logger.info("%s: only the adapter was saved, and the base stays as it is", self._folder)
        return absent

    def _is_built_otherwise(self, bound: BoundOptimizer) -> bool:
        """Whether an optimizer has other flags than were saved, such as `amsgrad`.

        Then tensors in its state that the step lacks are no leftovers of later steps.
        """
        defaults: Mapping[str, Any] = getattr(unwrap_optimizer(bound.optimizer), "defaults", {})
        flags = {name: value for name, value in defaults.items() if isinstance(value, bool)}
        return any(
            group.get(name, value) is not value
            for group in self._groups_of(bound)
            for name, value in flags.items()
        )

    def _checked_groups(self, bound: BoundOptimizer, pieces: list[Piece]) -> list[Apply]:
        """Checks that an optimizer fits, and returns what sets its hyperparameters."""
        where = bound.name
        lost = self.stored.findings.lost.get(where)
        if lost is not None:
            raise ResumeError(
                f"its state was not saved with this step: {lost}", where=where, hint=LOST_HINT
            )
        groups = self._groups_of(bound)
        optimizers = self.bound.optimizers
        missing = missing_groups(self.stored, bound, optimizers, self._slots, groups, self._world)
        if missing and self.bound.missing_groups == "error":
            raise ResumeError(
                f"the step has a different number of parameter groups: {missing}",
                where=where,
                hint="give the optimizer all groups before it is resumed, as add_param_group did"
                " when it was saved, or drop their state with missing_groups='drop'",
            )
        if missing and self.bound.rank == 0:
            logger.warning("%s: the state of groups that it lacks is dropped: %s", where, missing)
        check_state(self.stored, bound, self._slots, self._world)
        return [
            *group_changes(self.stored, bound, self._slots, groups, self._world),
            *unbound_changes(self.stored, bound, groups, pieces),
        ]

    def _groups_of(self, bound: BoundOptimizer) -> list[dict[str, Any]]:
        groups = stored_groups(self.stored, bound, self._slots)
        entry = self.stored.entry(*bound.saved_as)
        made_by = entry.made_by if entry is not None else ""
        check_optimizer(bound.optimizer, groups, made_by=made_by, where=bound.name)
        return groups

    @property
    def _world(self) -> Copies:
        return Copies(self.bound.world_size, self.bound.rank)

    @cached_property
    def _views(self) -> list[ModelView]:
        """What this rank holds of each model, with memory for it."""
        bound = self.bound
        materialise([m.module for m in bound.models], [o.optimizer for o in bound.optimizers])
        return [ModelWalk(m.module, m.places, world=self._world).look() for m in bound.models]

    @cached_property
    def _slots(self) -> dict[int, tuple[ShardLayout, ...]]:
        return {key: slots for view in self._views for key, slots in view.slots.items()}

    def _check_models(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Refuses tensors that no model has, as torch's strict load_state_dict does.

        Tensors that a pipeline's stage does not have are those of other stages.
        """
        for model, view in zip(self.bound.models, self._views, strict=True):
            if view.values.count < self.bound.world_size:
                continue
            extra: list[str] = []
            start = model.path
            for unit in model.places.units:
                if unit in self._absent:
                    continue
                index = self.stored.index(unit)
                # A model that was wrapped before has the scales of its packed weights elsewhere.
                extra += [
                    key
                    for key in unexpected_keys(index, pieces.get(unit, ()))
                    if index.tensors[key].key_path[: len(start)] == start
                    and not is_extra(index.tensors[key].key_path, start)
                    and not is_scale(key, index.tensors)
                ]
            if extra:
                raise ResumeError(
                    f"{len(extra):,} tensors of the checkpoint are not in the model:"
                    f" {list_first(extra)}",
                    where=model.key,
                    hint="build the model that was saved",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stored is not None:
            self._stored.close()


def _records_of(index: TensorIndex, entry: TensorEntry) -> list[tuple[int, int]]:
    records = [index.records[int(number)] for number in entry.chunks.record]
    return sorted((record.file, record.start) for record in records)


def _largest_difference(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest absolute difference; NaN equals NaN, and is infinitely far from else."""
    largest = 0.0
    for start in range(0, tensor.numel(), _COMPARED):
        left, right = (t.reshape(-1)[start : start + _COMPARED] for t in (tensor, other))
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        apart = (left.to(wide) - right.to(wide)).abs()
        apart[(left == right) | (left.isnan() & right.isnan())] = 0
        largest = max(largest, float(apart.nan_to_num(float("inf"), float("inf")).max()))
    return largest
