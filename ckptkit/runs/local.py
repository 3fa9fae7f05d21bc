"""`RunStore` lists, holds and removes the steps of a run; `LocalRun` is that of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptkit.core.errors import InputError, NotACheckpointError, OutputError
from ckptkit.runs.marks import FileLocks, claim, hold, run_is_live
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import TRASH, new_hidden_path, remove_tree
from ckptkit.storage.local.names import WORK_INFIX, is_work_folder


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a run.

    Attributes:
        path: Relative to the run, with `/` between segments.
        size_bytes: Its size.
        modified: When it was written, in seconds since 1970; 0 where that is unknown.
        identity: Changes when the file is replaced or rewritten.
        links: How many names the file has, of which this is one.
        inode: What the names of one file have in common; empty where a file has one name only.
    """

    path: str
    size_bytes: int
    modified: float
    identity: str
    links: int = 1
    inode: str = ""


class RunStore(Protocol):
    """A run on any storage: its files, marks of readers, and removal of steps.

    Steps are identified by the names of their folders.
    """

    @property
    def location(self) -> str:
        """The path or URL as the user passed it, for messages."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """Returns the files of all steps, sorted by path."""
        ...

    def is_live(self) -> bool | None:
        """Returns whether a job is writing to the run; None if unknown."""
        ...

    def is_there(self, path: str) -> bool:
        """Returns whether a file exists now."""
        ...

    def hold(self, step: str, markers: Collection[str]) -> AbstractContextManager[object]:
        """Marks a step as being read until the context is left.

        Args:
            step: The name of its folder.
            markers: The files of the step that its readers lock, relative to the run.
        """
        ...

    def in_use(self, step: str, markers: Collection[str]) -> bool:
        """Returns whether a step is being read now; changes nothing."""
        ...

    def claim(
        self, step: str, markers: Collection[str], files: Sequence[StoredFile]
    ) -> AbstractContextManager[object] | None:
        """Keeps new readers from a step that is to be removed until the context is left.

        Args:
            step: The name of its folder.
            markers: The files of the step that its readers lock, relative to the run.
            files: The files to remove.

        Returns:
            The context, or None if the step is being read now.
        """
        ...

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Removes a step; at no moment do the remaining files look like a complete step.

        Args:
            step: The name of its folder.
            files: The files that were listed; newer ones are not removed.
        """
        ...

    def clear_up(self, *, remove: bool) -> Sequence[str]:
        """Finishes removals that were interrupted.

        Args:
            remove: Whether to remove the files; otherwise the steps are only returned.

        Returns:
            The names of these steps.
        """
        ...


_AGAIN = "was replaced or changed since it was listed"
_JUDGED_ANEW = "run again to judge it anew"
_HIDDEN = re.compile(rf"\.(?P<step>.+?){re.escape(WORK_INFIX)}{TRASH}-[0-9a-f]+")


class LocalRun:
    """A directory with steps in it; see `RunStore`."""

    def __init__(self, root: Path, is_step: Callable[[str], bool]) -> None:
        """Checks that the directory exists.

        Args:
            root: The directory, as it appears in messages.
            is_step: Returns whether the name of a folder is that of a step.
        """
        if not root.is_dir():
            raise NotACheckpointError("no such directory", where=str(root))
        self._root = root
        self._is_step = is_step

    @property
    def location(self) -> str:
        return str(self._root)

    def files(self) -> Sequence[StoredFile]:
        """Returns the files of all steps, sorted by path; links are not followed."""
        with _readable(self._root), os.scandir(self._root) as entries:
            steps = sorted(
                entry.name
                for entry in entries
                if self._is_step(entry.name) and entry.is_dir(follow_symlinks=False)
            )
        return [file for step in steps for file in self._below(step)]

    def is_live(self) -> bool | None:
        """Returns whether a job has the lock of the run; None if unknown."""
        try:
            return run_is_live(self._root)
        except OSError:
            return None

    def is_there(self, path: str) -> bool:
        return (self._root / path).exists()

    def hold(self, step: str, markers: Collection[str]) -> FileLocks:  # noqa: ARG002
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
        """Takes the locks of a step's markers for removal; None if a reader has one."""
        return claim(self._root / path for path in sorted(markers))

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Renames a step, durably, and then removes it.

        A job may replace the step at any time; a folder with other files gets its name back.
        """
        folder = self._root / step
        trash = new_hidden_path(folder, TRASH)
        with _removable(folder):
            if not self._holds(step, step, files):
                raise OutputError(_AGAIN, where=str(folder), hint=_JUDGED_ANEW)
            folder.rename(trash)
            if not self._holds(trash.name, step, files):
                trash.rename(folder)
                raise OutputError(_AGAIN, where=str(folder), hint=_JUDGED_ANEW)
            LOCAL_DISK.sync_directory(self._root)
            remove_tree(trash)

    def clear_up(self, *, remove: bool) -> Sequence[str]:
        """Removes folders that `remove` has renamed."""
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
            if entry.is_dir(follow_symlinks=False):
                if not is_work_folder(entry.name):
                    yield from self._below(f"{folder}/{entry.name}")
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield _stored(f"{folder}/{entry.name}", status)


def _stored(path: str, status: os.stat_result) -> StoredFile:
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
    return InputError(f"the run cannot be listed: {error.strerror or error}", where=str(path))


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
