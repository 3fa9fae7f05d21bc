"""A job's use of a run: its lock, names of attempts, and the sidecar folders of its steps."""

from __future__ import annotations

import logging
import math
import operator
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsIndex, cast

import torch
from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import a_kind
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of
from ckptkit.training.agree.peers import Peers
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.pushing import FollowedPushes, Pushing
from ckptkit.training.run_folders import RunFolder, RunLock, TrainingRun
from ckptkit.training.save.attempts import SaveAttempt
from ckptkit.training.save.writer_process import WriterTimeouts
from ckptkit.training.settings import Settings, check_shared
from ckptkit.training.sidecar import collect_sidecar, run_facts
from ckptkit.training.state.collect import BoundState
from ckptkit.training.tiers.url_run import UrlRun, check_place
from ckptkit.version import __version__
from ckptkit.writer.messages import Inline
from ckptkit.writer.process import as_failure
from ckptkit.writer.sweep import sweep

logger = logging.getLogger(__name__)


class SidecarFolders:
    """Folders of sidecar files, which never change; the newest one is for the next save.

    Commits under way copy from earlier ones, as many as saves may be in flight.

    Attributes:
        folder: The newest one.
    """

    def __init__(self, parents: Sequence[Path], in_flight: int) -> None:
        """Creates nothing yet.

        Args:
            parents: The folders are created in the first of these that is writable.
            in_flight: How many saves may be under way, including the next one.
        """
        self._parents = parents
        self.folder = Path()
        self._kept: deque[Path] = deque()
        self._most = in_flight
        self._count = 0
        self._objects: tuple[object, ...] = ()
        self._places: object = ()
        self._files: Sequence[Inline] = ()

    def put(
        self,
        objects: Sequence[object],
        places: object,
        collect: Callable[[], Sequence[Inline]],
    ) -> Path:
        """Returns the folder for the next save, and removes those that no commit needs.

        It is a new one if the files differ from those of the newest one, or if that is gone.

        Args:
            objects: The models and optimizers that the files describe.
            places: The places of other values, which they describe as well.
            collect: Returns the sidecar; called if any of these is another one.
        """
        exists = bool(self._kept) and self.folder.is_dir()
        is_same = list(map(id, objects)) == list(map(id, self._objects))
        if exists and is_same and places == self._places:
            return self.folder
        files = collect()
        if not exists or tuple(files) != tuple(self._files):
            self._count += 1
            self.folder = self._create(str(self._count), files)
            self._kept.append(self.folder)
            self._files = files
        self._objects, self._places = tuple(objects), places
        while len(self._kept) > self._most:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)
        return self.folder

    def close(self) -> None:
        """Removes all of them."""
        for parent in self._parents:
            shutil.rmtree(parent, ignore_errors=True)
        self._kept.clear()

    def _create(self, name: str, files: Sequence[Inline]) -> Path:
        problems: list[CkptkitError] = []
        for parent in self._parents:
            new = parent / name
            try:
                for file in files:
                    path = new / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(file.data)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                problems.append(as_failure(error, str(new)))
            else:
                return new
        raise problems[-1]


_LOCK = "the lock of the run"
_STEPS = 10**18  # numbers with more digits are not found among the names of directories
_REMEMBERED = 64  # decisions that stay in the store


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
        """Takes over the lock of the run.

        Args:
            run: The run.
            peers: The ranks.
            settings: The options.
            lock: None on ranks other than 0, and on file systems without locks.
            saved_before: The number of the last save of earlier jobs.
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
        self._descriptions = SidecarFolders(folders, settings.max_in_flight)
        self._saved_before = saved_before
        self._count = 0
        self._tries: Counter[int] = Counter()
        self._pushing: Pushing | FollowedPushes | None = None
        if settings.hub is not None and peers.rank == 0:
            self._pushing = Pushing(run, settings.hub, settings.retention, peers.store)
        elif settings.hub is not None:
            self._pushing = FollowedPushes(run, settings.hub, peers.store)
        self._asked: deque[str] = deque()

    def count_from(self, save_number: int) -> None:
        """Numbers later saves after one of an earlier job."""
        self._saved_before = max(self._saved_before, save_number)

    def attempt(self, step: object, name: str | None = None) -> SaveAttempt:
        """Names an attempt to save a step, the same on all ranks, even if one has missed a step.

        `describe` completes it.

        Args:
            step: The training step.
            name: Of its directory, if that is not named by the step.
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
        return SaveAttempt(
            number=self._count,
            name=attempt,
            step=count,
            folder=self.run.working_folder(final, self._peers.nonce, number),
            final=final,
            manifest=manifest.to_document(),
            retires=name is None,
        )

    def handle(self, attempt: SaveAttempt) -> SaveHandle:
        """Returns a new handle for an attempt and its push."""
        handle = SaveHandle(attempt.step)
        if isinstance(self._pushing, Pushing):
            self._pushing.follow(handle, attempt.step_name)
        return handle

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

    def goes(self, attempt: str, *, here: bool) -> bool:
        """Returns whether a save takes place on all ranks: the first rank that asks decides.

        Args:
            attempt: Its name.
            here: Whether this rank can start at once.
        """
        choice = b"go" if here else b"skip"
        store = self._peers.store
        self._asked.append(attempt)
        if len(self._asked) > _REMEMBERED:  # every rank has asked long ago
            store.delete(f"goes/{self._asked.popleft()}")
        return store.compare_set(f"goes/{attempt}", b"", choice) == b"go"

    def describe(
        self, attempt: SaveAttempt, bound: BoundState, metrics: Mapping[str, float] | None
    ) -> SaveAttempt:
        """Returns an attempt with its metrics and its sidecar folder."""
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
        source = {**attempt.manifest["source"], "metrics": finite}
        manifest = {**attempt.manifest, "source": source}
        return replace(attempt, manifest=manifest, beside=self.put_beside(bound))

    def put_beside(self, bound: BoundState) -> str:
        """Writes the sidecar of later steps; only rank 0 does something.

        Returns:
            The folder: a new one if something changed, since others may be in use.
        """
        if self._peers.rank != 0:
            return ""
        modules = [model.module for model in bound.models]
        objects = [*modules, *(entry.optimizer for entry in bound.optimizers)]
        places = [(other.key, other.position, other.kind, other.file) for other in bound.others]

        def collect() -> Sequence[Inline]:
            files = collect_sidecar(modules, self._settings.sidecar)
            return *files, run_facts(bound.facts(), modules)

        return str(self._descriptions.put(objects, places, collect))

    def origin(self, step: int | None) -> Mapping[str, Any]:
        """Returns the origin of an export of the live state.

        Args:
            step: The last saved one, None for none.
        """
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
            self._descriptions.close()
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
        opened = _open_on_all(make, peers, settings)
        undo.pop_all()
    return Session(opened, peers, settings, held[0] if held else None, saved_before)


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


def _open_on_all(
    make: Callable[[], TrainingRun[Any]], peers: Peers, settings: Settings
) -> TrainingRun[Any]:
    """Opens the run that rank 0 has created; an error of one rank is raised on all."""
    opened: list[TrainingRun[Any]] = []
    problem: CkptkitError | None = None
    try:
        opened.append(make())
        opened[0].look()
    except CkptkitError as error:
        problem = error
    timeout = settings.timeout_seconds
    peers.raise_first("the directory of the run", problem, timeout_seconds=timeout)
    return opened[0]


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
