"""Where a run is, what a path without one may be meant as, and what a search could not see."""

from __future__ import annotations

import os
import posixpath
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby, islice
from pathlib import Path

from ckptkit.core.errors import (
    AmbiguousSourceError,
    MissingFileError,
    NotACheckpointError,
)
from ckptkit.core.text import join_first
from ckptkit.formats.discovery import (
    find_step,
    parse_step,
    parse_step_entry,
    step_of_files,
)
from ckptkit.formats.registry import (
    READERS,
    SEARCH_DEPTH,
    find_unread,
    group_files,
    list_plug_in_problems,
    recognise,
)
from ckptkit.runs.marks import is_step_folder
from ckptkit.runs.step_manifests import list_files, step_folder
from ckptkit.runs.steps import series_of
from ckptkit.storage.base import Source
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source

_LISTED = 5
_NEAR = 0.6  # similarity of names from which one is proposed for another
_MOST_FOLDERS = 5_000  # that are looked at for steps
_MOST_ABOVE = 4
ENTER_HINT = "see who may enter it: `ls -ld`"
_LOST = "lost+found"  # of ext4, which root alone may enter


def absent_run(run: PathLike) -> NotACheckpointError:
    """Returns the error for a path without a directory, where a run was expected."""
    if local_path(run).exists():
        hint = "pass the directory that contains the folders of steps"
        text = "is a file, where the directory of a run was expected"
        return NotACheckpointError(text, where=os.fspath(run), hint=hint)
    hint = suggest_path(run)
    return NotACheckpointError("no such file or directory", where=os.fspath(run), hint=hint)


def absent_folder(place: PathLike, meant: str) -> tuple[str, str]:
    """Returns what is wrong with a local path that is no directory, and what to do."""
    path = local_path(place)
    if path.exists():
        return (
            "is a file, where a directory was expected",
            meant or f"pass its folder: {path.parent}",
        )
    return "no such directory", suggest_path(place, meant)


def suggest_path(place: PathLike, meant: str = "") -> str:
    """Returns what a path that does not exist may be meant as; at least where its name ends."""
    path = local_path(place)
    above = next((folder for folder in path.parents if folder.is_dir()), Path())
    try:
        names = sorted(entry.name for entry in above.iterdir() if not entry.name.startswith("."))
    except OSError:
        names = []
    missing = path.parts[len(above.parts)] if len(path.parts) > len(above.parts) else ""
    rest = path.parts[len(above.parts) + 1 :]
    is_file = not rest and bool(path.suffix)  # else only a folder can be meant
    possible = [name for name in names if is_file or Path(above, name).is_dir()]
    near = [
        Path(above, name, *rest) for name in get_close_matches(missing, possible, _LISTED, _NEAR)
    ]
    there = next((place for place in near if place.exists()), None)
    if there is not None:
        return "; ".join(filter(None, [f"did you mean {there}?", meant]))
    if near:  # what is missing in that folder, which is one level further down
        return suggest_path(near[0], meant)
    if meant and above == Path():
        return meant
    listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return "; ".join(filter(None, [f"{above.absolute()} contains {listed or 'nothing'}", meant]))


def find_run(run: PathLike) -> PathLike:
    """Returns a run: the path itself, or the only run in a folder below it.

    A path without any step is returned as it is, since steps may be saved there later.
    """
    try:
        with open_source(run) as source:
            candidates = recognise(list_files(source))
            closed = {step_folder(folder) for folder in source.closed_folders}
    except MissingFileError as error:
        if is_url(run) or local_path(run).is_dir():
            raise
        raise absent_run(run) from error
    closed = {folder for folder in closed if not posixpath.basename(folder).isdigit()}
    folders = {candidate.folder for candidate in candidates} | closed
    found = {step for folder in folders if (step := find_step(folder)) is not None}
    found |= {
        posixpath.join(candidate.folder, posixpath.basename(candidate.files[0]))
        for candidate in candidates
        if step_of_files(candidate)
    }
    # Folders of a step may be named like steps, too.
    apart = {posixpath.dirname(step) for step in found}
    steps = {step for step in found if apart.isdisjoint(_runs_above(step))}
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


def _runs_above(step: str) -> Iterator[str]:
    """Yields the folders of the steps that a step is in."""
    parts = step.split("/")
    for at, name in enumerate(parts[:-1]):
        if parse_step(name) is not None:
            yield "/".join(parts[:at])


def list_closed(folders: Sequence[Source]) -> dict[str, str]:
    """Returns the folders of a source that may not be entered, each with the location above it."""
    return {
        path: folder.location
        for folder in folders
        for path in sorted(folder.closed_folders)
        if MARKS_FOLDER not in path.split("/")
    }


def describe_links(folders: Sequence[Source], *, as_run: bool = False) -> tuple[str, str]:
    """Returns which links to folders a search did not follow, and what to pass instead."""
    targets: dict[str, str] = {}
    for folder in folders:
        for name in folder.linked_folders():
            target = os.path.realpath(Path(folder.location, name))
            is_step = as_run and parse_step(name) is not None
            targets[name] = posixpath.dirname(target) if is_step else target
    if not targets:
        return "", ""
    text = f"{join_first(targets, len(targets), _LISTED)}: links, which are not followed"
    places = sorted(set(targets.values()))
    return text, f"pass what they lead to: {join_first(places, len(places), _LISTED)}"


def find_steps_without_weights(
    source: Source, paths: Iterable[str], run: str, held: Collection[str], taken: str, number: int
) -> Iterator[str]:
    """Yields what is wrong with steps of a run that nothing reads and that are newer than one.

    Args:
        source: What holds the run.
        paths: The files in it.
        run: Its folder, relative to the source.
        held: The entries of the run in which a checkpoint was recognised.
        taken: The entry of the step that is taken.
        number: Its number.
    """
    above = f"{run}/" if run else ""
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    for entry, files in groupby(
        (path for path in paths if path.startswith(above)),
        lambda path: path[len(above) :].split("/", 1)[0],
    ):
        listed = list(files)
        step = parse_step_entry(entry, is_file=listed == [above + entry])
        if step is not None and step[1] > number and entry not in held:
            found[step[1], step[0]] += listed
    for (_, name), files_of_step in sorted(found.items(), reverse=True):
        folder = above + name
        unread = find_unread(source, files_of_step, folder)
        if unread is not None:
            yield f"{folder} was passed over: {unread.message}; {unread.hint}"
        elif series_of(name) == series_of(taken) and files_of_step[0].startswith(f"{folder}/"):
            yield f"{folder} was passed over: {NO_CHECKPOINT}"


NO_CHECKPOINT = "it holds no checkpoint of a known format"


def make_not_found(
    folders: Sequence[Source], paths: Sequence[str], location: str
) -> NotACheckpointError:
    """Returns the error for a place without a checkpoint, and says what was not searched there."""
    there = ", ".join(map(str, group_files(paths)))
    text = f"no checkpoint of a known format is here, but {there}" if there else "no file is here"
    known = (one for one in reversed(READERS) if one.expected)  # what is common comes first
    expected = "; ".join(f"{reader.name}: {reader.expected}" for reader in known)
    texts = [text, *list_plug_in_problems()]
    hints = [
        f"give a directory with one of these, or one up to {SEARCH_DEPTH - 1} above it: {expected}"
    ]
    closed = list(list_closed(folders))
    if closed:
        texts.append(f"may not be entered: {join_first(closed, len(closed), _LISTED)}")
        hints.insert(0, ENTER_HINT)
    links, targets = describe_links(folders)
    if links:
        texts.append(links)
        hints.insert(0, targets)
    return NotACheckpointError("; ".join(texts), where=location, hint="; else ".join(hints))


def find_runs_nearby(run: PathLike) -> tuple[str, ...]:
    """Returns folders near one without steps that hold folders named like steps.

    Those below are preferred; if there are none, the nearest one above is returned. Of a URL only
    the name is examined, since listing the storage around it may take minutes.
    """
    location = os.fspath(run).rstrip("/")
    if is_url(run):
        above = _run_in_name(location)
        return (above,) if above else ()
    folder = local_path(run).absolute()
    below = set()
    for place, names, _ in islice(os.walk(folder), _MOST_FOLDERS):  # skips what cannot be listed
        named = [name for name in names if is_step_folder(name)]
        steps = [name for name in named if not Path(place, name).is_symlink()]
        if steps:
            below.add(place)
        names[:] = [name for name in names if name not in named and not name.startswith(".")]
    if below:
        return tuple(sorted(below)[:_LISTED])
    above = _run_in_name(str(folder))
    if above:
        return (above,)
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


def _holds_steps(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(
                is_step_folder(e.name) and e.is_dir() for e in islice(entries, _MOST_FOLDERS)
            )
    except OSError:
        return False
