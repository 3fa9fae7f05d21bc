"""A run at a path or URL: where it is, the files of its steps, the marks of readers, removal.

`LocalRun` is a run in a directory, `ckptkit.runs.remote.RemoteRun` one in an object store. A reader
marks a step as being read, and pruning leaves the step there.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from ckptkit.core.errors import (
    AccessError,
    AmbiguousSourceError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    OutputError,
)
from ckptkit.core.text import Aside
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import (
    ResolvedSource,
    find_step,
    is_unit_folder,
    names_step,
    parse_step,
    step_of_files,
)
from ckptkit.formats.parsing import list_first
from ckptkit.formats.registry import find_candidates, make_not_found_error, recognise
from ckptkit.runs.marks import FileLocks, claim, hold, is_step_folder, run_is_live
from ckptkit.runs.step_manifests import list_files, step_folder
from ckptkit.runs.steps import StoredFile
from ckptkit.storage.base import Source
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import TRASH, new_hidden_path, remove_tree
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.locations import MARKS_FOLDER, WORK_INFIX, is_work_folder
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of

if TYPE_CHECKING:
    from ckptkit.runs.push_journal import StepPush, WatchStatus
    from ckptkit.runs.remote import RemoteRun

_LISTED = 5
_NEAR = 0.6  # similarity of names from which one is proposed for another
_MOST_FOLDERS = 5_000  # that are looked at for steps
_MOST_ABOVE = 4
ENTER_HINT = "see who may enter it: `ls -ld`"
_LOST = "lost+found"  # of ext4, which root alone may enter
_AGAIN = "was replaced or changed since it was listed"
_JUDGED_ANEW = "run again to judge it anew"
_HIDDEN = re.compile(rf"\.(?P<step>.+?){re.escape(WORK_INFIX)}{TRASH}-[0-9a-f]+")


class LocalRun:
    """A directory with steps in it, which are identified by the names of their folders or files.

    `markers` are the files of a step that its readers lock, relative to the run, and `files` those
    that were listed of it.
    """

    def __init__(self, root: Path) -> None:
        """Checks that the directory exists; its name is kept for messages as it is given."""
        if not root.is_dir():
            raise absent_run(root)
        self.location = str(root)
        self._root = root

    def files(self) -> Sequence[StoredFile]:
        """Returns the files of all steps, sorted by path; links are not followed."""
        with _readable(self._root), os.scandir(self._root) as entries:
            steps = sorted(
                (entry for entry in entries if parse_step(entry.name) is not None),
                key=lambda entry: entry.name,
            )
        return [file for entry in steps for file in self._stored(entry.name, entry)]

    def is_live(self) -> bool | None:
        """Returns whether a job has the lock of the run; None if unknown."""
        try:
            return run_is_live(self._root)
        except OSError:
            return None

    def is_there(self, path: str) -> bool:
        return (self._root / path).exists()

    def hold(self, step: str, markers: Collection[str]) -> FileLocks:  # noqa: ARG002
        """Marks a step as being read until the mark is closed."""
        return hold(self._root / path for path in sorted(markers))

    def in_use(self, step: str, markers: Collection[str]) -> bool:
        """Returns whether another process has one of the locks of a step's markers."""
        mark = self.claim(step, markers, ())
        if mark is None:
            return True
        mark.close()
        return False

    def claim(
        self,
        step: str,  # noqa: ARG002
        markers: Collection[str],
        files: Sequence[StoredFile],  # noqa: ARG002
    ) -> FileLocks | None:
        """Keeps new readers from a step that is to be removed; None if it is being read."""
        return claim(self._root / path for path in sorted(markers))

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Renames a step, durably, and then removes it: no part of it looks like a complete step.

        A job may replace the step at any time; a folder with other files gets its name back.
        """
        folder = self._root / step
        trash = new_hidden_path(folder, TRASH)
        with _removable(folder):
            if not folder.is_dir():
                self._remove_files(trash, files)
                return
            if not self._holds(step, step, files):
                raise OutputError(_AGAIN, where=str(folder), hint=_JUDGED_ANEW)
            folder.rename(trash)
            if not self._holds(trash.name, step, files):
                trash.rename(folder)
                raise OutputError(_AGAIN, where=str(folder), hint=_JUDGED_ANEW)
            LOCAL_DISK.sync_directory(self._root)
            remove_tree(trash)

    def _remove_files(self, trash: Path, files: Sequence[StoredFile]) -> None:
        """Removes a step that is files right in the run, the first of which makes it complete."""
        for file in files:
            path = self._root / file.path
            if _stored_file(file.path, path.lstat()).identity != file.identity:
                raise OutputError(_AGAIN, where=str(path), hint=_JUDGED_ANEW)
        trash.mkdir()
        for file in files:
            (self._root / file.path).rename(trash / file.path)
            LOCAL_DISK.sync_directory(self._root)
        remove_tree(trash)

    def clear_up(self, *, remove: bool) -> Sequence[str]:
        """Finishes removals that were interrupted; returns the names of these steps."""
        steps = []
        with _readable(self._root):
            left = sorted(self._root.iterdir())
        for path in left:
            match = _HIDDEN.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():
                continue
            steps.append(match["step"])
            if remove:
                with _removable(path):
                    remove_tree(path)
        return steps

    def _holds(self, folder: str, step: str, files: Sequence[StoredFile]) -> bool:
        """Returns whether a folder has the files that were listed in a step, and no others."""
        seen = {file.path.removeprefix(step): file.identity for file in files}
        return seen == {f.path.removeprefix(folder): f.identity for f in self._below(folder)}

    def _below(self, folder: str) -> Iterator[StoredFile]:
        try:
            with os.scandir(self._root / folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:  # removed meanwhile
            return
        except OSError as error:
            raise _unreadable(self._root / folder, error) from error
        for entry in listed:
            yield from self._stored(f"{folder}/{entry.name}", entry)

    def _stored(self, path: str, entry: os.DirEntry[str]) -> Iterator[StoredFile]:
        """Yields a file, or the files below a folder; a link right in the run is no step of it."""
        if entry.is_dir(follow_symlinks=False):
            if not is_work_folder(entry.name):
                yield from self._below(path)
            return
        if "/" not in path and entry.is_symlink():
            return
        try:
            yield _stored_file(path, entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            return
        except OSError as error:  # the folder may be listed and not entered
            raise _unreadable((self._root / path).parent, error) from error


def _stored_file(path: str, status: os.stat_result) -> StoredFile:
    return StoredFile(
        path,
        status.st_size,
        status.st_mtime,
        f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}",
        links=status.st_nlink,
        inode=f"{status.st_dev:x}-{status.st_ino:x}",
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> InputError:
    reason = (error.strerror or str(error)).lower()
    hint = ENTER_HINT if isinstance(error, PermissionError) else ""
    return InputError(f"the run cannot be listed: {reason}", where=str(path), hint=hint)


@contextmanager
def _removable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        raise OutputError(
            f"cannot be removed: {error.strerror or error}",
            where=str(path),
            hint="check its owner, and whether the file system is mounted read-only",
        ) from error


RunStore: TypeAlias = "LocalRun | RemoteRun"
"""A run on any storage: its files, marks of readers, and removal of steps."""


def absent_run(run: PathLike) -> NotACheckpointError:
    """Returns the error for a path without a directory, where a run was expected."""
    if local_path(run).exists():
        hint = "pass the directory that contains the folders of steps"
        text = "is a file, where the directory of a run was expected"
        return NotACheckpointError(text, where=os.fspath(run), hint=hint)
    hint = hint_at_near(run)
    return NotACheckpointError("no such file or directory", where=os.fspath(run), hint=hint)


def absent_folder(place: PathLike, meant: str) -> tuple[str, str]:
    """Returns what is wrong with a local path that is no directory, and what to do."""
    path = local_path(place)
    if path.exists():
        return (
            "is a file, where a directory was expected",
            meant or f"pass its folder: {path.parent}",
        )
    return "no such directory", hint_at_near(place, meant)


def hint_at_near(place: PathLike, meant: str = "") -> str:
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
        return hint_at_near(near[0], meant)
    if meant and above == Path():
        return meant
    listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return "; ".join(filter(None, [f"{above.absolute()} contains {listed or 'nothing'}", meant]))


def open_run(run: PathLike) -> RunStore:
    """Returns the store of a run."""
    if is_url(run):
        from ckptkit.runs.remote import RemoteRun

        return RemoteRun(run)
    return LocalRun(local_path(run))


def read_pushes(run: PathLike, state: PathLike | None) -> tuple[StepPush, ...]:
    """Returns the pushes that a watch has recorded for a run."""
    from ckptkit.runs.push_journal import read_journals  # late: few runs are pushed

    folder = _watch_folder(run, state)
    return () if folder is None else read_journals(folder)


def read_watch(run: PathLike, state: PathLike | None) -> WatchStatus | None:
    """Returns what the last watch of a run has not pushed; None where there was none."""
    from ckptkit.runs.push_journal import read_status

    folder = _watch_folder(run, state)
    status = None if folder is None else read_status(folder)
    return status if status is not None and status.repo_id else None


def _watch_folder(run: PathLike, state: PathLike | None) -> Path | None:
    """Returns the folder with the state of a watch; None where it is unknown."""
    from ckptkit.runs.push_journal import WATCH_FOLDER

    if state is not None:
        return Path(state)
    return None if is_url(run) else local_path(run) / WATCH_FOLDER


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
    found |= {candidate.files[0] for candidate in candidates if step_of_files(candidate)}
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
    text = f"{list_first(targets, len(targets), _LISTED)}: links, which are not followed"
    places = sorted(set(targets.values()))
    return text, f"pass what they lead to: {list_first(places, len(places), _LISTED)}"


def make_not_found(
    folders: Sequence[Source], paths: Sequence[str], location: str, base: str
) -> NotACheckpointError:
    """Returns the error for a place without a checkpoint, and says what was not searched there."""
    error = make_not_found_error(paths, location, base)
    closed = [path for path in list_closed(folders) if not base or path.startswith(f"{base}/")]
    texts, hints = [error.message], [error.hint]
    if closed:
        texts.append(f"may not be entered: {list_first(closed, len(closed), _LISTED)}")
        hints.insert(0, ENTER_HINT)
    links, targets = ("", "") if base else describe_links(folders)
    if links:
        texts.append(links)
        hints.insert(0, targets)
    return NotACheckpointError("; ".join(texts), where=error.where, hint="; else ".join(hints))


def check_closed(
    found: ResolvedSource,
    folders: Sequence[Source],
    select: str | None,
    read_tracker: Callable[[str], tuple[str, str] | None],
) -> ResolvedSource:
    """Refuses a choice that a folder which may not be entered could change.

    It may be a newer step, or hold a part of the chosen checkpoint. Others, such as `lost+found`
    and those of other users, do not matter.
    """
    labels = {found.folder, *(posixpath.join(found.folder, unit.label) for unit in found.units)}
    called = f"{select or ''}/"
    named = max((n for n in labels if n and called.startswith(f"{n}/")), key=len, default="")

    def is_tracked(step: str) -> bool:
        run, name = posixpath.split(step)
        tracked = read_tracker(run)
        return tracked is not None and names_step(tracked[1], name)

    others = []
    for path, location in list_closed(folders).items():
        steps = (
            f
            for f in _from_above(path)
            if parse_step(posixpath.basename(f)) is not None or is_tracked(f)
        )
        step = next(steps, "")
        is_other = bool(step) and not f"{found.folder}/".startswith(f"{step}/")
        if named:
            matters = path.startswith(f"{named}/")
        elif is_other:
            matters = _may_be_taken(step, found.folder, is_tracked=is_tracked(found.folder))
        else:
            matters = bool(step) or _is_part(path, found, location)
        if matters:
            raise _closed_error(path, location, step if is_other else None)
        if posixpath.basename(path) != _LOST:
            others.append(path)
    notes = [Aside(f"left alone, since they may not be entered: {', '.join(others)}")]
    return replace(found, notes=(*found.notes, *notes)) if others else found


def _closed_error(path: str, location: str, other: str | None) -> AccessError:
    """Returns the error for a closed folder in the chosen checkpoint, or in another step."""
    whole = "the checkpoint" if other is None else "the step to take"
    what = whole if path == other else f"a part of {whole}"
    return AccessError(
        f"cannot be read: permission denied; it may be {what}",
        where=posixpath.join(location, path),
        hint=ENTER_HINT
        if other is None
        else f"{ENTER_HINT}; to take another step, pass its own path",
    )


def _may_be_taken(step: str, chosen: str, *, is_tracked: bool) -> bool:
    """Returns whether a closed step might have been chosen instead of another one."""
    if posixpath.dirname(step) == posixpath.dirname(chosen) and chosen:
        return not is_tracked
    return not posixpath.basename(step).isdigit()  # a number alone names a step only beside others


def _is_part(path: str, found: ResolvedSource, location: str) -> bool:
    """Returns whether a closed folder in no step may belong to a checkpoint."""
    if is_unit_folder(posixpath.basename(path)):
        return True
    if not found.folder and parse_step(Path(location).absolute().name) is not None:
        return True
    for candidate in (unit.candidate for unit in found.units):
        inside = f"{candidate.folder}/".lstrip("/")
        if path.startswith(inside) and any("/" in f.removeprefix(inside) for f in candidate.files):
            return True
    return False


def _from_above(path: str) -> Iterator[str]:
    """Returns the folders that lead to a folder, the outermost first, and the folder itself."""
    parts = path.split("/")
    return ("/".join(parts[: at + 1]) for at in range(len(parts)))


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
    """Protects a step of a run from pruning while a block of code runs."""
    if is_url(step):
        with _held_at_store(place_of(step)):
            yield
        return
    path = local_path(step)
    folder, name = (path.parent, path.name) if path.is_file() else (path, None)
    with LocalSource(folder) as source:
        own = [c for c in find_candidates(source) if name is None or name in c.files]
        with hold_candidates([source], own):
            yield


@contextmanager
def hold_at_stores(steps: Sequence[PathLike]) -> Iterator[None]:
    """Marks the steps among some that are in runs on object stores as being read."""
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
