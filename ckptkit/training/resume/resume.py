"""Resuming: the newest step that is whole, loaded on all ranks or on none.

    choose a step -> open -> match model, optimizers, objects -> plan reads -> fill -> restore

`_Attempt.load` drives these, and all ranks agree before the next; `StepLoader` does them on one.
"""

from __future__ import annotations

import dataclasses
import logging
import posixpath
import time
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, convert, to_builtins

from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    InputError,
    MissingFileError,
    PartlyFilledError,
    ResumeError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    error_from_json,
)
from ckptkit.core.index import Key, TensorEntry, TensorIndex
from ckptkit.core.text import Closing, list_first, size_text
from ckptkit.core.threads import few_collections
from ckptkit.engine.checksum_tracker import NumberedRecord
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import parse_step
from ckptkit.runs.marks import STEP_PREFIXES, step_folders
from ckptkit.storage.places import Place
from ckptkit.training.agree.peers import Peers, check_same_place, place_facts
from ckptkit.training.load.group_reads import GroupReads, agreeing
from ckptkit.training.load.load_into import ModelLoad
from ckptkit.training.load.load_pieces import (
    FillReport,
    Packed,
    copied_changes,
    load_pieces,
    match_entries,
    names_of,
    pack,
    prove_together,
)
from ckptkit.training.load.materialise import materialise
from ckptkit.training.resume.changed_models import (
    Comparison,
    Survey,
    clip,
    compare,
    is_part,
    judge_options,
    log_changes,
    refuse_others,
    report_changes,
)
from ckptkit.training.resume.optimizers import LOST_HINT, StoredOptimizer
from ckptkit.training.resume.restore import (
    Apply,
    extra_state_changes,
    is_extra,
    loaders_alike,
    merge_loaders,
    object_changes,
    random_changes,
)
from ckptkit.training.resume.stored_step import Renaming, StoredStep, bind_to_step
from ckptkit.training.run_folders import saved_steps
from ckptkit.training.state.collect import BoundModel, BoundOptimizer, BoundState, bind
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.fsdp import cast_buffers
from ckptkit.training.state.memory_changes import count_changes
from ckptkit.training.state.models import ModelView, ModelWalk
from ckptkit.training.state.pieces import Entry, Piece, ShardLayout
from ckptkit.training.state.quant_states import (
    StoredScale,
    is_made_anew,
    packed_weights,
    plan_scales,
    scale_names,
)
from ckptkit.training.step_names import model_unit, name_save, parallel_prefixes
from ckptkit.training.tiers.url_run import NearPlace, steps_of_place

logger = logging.getLogger(__name__)

# An older step would not help against these: the checkpoint is whole, and not for this state.
_MISFITS = (ResumeError, UnsupportedError, UnsafePickleError)
_FIRST_ROUND = "the steps to resume from"
_WHOLE = ""  # what records are sent under that belong to no directory of a step
_ALL_DAMAGED = (
    "see the warnings above; the state may be overwritten in part, so build it anew before training"
    " from the start"
)
_COMPARED = 1 << 20  # elements at once, so that little memory is needed

Untied = dict[str, tuple[str, float]]
"""By the name of a tensor that is left out, because the model holds it as one with another: that
one's name, and the largest absolute difference on this rank.
"""


def resume(
    bound: BoundState,
    run: Path | Place,
    peers: Peers,
    *,
    timeout_seconds: float,
    step: int | None = None,
    prefix: str = STEP_PREFIXES[0],
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """Loads the newest complete step of a run in place, on all ranks.

    A step that turns out to be damaged is skipped with a warning, on all ranks. With `step`, that
    one is loaded, and none is skipped. Returns None where no step is complete.
    """
    if step is not None and (type(step) is not int or step < 0):
        error = UsageError(f"is {step!r}, where a count of steps was expected", where="step")
        decline(peers, error, timeout_seconds=timeout_seconds)
        raise error
    steps = peers.agree(
        _FIRST_ROUND,
        {"step": step, "options": _options(bound)},
        lambda requests: _steps_to_try(requests, run, prefix),
        timeout_seconds=timeout_seconds,
    )
    attempt = _Attempt(bound, peers, timeout_seconds, group)
    for entry in steps:
        problem = entry["problem"] or attempt.load_from(run, entry["folder"], entry["step"])
        if problem is None:
            return int(entry["step"])
        if step is not None:
            raise problem
        if peers.rank == 0 and entry["finished"]:
            logger.warning("step %d is skipped: %s", entry["step"], problem)
        elif peers.rank == 0:
            logger.info("step %d was not finished: %s", entry["step"], problem)
    if any(entry["finished"] for entry in steps):
        raise ResumeError("every step that was found is damaged", where=str(run), hint=_ALL_DAMAGED)
    if peers.rank == 0:
        logger.info("%s: no step to resume from was found", run)
        # There may be steps whose names begin otherwise, such as those of accelerate.
        others, found = [other for other in STEP_PREFIXES if other != prefix], dict[int, Path]()
        with suppress(OSError):
            found = step_folders(run, others) if isinstance(run, Path) else {}
        if found:
            logger.warning(
                "%s: training begins anew, although %s is there: to resume from it, pass prefix=%r,"
                " or call accelerator.load_state",
                *(run, found[max(found)].name, others[0]),
            )
    return None


def decline(peers: Peers, error: Exception, *, timeout_seconds: float) -> None:
    """Lets the other ranks, which call `resume`, know at once that this one cannot.

    It is raised on all of them.
    """
    peers.refuse(_FIRST_ROUND, error, timeout_seconds=timeout_seconds)


def resume_from(
    bound: BoundState,
    folder: Path | Place,
    peers: Peers,
    *,
    timeout_seconds: float,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Loads one given directory in place, on all ranks; it may have been written by other tools.

    Of a checkpoint that no training loop resumes from, such as a model folder, only the model is
    loaded. Returns the number of the step, 0 where it is not known.
    """
    found: dict[str, Any] = peers.agree(
        _FIRST_ROUND,
        {"folder": place_facts(folder), "options": _options(bound)},
        lambda requests: _step_in(folder, requests, bound),
        timeout_seconds=timeout_seconds,
    )
    attempt = _Attempt(bound, peers, timeout_seconds, group)
    if found["is_other"]:
        return attempt.fill_model(folder) or found["step"]
    problem = attempt.load(folder, found["step"])
    if problem is not None:
        raise problem
    return int(found["step"])


def _options(bound: BoundState) -> dict[str, Any]:
    return {"grow": list(bound.grow), "renamed": dict(bound.renamed)}


def _steps_to_try(
    requests: Sequence[Mapping[str, Any]], run: Path | Place, prefix: str
) -> list[dict[str, Any]]:
    """Lists the steps, newest first, each with the problem that its listing shows.

    All ranks have to request the same.
    """
    saved = saved_steps(run, prefix) if isinstance(run, Path) else steps_of_place(run, prefix)
    _check_alike(requests)
    step = requests[0]["step"]
    for rank, request in enumerate(requests):
        if request["step"] != step:
            raise UsageError(
                f"is {request['step']} on rank {rank} and {step} on rank 0, where"
                " the same was expected on all ranks",
                where="step",
                hint="resume from the same step on every rank",
            )
    steps = [
        {
            "step": entry.step,
            "folder": entry.name,
            "problem": None if entry.complete else entry.problem or "it is not complete",
            "finished": entry.has_manifest,
        }
        for entry in reversed(saved)
        if step in {None, entry.step}
    ]
    if step is not None and not any(entry["problem"] is None for entry in steps):
        reason = f": {steps[0]['problem']}" if steps else ""
        raise ResumeError(
            f"step {step} was requested and is not complete{reason}",
            where=str(run),
            hint="`ckptkit inspect` shows what is in a directory",
        )
    return steps


def _check_alike(requests: Sequence[Mapping[str, Any]]) -> None:
    of_folders = ["folder" in request for request in requests]
    if len(set(of_folders)) > 1:
        raise UsageError(
            f"was given on some ranks only: rank {of_folders.index(True)} resumes from a folder,"
            f" and rank {of_folders.index(False)} from the run",
            where="folder",
            hint="resume from the same directory on every rank",
        )
    for option, value in requests[0]["options"].items():
        for rank, request in enumerate(requests):
            if request["options"][option] != value:
                raise UsageError(
                    f"is {request['options'][option]!r:.200} on rank {rank} and {value!r:.200} on"
                    " rank 0, where the same was expected on all ranks",
                    where=option,
                    hint="resume with the same options on every rank",
                )


def _step_in(
    folder: Path | Place, requests: Sequence[Mapping[str, Any]], bound: BoundState
) -> dict[str, Any]:
    """Returns the number of the step in a directory, where all ranks name the same one.

    With it, whether that is no step of a training loop but another checkpoint of a model.
    """
    _check_alike(requests)
    check_same_place([request["folder"] for request in requests], "folder")
    try:
        with StoredStep.open(folder) as stored:
            manifest = stored.manifest
            is_other = not _can_resume(stored, bound)
    except MissingFileError as error:
        raise ResumeError(
            "no directory was found there",
            where=str(folder),
            hint="name the directory of a step, as other ranks see it too",
        ) from error
    step = manifest.source.get("step") if manifest is not None else None
    number = step if isinstance(step, int) else parse_step(posixpath.basename(folder)) or 0
    return {"step": number, "is_other": is_other}


def _can_resume(stored: StoredStep, bound: BoundState) -> bool:
    """Whether a directory is laid out as a step, and not a model of other names alone."""
    if stored.manifest is not None and stored.layout is not None:
        return True
    if not stored.has_file(METADATA):
        units = {unit for model in bound.models for unit in model.places.units}
        units |= {model_unit(number) for number in range(len(bound.models))}
        return any(stored.has_file(posixpath.join(unit, METADATA)) for unit in units)
    own = {str(piece.key_path[-1]) for piece in bound.pieces()}
    entries = stored.index("").tensors.values()
    return bool(bound.renamed) or any(
        str(entry.key_path[-1]) in own or entry.key in own for entry in entries
    )


class _Attempt(Struct, frozen=True):
    """Loads one step, or tries to; all ranks do the same, and agree after each part of it."""

    bound: BoundState
    peers: Peers
    timeout_seconds: float
    group: dist.ProcessGroup | None = None  # of ranks that read for each other
    # the steps that may have been loaded in part, and how the models differed from them
    tried: list[tuple[int, list[Comparison]]] = []

    def load_from(self, run: Path | Place, name: str, step: int) -> InputError | None:
        """Does what `load` does with a step of a run, if need be without the nodes' own copies."""
        if isinstance(run, Path):
            return self.load(run / name, step)
        if isinstance(run, NearPlace) and self.load(run.step(name), step) is None:
            return None
        return self.load(run.beside(posixpath.join(run, name)), step)

    def load(self, folder: Path | Place, step: int) -> InputError | None:
        """Returns what is damaged, the same on all ranks, or None where all is in place."""
        start = time.perf_counter()
        with few_collections(), StepLoader(folder, self.bound) as opening:
            # Match: models get memory, optimizers and objects are compared with what is stored.
            alike = self._agree("where dataloaders go on", None, lambda _: _look(opening))
            self._give_names(opening)
            anew = self._starting_anew(opening)
            # Plan: what is no tensor is read. All of it has to fit on all ranks before any of them
            # overwrites a tensor.
            planned, problem = self._together(
                "what fits of a step",
                lambda: opening.prepare(step, alike, anew, self.tried),
                lambda _: {"changes": opening.report_changes()},
                lambda values: log_changes(value["changes"] for value in values),
            )
            if problem is not None:
                return problem
            pieces, changes = planned
            # Fill: each rank reads its parts of tensors, and rank 0 proves what none read whole.
            filled, problem = self._together(
                "what was loaded of a step",
                lambda: opening.fill(pieces, self.group),
                lambda filled: {
                    "partial": self._pack({unit: r.partial for unit, r in filled[0].items()}),
                    "untied": filled[1],
                },
                lambda values: _verdict(values, opening),
            )
            if problem is not None:
                return problem
            # Restore: everything else is put in place.
            _, problem = self._together(
                "putting the loaded values in place", lambda: _apply(changes)
            )
            if problem is not None:
                raise problem
        if self.peers.rank == 0:
            reports = filled[0].values()
            read = size_text(sum(report.bytes_read for report in reports))
            seconds = time.perf_counter() - start
            done = name_save(step, folder)
            logger.info("resumed from %s: %s in %.2f s on rank 0", done, read, seconds)
            unverified = [key for report in reports for key in report.unverified]
            if unverified:
                logger.info("no checksums were stored for %s", list_first(unverified))
        return None

    def _give_names(self, opening: StepLoader) -> None:
        """Agrees on whether the step gets the names of changed models, if the user has some."""
        if not self.bound.grow and not self.bound.renamed:
            return
        survey: Survey | None = None
        try:
            survey = opening.survey()
        except Exception as error:  # noqa: BLE001  loading fails likewise, on all ranks
            logger.debug("models were not compared: %s", error)
        own = None if survey is None else to_builtins(survey)
        verdict = self._agree("which models were changed", own, _judge)
        if verdict["problem"] is not None:
            raise error_from_json(verdict["problem"]["error"])
        if verdict["is_renamed"]:
            opening.rename()
        elif self.bound.renamed and self.peers.rank == 0:
            logger.info("renamed is left out: the step has the names of the model")

    def fill_model(self, folder: Path | Place) -> int | None:
        """Fills the one model from a checkpoint of any format; returns the step of that."""
        bound = self.bound
        with ExitStack() as stack:

            def match() -> ModelLoad:
                for option, value in _options(bound).items():
                    if value:
                        raise UsageError(
                            f"is for steps, and {folder} is a model alone",
                            where=option,
                            hint="leave it out: a model alone is loaded as a whole",
                        )
                if len(bound.models) != 1:
                    raise ResumeError(
                        f"holds a model alone, and the state has {len(bound.models)}",
                        where=str(folder),
                        hint="fill each of them with ckptkit.training.load_into",
                    )
                load = stack.enter_context(ModelLoad(bound.models[0].module, folder))
                load.check(strict=True)
                return load

            load, problem = self._together("whether the model fits", match)
            if problem is not None:
                raise problem
            result, problem = self._together(
                "whether the model was filled",
                lambda: load.fill([o.optimizer for o in bound.optimizers], group=self.group),
                lambda _: {"partial": self._pack({_WHOLE: load.partial})},
                lambda values: _unproven(load, values),
            )
            if problem is not None:
                raise problem
        if self.peers.rank == 0:
            left = [entry.key for entry in (*bound.optimizers, *bound.others)]
            also = f"; as before: {', '.join(dict.fromkeys(left))}" if left else ""
            logger.warning(
                "%s: of this %s only the model was loaded%s", folder, result.format, also
            )
        step: int | None = load.step
        return step

    def _agree(self, topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return self.peers.agree(topic, value, decide, timeout_seconds=self.timeout_seconds)

    def _together(
        self,
        topic: str,
        work: Callable[[], Any],
        share: Callable[[Any], Mapping[str, Any]] = lambda _: {},
        decide: Callable[[list[Any]], dict[str, Any] | None] = lambda _: None,
    ) -> tuple[Any, InputError | None]:
        """Does a part of the work on all ranks; returns its result here, and what is damaged.

        If it fails on any rank because the state does not fit, it raises on all of them. Otherwise
        rank 0 decides over what the ranks share.
        """
        result, error, shared = None, None, dict[str, Any]()
        try:
            result = work()
            shared = dict(share(result))
        except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
            error = caught
        value = {"problem": _problem(error), **shared}

        def judge(values: list[Any]) -> Any:
            # A state that does not fit comes before a damaged file.
            problems = [v["problem"] for v in values if v["problem"] is not None]
            return (
                min(problems, key=lambda problem: not problem["misfit"])
                if problems
                else decide(values)
            )

        verdict = self._agree(topic, value, judge)
        if verdict is None:
            return result, None
        problem = error_from_json(verdict["error"])
        problem.__cause__ = error
        if verdict["misfit"]:
            raise problem
        return result, problem if isinstance(problem, InputError) else InputError(str(problem))

    def _pack(self, partial: Mapping[str, Sequence[NumberedRecord]]) -> Packed:
        return pack(partial, world_size=self.peers.world_size)

    def _starting_anew(self, opening: StepLoader) -> frozenset[str]:
        """Agrees on which optimizers start without their state, where the user allows that."""
        if self.bound.unfit_optimizer != "reset":
            return frozenset()
        unfit: dict[str, str] = {}
        try:
            unfit = opening.unfit_optimizers()
        except Exception as error:  # noqa: BLE001  loading fails likewise, on all ranks
            logger.debug("optimizers were not compared: %s", error)
        reasons: dict[str, str] = self._agree(
            "which optimizers start anew", unfit, lambda values: dict(ChainMap(*values))
        )
        for name, reason in sorted(reasons.items() if self.peers.rank == 0 else ()):
            logger.warning("%s starts anew, without the state in the step: %s", name, reason)
        return frozenset(reasons)


def _look(opening: StepLoader) -> dict[str, bool | str]:
    """Returns which dataloaders were alike, or their states in one.

    Where what they had cannot be read, loading the step fails likewise.
    """
    try:
        alike = loaders_alike(opening.stored, opening.bound)
    except Exception as error:  # noqa: BLE001  all ranks hear of it when they load the step
        logger.debug("dataloaders were not compared: %s", error)
        return {}
    return alike | merge_loaders(opening.stored, opening.bound)


def _judge(surveys: Sequence[Any]) -> dict[str, Any]:
    try:
        found = [convert(survey, Survey) for survey in surveys if survey is not None]
        is_renamed = len(found) == len(surveys) and judge_options(found)
    except Exception as error:  # noqa: BLE001  the other ranks have to hear of it
        return {"problem": _problem(error), "is_renamed": False}
    return {"problem": None, "is_renamed": is_renamed}


def _apply(changes: Sequence[Apply]) -> None:
    try:
        for change in changes:
            change()
    except Exception:
        logger.exception("the values of the checkpoint could not be put in place")
        raise


def _problem(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, CkptkitError):
        misfit = isinstance(error, _MISFITS) or not isinstance(error, InputError)
        return {"error": error.to_json(), "misfit": misfit}
    text = f"loading failed: {type(error).__name__}: {error}"
    return {"error": ResumeError(text[:2_000]).to_json(), "misfit": True}


def _verdict(values: Sequence[Mapping[str, Any]], opening: StepLoader) -> dict[str, Any] | None:
    """Proves what no rank could alone, and says what was left out; for rank 0."""
    stored = opening.stored

    def name(unit: str, number: int) -> str:
        return posixpath.join(stored.source.location, stored.index(unit).path_of(number))

    try:
        stored.check_digests()
        left = prove_together([value["partial"] for value in values], name)
    except Exception as error:  # noqa: BLE001  the other ranks have to hear of it
        return _problem(error)
    if left:
        logger.info("%d records were read in part by all ranks, and not checked", left)
    for note in stored.findings.notes:
        logger.warning("the step that is resumed: %s", note)
    untied = [value["untied"] for value in values]
    for name in sorted({name for of_rank in untied for name in of_rank}):
        reports = [of_rank[name] for of_rank in untied if name in of_rank]
        logger.warning(
            "%s was saved apart from %s, and the model holds them as one tensor: the values of %s"
            " are dropped, which differ by up to %.3g",
            name,
            reports[0][0],
            name,
            max(difference for _, difference in reports),
        )
    return None


def _unproven(load: ModelLoad, values: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Proves records that no rank has read as a whole; returns the problem of a damaged one."""
    packed = [value["partial"] for value in values]
    try:
        left = prove_together(packed, lambda _, number: load.name_record(number))
    except ChecksumError as error:
        text = f"{error.message}; the model is filled with what was read"
        return _problem(PartlyFilledError(text, where=error.where))
    if left:
        logger.warning("%d records were read in part by all ranks, and not checked", left)
    return None


class StepLoader(Closing):
    """Loads a step into the state of this rank; its directory is opened on first use."""

    def __init__(self, folder: Path | Place, bound: BoundState) -> None:
        self._folder = folder
        self._given = bound
        self._stored: StoredStep | None = None
        self._world = Copies(bound.world_size, bound.rank)
        self._optimizers: dict[int, StoredOptimizer] = {}
        self._dropped: list[str] = []  # names in the step

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
            given = bound
            bound = bind(state, layout=layout, rank=bound.rank, world_size=bound.world_size)
            bound = bound.resuming(
                given.unfit_optimizer, given.missing_groups, given.grow, given.renamed
            )
        if self.stored.entries is not None:
            bound = bind_to_step(bound, self.stored.entries, where=str(self._folder))
        return bound

    def _compare(self) -> list[Comparison]:
        """Compares the models with the step, before they get memory."""
        found: list[Comparison] = []
        for model in self.bound.models:
            view = ModelWalk(model.module, model.places, world=self._world).look()
            is_stage = view.values.count < self.bound.world_size
            place = model, view, self.stored.index, self._absent
            found.append(compare(*place, is_stage=is_stage))
        return found

    def survey(self) -> Survey:
        return Survey.of(self._compare(), self.bound.grow, self.bound.renamed)

    def rename(self) -> None:
        """Gives the step the names of the models, as the user has passed them."""
        bound = self.bound
        names = [name for one in self._compare() for name in one.stored]
        self.stored.renaming = renaming = Renaming(
            bound.renamed,
            [(unit, model.path) for model in bound.models for unit in model.places.units],
            [(optimizer.unit, optimizer.path) for optimizer in bound.optimizers],
        )
        self._dropped = sorted({name for name in names if renaming.name(name) is None})

    @cached_property
    def _changed(self) -> list[Comparison]:
        """How each of the models differs from the step, all of which the user allows."""
        found = self._compare()
        refuse_others(found, self.bound.grow, self.bound.renamed)
        return found

    def report_changes(self) -> dict[str, list[str]]:
        """Returns what was changed in the models; one of several ranks with the same tells it."""
        is_stage = any(view.values.count < self.bound.world_size for view in self._views)
        if self.bound.rank and not is_stage:
            return {}
        return report_changes(self._changed, self._dropped, self.stored.renaming)

    def unfit_optimizers(self) -> dict[str, str]:
        """Returns the optimizers that do not fit this step, by name, and why."""
        problems: dict[str, str] = {}
        for optimizer in self.bound.optimizers:
            try:
                self._checked_groups(optimizer, [])
                # It also has to have, or be able to create, state like that in the step.
                matched = self._matched(optimizer)
                matched.allocate()
                depth = len(optimizer.path)
                pieces = [
                    piece
                    for piece in self._stored_pieces()
                    if piece.unit == optimizer.unit and piece.key_path[:depth] == optimizer.path
                ]
                match_entries(self.stored.index(optimizer.unit), self._clipped(pieces))
                list(matched.value_changes())
            except ResumeError as error:
                problems[optimizer.name] = str(error)
        return problems

    def prepare(
        self,
        step: int,
        alike: Mapping[str, bool | str],
        anew: Collection[str] = frozenset(),
        tried: list[tuple[int, list[Comparison]]] | None = None,
    ) -> tuple[dict[str, list[Piece]], list[Apply]]:
        """Reads everything but the tensors, and checks that these fit; overwrites none of them.

        Returns the tensors to fill, by DCP directory, and functions that put everything else in
        place. The state of the optimizers that `anew` names is cleared, not loaded. `tried` has
        the steps of which tensors may have been filled before, and gets this one.
        """
        stored, bound = self.stored, self.bound
        tried = [] if tried is None else tried
        for other, before in tried:
            if any(map(Comparison.lacks_what, self._changed, before)):
                raise ResumeError(
                    f"step {step} lacks what step {other} has, which turned out to be damaged after"
                    " parts of it may have been loaded",
                    where=str(self._folder),
                    hint=f"build the model anew, and resume it with step={step}",
                )
        tried.append((step, self._changed))
        fresh = [o for o in bound.optimizers if o.name in anew]
        resumed = [o for o in bound.optimizers if o not in fresh]
        further: list[Piece] = []
        changes = [
            change for optimizer in resumed for change in self._checked_groups(optimizer, further)
        ]
        for optimizer in resumed:
            changes += self._matched(optimizer).value_changes()
        for optimizer in fresh:
            changes.append(optimizer.optimizer.state.clear)
            try:
                changes += list(self._matched(optimizer).group_changes())
            except ResumeError as error:
                logger.debug("hyperparameters stay as they are: %s", error)
        for model in bound.models:
            changes += extra_state_changes(stored, model, further, rank=bound.rank)
        changes += object_changes(stored, bound, alike, further)
        # Last, as loading a state dict may draw numbers.
        changes += random_changes(stored, bound, step)
        for optimizer in resumed:
            self._matched(optimizer).allocate()
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in self._stored_pieces(fresh):
            pieces[piece.unit].append(piece)
        changes += [c for model in bound.models for c in self._scale_changes(model, pieces)]
        changes += [c for model in bound.models for c in self._uncast_buffers(model, pieces)]
        for model in bound.models:
            changes += copied_changes(model, pieces)
        for piece in further:
            pieces[piece.unit].append(piece)
        for unit, of_unit in pieces.items():
            pieces[unit] = self._clipped(of_unit)
            match_entries(stored.index(unit), pieces[unit])
        return pieces, changes

    def fill(
        self, pieces: Mapping[str, Sequence[Piece]], group: dist.ProcessGroup | None = None
    ) -> tuple[dict[str, FillReport], Untied]:
        own, reports = defaultdict(list), dict[str, FillReport]()
        wanted = [piece for of_unit in pieces.values() for piece in of_unit]
        folder = str(self._folder)
        texts = [f"{folder} {p.unit} {p.key} {p.places} {p.local.dtype}" for p in wanted]
        locals_ = [piece.local for piece in wanted]
        shared = GroupReads(list(zip(texts, locals_, strict=True)), group)
        for piece, is_own in zip(wanted, shared.is_own, strict=True):
            if is_own:
                own[piece.unit].append(piece)
        with agreeing(group):
            for unit in pieces:
                reports[unit] = load_pieces(self.stored.index(unit), self.stored.source, own[unit])
        shared.exchange()
        count_changes(locals_)
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
        """Returns the pieces to fill: not what a model or an optimizer has beyond the step."""
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
            if optimizer not in fresh:
                dropped.update(map(id, self._matched(optimizer).leftovers(pieces)))
        new = {entry for one in self._changed for entry in one.new_entries}
        new |= {place for one in self._optimizers.values() for place in one.places(one.new)}
        return [p for p in pieces if id(p) not in dropped and not _is_below(p, new)]

    def _clipped(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the pieces, those of grown parameters without what the step lacks."""
        grown = {entry for one in self._changed for entry in one.grown_entries}
        grown |= {place for one in self._optimizers.values() for place in one.places(one.grown)}
        clipped: list[Piece] = []
        for piece in pieces:
            tensors = self.stored.index(piece.unit).tensors if _is_below(piece, grown) else {}
            shapes = (tensors[key].shape for key in names_of(piece) if key in tensors)
            shape = next(shapes, piece.shape)
            clipped += clip(piece, shape) if is_part(shape, piece.shape) else (piece,)
        return clipped

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
        problems, changes = plan_scales(packed, stored)
        if problems:
            raise ResumeError(
                f"packed weights of the checkpoint are not those of the model: {problems[0]}",
                where=model.key,
                hint="quantize the base as the run did",
            )
        return changes

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

    def _checked_groups(self, bound: BoundOptimizer, pieces: list[Piece]) -> list[Apply]:
        """Checks that an optimizer fits, and returns what sets its hyperparameters."""
        where = bound.name
        lost = self.stored.findings.lost.get(where)
        if lost is not None:
            raise ResumeError(
                f"its state was not saved with this step: {lost}", where=where, hint=LOST_HINT
            )
        matched = self._matched(bound)
        missing = matched.missing_groups(self.bound.optimizers)
        if missing and self.bound.missing_groups == "error":
            raise ResumeError(
                f"the step has a different number of parameter groups: {missing}",
                where=where,
                hint="give the optimizer all groups before it is resumed, as add_param_group did"
                " when it was saved, or drop their state with missing_groups='drop'",
            )
        if missing and self.bound.rank == 0:
            logger.warning("%s: the state of groups that it lacks is dropped: %s", where, missing)
        matched.check_state()
        return [*matched.group_changes(), *matched.unbound_changes(pieces)]

    def _matched(self, bound: BoundOptimizer) -> StoredOptimizer:
        key = id(bound.optimizer)
        if key not in self._optimizers:
            pairs = zip(self._views, self._changed, strict=True)
            changed = {identity: one for view, one in pairs for identity in view.slots}
            matched = StoredOptimizer(self.stored, bound, self._slots, self._world, changed)
            self._optimizers[key] = matched
        return self._optimizers[key]

    @cached_property
    def _views(self) -> list[ModelView]:
        """What this rank holds of each model, with memory for it."""
        bound, _ = self.bound, self._changed
        materialise([m.module for m in bound.models], [o.optimizer for o in bound.optimizers])
        return [ModelWalk(m.module, m.places, world=self._world).look() for m in bound.models]

    @cached_property
    def _slots(self) -> dict[int, tuple[ShardLayout, ...]]:
        return {key: slots for view in self._views for key, slots in view.slots.items()}

    def close(self) -> None:
        if self._stored is not None:
            self._stored.close()


def _is_below(piece: Piece, places: Collection[Entry]) -> bool:
    path = piece.key_path
    return bool(places) and any(
        (piece.unit, path[:end]) in places for end in range(1, len(path) + 1)
    )


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
