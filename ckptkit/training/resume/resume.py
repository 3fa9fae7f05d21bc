"""Resuming: the newest step that is whole, loaded on all ranks or on none."""

from __future__ import annotations

import logging
import posixpath
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.core.errors import (
    CkptkitError,
    InputError,
    MissingFileError,
    ResumeError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    error_from_json,
)
from ckptkit.core.index import TensorIndex
from ckptkit.core.text import size_text
from ckptkit.formats.discovery import parse_step
from ckptkit.runs.marks import STEP_PREFIXES
from ckptkit.runs.steps import RunStep
from ckptkit.storage.places import Place
from ckptkit.training.agree.peers import Peers, check_same_place, place_facts
from ckptkit.training.resume.fill import FillPlan, LoadedStep, StepLoader
from ckptkit.training.resume.load_pieces import list_first
from ckptkit.training.resume.proofs import cross_check, pack, unpack
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.run_folders import saved_steps
from ckptkit.training.state.collect import BoundState
from ckptkit.training.tiers.recover import NearPlace
from ckptkit.training.tiers.url_run import steps_of_place
from ckptkit.writer.merge import few_collections

logger = logging.getLogger(__name__)

# An older step would not help against these: the checkpoint is whole, and not for this state.
_MISFITS = (ResumeError, UnsupportedError, UnsafePickleError)
_FIRST_ROUND = "the steps to resume from"
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

    A step that turns out to be damaged is skipped with a warning, on all ranks.

    Args:
        bound: The state to fill.
        run: The run's directory, or its URL.
        peers: The other ranks, which have to call this too.
        timeout_seconds: How long to wait for the slowest of them, for each thing to agree on.
        step: A step to load instead of the newest; then no step is skipped.
        prefix: What comes before the number in the names of the run's steps.

    Returns:
        The step, or None where the run has none that is complete.
    """
    _check_count(step, peers, timeout_seconds)
    steps = peers.agree(
        _FIRST_ROUND,
        {"step": step},
        lambda requests: _steps_to_try(requests, _steps(run, prefix), run),
        timeout_seconds=timeout_seconds,
    )
    for entry in steps:
        attempt = _Attempt(bound, peers, timeout_seconds)
        problem = entry["problem"] or attempt.load_from(run, entry["folder"], entry["step"])
        if problem is None:
            return int(entry["step"])
        if step is not None:
            raise problem
        if peers.rank == 0:
            _log_unusable(entry, problem)
    if any(entry["finished"] for entry in steps):
        raise ResumeError("every step that was found is damaged", where=str(run), hint=_ALL_DAMAGED)
    if peers.rank == 0:
        logger.info("%s: no step to resume from was found", run)
    return None


def _check_count(step: int | None, peers: Peers, timeout_seconds: float) -> None:
    if step is not None and (type(step) is not int or step < 0):
        error = UsageError(f"is {step!r}, where a count of steps was expected", where="step")
        decline(peers, error, timeout_seconds=timeout_seconds)
        raise error


def decline(peers: Peers, error: Exception, *, timeout_seconds: float) -> None:
    """Lets the other ranks, which call `resume`, know at once that this one cannot.

    Args:
        peers: The other ranks.
        error: Why not; it is raised on all of them.
        timeout_seconds: As for `resume`.
    """
    peers.refuse(_FIRST_ROUND, error, timeout_seconds=timeout_seconds)


def _log_unusable(entry: Mapping[str, Any], problem: object) -> None:
    if entry["finished"]:
        logger.warning("step %d is skipped: %s", entry["step"], problem)
    else:
        logger.info("step %d was not finished: %s", entry["step"], problem)


def resume_from(
    bound: BoundState, folder: Path | Place, peers: Peers, *, timeout_seconds: float
) -> int:
    """Loads one given directory in place, on all ranks; it may have been written by other tools.

    Args:
        bound: The state to fill.
        folder: A step's directory, or its URL, with or without a manifest.
        peers: The other ranks, which have to call this too.
        timeout_seconds: As for `resume`.

    Returns:
        The number of the step, 0 where it is not known.
    """
    step: int = peers.agree(
        _FIRST_ROUND,
        {"folder": place_facts(folder)},
        lambda requests: _step_of_all(requests, folder),
        timeout_seconds=timeout_seconds,
    )
    problem = _Attempt(bound, peers, timeout_seconds).load(folder, step)
    if problem is not None:
        raise problem
    return step


def _steps_to_try(
    requests: Sequence[Mapping[str, Any]], saved: Sequence[RunStep], run: Path | Place
) -> list[dict[str, Any]]:
    """Lists the steps to try, if all ranks request the same."""
    _check_alike(requests, "folder")
    for rank, request in enumerate(requests):
        if request["step"] != requests[0]["step"]:
            raise UsageError(
                f"is {request['step']} on rank {rank} and {requests[0]['step']} on rank 0, where"
                " the same was expected on all ranks",
                where="step",
                hint="resume from the same step on every rank",
            )
    return _list_steps(saved, requests[0]["step"], run)


def _step_of_all(requests: Sequence[Mapping[str, Any]], folder: Path | Place) -> int:
    """Returns the number of the step in a directory, where all ranks name the same one."""
    _check_alike(requests, "step")
    check_same_place([request["folder"] for request in requests], "folder")
    return _step_in(folder)


def _check_alike(requests: Sequence[Mapping[str, Any]], other: str) -> None:
    odd = next((rank for rank, request in enumerate(requests) if other in request), None)
    if odd is not None:
        raise UsageError(
            f"was given on some ranks only: rank {0 if other == 'step' else odd} resumes from a"
            f" folder, and rank {odd if other == 'step' else 0} from the run",
            where="folder",
            hint="resume from the same directory on every rank",
        )


def _step_in(folder: Path | Place) -> int:
    try:
        with StoredStep.open(folder) as stored:
            manifest = stored.manifest
    except MissingFileError as error:
        raise ResumeError(
            "no directory was found there",
            where=str(folder),
            hint="name the directory of a step, as other ranks see it too",
        ) from error
    step = manifest.source.get("step") if manifest is not None else None
    return step if isinstance(step, int) else parse_step(posixpath.basename(folder)) or 0


def _steps(run: Path | Place, prefix: str) -> tuple[RunStep, ...]:
    return saved_steps(run, prefix) if isinstance(run, Path) else steps_of_place(run, prefix)


def _below(run: Path | Place, name: str) -> Path | Place:
    if isinstance(run, NearPlace):
        return run.step(name)
    return run / name if isinstance(run, Path) else run.beside(posixpath.join(run, name))


def _list_steps(
    saved: Sequence[RunStep], step: int | None, run: Path | Place
) -> list[dict[str, Any]]:
    """Lists the steps, newest first, each with the problem that its listing shows."""
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


class _Attempt:
    """One try to load one step."""

    def __init__(self, bound: BoundState, peers: Peers, timeout_seconds: float) -> None:
        self._bound = bound
        self._peers = peers
        self._timeout_seconds = timeout_seconds

    def load_from(self, run: Path | Place, name: str, step: int) -> InputError | None:
        """Does what `load` does with a step of a run, if need be without the nodes' own copies."""
        problem = self.load(_below(run, name), step)
        if problem is not None and isinstance(run, NearPlace):  # one of these may be damaged
            return self.load(_below(Place(run, run.options), name), step)
        return problem

    def load(self, folder: Path | Place, step: int) -> InputError | None:
        """Returns what is damaged, the same on all ranks, or None where all is in place."""
        start = time.perf_counter()
        with few_collections(), StepLoader(folder, self._bound) as opening:
            alike = self._ask_rank_0(opening.loaders_alike)
            anew = self._starting_anew(opening)
            loaded, prepared = LoadedStep(), FillPlan()
            try:
                prepared = opening.prepare(step, alike, anew)
            except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
                return self._stopped(self._agree_to_fill(caught), caught)
            problem = self._stopped(self._agree_to_fill(None), None)
            if problem is not None:
                return problem
            error: Exception | None = None
            try:
                loaded = opening.fill(prepared)
            except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
                error = caught
            problem = self._stopped(self._agree(opening, loaded, error), error)
            if problem is not None:
                return problem
            self._apply(loaded.changes)
        self._report(step, loaded, time.perf_counter() - start)
        return None

    def _agree_to_fill(self, error: Exception | None) -> dict[str, Any] | None:
        """Agrees that everything fits on all ranks, before any of them overwrites a tensor."""
        answer: dict[str, Any] | None = self._peers.agree(
            "what fits of a step",
            None if error is None else _problem(error),
            _first_problem,
            timeout_seconds=self._timeout_seconds,
        )
        return answer

    @staticmethod
    def _stopped(verdict: Mapping[str, Any] | None, error: Exception | None) -> InputError | None:
        """Returns what is damaged, None where nothing is; raises what does not fit."""
        if verdict is None:
            return None
        problem = error_from_json(verdict["error"])
        if verdict["misfit"]:
            raise problem from error
        return problem if isinstance(problem, InputError) else InputError(str(problem))

    def _ask_rank_0(self, look: Callable[[], dict[str, bool]]) -> dict[str, bool]:
        """Returns what rank 0 finds; where it fails it does so again when it loads the step."""

        def decide(_: Sequence[Any]) -> dict[str, bool]:
            try:
                return look()
            except Exception as error:  # noqa: BLE001  all ranks hear of it from the next round
                logger.debug("dataloaders were not compared: %s", error)
                return {}

        answer: dict[str, bool] = self._peers.agree(
            "where dataloaders go on", None, decide, timeout_seconds=self._timeout_seconds
        )
        return answer

    def _starting_anew(self, opening: StepLoader) -> frozenset[str]:
        """Agrees on which optimizers start without their state, where the user allows that."""
        if self._bound.unfit_optimizer != "reset":
            return frozenset()
        unfit: dict[str, str] = {}
        try:
            unfit = opening.unfit_optimizers()
        except Exception as error:  # noqa: BLE001  loading fails likewise, on all ranks
            logger.debug("optimizers were not compared: %s", error)
        reasons: dict[str, str] = self._peers.agree(
            "which optimizers start anew",
            unfit,
            lambda values: dict(ChainMap(*values)),
            timeout_seconds=self._timeout_seconds,
        )
        for name, reason in sorted(reasons.items() if self._peers.rank == 0 else ()):
            logger.warning("%s starts anew, without the state in the step: %s", name, reason)
        return frozenset(reasons)

    def _agree(
        self, opening: StepLoader, loaded: LoadedStep, error: Exception | None
    ) -> dict[str, Any] | None:
        partial = {unit: report.partial for unit, report in loaded.reports.items()}
        value = {
            "problem": None if error is None else _problem(error),
            "partial": pack(partial, world_size=self._peers.world_size),
            "untied": loaded.untied,
        }
        answer: dict[str, Any] | None = self._peers.agree(
            "what was loaded of a step",
            value,
            lambda values: _verdict(values, opening),
            timeout_seconds=self._timeout_seconds,
        )
        return answer

    def _apply(self, changes: Sequence[Callable[[], object]]) -> None:
        error: Exception | None = None
        try:
            for change in changes:
                change()
        except Exception as caught:
            error = caught
            logger.exception("the values of the checkpoint could not be put in place")
        problem = self._peers.agree(
            "putting the loaded values in place",
            None if error is None else _problem(error),
            lambda values: next(filter(None, values), None),
            timeout_seconds=self._timeout_seconds,
        )
        if problem is not None:
            raise error_from_json(problem["error"]) from error

    def _report(self, step: int, loaded: LoadedStep, seconds: float) -> None:
        if self._peers.rank != 0:
            return
        reports = loaded.reports.values()
        unverified = [key for report in reports for key in report.unverified]
        read = size_text(sum(report.bytes_read for report in reports))
        logger.info("resumed from step %d: %s in %.2f s on rank 0", step, read, seconds)
        if unverified:
            logger.info("no checksums were stored for %s", list_first(unverified))


def _problem(error: Exception) -> dict[str, Any]:
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
    _warn_of_ties([value["untied"] for value in values])
    return None


def _warn_of_ties(of_ranks: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    for name in sorted({name for of_rank in of_ranks for name in of_rank}):
        reports = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        logger.warning(
            "%s was saved apart from %s, and the model holds them as one tensor: the values of %s"
            " are dropped, which differ by up to %.3g",
            name,
            reports[0][0],
            name,
            max(difference for _, difference in reports),
        )


def _first_problem(of_ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the problem to report: a state that does not fit comes before a damaged file."""
    problems = [(rank, problem) for rank, problem in enumerate(of_ranks) if problem is not None]
    problems.sort(key=lambda entry: not entry[1]["misfit"])
    for rank, problem in problems:
        logger.debug("rank %d: %s", rank, problem["error"]["message"])
        return dict(problem)
    return None


def _prove(stored: StoredStep, packed: Sequence[Mapping[str, Any]]) -> None:
    """Checks records of which no rank has read all."""
    unproven = max(rank["left_out"] for rank in packed)
    for unit in sorted({unit for rank in packed for unit in rank["tables"]}):
        index = stored.index(unit)

        def name(number: int, index: TensorIndex = index) -> str:
            file = index.files[int(index.records.file[number])].path
            return posixpath.join(stored.source.location, file)

        texts = [rank["tables"][unit] for rank in packed if unit in rank["tables"]]
        unproven += cross_check([unpack(text) for text in texts], name)
    if unproven:
        logger.info("%d records were read in part by all ranks, and not checked", unproven)
