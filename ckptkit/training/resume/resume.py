"""Resuming: the newest step that is whole, loaded on all ranks or on none."""

from __future__ import annotations

import logging
import posixpath
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from torch import nn

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
from ckptkit.core.index import TensorIndex
from ckptkit.core.text import list_first, size_text
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import parse_step
from ckptkit.runs.marks import STEP_PREFIXES, step_folders
from ckptkit.storage.places import Place
from ckptkit.training.agree.peers import Peers, check_same_place, place_facts
from ckptkit.training.load.filling import LoadResult
from ckptkit.training.load.load_into import ModelLoad
from ckptkit.training.resume.fill import StepLoader, Untied
from ckptkit.training.resume.load_pieces import (
    FillReport,
    Packed,
    cross_check,
    pack,
    unpack,
)
from ckptkit.training.resume.restore import Apply
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.run_folders import saved_steps
from ckptkit.training.state.collect import BoundState
from ckptkit.training.state.pieces import Piece
from ckptkit.training.step_names import model_unit, name_save
from ckptkit.training.tiers.url_run import NearPlace, steps_of_place
from ckptkit.writer.merge import few_collections

logger = logging.getLogger(__name__)

# An older step would not help against these: the checkpoint is whole, and not for this state.
_MISFITS = (ResumeError, UnsupportedError, UnsafePickleError)
_FIRST_ROUND = "the steps to resume from"
_WHOLE = ""  # what records are sent under that belong to no directory of a step
_ALL_DAMAGED = (
    "see the warnings above; the state may be overwritten in part, so build it anew before training"
    " from the start"
)


def resume(
    bound: BoundState,
    run: Path | Place,
    peers: Peers,
    *,
    timeout_seconds: float,
    step: int | None = None,
    prefix: str = STEP_PREFIXES[0],
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
        {"step": step},
        lambda requests: _steps_to_try(requests, run, prefix),
        timeout_seconds=timeout_seconds,
    )
    for entry in steps:
        attempt = _Attempt(bound, peers, timeout_seconds)
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
        _say_that_none_was_found(run, prefix)
    return None


def _say_that_none_was_found(run: Path | Place, prefix: str) -> None:
    """Logs it, and warns of steps whose names begin otherwise, such as those of accelerate."""
    logger.info("%s: no step to resume from was found", run)
    others = [other for other in STEP_PREFIXES if other != prefix]
    with suppress(OSError):
        found = step_folders(run, others) if isinstance(run, Path) else {}
        if found:
            newest = found[max(found)].name
            logger.warning(
                "%s: training begins anew, although %s is there: to resume from it, pass prefix=%r,"
                " or call accelerator.load_state",
                *(run, newest, others[0]),
            )


def decline(peers: Peers, error: Exception, *, timeout_seconds: float) -> None:
    """Lets the other ranks, which call `resume`, know at once that this one cannot.

    It is raised on all of them.
    """
    peers.refuse(_FIRST_ROUND, error, timeout_seconds=timeout_seconds)


def resume_from(
    bound: BoundState, folder: Path | Place, peers: Peers, *, timeout_seconds: float
) -> int:
    """Loads one given directory in place, on all ranks; it may have been written by other tools.

    Of a checkpoint that no training loop resumes from, such as a model folder, only the model is
    loaded. Returns the number of the step, 0 where it is not known.
    """
    found: dict[str, Any] = peers.agree(
        _FIRST_ROUND,
        {"folder": place_facts(folder)},
        lambda requests: _step_in(folder, requests, bound),
        timeout_seconds=timeout_seconds,
    )
    if found["is_other"]:
        return _fill_model(bound, folder, peers, timeout_seconds) or found["step"]
    problem = _Attempt(bound, peers, timeout_seconds).load(folder, found["step"])
    if problem is not None:
        raise problem
    return int(found["step"])


def _fill_model(
    bound: BoundState, folder: Path | Place, peers: Peers, timeout_seconds: float
) -> int | None:
    """Fills the one model of a state from a checkpoint of any format; returns the step of that."""
    with ExitStack() as stack:
        error: Exception | None = None
        load: ModelLoad | None = None
        result: LoadResult | None = None
        partial: Packed = Packed(tables={}, left_out=0)

        def agree(topic: str, decide: Callable[[list[Any]], dict[str, Any] | None]) -> None:
            value = {"problem": _problem(error), "partial": partial}
            problems = peers.agree(topic, value, decide, timeout_seconds=timeout_seconds)
            if problems is not None:
                raise error_from_json(problems["error"]) from error

        def first(values: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
            return _first_problem([value["problem"] for value in values])

        try:
            load = stack.enter_context(ModelLoad(_only_model(bound, folder), folder))
            load.check(strict=True)
        except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
            error = caught
        agree("whether the model fits", first)
        assert load is not None  # noqa: S101  else it raised
        opened = load
        try:
            result = load.fill([entry.optimizer for entry in bound.optimizers])
            partial = pack({_WHOLE: load.partial}, world_size=peers.world_size)
        except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
            error = caught
        agree("whether the model was filled", lambda v: first(v) or _unproven(opened, v))
    if peers.rank == 0 and result is not None:
        left = [entry.key for entry in (*bound.optimizers, *bound.others)]
        also = f"; as before: {', '.join(dict.fromkeys(left))}" if left else ""
        logger.warning("%s: of this %s only the model was loaded%s", folder, result.format, also)
    return load.step


def _unproven(load: ModelLoad, values: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Proves records that no rank has read as a whole; returns the problem of a damaged one."""
    packed = [value["partial"] for value in values]
    texts = [rank["tables"][_WHOLE] for rank in packed if _WHOLE in rank["tables"]]
    try:
        left = cross_check([unpack(text) for text in texts], load.name_record)
    except ChecksumError as error:
        text = f"{error.message}; the model is filled with what was read"
        return _problem(PartlyFilledError(text, where=error.where))
    left += max(rank["left_out"] for rank in packed)
    if left:
        logger.warning("%d records were read in part by all ranks, and not checked", left)
    return None


def _only_model(bound: BoundState, folder: Path | Place) -> nn.Module:
    if len(bound.models) == 1:
        return bound.models[0].module
    raise ResumeError(
        f"holds a model alone, and the state has {len(bound.models)}",
        where=str(folder),
        hint="fill each of them with ckptkit.training.load_into",
    )


def _steps_to_try(
    requests: Sequence[Mapping[str, Any]], run: Path | Place, prefix: str
) -> list[dict[str, Any]]:
    """Lists the steps, newest first, each with the problem that its listing shows.

    All ranks have to request the same.
    """
    saved = saved_steps(run, prefix) if isinstance(run, Path) else steps_of_place(run, prefix)
    _check_alike(requests, "folder")
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


def _check_alike(requests: Sequence[Mapping[str, Any]], other: str) -> None:
    odd = next((rank for rank, request in enumerate(requests) if other in request), None)
    if odd is not None:
        raise UsageError(
            f"was given on some ranks only: rank {0 if other == 'step' else odd} resumes from a"
            f" folder, and rank {odd if other == 'step' else 0} from the run",
            where="folder",
            hint="resume from the same directory on every rank",
        )


def _step_in(
    folder: Path | Place, requests: Sequence[Mapping[str, Any]], bound: BoundState
) -> dict[str, Any]:
    """Returns the number of the step in a directory, where all ranks name the same one.

    With it, whether that is no step of a training loop but another checkpoint of a model.
    """
    _check_alike(requests, "step")
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
        return any(stored.has_file(f"{unit}/{METADATA}") for unit in units)
    own = {str(piece.key_path[-1]) for piece in bound.pieces()}
    entries = stored.index("").tensors.values()
    return any(str(entry.key_path[-1]) in own or entry.key in own for entry in entries)


class _Attempt(Struct, frozen=True):
    """One try to load one step."""

    bound: BoundState
    peers: Peers
    timeout_seconds: float

    def load_from(self, run: Path | Place, name: str, step: int) -> InputError | None:
        """Does what `load` does with a step of a run, if need be without the nodes' own copies."""
        if isinstance(run, Path):
            return self.load(run / name, step)
        folder = run.beside(posixpath.join(run, name))
        if not isinstance(run, NearPlace):
            return self.load(folder, step)
        problem = self.load(run.step(name), step)
        # A node's own copies may be damaged.
        return None if problem is None else self.load(folder, step)

    def load(self, folder: Path | Place, step: int) -> InputError | None:
        """Returns what is damaged, the same on all ranks, or None where all is in place."""
        start = time.perf_counter()
        with few_collections(), StepLoader(folder, self.bound) as opening:
            alike = self._agree("where dataloaders go on", None, lambda _: _look(opening))
            anew = self._starting_anew(opening)
            pieces: dict[str, list[Piece]] = {}
            changes: list[Apply] = []
            reports: dict[str, FillReport] = {}
            untied: Untied = {}
            error: Exception | None = None
            try:
                pieces, changes = opening.prepare(step, alike, anew)
            except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
                error = caught
            # All of it has to fit on all ranks before any of them overwrites a tensor.
            verdict = self._agree("what fits of a step", _problem(error), _first_problem)
            problem = _stopped(verdict, error)
            if problem is not None:
                return problem
            try:
                reports, untied = opening.fill(pieces)
            except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
                error = caught
            partial = {unit: report.partial for unit, report in reports.items()}
            value = {
                "problem": _problem(error),
                "partial": pack(partial, world_size=self.peers.world_size),
                "untied": untied,
            }
            verdict = self._agree(
                "what was loaded of a step", value, lambda values: _verdict(values, opening)
            )
            problem = _stopped(verdict, error)
            if problem is not None:
                return problem
            self._apply(changes)
        if self.peers.rank == 0:
            read = size_text(sum(report.bytes_read for report in reports.values()))
            seconds = time.perf_counter() - start
            done = name_save(step, folder)
            logger.info("resumed from %s: %s in %.2f s on rank 0", done, read, seconds)
            unverified = [key for report in reports.values() for key in report.unverified]
            if unverified:
                logger.info("no checksums were stored for %s", list_first(unverified))
        return None

    def _agree(self, topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return self.peers.agree(topic, value, decide, timeout_seconds=self.timeout_seconds)

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

    def _apply(self, changes: Sequence[Apply]) -> None:
        error: Exception | None = None
        try:
            for change in changes:
                change()
        except Exception as caught:
            error = caught
            logger.exception("the values of the checkpoint could not be put in place")
        problem = self._agree(
            "putting the loaded values in place",
            _problem(error),
            lambda values: next(filter(None, values), None),
        )
        if problem is not None:
            raise error_from_json(problem["error"]) from error


def _look(opening: StepLoader) -> dict[str, bool]:
    """Returns which dataloaders were alike; where that fails, loading the step fails likewise."""
    try:
        return opening.loaders_alike()
    except Exception as error:  # noqa: BLE001  all ranks hear of it when they load the step
        logger.debug("dataloaders were not compared: %s", error)
        return {}


def _stopped(verdict: Mapping[str, Any] | None, error: Exception | None) -> InputError | None:
    """Returns what is damaged, None where nothing is; raises what does not fit."""
    if verdict is None:
        return None
    problem = error_from_json(verdict["error"])
    if verdict["misfit"]:
        raise problem from error
    return problem if isinstance(problem, InputError) else InputError(str(problem))


def _problem(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, CkptkitError):
        misfit = isinstance(error, _MISFITS) or not isinstance(error, InputError)
        return {"error": error.to_json(), "misfit": misfit}
    text = f"loading failed: {type(error).__name__}: {error}"
    return {"error": ResumeError(text[:2_000]).to_json(), "misfit": True}


def _verdict(values: Sequence[Mapping[str, Any]], opening: StepLoader) -> dict[str, Any] | None:
    """Decides for all ranks, on rank 0."""
    problem = _first_problem([value["problem"] for value in values])
    if problem is not None:
        return problem
    try:
        opening.stored.check_digests()
        _prove(opening.stored, [value["partial"] for value in values])
    except Exception as error:  # noqa: BLE001  the other ranks have to hear of it
        return _problem(error)
    for note in opening.stored.findings.notes:
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


def _first_problem(of_ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the problem to report: a state that does not fit comes before a damaged file."""
    problems = [(rank, problem) for rank, problem in enumerate(of_ranks) if problem is not None]
    problems.sort(key=lambda entry: not entry[1]["misfit"])
    for rank, problem in problems:
        logger.debug("rank %d: %s", rank, problem["error"]["message"])
        return dict(problem)
    return None


def _prove(stored: StoredStep, packed: Sequence[Mapping[str, Any]]) -> None:
    """Checks records that no rank has read as a whole."""
    unproven = max(rank["left_out"] for rank in packed)
    for unit in sorted({unit for rank in packed for unit in rank["tables"]}):
        index = stored.index(unit)

        def name(number: int, index: TensorIndex = index) -> str:
            return posixpath.join(stored.source.location, index.path_of(number))

        texts = [rank["tables"][unit] for rank in packed if unit in rank["tables"]]
        unproven += cross_check([unpack(text) for text in texts], name)
    if unproven:
        logger.info("%d records were read in part by all ranks, and not checked", unproven)
