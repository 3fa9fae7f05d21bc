"""From the path or URL of a run, or of a step, to its store and to the marks of its readers.

A reader marks a step as being read, and pruning leaves the step there.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from ckptkit.core.errors import AmbiguousSourceError, NotACheckpointError
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import is_unit_folder, parse_step
from ckptkit.formats.registry import find_candidates, recognise
from ckptkit.runs.local import LocalRun, RunStore
from ckptkit.runs.marks import FileLocks, hold, is_step_folder
from ckptkit.runs.push_journal import WATCH_FOLDER, StepPush, read_journals
from ckptkit.runs.step_manifests import list_files, step_folder
from ckptkit.storage.base import Source
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of

_LISTED = 5
_MOST_FOLDERS = 5_000  # that are looked at for steps
_MOST_ABOVE = 4


def open_run(run: PathLike) -> RunStore:
    """Returns the store of a run."""
    if is_url(run):
        from ckptkit.runs.remote import RemoteRun

        return RemoteRun(run, is_step_name)
    return LocalRun(local_path(run), is_step_name)


def is_step_name(name: str) -> bool:
    return parse_step(name) is not None


def read_pushes(run: PathLike, state: PathLike | None) -> tuple[StepPush, ...]:
    """Returns the pushes that a watch has recorded for a run."""
    if state is not None:
        return read_journals(Path(state))
    return () if is_url(run) else read_journals(local_path(run) / WATCH_FOLDER)


def find_run(run: PathLike) -> PathLike:
    """Returns a run: the path itself, or the only run in a folder below it.

    A path without any step is returned as it is, since steps may be saved there later.
    """
    with open_source(run) as source:
        folders = {step_folder(candidate.folder) for candidate in recognise(list_files(source))}
    steps = {folder for folder in folders if parse_step(folder) is not None}
    location = os.fspath(run).rstrip("/")
    if not steps and folders and parse_step(posixpath.basename(location)) is not None:
        raise NotACheckpointError(
            "is a step, where a run was expected",
            where=location,
            hint=f"pass the directory above it: {posixpath.dirname(location) or '.'}",
        )
    runs = sorted({posixpath.dirname(folder) for folder in steps})
    if not runs or "" in runs:
        return run
    if len(runs) > 1:
        raise AmbiguousSourceError(
            f"holds {len(runs):,} runs: {', '.join(runs[:_LISTED])}",
            where=location,
            hint=f"pass one of them, such as {location}/{runs[0]}",
        )
    below = f"{location}/{runs[0]}"
    return run.beside(below) if isinstance(run, Place) else below


def find_runs_nearby(run: PathLike) -> tuple[str, ...]:
    """Returns folders near one without steps that hold folders named like steps.

    Those below are preferred; if there are none, the nearest one above is returned. Of a URL only
    the name is examined, since listing the storage around it may take minutes.
    """
    location = os.fspath(run).rstrip("/")
    if is_url(run):
        named = _run_in_name(location)
        return (named,) if named else ()
    folder = local_path(run).absolute()
    below = sorted(set(_runs_below(folder)))
    if below:
        return tuple(below[:_LISTED])
    named = _run_in_name(str(folder))
    if named:
        return (named,)
    return tuple(islice((str(p) for p in folder.parents[:_MOST_ABOVE] if _holds_steps(p)), 1))


def _run_in_name(location: str) -> str:
    """Returns the run of the step that a path leads through; empty if there is none."""
    while location:
        location, name = posixpath.split(location.rstrip("/"))
        if name and is_step_folder(name):
            return location
        if not name:
            break
    return ""


def _runs_below(folder: Path) -> Iterator[str]:
    """Yields the folders at any depth below one that hold a folder of a step."""
    walked = islice(os.walk(folder), _MOST_FOLDERS)  # folders that cannot be listed are skipped
    for place, names, _ in walked:
        steps = [name for name in names if is_step_folder(name)]
        if steps:
            yield place
        names[:] = [name for name in names if name not in steps and not name.startswith(".")]


def _holds_steps(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(
                is_step_folder(e.name) and e.is_dir() for e in islice(entries, _MOST_FOLDERS)
            )
    except OSError:
        return False


def marker(candidate: Candidate) -> str:
    """Returns the file of a checkpoint that its readers lock: they open it first."""
    index = posixpath.join(candidate.folder, ".metadata")
    return index if index in candidate.files else min(candidate.files)


def hold_candidates(folders: Sequence[Source], candidates: Sequence[Candidate]) -> FileLocks:
    """Marks checkpoints as being read until the mark is closed."""
    roots = [Path(folder.location) for folder in folders if not is_url(folder.location)]
    paths = (root / marker(candidate) for root in roots for candidate in candidates)
    return hold(path for path in paths if path.exists())


def hold_source(source: Source) -> FileLocks:
    """Marks the checkpoints of a source as being read until the mark is closed."""
    return hold_candidates([source], find_candidates(source))


@contextmanager
def hold_step(step: PathLike) -> Iterator[None]:
    """Protects a step of a run from pruning while a block of code runs.

    Args:
        step: The folder of the step. At a URL, a mark is written into the run if allowed.

    Yields:
        Nothing.
    """
    if is_url(step):
        with _held_at_store(place_of(step)):
            yield
        return
    with (
        LocalSource(local_path(step)) as source,
        hold_source(source),
    ):
        yield


@contextmanager
def hold_at_stores(steps: Sequence[PathLike]) -> Iterator[None]:
    """Marks the steps among some that are in runs on object stores as being read.

    Args:
        steps: Folders of steps, or of parts of them.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        for place in dict.fromkeys(place_of(step) for step in steps if is_url(step)):
            run, _, name = place.rpartition("/")
            while is_unit_folder(name) and parse_step(name) is None and "/" in run:
                run, _, name = run.rpartition("/")
            if parse_step(name) is not None:
                stack.enter_context(_held_at_store(place.beside(f"{run}/{name}")))
        yield


@contextmanager
def _held_at_store(step: Place) -> Iterator[None]:
    from ckptkit.runs.remote import run_and_step

    run, name = run_and_step(step)
    with open_run(run).hold(name, ()):
        yield
