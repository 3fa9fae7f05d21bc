"""A job's use of a run: its lock, names of attempts, and the sidecar folders of its steps."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsIndex, cast

import torch

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import a_kind
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of
from ckptkit.training.agree.barrier import SharedAnswers
from ckptkit.training.agree.peers import Peers
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.pushing import FollowedPushes, Pushing
from ckptkit.training.run_folders import RunFolder, RunLock, TrainingRun
from ckptkit.training.save.saver import Save
from ckptkit.training.save.writer_process import WriterTimeouts
from ckptkit.training.settings import Settings, check_shared
from ckptkit.training.sidecar import SidecarFolders, collect_sidecar, run_facts
from ckptkit.training.state.collect import BoundState
from ckptkit.training.tiers.url_run import UrlRun, check_place
from ckptkit.version import __version__
from ckptkit.writer.sweep import sweep

logger = logging.getLogger(__name__)


_LOCK = "the lock of the run"
_STEPS = 10**18  # numbers with more digits are not found among the names of directories


class Session:
    """What the saves of one job share.

    Attributes:
        run: The run.
        committer: The process that commits on rank 0; on all ranks it drains what earlier jobs left
            on the nodes' disks.
    """

    def __init__(
        self,
        run: TrainingRun[Any],
        peers: Peers,
        settings: Settings,
        lock: RunLock | None,
        saved_before: int,
    ) -> None:
        """Takes over the lock of the run: None on other ranks, and on file systems without locks.

        `saved_before` is the number of the last save of earlier jobs.
        """
        self.run = run
        timeouts = WriterTimeouts(settings.stall_seconds, settings.timeout_seconds)
        self.committer = run.process(timeouts, f"committer of rank {peers.rank}")
        self._peers = peers
        self._settings = settings
        self._lock = lock
        # A slow shared storage must not block the training thread.
        places = [settings.local.absolute()] if settings.local is not None else []
        folders = [place / MARKS_FOLDER / peers.nonce for place in (*places, run.path)]
        self._sidecars = SidecarFolders(folders, settings.max_in_flight)
        self._saved_before = saved_before
        self._count = 0
        self._tries: Counter[int] = Counter()
        self._pushing: Pushing | FollowedPushes | None = None
        if settings.hub is not None and peers.rank == 0:
            self._pushing = Pushing(run, settings.hub, settings.retention, peers.store)
        elif settings.hub is not None:
            self._pushing = FollowedPushes(run, settings.hub, peers.store)
        self._answers = SharedAnswers(peers.store)

    def count_from(self, save_number: int) -> None:
        """Numbers later saves after one of an earlier job."""
        self._saved_before = max(self._saved_before, save_number)

    def begin_save(self, step: object, name: str | None, began: float) -> Save:
        """Names a save, the same on all ranks, even if one has missed a step.

        `describe` completes it. `name` is that of its directory, if that is not named by the step.
        """
        self._count += 1
        count = _check_step(step)
        self._tries[count] += 1
        number = self._tries[count]
        attempt = f"{self._peers.nonce}-{count}-{number}"
        final = self.run.step_folder(count) if name is None else self.run.named_folder(name)
        manifest = Manifest(
            kind="training",
            source={
                "step": count,
                "world_size": self._peers.world_size,
                "layout": self._settings.layout,
                "attempt": attempt,
                "save_number": self._saved_before + self._count,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            options={},
            versions={"ckptkit": __version__, "torch": torch.__version__},
            tensors={},
        )
        save = Save(
            number=self._count,
            name=attempt,
            step=count,
            folder=self.run.working_folder(final, self._peers.nonce, number),
            final=final,
            manifest=manifest.to_document(),
            handle=SaveHandle(count),
            began=began,
            retires=name is None,
        )
        if isinstance(self._pushing, Pushing):
            self._pushing.follow(save.handle, save.step_name)
        return save

    @property
    def unpushed(self) -> frozenset[int]:
        """The steps that wait for their push; they are not retired before."""
        return self._pushing.outstanding if isinstance(self._pushing, Pushing) else frozenset()

    def listen(self, report: SaveReport) -> None:
        """Has a committed step pushed, and calls the user's listener."""
        if self._pushing is not None:
            self._pushing.listen(report)
        if self._settings.listener is not None:
            self._settings.listener(report)

    def takes_place(self, save: Save, *, here: bool) -> bool:
        """Returns whether no rank skips a save: the first rank that asks decides.

        `here` says whether this rank can start at once.
        """
        return self._answers.first(f"goes/{save.name}", "go" if here else "skip") == "go"

    def describe(self, save: Save, bound: BoundState, metrics: Mapping[str, float] | None) -> None:
        """Adds the metrics and the sidecar folder to a save."""
        if not isinstance(metrics, Mapping | None):
            raise UsageError(f"expected numbers by name, got {a_kind(metrics)}", where="metrics")
        try:
            numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
        except (TypeError, ValueError, OverflowError) as error:
            message = f"expected a number for each name: {error}"
            raise UsageError(message, where="metrics") from error
        infinite = [name for name, value in numbers.items() if not math.isfinite(value)]
        if infinite:
            logger.warning("not finite, and kept as null: metrics %s", ", ".join(sorted(infinite)))
        finite = {**numbers, **dict.fromkeys(infinite)}
        source = {**save.manifest["source"], "metrics": finite}
        save.manifest = {**save.manifest, "source": source}
        save.beside = self.write_sidecar(bound)

    def write_sidecar(self, bound: BoundState) -> str:
        """Writes the sidecar of later steps on rank 0, and returns its folder.

        It is a new one if something changed, since others may be in use.
        """
        if self._peers.rank != 0:
            return ""
        modules = [model.module for model in bound.models]
        objects = [*modules, *(entry.optimizer for entry in bound.optimizers)]
        places = [(other.key, other.position, other.kind, other.file) for other in bound.others]

        if not self._sidecars.describes(objects, places):
            files = collect_sidecar(modules, self._settings.sidecar)
            self._sidecars.write([*files, run_facts(bound.facts(), modules)], objects, places)
        return str(self._sidecars.folder)

    def origin(self, step: int | None) -> Mapping[str, Any]:
        """Returns the origin of an export of the live state, after that last saved step."""
        world_size = self._peers.world_size
        path = str(self.run.place)
        return {"path": path, "format": "live", "step": step, "world_size": world_size}

    def place_of(self, folder: PathLike) -> Path | Place:
        """Returns a folder that the user named, with the storage options if it is a URL."""
        if is_url(folder):
            return place_of(folder, self._settings.storage_options)
        return local_path(folder).absolute()

    def retired_by(self, step: int, metrics: Mapping[str, float | None]) -> Sequence[Path | Place]:
        """Returns the steps to remove once a new one is durable; none if they are unknown."""
        try:
            retired = self.run.retired_by(step, metrics, self._settings.retention)
            waiting = {str(self.run.step_folder(unpushed)) for unpushed in self.unpushed}
            return [place for place in retired if str(place) not in waiting]
        except CkptkitError as error:
            logger.warning("no step is retired by step %d: %s", step, error)
            return ()

    def close(self) -> None:
        """Ends the committer, unlocks the run for the next job, and leaves pushes to themselves."""
        self.committer.close()
        if self._peers.rank == 0:
            self._sidecars.close()
        if self._lock is not None:
            self._lock.close()
        if self._pushing is not None:
            self._pushing.close()


def open_session(run: PathLike, peers: Peers, settings: Settings) -> Session:
    """Opens a run on all ranks; rank 0 creates, locks and sweeps it."""
    held: list[RunLock] = []  # on rank 0, unless the file system has no locks
    undo = ExitStack()
    try:
        place = _check_place(run, settings)
    except UsageError as error:  # so that the other ranks fail at once
        peers.refuse(_LOCK, error, timeout_seconds=settings.timeout_seconds)
        raise

    def make() -> TrainingRun[Any]:
        if isinstance(place, Path):
            return RunFolder(place, prefix=settings.prefix)
        assert settings.local is not None  # noqa: S101  `_check_place` requires it
        return UrlRun(place, settings.local, peers.nonce, settings.prefix)

    def take(options: Sequence[Mapping[str, Any]]) -> int:
        check_shared(options)
        opened_run = make()
        if isinstance(opened_run, UrlRun):
            opened_run.open()
        elif isinstance(opened_run, RunFolder):
            lock = opened_run.lock()
            if lock is not None:  # without a lock another job may be saving there
                undo.callback(lock.close)
                held.append(lock)
                for note in sweep(opened_run.path):
                    logger.info("%s", note)
        return opened_run.last_save_number()

    with undo:
        saved_before = peers.agree(
            _LOCK, settings.shared(), take, timeout_seconds=settings.timeout_seconds
        )
        opened: list[TrainingRun[Any]] = []
        problem: CkptkitError | None = None
        try:
            opened.append(make())
            opened[0].check()
        except CkptkitError as error:
            problem = error
        peers.raise_first(
            "the directory of the run", problem, timeout_seconds=settings.timeout_seconds
        )
        undo.pop_all()
    return Session(opened[0], peers, settings, held[0] if held else None, saved_before)


def _check_place(run: PathLike, settings: Settings) -> Path | Place:
    """Returns the place of a run that the user named."""
    if not is_url(run):
        if settings.storage_options:
            raise UsageError(
                "cannot be combined with a run that is a directory",
                where="storage_options",
                hint="leave them out, or save to a URL",
            )
        return local_path(run)
    place = place_of(run, settings.storage_options)
    check_place(place)
    if settings.local is None:
        raise UsageError(
            "is required for a run at a URL: steps are durable there first and uploaded from there",
            where="local",
            hint='pass local="/nvme/run": a directory on the node\'s own disk, kept between jobs,'
            " with room for two steps of its ranks",
        )
    return place


def _check_step(step: object) -> int:
    try:
        count = -1 if isinstance(step, bool) else operator.index(cast("SupportsIndex", step))
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"expected a count of steps, got {step!r}", where="step")
    if count >= _STEPS:
        raise UsageError(
            f"expected a count of at most {len(str(_STEPS)) - 1} digits, got {count}",
            where="step",
            hint="count steps from 0, or give the directory a name of its own with `name`",
        )
    return count
