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
from ckptkit.runs.marks import StepMark, hold, is_step_folder
from ckptkit.runs.push_journal import WATCH_FOLDER, StepPush, pushes_in
from ckptkit.runs.step_manifests import listed_files, step_folder
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


def recorded_pushes(run: PathLike, state: PathLike | None) -> tuple[StepPush, ...]:
    """Returns what a watch has written down of a run.

    Args:
        run: The run.
        state: Where the watch keeps its state; in the run itself if left out.
    """
    if state is not None:
        return pushes_in(Path(state))
    return () if is_url(run) else pushes_in(local_path(run) / WATCH_FOLDER)


def run_below(run: PathLike) -> PathLike:
    """Returns the run that a place stands for: itself, or the only run in a folder below it.

    A place without any step, which may get some, stands for itself.
    """
    with open_source(run) as source:
        folders = {step_folder(one.folder) for one in recognise(listed_files(source))}
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


def runs_nearby(run: PathLike) -> tuple[str, ...]:
    """Returns folders that hold folders of steps, by their names, near one that holds none.

    Those below come first; where there are none, the nearest one above is the only one. Of a URL
    the name alone is looked at, since listing the storage around it may take minutes.
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
    """Returns the folder of the step that a path leads through; empty where it names none."""
    while location:
        location, name = posixpath.split(location.rstrip("/"))
        if name and is_step_folder(name):
            return location
        if not name:
            break
    return ""


def _runs_below(folder: Path) -> Iterator[str]:
    """Yields the folders below one, however deep, that hold a folder of a step."""
    walked = islice(os.walk(folder), _MOST_FOLDERS)  # what cannot be listed is passed over
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
    """Returns the file of a checkpoint that stands for all of it: its reader opens it first."""
    index = posixpath.join(candidate.folder, ".metadata")
    return index if index in candidate.files else min(candidate.files)


def hold_candidates(folders: Sequence[Source], candidates: Sequence[Candidate]) -> StepMark:
    """Marks checkpoints as being read, until the result is closed.

    Args:
        folders: The places that hold them; those that are no directories are passed over.
        candidates: What is read, relative to each of the places.
    """
    roots = [Path(folder.location) for folder in folders if not is_url(folder.location)]
    paths = (root / marker(candidate) for root in roots for candidate in candidates)
    return hold(path for path in paths if path.exists())


def hold_source(source: Source) -> StepMark:
    """Marks what lies in a source as being read, until the result is closed."""
    return hold_candidates([source], find_candidates(source))


@contextmanager
def step_in_use(step: PathLike) -> Iterator[None]:
    """Keeps a step of a run from being pruned, for as long as a block of code runs.

    Args:
        step: The step's own folder. At a URL, a mark is left in the run where that is allowed.

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
def read_at_store(steps: Sequence[PathLike]) -> Iterator[None]:
    """Marks those of some steps as being read that lie on an object store, in a run.

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
