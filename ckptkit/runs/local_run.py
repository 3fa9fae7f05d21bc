"""A run on any storage: the files of its steps, the marks of readers, removal.

`LocalRun` is a run in a directory, `ckptkit.runs.remote_run.RemoteRun` one in an object store. A
reader marks a step as being read, and pruning leaves the step there.
"""

from __future__ import annotations

import os
import posixpath
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ckptkit.core.errors import InputError, OutputError, SourceChangedError
from ckptkit.core.frameworks import is_unit_folder
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import name_step, parse_step
from ckptkit.formats.registry import find_candidates
from ckptkit.runs.find_run import ENTER_HINT, absent_run
from ckptkit.runs.marks import FileLocks, claim, hold, run_is_live
from ckptkit.runs.steps import RunStep, StoredFile
from ckptkit.storage.base import Source
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import TRASH, new_hidden_path, remove_tree, replace_file
from ckptkit.storage.locations import MARKS_FOLDER, WORK_INFIX, is_work_folder
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of

if TYPE_CHECKING:
    from ckptkit.runs.remote_run import RemoteRun

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

    def drop(self, step: str, files: Sequence[StoredFile]) -> None:
        """Removes some files of a claimed step, and folders that are empty without them."""
        for file in files:
            path = self._root / file.path
            with _removable(path):
                path.unlink()
            with suppress(OSError):  # it has other files
                while path.parent != self._root / step:
                    path.parent.rmdir()
                    path = path.parent

    def put(self, path: str, data: bytes) -> None:
        """Creates or replaces a small file of a step, which becomes visible as a whole."""
        folder = self._root / MARKS_FOLDER  # what a kill leaves there is in no step
        draft = folder / f".put-{socket.gethostname()}-{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            replace_file(self._root / path, data, LOCAL_DISK, draft=draft)
        except OSError as error:
            raise OutputError(
                f"cannot be written: {error.strerror or error}",
                where=str(self._root / path),
                hint="check its owner, and whether the file system is mounted read-only",
            ) from error

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


def open_run(run: PathLike) -> RunStore:
    if is_url(run):
        from ckptkit.runs.remote_run import RemoteRun

        return RemoteRun(run)
    return LocalRun(local_path(run))


def check_unchanged(store: RunStore, step: RunStep, text: str) -> None:
    """Refuses a step whose files are not those that were listed."""
    now = {f.path: f.identity for f in store.files() if name_step(f.path) == step.name}
    if now != {file.path: file.identity for file in step.files}:
        raise SourceChangedError(
            text, where=step.path, hint="run again when nothing writes there any more"
        )


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
    from ckptkit.runs.remote_run import run_and_step

    run, name = run_and_step(step)
    with open_run(run).hold(name, ()):
        yield
