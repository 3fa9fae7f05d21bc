"""A run on a local or mounted file system.

The directory of a run as a whole: what lies in it, who uses it, and removal step by step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptkit.core.errors import InputError, NotACheckpointError, OutputError
from ckptkit.runs.marks import StepMark, claim, hold, run_is_live
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
    """A run on some storage. Steps are called by the names of their folders."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """Returns the files of all steps, sorted by path."""
        ...

    def is_live(self) -> bool | None:
        """Returns whether a job is writing to the run; None where nobody can know."""
        ...

    def is_there(self, path: str) -> bool:
        """Returns whether a file is there at this moment."""
        ...

    def hold(self, step: str, markers: Collection[str]) -> AbstractContextManager[object]:
        """Marks a step as being read, until the result is left.

        Args:
            step: The name of its folder.
            markers: Files of the step by which its readers are known, relative to the run.
        """
        ...

    def in_use(self, step: str, markers: Collection[str]) -> bool:
        """Returns whether somebody reads a step now; changes nothing."""
        ...

    def claim(
        self, step: str, markers: Collection[str], files: Sequence[StoredFile]
    ) -> AbstractContextManager[object] | None:
        """Keeps new readers from a step that is to be removed, until the result is left.

        Args:
            step: The name of its folder.
            markers: Files of the step by which its readers are known, relative to the run.
            files: What is to be removed.

        Returns:
            What keeps them out, or None where somebody reads it now.
        """
        ...

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Removes a step; at no moment does half of it look like a whole one.

        Args:
            step: The name of its folder.
            files: What was seen in it, and no file that came later.
        """
        ...

    def clear_up(self, *, remove: bool) -> Sequence[str]:
        """Removes what removals left behind that were interrupted.

        Args:
            remove: Whether it goes; otherwise it is only named.

        Returns:
            The steps concerned, by name.
        """
        ...


_AGAIN = "was written again, or changed, since it was listed"
_JUDGED_ANEW = "run again; it is judged anew"
_HIDDEN = re.compile(rf"\.(?P<step>.+?){re.escape(WORK_INFIX)}{TRASH}-[0-9a-f]+")


class LocalRun:
    """A directory with steps in it; see `RunStore`."""

    def __init__(self, root: Path, is_step: Callable[[str], bool]) -> None:
        """Looks at nothing but whether it is there.

        Args:
            root: The directory; its name is kept for messages as it is given.
            is_step: Tells from the name of a folder whether it is that of a step.
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
        """Returns whether a job has the lock of the run; None where nobody can know."""
        try:
            return run_is_live(self._root)
        except OSError:
            return None

    def is_there(self, path: str) -> bool:
        return (self._root / path).exists()

    def hold(self, step: str, markers: Collection[str]) -> StepMark:  # noqa: ARG002
        return hold(self._root / path for path in sorted(markers))

    def in_use(self, step: str, markers: Collection[str]) -> bool:
        """Returns whether somebody has one of the locks of a step's markers."""
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
    ) -> StepMark | None:
        """Takes the locks of a step's markers for removal; None where somebody has one."""
        return claim(self._root / path for path in sorted(markers))

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Takes a step's name away, durably, and then removes it.

        A job may replace the step at any time; what is not what was seen gets its name back.
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
        """Removes folders that have lost their names."""
        found = []
        with _readable(self._root):
            left = sorted(self._root.iterdir())
        for path in left:
            match = _HIDDEN.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():
                continue
            found.append(match["step"])
            if remove:
                with _removable(path):
                    remove_tree(path)
        return found

    def _holds(self, folder: str, step: str, files: Sequence[StoredFile]) -> bool:
        """Returns whether a folder has the files that were seen in a step, and no others."""
        seen = {file.path.removeprefix(step): file.identity for file in files}
        return seen == {f.path.removeprefix(folder): f.identity for f in self._below(folder)}

    def _below(self, folder: str) -> Iterator[StoredFile]:
        try:
            with os.scandir(self._root / folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:  # removed meanwhile
            return
        except OSError as error:
            raise _unreadable(self._root / folder, error) from error
        for entry in found:
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
        return  # somebody else was faster
    except OSError as error:
        raise OutputError(
            f"cannot be removed: {error.strerror or error}",
            where=str(path),
            hint="see whose it is, and whether the file system was mounted read-only",
        ) from error
