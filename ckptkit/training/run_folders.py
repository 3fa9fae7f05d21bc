"""What training has to know of a run, wherever it lies: the names in it, and what was saved.

The directory of a run: what was saved there, and who may write.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.runs.marks import (
    MARKS_FOLDER,
    STEP_PREFIXES,
    Owner,
    RunLock,
    is_step_folder,
    run_identity,
    step_folders,
    take_request,
    take_run_lock,
)
from ckptkit.runs.save_order import Retention, missing_metric, steps_to_remove
from ckptkit.runs.steps import (
    KnownSteps,
    LocalStepFiles,
    RunStep,
    list_saved_steps,
    parse_metrics,
    save_number_of,
)
from ckptkit.storage.local.names import hidden_name
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.storage.places import Place
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts
from ckptkit.writer.process import writer_command

logger = logging.getLogger(__name__)

PlaceT = TypeVar("PlaceT", Path, Place)


class TrainingRun(Generic[PlaceT]):
    """What training has to know of a run, wherever it lies.

    Attributes:
        place: Where its steps lie.
        path: A directory of this machine for marks, and for what is being written.
        prefix: What comes before the number in the names of its steps.
    """

    place: PlaceT
    path: Path
    prefix: str
    takes_saves = True
    """Whether the ranks can write to it themselves."""
    _has_warned = False

    def step_folder(self, step: int) -> PlaceT:
        return self.below(f"{self.prefix}{step}")

    def named_folder(self, name: str) -> PlaceT:
        """Returns where a step lies that has a name of its own."""
        if not name or name.startswith(".") or "\0" in name or Path(name).name != name:
            raise UsageError(
                f"is {name!r}, where the name of a directory in the run was expected", where="name"
            )
        if is_step_folder(name.lower()):  # some file systems take no notice of case
            raise UsageError(
                f"is {name!r}, which is the name of a step",
                where="name",
                hint="leave it out, and give the number as `step`",
            )
        return self.below(name)

    def working_folder(self, final: PlaceT, nonce: str, attempt: int) -> Path:
        """Returns where an attempt at a step is written; no tool takes it for a checkpoint.

        Args:
            final: Where the step will lie.
            nonce: Of the session: 8 hexadecimal digits.
            attempt: Of this session at this step.
        """
        return self.path / hidden_name(Path(final).name, f"{nonce}-{attempt}")

    def steps(self) -> tuple[RunStep, ...]:
        raise NotImplementedError

    def last_save_number(self) -> int:
        return max((step.save_number for step in self.steps()), default=0)

    def save_number_of(self, name: str) -> int:
        """Returns the `save_number` of the step in a folder of that name, 0 where there is none.

        Numbers of steps that are named by their number are compared with `last_save_number`.
        """
        manifest = self._manifest(name)
        return 0 if manifest is None else save_number_of(manifest)

    def retired_by(
        self, step: int, metrics: Mapping[str, Any], retention: Retention
    ) -> tuple[PlaceT, ...]:
        """Returns the steps that go once a new one is durable; nothing is read where all stay.

        The first time that no step has the metric of `keep_best` a warning says so.

        Args:
            step: The new one, which counts as the one saved last.
            metrics: Of the new one, as its manifest has them.
            retention: The rules.
        """
        if retention.keeps_all:
            return ()
        there: list[RunStep] = [saved for saved in self.steps() if saved.step != step]
        number = 1 + max((saved.save_number for saved in there), default=0)
        every = [*there, RunStep(step, metrics=parse_metrics(metrics), save_number=number)]
        problem = missing_metric(every, retention)
        if problem and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", problem)
        return tuple(self.step_folder(old) for old in steps_to_remove(every, retention))

    def identity(self) -> str:
        """Returns what tells the run from all others; called with the lock of the run."""
        raise NotImplementedError

    def process(
        self, timeouts: WriterTimeouts, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        """Returns what will write to the run, not started yet.

        Args:
            timeouts: How long to wait for it, and what to start.
            name: What it is called in messages.
            niceness: By how much its priority is lowered, if not as usual.
        """
        raise NotImplementedError

    def look(self) -> None:
        """Sees that this rank can use it."""

    def sweep(self) -> None:
        """Removes what was found not to be of use while the run was opened; by rank 0."""

    def take_request(self) -> Owner | None:
        """Takes up a request left by `ckptkit save-now`.

        Returns:
            Whose it was, or None if there is none.
        """
        return take_request(self.path)

    def below(self, name: str) -> PlaceT:
        raise NotImplementedError

    def _manifest(self, name: str) -> Manifest | None:
        raise NotImplementedError


__all__ = ["RunFolder", "RunLock", "saved_steps"]

_URL = re.compile(r"(?:^|/)[A-Za-z][A-Za-z0-9+.-]+:/")  # in a path made absolute as well


class RunFolder(TrainingRun[Path]):
    """A run's directory on a local or shared file system."""

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = STEP_PREFIXES[0]) -> None:
        """Makes the directory and its parents, where they are not there.

        Args:
            path: The directory.
            prefix: What comes before the number in the names of its steps.
        """
        named = os.fspath(path)
        if _URL.search(named):
            raise UsageError(
                "a URL was found where a directory was expected",
                where=named,
                hint="name a directory; a Checkpointer saves to a URL that it is given as a text",
            )
        self.path = self.place = Path(named).absolute()
        self.prefix = prefix
        self._known: KnownSteps = {}
        with _translated(self.path):
            _make_writable(self.path)

    def steps(self) -> tuple[RunStep, ...]:
        return saved_steps(self.path, self.prefix, self._known)

    def identity(self) -> str:
        """Returns what tells the run from all others; called with the lock of the run."""
        with _translated(self.path):
            return run_identity(self.path)

    def lock(self) -> RunLock | None:
        """Keeps other jobs from writing here, until the lock is closed or this process ends.

        A file system that knows no locks gets a warning.

        Returns:
            The lock, or None where there are no locks.
        """
        with _translated(self.path):
            lock = take_run_lock(self.path)
        if lock is None:
            logger.warning(
                "%s: the file system has no locks; see to it that no second job writes there",
                self.path,
            )
        return lock

    def process(
        self, timeouts: WriterTimeouts, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        """Returns what will write to the run, not started yet; see `TrainingRun`."""
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
    with _translated(run):
        folders = step_folders(run, (prefix,))
    numbers = {path.name: step for step, path in folders.items()}
    return list_saved_steps(numbers, LocalStepFiles(run), known)


def _make_writable(path: Path) -> None:
    (path / MARKS_FOLDER).mkdir(parents=True, exist_ok=True)
    if os.access(path, os.W_OK | os.X_OK):
        return
    frozen = hasattr(os, "statvfs") and os.statvfs(path).f_flag & os.ST_RDONLY
    number = errno.EROFS if frozen else errno.EACCES
    raise OSError(number, os.strerror(number))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputError(
            "a file was found where the directory of a run was expected",
            where=str(path),
            hint="name another directory, or move the file away",
        ) from error
    except OSError as error:
        raise OutputError(
            f"the directory of the run cannot be used: {error.strerror or error}",
            where=str(path),
            hint="see whether it is there, whose it is, and whether it was mounted read-only",
        ) from error
