"""Writing a directory on a local or mounted file system, invisible until it is whole."""

from __future__ import annotations

import errno
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import OutputError, OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.names import check_relative
from ckptkit.storage.publish import can_be_replaced, publish, publish_inside
from ckptkit.storage.replacing import manifest_mark, refuse_newer, refuse_unnamed_in
from ckptkit.storage.staged_files import StagedFiles, free_bytes, taken_bytes, translated
from ckptkit.storage.syscalls import (
    Capabilities,
    create_file,
    detect_capabilities,
    sync_directory,
)
from ckptkit.storage.workfolder import (
    WorkFolder,
    claim_work_folder,
    is_empty,
    reclaim_work_folder,
    sweep_work_folders,
)

_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def output_exists(out: Path) -> OutputExistsError:
    """Returns the error for a destination that holds something already."""
    return OutputExistsError(
        "the directory holds files where an empty or absent one was expected",
        where=str(out),
        hint="name another directory, or have this one replaced: --overwrite, overwrite=True",
    )


def cannot_be_replaced(out: Path) -> OutputError:
    """Returns the error for a full destination that is to be overwritten and cannot be renamed."""
    return OutputError(
        "the directory holds files and cannot be renamed, so it cannot be replaced at once",
        where=str(out),
        hint="empty it, or name a directory below it",
    )


class LocalTarget:
    """A directory that comes into being, complete and durable, when it is committed.

    Until then its files grow in a hidden folder beside it, on the same file system. Large
    writes go past the page cache where the file system and the alignment of the data allow.

    Attributes:
        has_finished: Whether something there is worth to be left to another run.
    """

    def __init__(
        self,
        out: Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Prepares the place, makes missing parents and sweeps away what a kill left behind.

        Args:
            out: The directory to be; its name is kept for messages as it is given.
            overwrite: Whether a directory that holds something is replaced by the commit.
            resume: Whether what a kill left behind is gone on with, where it has a journal.
            capabilities: What the platform offers; detected when left out.

        Raises:
            OutputExistsError: If `out` holds something and is not to be overwritten.
            OutputError: If `out` is no directory, or nothing can be written there.
        """
        self._named = out
        self._overwrite = overwrite
        self._resume = resume
        self._is_left = False
        self.has_finished = False
        self._capabilities = capabilities or detect_capabilities()
        self._made: list[Path] = []
        with translated(self._named):
            self._out = out.resolve()
            self._refuse_file()
            try:
                self._made = make_missing(self._out.parent)
                self._work = self._prepare()
            except BaseException:
                remove_empty(self._made)
                raise
        self._seen = manifest_mark(self._out)
        self._inside = self._work.path.parent == self._out
        self._files = StagedFiles(self._work.files, out, self._capabilities)

    @property
    def location(self) -> str:
        """The directory to be, as it was named."""
        return str(self._named)

    def create(self, path: str, size_bytes: int) -> None:
        """Makes a file of that size, its blocks reserved, its content undefined until written.

        Raises:
            NoSpaceError: If the place has no room for it.
            OutputError: If it exists already or cannot be made.
            UnsafePathError: If it would lie outside the output.
        """
        self._files.create(path, size_bytes, create_file)

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start` of a created file; thread-safe for disjoint ranges.

        Data whose address is congruent to `start` modulo 4,096 goes past the page cache.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be written.
            ValueError: If the range is not inside a file that was created.
        """
        self._files.write(path, start, data)

    def commit(self, last: str) -> None:
        """Makes everything durable and visible at once, the file `last` after all others.

        Raises:
            OutputExistsError: If another run has filled the destination, or replaced what was
                there, since this target was made.
            RefusedError: If it holds files that are not of an earlier output.
            NoSpaceError: If the disk is full.
            OutputError: If something cannot be made durable or visible.
            ValueError: If `last` was not created.
        """
        if last not in self._files:
            raise ValueError(f"file {last!r} was not created")
        with translated(self._named):
            self._files.sync()
            if last == MANIFEST_NAME and self._overwrite and self._out.is_dir():
                refuse_newer(manifest_mark(self._out), self._seen, str(self._named))
                refuse_unnamed_in(self._out, str(self._named))
            if not self._publish(last):
                raise self._filled()
            made, self._made = self._made, []
            for folder in {self._out.parent, *(path.parent for path in made)}:
                sync_directory(folder, self._capabilities)
        self._work.remove()
        self._sweep()  # what killed runs left to be resumed is of no use any more

    @property
    def is_filled(self) -> bool:
        """Whether another process has filled the destination, so that nothing can be committed."""
        return not self._overwrite and self._out.is_dir() and not is_empty(self._out)

    def _sweep(self) -> None:
        for parent in (self._out.parent, self._out):
            sweep_work_folders(parent, self._out, self._capabilities)

    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit, or where it was left."""
        if self._is_left:
            return
        self._files.close()
        self._work.remove()
        remove_empty(self._made)

    def leave(self) -> None:
        """Ends without a commit, and leaves what was written to whoever goes on with it."""
        self._is_left = True
        self._files.close()
        self._work.release()

    @property
    def folder(self) -> Path:
        """The hidden folder in which the output grows."""
        return self._work.path

    @property
    def journal(self) -> Path:
        """Where it is written down what is finished."""
        return self._work.journal

    def staged(self, path: str) -> Path:
        """Returns where a file of the output is until the commit.

        Raises:
            UnsafePathError: If it would lie outside the output.
        """
        check_relative(path, str(self._named))
        return self._work.files / path

    def keep(self, paths: Collection[str]) -> None:
        """Takes over finished files of an earlier run, and removes what else it left.

        Args:
            paths: Relative to the output; they have been proven.

        Raises:
            OutputError: If something cannot be removed.
        """
        kept = {self.staged(path) for path in paths}
        with translated(self._named):
            for file in list(self._work.files.rglob("*")):
                if file not in kept and not file.is_dir():
                    file.unlink()
        for path in paths:
            self._files.create(path, self.staged(path).stat().st_size, _stays)
        self.has_finished = bool(paths)

    def free_bytes(self) -> int:
        """Returns how much room there is for the output, with what an earlier run has taken."""
        with translated(self._named):
            taken = sum(taken_bytes(path) for path in self._work.files.rglob("*"))
            return free_bytes(self._work.path) + taken

    def _refuse_file(self) -> None:
        if self._out.exists() and not self._out.is_dir():
            raise OutputError(
                "a file was found where an empty or absent directory was expected",
                where=str(self._named),
            )

    def _prepare(self) -> WorkFolder:
        found = self._reclaimed() if self._resume else None
        self._sweep()
        if self.is_filled:
            if found is not None:
                found.remove()
            raise self._filled()
        self.has_finished = found is not None
        return found or self._claimed()

    def _claimed(self) -> WorkFolder:
        out, exists = self._out, self._out.is_dir()
        try:
            work = claim_work_folder(out.parent, out.name, self._capabilities)
        except OSError as error:
            if not exists or error.errno not in _NOT_WRITABLE:
                raise
        else:
            if not exists or can_be_replaced(out, work):
                return work
            work.remove()
        return self._prepare_inside()

    def _reclaimed(self) -> WorkFolder | None:
        out = self._out
        found = reclaim_work_folder(out.parent, out, self._capabilities)
        return found or reclaim_work_folder(out, out, self._capabilities)

    def _prepare_inside(self) -> WorkFolder:
        if not is_empty(self._out):
            raise cannot_be_replaced(self._named)
        return claim_work_folder(self._out, self._out.name, self._capabilities)

    def _publish(self, last: str) -> bool:
        work, out, capabilities = self._work, self._out, self._capabilities
        if self._inside:
            return publish_inside(work, out, last, capabilities)
        return publish(work, out, overwrite=self._overwrite, capabilities=capabilities)

    def _filled(self) -> OutputExistsError:
        return output_exists(self._named)


def _stays(_path: Path, _size_bytes: int, _capabilities: Capabilities) -> None:
    """Makes no file, since it is there."""


def make_missing(folder: Path) -> list[Path]:
    """Makes a folder and its missing parents, and returns those it made, outermost first."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    missing.reverse()
    for path in missing:
        path.mkdir(exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Removes folders, given outermost first, as far as nobody else uses them."""
    with suppress(OSError):  # somebody else uses it by now
        for folder in reversed(folders):
            folder.rmdir()
