"""Writing a directory on a local or mounted file system, invisible until it is whole."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.core.errors import NoSpaceError, OutputError, OutputExistsError
from ckptkit.storage.buffers import address_of
from ckptkit.storage.descriptors import DescriptorPool
from ckptkit.storage.names import check_relative
from ckptkit.storage.publish import can_be_replaced, publish, publish_inside
from ckptkit.storage.syscalls import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Capabilities,
    create_file,
    detect_capabilities,
    is_out_of_space,
    is_refused,
    open_direct,
    open_for_writing,
    sync_directory,
)
from ckptkit.storage.workfolder import (
    WorkFolder,
    claim_work_folder,
    is_empty,
    sweep_work_folders,
)

_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

OPEN_FILES = 64
SYNC_THREADS = 4
MIN_DIRECT_BYTES = 128 * 1024
"""Shorter writes go through the page cache: waiting for the device would cost more."""


def output_exists(out: Path) -> OutputExistsError:
    """Returns the error for a destination that holds something already."""
    return OutputExistsError(
        "the directory holds files where an empty or absent one was expected",
        where=str(out),
        hint="name another directory, or pass --overwrite to replace this one",
    )


class LocalTarget:
    """A directory that comes into being, complete and durable, when it is committed.

    Until then its files grow in a hidden folder beside it, on the same file system. Large
    writes go past the page cache where the file system and the alignment of the data allow.
    """

    def __init__(
        self, out: Path, *, overwrite: bool = False, capabilities: Capabilities | None = None
    ) -> None:
        """Prepares the place, makes missing parents and sweeps away what a kill left behind.

        Args:
            out: The directory to be; its name is kept for messages as it is given.
            overwrite: Whether a directory that holds something is replaced by the commit.
            capabilities: What the platform offers; detected when left out.

        Raises:
            OutputExistsError: If `out` holds something and is not to be overwritten.
            OutputError: If `out` is no directory, or nothing can be written there.
        """
        self._named = out
        self._overwrite = overwrite
        self._capabilities = capabilities or detect_capabilities()
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pool = DescriptorPool(self._open, OPEN_FILES, retire=_StagedFile.retire)
        self._made: list[Path] = []
        with self._translated():
            self._out = out.resolve()
            self._refuse_file()
            try:
                self._made = _make_missing(self._out.parent)
                self._work = self._prepare()
            except BaseException:
                _remove_empty(self._made)
                raise
        self._inside = self._work.path.parent == self._out

    def create(self, path: str, size_bytes: int) -> None:
        """Makes a file of that size, its blocks reserved, its content undefined until written.

        Raises:
            NoSpaceError: If the place has no room for it.
            OutputError: If it exists already or cannot be made.
            UnsafePathError: If it would lie outside the output.
        """
        check_relative(path, str(self._named))
        file = self._work.files / path
        with self._translated(size_bytes):
            file.parent.mkdir(parents=True, exist_ok=True)
            create_file(file, size_bytes, self._capabilities)
        with self._lock:
            self._sizes[path] = size_bytes

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start` of a created file; thread-safe for disjoint ranges.

        Data whose address is congruent to `start` modulo 4,096 goes past the page cache.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be written.
            ValueError: If the range is not inside a file that was created.
        """
        size_bytes = self._sizes.get(path, -1)
        if start < 0 or start + data.nbytes > size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        if not data.nbytes:
            return
        with self._translated(data.nbytes), self._pool.use(path) as file:
            file.write_at(start, data.cast("B"))

    def commit(self, last: str) -> None:
        """Makes everything durable and visible at once, the file `last` after all others.

        Raises:
            OutputExistsError: If the destination was filled by somebody else meanwhile.
            NoSpaceError: If the disk is full.
            OutputError: If something cannot be made durable or visible.
            ValueError: If `last` was not created.
        """
        if last not in self._sizes:
            raise ValueError(f"file {last!r} was not created")
        with self._translated():
            self._sync()
            if not self._publish(last):
                raise self._filled()
            made, self._made = self._made, []
            for folder in {self._out.parent, *(path.parent for path in made)}:
                sync_directory(folder, self._capabilities)
        self._work.remove()

    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit."""
        self._pool.close()
        self._work.remove()
        _remove_empty(self._made)

    def free_bytes(self) -> int:
        """Returns how much room there is where the files are staged."""
        with self._translated():
            return _free_bytes(self._work.path)

    def _refuse_file(self) -> None:
        if self._out.exists() and not self._out.is_dir():
            raise OutputError(
                "a file was found where an empty or absent directory was expected",
                where=str(self._named),
            )

    def _prepare(self) -> WorkFolder:
        out, capabilities = self._out, self._capabilities
        for parent in (out.parent, out):
            sweep_work_folders(parent, out, capabilities)
        exists = out.is_dir()
        if exists and not self._overwrite and not is_empty(out):
            raise self._filled()
        try:
            work = claim_work_folder(out.parent, out.name, capabilities)
        except OSError as error:
            if not exists or error.errno not in _NOT_WRITABLE:
                raise
        else:
            if not exists or can_be_replaced(out, work):
                return work
            work.remove()
        return self._prepare_inside()

    def _prepare_inside(self) -> WorkFolder:
        if not is_empty(self._out):
            raise OutputError(
                "the directory holds files and cannot be renamed, so it cannot be replaced at once",
                where=str(self._named),
                hint="empty it, or name a directory below it",
            )
        return claim_work_folder(self._out, self._out.name, self._capabilities)

    def _open(self, path: str) -> _StagedFile:
        return _StagedFile(self._work.files / path, self._sizes[path], self._capabilities)

    def _publish(self, last: str) -> bool:
        work, out, capabilities = self._work, self._out, self._capabilities
        if self._inside:
            return publish_inside(work, out, last, capabilities)
        return publish(work, out, overwrite=self._overwrite, capabilities=capabilities)

    def _filled(self) -> OutputExistsError:
        return output_exists(self._named)

    def _sync(self) -> None:
        with ThreadPoolExecutor(SYNC_THREADS) as threads:
            for _ in threads.map(self._sync_file, self._sizes):
                pass
        self._pool.close()
        folders = [path for path in self._work.files.rglob("*") if path.is_dir()]
        for folder in (*folders, self._work.files):
            sync_directory(folder, self._capabilities)

    def _sync_file(self, path: str) -> None:
        with self._pool.use(path) as file:
            file.sync()

    @contextmanager
    def _translated(self, size_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_out_of_space(error):
                raise self._no_space(size_bytes) from error
            reason = (error.strerror or str(error)).lower()
            name = f" (at {error.filename!r})" if error.filename else ""
            raise OutputError(
                f"cannot be written: {reason}{name}", where=str(self._named)
            ) from error

    def _no_space(self, size_bytes: int) -> NoSpaceError:
        free = _free_bytes(self._out)
        place = str(self._named.parent)
        if free > size_bytes > 0:
            text = f"the disk or a quota is full, although {free:,} bytes are free at {place!r}"
        else:
            text = f"needs {size_bytes:,} bytes more, but {free:,} are free at {place!r}"
        return NoSpaceError(
            text, where=str(self._named), hint="free some space, or name a place with more"
        )


class _StagedFile:
    """A file under construction: whole pages go past the page cache, ragged edges through it."""

    __slots__ = ("_buffered", "_direct", "_direct_works")

    def __init__(self, path: Path, size_bytes: int, capabilities: Capabilities) -> None:
        self._buffered = open_for_writing(path, capabilities)
        self._direct = None
        try:
            if size_bytes >= MIN_DIRECT_BYTES:
                self._direct = open_direct(path, capabilities)
        except OSError:
            self._buffered.close()
            raise
        self._direct_works = self._direct is not None

    def write_at(self, start: int, data: memoryview) -> None:
        """Writes all of `data` at byte `start`."""
        head, tail = _whole_pages(start, data) if self._direct_works else (0, 0)
        if tail - head < MIN_DIRECT_BYTES:
            self._buffered.write_at(start, data)
            return
        if head:
            self._buffered.write_at(start, data[:head])
        self._write_pages(start + head, data[head:tail])
        if tail < len(data):
            self._buffered.write_at(start + tail, data[tail:])

    def sync(self) -> None:
        """Makes the content durable."""
        self._buffered.sync()

    def close(self) -> None:
        """Closes the descriptors."""
        self._buffered.close()
        if self._direct is not None:
            self._direct.close()

    def retire(self) -> None:
        """Closes the descriptors, but not before an error of writing back has been seen."""
        try:
            self.sync()
        finally:
            self.close()

    def _write_pages(self, start: int, data: memoryview) -> None:
        assert self._direct is not None  # noqa: S101 - narrows the type
        try:
            self._direct.write_at(start, data)
        except OSError as error:
            if not is_refused(error):
                raise
            self._direct_works = False  # other threads may still be in a direct write: not closed
            self._buffered.write_at(start, data)


def _whole_pages(start: int, data: memoryview) -> tuple[int, int]:
    """Returns the part of `data` that fills whole pages of the file; empty if misaligned."""
    head = -start % PAGE_BYTES
    tail = len(data) - (start + len(data)) % PAGE_BYTES
    if tail - head < MIN_DIRECT_BYTES or (address_of(data) + head) % BLOCK_BYTES:
        return 0, 0
    return head, tail


def _free_bytes(path: Path) -> int:
    """Returns the room on the disk that holds `path`, or will."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _make_missing(folder: Path) -> list[Path]:
    """Makes a folder and its missing parents, and returns those it made, outermost first."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    missing.reverse()
    for path in missing:
        path.mkdir(exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # somebody else uses it by now
        for folder in reversed(folders):
            folder.rmdir()
