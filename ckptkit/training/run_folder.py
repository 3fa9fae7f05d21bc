"""The directory of a run: what was saved there, and who may write."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.run_marks import (
    MARKS_FOLDER,
    STEP_PREFIXES,
    RunLock,
    run_identity,
    step_folders,
    take_run_lock,
)
from ckptkit.training.runs import Run, SavedStep, in_order, step_of_manifest, unfinished_step
from ckptkit.training.writer_process import Patience, WriterProcess
from ckptkit.writer.command import writer_command

__all__ = ["RunFolder", "RunLock", "SavedStep", "saved_steps"]

logger = logging.getLogger(__name__)

_URL = re.compile(r"(?:^|/)[A-Za-z][A-Za-z0-9+.-]+:/")  # in a path made absolute as well
_Identity = tuple[int, ...]


class RunFolder(Run[Path]):
    """A run's directory on a local or shared file system."""

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = STEP_PREFIXES[0]) -> None:
        """Makes the directory and its parents, where they are not there.

        Args:
            path: The directory.
            prefix: What comes before the number in the names of its steps.

        Raises:
            UsageError: If the path is a URL.
            OutputError: If it is no directory, or nothing can be written there.
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

        Raises:
            OutputError: If the run cannot be listed.
        """
        with _translated(self.path):
            folders = step_folders(self.path, (self.prefix,))
        known, self._known = self._known, {}
        return in_order(self._step(step, path, known.get(path)) for step, path in folders.items())

    def identity(self) -> str:
        """Returns what tells the run from all others; called with the lock of the run.

        Raises:
            OutputError: If it cannot be read or written.
        """
        with _translated(self.path):
            return run_identity(self.path)

    def lock(self) -> RunLock | None:
        """Keeps other jobs from writing here, until the lock is closed or this process ends.

        A file system that knows no locks gets a warning.

        Returns:
            The lock, or None where there are no locks.

        Raises:
            RefusedError: If another job is writing here.
            OutputError: If the lock cannot be written.
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
        """Returns where the step of that name lies."""
        return self.path / name

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return read_manifest(self.path / name)
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

    Raises:
        OutputError: If the run cannot be listed.
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
        manifest = read_manifest(path)
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
