"""The hidden folder in which a pull grows: it outlives a kill, and the next pull goes on there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.core.errors import NoSpaceError, OutputError, OutputExistsError, RefusedError
from ckptkit.core.texts import size_text
from ckptkit.storage.names import WORK_INFIX
from ckptkit.storage.publish import publish
from ckptkit.storage.staged_files import free_bytes, translated
from ckptkit.storage.staging import make_missing
from ckptkit.storage.syscalls import (
    Capabilities,
    detect_capabilities,
    is_refused,
    open_locked,
    sync_directory,
)
from ckptkit.storage.workfolder import WorkFolder, is_empty

_CLIENT = ".cache"  # what the client remembers of its downloads lies here, beside the files


class Partial:
    """The files of a pull on their way to the folder that they are to be."""

    def __init__(self, out: Path, work: WorkFolder, capabilities: Capabilities) -> None:
        self._named = out
        self._out = out.resolve()
        self._work = work
        self._capabilities = capabilities

    @property
    def files(self) -> Path:
        """Where the files are put."""
        return self._work.files

    def keep_only(self, paths: set[str]) -> None:
        """Removes what an earlier pull of another revision left."""
        for path in list(self._files()):
            if path.relative_to(self.files).as_posix() not in paths:
                path.unlink()

    def check_room(self, sizes: dict[str, int]) -> None:
        """Refuses a pull that the disk has no room for.

        Raises:
            NoSpaceError: If there is too little.
        """
        there = sum(
            (self.files / path).stat().st_size for path in sizes if (self.files / path).is_file()
        )
        wanted, free = sum(sizes.values()) - there, free_bytes(self.files)
        if wanted > free:
            raise NoSpaceError(
                f"{size_text(wanted)} are to be written, and {size_text(free)} are free",
                where=str(self._named),
                hint="make room, or name a directory on another disk",
            )

    def commit(self) -> None:
        """Makes everything durable, and the folder visible.

        Raises:
            OutputExistsError: If somebody filled the destination meanwhile.
            OutputError: If something cannot be made durable or visible.
        """  # noqa: DOC501  `_exists` and `translated` make them
        with translated(self._named):
            shutil.rmtree(self.files / _CLIENT, ignore_errors=True)
            folders = {self.files}
            for path in self._files():
                _sync(path)
                folders.add(path.parent)
            for folder in folders:
                sync_directory(folder, self._capabilities)
            if not publish(self._work, self._out, overwrite=False, capabilities=self._capabilities):
                raise _exists(self._named)
            sync_directory(self._out.parent, self._capabilities)
        self._work.remove()

    def leave(self) -> None:
        """Lets go of the folder; what came so far stays for the next pull."""
        if any(self._files()) or (self.files / _CLIENT).exists():
            self._work.release()
        else:
            self._work.remove()

    def _files(self) -> Iterator[Path]:
        for path in self.files.rglob("*"):
            if path.is_file() and _CLIENT not in path.relative_to(self.files).parts[:1]:
                yield path


@contextmanager
def partial_folder(out: Path) -> Iterator[Partial]:
    """Makes the hidden folder beside `out`, or enters the one that a pull left behind.

    Yields:
        What is to be filled, and committed.

    Raises:
        OutputExistsError: If `out` holds something.
        OutputError: If `out` is a file, or nothing can be written there.
        RefusedError: If another pull is at work there.
    """  # noqa: DOC501  `_exists` makes the first
    capabilities = detect_capabilities()
    if out.exists() and not out.is_dir():
        raise OutputError("a file was found where a directory was expected", where=str(out))
    if out.is_dir() and not is_empty(out):
        raise _exists(out)
    with translated(out):
        resolved = out.resolve()
        make_missing(resolved.parent)
        work = _enter(resolved, capabilities)
    if work is None:
        raise RefusedError(
            "another pull is writing there",
            where=str(out),
            hint="wait for it, or name another directory",
        )
    partial = Partial(out, work, capabilities)
    try:
        yield partial
    finally:
        partial.leave()


def _exists(out: Path) -> OutputExistsError:
    return OutputExistsError(
        "the directory holds files where an empty or absent one was expected",
        where=str(out),
        hint="name another directory",
    )


def _enter(out: Path, capabilities: Capabilities) -> WorkFolder | None:
    path = out.parent / f".{out.name}{WORK_INFIX}pull"
    path.mkdir(exist_ok=True)
    lock = None
    if capabilities.locks:
        try:
            lock = open_locked(path / ".lock", capabilities)
        except OSError as error:
            if not is_refused(error):
                raise
        else:
            if lock is None:
                return None
    work = WorkFolder(path, lock)
    work.files.mkdir(exist_ok=True)
    return work


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
