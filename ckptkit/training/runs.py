"""What training has to know of a run, wherever it lies: the names in it, and what was saved.

The directory of a run: what was saved there, and who may write.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckptkit.core.errors import CkptkitError, FormatError, OutputError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, Manifest
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
from ckptkit.runs.save_order import Retention, StepFacts, abandoned, missing_metric, steps_to_remove
from ckptkit.storage.local.names import WORK_INFIX
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.storage.places import Place
from ckptkit.training.save.writer_process import Patience, WriterProcess
from ckptkit.writer.process import writer_command

logger = logging.getLogger(__name__)

PlaceT = TypeVar("PlaceT", Path, Place)


@dataclass(frozen=True, slots=True)
class SavedStep(StepFacts):
    """A step that lies in a run.

    Attributes:
        path: Its directory; where the run lies at a URL, only the name of that.
        problem: Why it is not complete; empty where it is.
        finished: Whether it was once: it has a manifest.
    """

    path: Path = Path()
    problem: str = ""
    finished: bool = True


class Run(Generic[PlaceT]):
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
        return self.path / f".{Path(final).name}{WORK_INFIX}{nonce}-{attempt}"

    def steps(self) -> tuple[SavedStep, ...]:
        raise NotImplementedError

    def last_save_number(self) -> int:
        return max((step.save_number for step in self.steps()), default=0)

    def save_number_of(self, name: str) -> int:
        """Returns the `save_number` of the step in a folder of that name, 0 where there is none.

        Numbers of steps that are named by their number are compared with `last_save_number`.
        """
        manifest = self._manifest(name)
        number = manifest.source.get("save_number") if manifest is not None else None
        return number if isinstance(number, int) else 0

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
        there: list[StepFacts] = [saved for saved in self.steps() if saved.step != step]
        number = 1 + max((saved.save_number for saved in there), default=0)
        every = [*there, StepFacts(step, metrics=_finite(metrics), save_number=number)]
        problem = missing_metric(every, retention)
        if problem and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", problem)
        return tuple(self.step_folder(old) for old in steps_to_remove(every, retention))

    def identity(self) -> str:
        """Returns what tells the run from all others; called with the lock of the run."""
        raise NotImplementedError

    def process(
        self, patience: Patience, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        """Returns what will write to the run, not started yet.

        Args:
            patience: How long it is waited for.
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


def in_order(steps: Iterable[SavedStep]) -> tuple[SavedStep, ...]:
    """Returns steps by their number, those that training went back from before all others."""
    found = tuple(steps)
    left = abandoned(found)
    return tuple(sorted(found, key=lambda saved: (saved.step not in left, saved.step)))


def unfinished_step(step: int, path: Path) -> SavedStep:
    """Returns what is known of a step without a manifest."""
    problem = f"it has no {MANIFEST_NAME}"
    return SavedStep(step, complete=False, path=path, problem=problem, finished=False)


def step_of_manifest(
    step: int, path: Path, manifest: Manifest, size_bytes: Callable[[str], int | None]
) -> SavedStep:
    """Returns what is known of a step, which is complete if its manifest is true.

    Args:
        step: Its number.
        path: Its directory.
        manifest: What it says of itself.
        size_bytes: Tells the length of a file in it, None where it is not there.
    """
    try:
        _check(step, manifest, size_bytes)
    except FormatError as error:
        return SavedStep(step, complete=False, path=path, problem=str(error))
    metrics = _finite(manifest.source.get("metrics"))
    number = manifest.source.get("save_number")
    number = number if isinstance(number, int) and number > 0 else 0
    return SavedStep(step, metrics=metrics, save_number=number, path=path)


def _check(step: int, manifest: Manifest, size_bytes: Callable[[str], int | None]) -> None:
    if manifest.kind != TRAINING or manifest.source.get("step") != step:
        raise FormatError(
            f"a manifest of kind {manifest.kind!r} and step {manifest.source.get('step')!r} was"
            f" found against {TRAINING!r} and {step}"
        )
    for name, record in manifest.files.items():
        size = size_bytes(name)
        if size is None:
            raise FormatError(f"file {name!r} is missing")
        if size != record.size_bytes:
            raise FormatError(
                f"file {name!r} has {size:,} bytes against {record.size_bytes:,} in the manifest"
            )


def _finite(metrics: object) -> Mapping[str, float]:
    if not isinstance(metrics, dict):
        return {}
    table: dict[str, Any] = metrics
    return {
        name: float(value)
        for name, value in table.items()
        if isinstance(value, (int, float)) and _is_finite(value)
    }


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer without bound, in a manifest that somebody else made
        return False


__all__ = ["RunFolder", "RunLock", "SavedStep", "saved_steps"]

_URL = re.compile(r"(?:^|/)[A-Za-z][A-Za-z0-9+.-]+:/")  # in a path made absolute as well
_Identity = tuple[int, ...]


class RunFolder(Run[Path]):
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
        self._known: dict[Path, tuple[_Identity, SavedStep]] = {}
        with _translated(self.path):
            _make_writable(self.path)

    def steps(self) -> tuple[SavedStep, ...]:
        """Returns what lies there, as `saved_steps` does, but looks into no step twice.

        A step that was found complete is looked into again once it was replaced: the directory
        or its manifest is another one, or was changed.
        """
        with _translated(self.path):
            folders = step_folders(self.path, (self.prefix,))
        known, self._known = self._known, {}
        return in_order(self._step(step, path, known.get(path)) for step, path in folders.items())

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
        self, patience: Patience, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        """Returns what will write to the run, not started yet; see `Run`."""
        if niceness is not None:
            patience = replace(patience, command=partial(writer_command, niceness=niceness))
        return WriterProcess(patience, name=name)

    def below(self, name: str) -> Path:
        return self.path / name

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return read_local_manifest(self.path / name)
        except (CkptkitError, OSError):
            return None

    def _step(
        self, number: int, path: Path, known: tuple[_Identity, SavedStep] | None
    ) -> SavedStep:
        before = _identity(path)
        if known is not None and known[0] == before:
            self._known[path] = known
            return known[1]
        saved = _saved_step(number, path)
        if saved.complete and before is not None:
            self._known[path] = before, saved
        return saved


def saved_steps(run: Path, prefix: str = STEP_PREFIXES[0]) -> tuple[SavedStep, ...]:
    """Returns what lies in a run, the newest last; a step is complete if its manifest is true.

    That is, it can be read, belongs to this step, and every file in it has its size. Steps that
    training went back from, see `abandoned`, come before all others: to go on from one of them
    is the last resort.
    """
    with _translated(run):
        folders = step_folders(run, (prefix,))
    return in_order(_saved_step(step, path) for step, path in folders.items())


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


def _identity(path: Path) -> _Identity | None:
    """Returns numbers that change when a step is replaced; None where they cannot be told."""
    try:
        found = path.stat(), (path / MANIFEST_NAME).stat()
    except OSError:
        return None
    return tuple(n for stat in found for n in (stat.st_dev, stat.st_ino, stat.st_mtime_ns))


def _saved_step(step: int, path: Path) -> SavedStep:
    try:
        manifest = read_local_manifest(path)
    except FileNotFoundError:
        return unfinished_step(step, path)
    except (OSError, CkptkitError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        return SavedStep(step, complete=False, path=path, problem=problem)

    def size_bytes(name: str) -> int | None:
        try:
            return (path / name).stat().st_size
        except FileNotFoundError:
            return None

    return step_of_manifest(step, path, manifest, size_bytes)
