"""Resuming: the newest step that is whole, loaded on all ranks or on none."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ckptkit.core.errors import (
    CkptkitError,
    InputError,
    ResumeError,
    UnsafePickleError,
    UnsupportedError,
    error_from_json,
)
from ckptkit.core.manifest import MANIFEST_NAME, parse_manifest
from ckptkit.training.dtensors import Copies
from ckptkit.training.loading import LoadReport, first_few, load_pieces, unexpected_keys
from ckptkit.training.materialising import allocate_state, materialise
from ckptkit.training.modules import ModelWalk
from ckptkit.training.peers import Peers
from ckptkit.training.pieces import Piece
from ckptkit.training.proofs import cross_check, pack, unpack
from ckptkit.training.restoring import (
    Apply,
    group_changes,
    object_changes,
    random_changes,
    tensor_pieces,
)
from ckptkit.training.run_folder import saved_steps
from ckptkit.training.slots import Slot
from ckptkit.training.state import BoundState, Layout, bind
from ckptkit.training.stored_step import StoredStep
from ckptkit.writer.merge import few_collections

logger = logging.getLogger(__name__)

# An older step would not help against these: the checkpoint is whole, and not for this state.
_MISFITS = (ResumeError, UnsupportedError, UnsafePickleError)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What one rank has read of a step."""

    reports: Mapping[str, LoadReport] = field(default_factory=dict)
    changes: Sequence[Apply] = ()


def resume(
    bound: BoundState,
    run: Path,
    peers: Peers,
    *,
    timeout_seconds: float,
    step: int | None = None,
) -> int | None:
    """Loads the newest complete step of a run in place, on all ranks.

    A step that turns out to be damaged is passed over with a warning, on all ranks.

    Args:
        bound: The state to fill.
        run: The run's directory.
        peers: The other ranks, which have to call this too.
        timeout_seconds: How long to wait for the slowest of them, for each thing to agree on.
        step: A step to take instead of the newest; then nothing is passed over.

    Returns:
        The step, or None where the run has none that is complete.

    Raises:
        ResumeError: If a step does not fit the state, or all that there are are damaged.
        PeerError: If another rank does not answer in time.
    """
    candidates = peers.agree(
        "the steps to resume from",
        None,
        lambda _: _candidates(run, step),
        timeout_seconds=timeout_seconds,
    )
    for number, folder in candidates["steps"]:
        attempt = _Attempt(bound, peers, timeout_seconds)
        problem = attempt.load(run / folder, number)
        if problem is None:
            return int(number)
        if step is not None:
            raise problem
        if peers.rank == 0:
            logger.warning("step %d is passed over: %s", number, problem)
    if candidates["steps"] or candidates["damaged"]:
        raise ResumeError(
            "every step that was found is damaged",
            where=str(run),
            hint="see the warnings above; the state may be overwritten in part, so build it anew"
            " before training from the start",
        )
    return None


def resume_from(
    bound: BoundState, folder: Path, peers: Peers, *, step: int, timeout_seconds: float
) -> None:
    """Loads one given directory in place, on all ranks; it may have been written by accelerate.

    Args:
        bound: The state to fill.
        folder: A step's directory, with or without a manifest.
        peers: The other ranks, which have to call this too.
        step: Its number, for messages and for seeding.
        timeout_seconds: As for `resume`.

    Raises:
        InputError: If it does not fit, or is damaged.
        PeerError: If another rank does not answer in time.
    """
    problem = _Attempt(bound, peers, timeout_seconds).load(folder, step)
    if problem is not None:
        raise problem


def _candidates(run: Path, step: int | None) -> dict[str, list[Any]]:
    """Lists complete steps, newest first, and those that have a manifest that is not true."""
    complete: list[tuple[int, str]] = []
    damaged: list[int] = []
    for saved in reversed(saved_steps(run)):
        if step not in {None, saved.step}:
            continue
        if saved.complete:
            complete.append((saved.step, saved.path.name))
        elif (saved.path / MANIFEST_NAME).exists():
            damaged.append(saved.step)
            logger.warning("step %d is passed over: %s", saved.step, saved.problem)
        else:
            logger.info("step %d was not finished: %s", saved.step, saved.problem)
    if step is not None and not complete:
        raise ResumeError(
            f"step {step} was asked for and is not complete",
            where=str(run),
            hint="`ckptkit ls` lists the steps of a run",
        )
    return {"steps": complete, "damaged": damaged}


class _Attempt:
    """One try to load one step."""

    def __init__(self, bound: BoundState, peers: Peers, timeout_seconds: float) -> None:
        self._bound = bound
        self._peers = peers
        self._timeout_seconds = timeout_seconds

    def load(self, folder: Path, step: int) -> InputError | None:
        """Returns what is damaged, the same on all ranks, or None where all is in place.

        Raises:
            ResumeError: If the step does not fit; also on ranks where it does.
            PeerError: If a rank does not answer in time.
        """  # noqa: DOC501
        start = time.perf_counter()
        with few_collections(), _Opening(folder, self._bound) as opening:
            loaded, error = _Loaded(), None
            try:
                loaded = opening.load(step)
            except Exception as caught:  # noqa: BLE001  the other ranks have to hear of it
                error = caught
            verdict = self._agree(opening, loaded, error)
            if verdict is not None:
                if verdict["misfit"]:
                    raise error_from_json(verdict["error"]) from error
                found = error_from_json(verdict["error"])
                return found if isinstance(found, InputError) else InputError(str(found))
            self._apply(loaded.changes)
        self._report(step, loaded, time.perf_counter() - start)
        return None

    def _agree(
        self, opening: _Opening, loaded: _Loaded, error: Exception | None
    ) -> dict[str, Any] | None:
        value = {
            "problem": None if error is None else _problem(error),
            "partial": {unit: pack(r.partial) for unit, r in loaded.reports.items()},
        }
        answer: dict[str, Any] | None = self._peers.agree(
            "what was loaded of a step",
            value,
            lambda values: _verdict(values, opening),
            timeout_seconds=self._timeout_seconds,
        )
        return answer

    def _apply(self, changes: Sequence[Apply]) -> None:
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

    def _report(self, step: int, loaded: _Loaded, seconds: float) -> None:
        reports = loaded.reports.values()
        unverified = [key for report in reports for key in report.unverified]
        read = sum(report.bytes_read for report in reports)
        logger.info("resumed from step %d: %.0f MiB in %.2f s", step, read / _MIB, seconds)
        if unverified:
            logger.info("no checksums were stored for %s", first_few(unverified))


def _problem(error: Exception) -> dict[str, Any]:
    if isinstance(error, CkptkitError):
        misfit = isinstance(error, _MISFITS) or not isinstance(error, InputError)
        return {"error": error.to_json(), "misfit": misfit}
    text = f"loading failed: {type(error).__name__}: {error}"
    return {"error": ResumeError(text[:2_000]).to_json(), "misfit": True}


def _verdict(values: Sequence[Mapping[str, Any]], opening: _Opening) -> dict[str, Any] | None:
    """Decides for all ranks, on rank 0: what does not fit comes before what is damaged."""
    problems = [(rank, v["problem"]) for rank, v in enumerate(values) if v["problem"] is not None]
    problems.sort(key=lambda entry: not entry[1]["misfit"])
    for rank, problem in problems:
        logger.debug("rank %d: %s", rank, problem["error"]["message"])
        return dict(problem)
    try:
        opening.stored.check_digests()
        for unit in values[0]["partial"]:
            index = opening.stored.index(unit)
            location = opening.stored.source.location
            texts = [value["partial"].get(unit) for value in values]
            parts = [part for text in texts if text for part in unpack(text, index, location)]
            unproven = cross_check(parts)
            if unproven:
                logger.info("%d blobs of %r were read in part, and not checked", unproven, unit)
    except InputError as error:
        return _problem(error)
    return None


class _Opening:
    """A step's directory and the state that is filled from it, on one rank."""

    def __init__(self, folder: Path, bound: BoundState) -> None:
        self._folder = folder
        self._stored: StoredStep | None = None
        self.bound = bound

    @property
    def stored(self) -> StoredStep:
        """The directory, opened when it is first asked for."""
        if self._stored is None:
            path = self._folder / MANIFEST_NAME
            manifest = parse_manifest(path.read_bytes(), where=str(path)) if path.exists() else None
            self._stored = StoredStep(self._folder, manifest)
        return self._stored

    def load(self, step: int) -> _Loaded:
        """Fills the tensors, and reads everything else."""
        manifest = self.stored.manifest
        layout = manifest.source.get("layout") if manifest else None
        if layout not in {None, self.bound.layout}:
            self.bound = _bound_again(self.bound, layout)
        bound = self.bound
        materialise([m.module for m in bound.models], [o.optimizer for o in bound.optimizers])
        slots = self._slots()
        for optimizer in bound.optimizers:
            index = self.stored.index(optimizer.unit)
            allocate_state(optimizer.optimizer, slots, index, optimizer.path)
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in tensor_pieces(bound):
            pieces[piece.unit].append(piece)
        self._check_models(pieces)
        reports = {
            unit: load_pieces(self.stored.index(unit), self.stored.source, of_unit)
            for unit, of_unit in pieces.items()
        }
        return _Loaded(reports, tuple(self._changes(slots, step)))

    def _changes(self, slots: Mapping[int, tuple[Slot, ...]], step: int) -> Iterator[Apply]:
        for optimizer in self.bound.optimizers:
            yield from group_changes(self.stored, optimizer, slots)
        yield from object_changes(self.stored, self.bound)
        yield from random_changes(self.stored, self.bound, step)

    def _slots(self) -> dict[int, tuple[Slot, ...]]:
        world = Copies(self.bound.world_size, self.bound.rank)
        found: dict[int, tuple[Slot, ...]] = {}
        for model in self.bound.models:
            found |= ModelWalk(model.module, model.unit, model.path, world=world).look().slots
        return found

    def _check_models(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Refuses tensors that no model asks for, as torch's strict load_state_dict does."""
        for model in self.bound.models:
            start, index = model.path, self.stored.index(model.unit)
            extra = [
                key
                for key in unexpected_keys(index, pieces[model.unit])
                if index.tensors[key].key_path[: len(start)] == start
            ]
            if extra:
                raise ResumeError(
                    f"{len(extra):,} tensors of the checkpoint are not in the model:"
                    f" {first_few(extra)}",
                    where=model.key,
                    hint="build the model that was saved",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stored is not None:
            self._stored.close()


def _bound_again(bound: BoundState, layout: Layout) -> BoundState:
    """Returns the same state with the places that it has in another layout."""
    state: dict[str, Any] = {}
    entries: list[tuple[str, int | None, Any]] = [
        *((model.key, model.position, model.module) for model in bound.models),
        *((entry.key, entry.position, entry.optimizer) for entry in bound.optimizers),
        *((other.key, other.position, other.target) for other in bound.others),
    ]
    for key, position, value in entries:
        if position is None:
            state[key] = value
        else:
            state.setdefault(key, []).append(value)
    return bind(state, layout=layout, rank=bound.rank, world_size=bound.world_size)
