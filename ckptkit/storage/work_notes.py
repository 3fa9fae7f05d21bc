"""Small files in a hidden folder, by which processes that fill one output tell of themselves."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.storage.staged_files import translated, write_small
from ckptkit.storage.syscalls import (
    Capabilities,
    is_refused,
    open_locked,
    sync_directory,
)

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES})
_CONTENT = "content"


class WorkNotes:
    """Notes, each a folder with one file in it: renaming a folder never replaces a filled one."""

    def __init__(self, folder: Path, named: Path, capabilities: Capabilities) -> None:
        """Looks into a folder that exists.

        Args:
            folder: The hidden folder.
            named: The output, as messages call it.
            capabilities: What the platform offers.
        """
        self._folder = folder
        self._named = named
        self._capabilities = capabilities

    def put(self, name: str, data: bytes) -> bytes:
        """Leaves a note unless there is one of that name, durable, whole or not at all.

        Returns:
            What the note says: `data`, or what another process was first with.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be left, or the folder is gone.
        """  # noqa: DOC501  what the system raises is translated
        new = self._folder / f"{name}.{os.urandom(8).hex()}"
        with translated(self._named, len(data)):
            try:
                new.mkdir()
                write_small(new / _CONTENT, data, self._capabilities)
                new.rename(self._folder / name)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                found = self.get(name) if error.errno in _OCCUPIED else None
                if found is None:
                    raise
                return found
            sync_directory(self._folder, self._capabilities)
        return data

    def get(self, name: str) -> bytes | None:
        """Returns what a note says, None where there is none.

        Raises:
            OutputError: If it cannot be read.
        """
        with translated(self._named):
            try:
                return (self._folder / name / _CONTENT).read_bytes()
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, name: str, _owner: str = "") -> Iterator[bool]:
        """Yields whether this process is the only one here; always, where there are no locks."""
        if not self._capabilities.locks:
            yield True
            return
        try:
            lock = open_locked(self._folder / f"{name}.lock", self._capabilities)
        except FileNotFoundError:  # the folder is gone: somebody was here before
            yield False
            return
        except OSError as error:
            if not is_refused(error):
                raise
            yield True
            return
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()
