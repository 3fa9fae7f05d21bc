"""From the path or URL of a run to what lists and prunes it."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ckptkit.core.errors import AmbiguousSourceError, NotACheckpointError
from ckptkit.formats.discovery import step_of
from ckptkit.formats.registry import recognise
from ckptkit.runs.files import listed_files
from ckptkit.runs.local import LocalRun, RunStore
from ckptkit.runs.marks import is_step_folder
from ckptkit.runs.push_journal import WATCH_FOLDER, StepPush, pushes_in
from ckptkit.runs.steps import step_folder
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source

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
    return step_of(name) is not None


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
    steps = {folder for folder in folders if step_of(folder) is not None}
    location = os.fspath(run).rstrip("/")
    if not steps and folders and step_of(posixpath.basename(location)) is not None:
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
