"""Runs from the view of training: names of steps, listings, locks, and the directory of a run."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.runs.marks import (
    STEP_PREFIXES,
    FileLocks,
    Owner,
    is_step_folder,
    run_identity,
    step_folders,
    take_request,
    take_run_lock,
)
from ckptkit.runs.retention import Retention, missing_metric, steps_to_remove
from ckptkit.runs.steps import (
    KnownSteps,
    LocalStepFiles,
    RunStep,
    list_saved_steps,
    save_number_of,
    step_of_source,
)
from ckptkit.storage.local.ownership import is_planted
from ckptkit.storage.locations import MARKS_FOLDER, hidden_name, local_path
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.storage.places import Place
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts, writer_command

__all__ = ["RunFolder", "TrainingRun", "saved_steps"]
logger = logging.getLogger(__name__)

PlaceT = TypeVar("PlaceT", Path, Place)


class TrainingRun(Generic[PlaceT]):
    place: PlaceT  # of its steps
    path: Path  # a directory of this machine for marks, and for what is being written
    prefix: str  # of the names of its steps, before the number
    takes_saves = True
    """Whether the ranks can write to it themselves."""
    _has_warned = False

    def step_folder(self, step: int) -> PlaceT:
        return self.below(f"{self.prefix}{step}")

    def named_folder(self, name: str) -> PlaceT:
        """Returns the folder of a step with a name of its own."""
        if not name or name.startswith(".") or "\0" in name or Path(name).name != name:
            raise UsageError(
                f"expected the name of a directory in the run, got {name!r}", where="name"
            )
        if is_step_folder(name.lower()):  # some file systems ignore case
            raise UsageError(
                f"is {name!r}, which is the name of a step",
                where="name",
                hint="leave it out, and give the number as `step`",
            )
        return self.below(name)

    def working_folder(self, final: PlaceT, nonce: str, attempt: int) -> Path:
        """Returns the working folder of an attempt, which no tool reads as a checkpoint."""
        return self.path / hidden_name(Path(final).name, f"{nonce}-{attempt}")

    def steps(self) -> tuple[RunStep, ...]:
        raise NotImplementedError

    def last_save_number(self) -> int:
        return max((step.save_number for step in self.steps()), default=0)

    def save_number_of(self, name: str) -> int:
        """Returns the `save_number` of the step in the folder of that name, 0 for none."""
        manifest = self._manifest(name)
        return 0 if manifest is None else save_number_of(manifest.source)

    def retired_by(
        self, step: int, source: Mapping[str, Any], retention: Retention
    ) -> tuple[PlaceT, ...]:
        """Returns the steps to remove once a new one, by its manifest's `source`, is durable.

        Nothing is read if all stay. A warning is logged once if no step has the metric of
        `keep_best`.
        """
        if retention.keeps_all:
            return ()
        earlier: list[RunStep] = [saved for saved in self.steps() if saved.step != step]
        number = 1 + max((saved.save_number for saved in earlier), default=0)
        every = [*earlier, replace(step_of_source(step, "", source), save_number=number)]
        problem = missing_metric(every, retention)
        if problem and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", problem)
        return tuple(self.step_folder(old) for old in steps_to_remove(every, retention))

    def identity(self) -> str:
        raise NotImplementedError

    def process(
        self, timeouts: WriterTimeouts, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        raise NotImplementedError

    def check(self) -> None:
        """Checks that this rank can use the run."""

    def sweep(self) -> None:
        """Removes leftovers of earlier jobs once the run is open; for rank 0."""

    def take_request(self) -> Owner | None:
        """Removes a request of `ckptkit save-now`, and returns its owner; None for none."""
        return take_request(self.path)

    def below(self, name: str) -> PlaceT:
        raise NotImplementedError

    def _manifest(self, name: str) -> Manifest | None:
        raise NotImplementedError


_URL = re.compile(r"(?:^|/)[A-Za-z][A-Za-z0-9+.-]+:/")  # in a path made absolute as well


class RunFolder(TrainingRun[Path]):
    """A run's directory on a local or shared file system."""

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = STEP_PREFIXES[0]) -> None:
        named = os.fspath(path)
        if _URL.search(named):
            raise UsageError(
                "expected a directory, got a URL",
                where=named,
                hint="pass a directory; to save to a URL, pass it to the Checkpointer as a string",
            )
        self.path = self.place = local_path(named).absolute()
        self.prefix = prefix
        self._known: KnownSteps = {}
        with _translate_errors(self.path):
            (self.path / MARKS_FOLDER).mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                frozen = hasattr(os, "statvfs") and os.statvfs(self.path).f_flag & os.ST_RDONLY
                number = errno.EROFS if frozen else errno.EACCES
                raise OSError(number, os.strerror(number))

    def steps(self) -> tuple[RunStep, ...]:
        return saved_steps(self.path, self.prefix, self._known)

    def identity(self) -> str:
        with _translate_errors(self.path):
            return run_identity(self.path)

    def lock(self) -> FileLocks | None:
        """Locks the run against other jobs until the lock is closed or this process ends.

        On a file system without locks it logs a warning and returns None.
        """
        with _translate_errors(self.path):
            lock = take_run_lock(self.path)
        if is_planted(self.path):
            logger.warning(
                "%s belongs to another user, who can replace its steps; give the run a directory"
                " that this user has made",
                self.path,
            )
        if lock is None:
            logger.warning(
                "%s: the file system has no locks; make sure that no second job writes there",
                self.path,
            )
        return lock

    def process(
        self, timeouts: WriterTimeouts, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        if niceness is not None:
            timeouts = replace(timeouts, command=partial(writer_command, niceness=niceness))
        return WriterProcess(timeouts, name=name)

    def below(self, name: str) -> Path:
        return self.path / name

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return read_local_manifest(self.path / name)
        except (CkptkitError, OSError):
            return None


def saved_steps(
    run: Path, prefix: str = STEP_PREFIXES[0], known: KnownSteps | None = None
) -> tuple[RunStep, ...]:
    """Lists the steps of a run's directory, the newest last; see `list_saved_steps`."""
    with _translate_errors(run):
        folders = step_folders(run, (prefix,))
    numbers = {path.name: step for step, path in folders.items()}
    return list_saved_steps(numbers, LocalStepFiles(run), known)


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputError(
            "expected the directory of a run, found a file",
            where=str(path),
            hint="pass another directory, or move the file away",
        ) from error
    except OSError as error:
        raise OutputError(
            f"the directory of the run cannot be used: {error.strerror or error}",
            where=str(path),
            hint="check that it exists, who owns it, and that it is mounted writable",
        ) from error
