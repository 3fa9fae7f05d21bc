"""Files under construction in a folder, written at their final offsets by many threads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ckptkit.core.errors import NoSpaceError, OutputError
from ckptkit.storage.buffers import address_of
from ckptkit.storage.descriptors import DescriptorPool
from ckptkit.storage.names import check_relative
from ckptkit.storage.syscalls import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Capabilities,
    is_out_of_space,
    is_refused,
    join_file,
    open_direct,
    open_for_writing,
    sync_directory,
)

OPEN_FILES = 64
SYNC_THREADS = 4
MIN_DIRECT_BYTES = 128 * 1024
"""Shorter writes go through the page cache: waiting for the device would cost more."""
Create = Callable[[Path, int, Capabilities], None]


class StagedFiles:
    """The files of an output in the hidden folder in which it grows."""

    def __init__(self, folder: Path, named: Path, capabilities: Capabilities) -> None:
        """Takes a folder that exists.

        Args:
            folder: Where the files are.
            named: The output, as messages call it.
            capabilities: What the platform offers.
        """
        self.folder = folder
        self._named = named
        self._capabilities = capabilities
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pool = DescriptorPool(self._open, OPEN_FILES, retire=StagedFile.retire)

    def __contains__(self, path: object) -> bool:
        return path in self._sizes

    def taken_bytes(self, path: str) -> int:
        """Returns the room that a file takes, 0 where nobody has made it."""
        return taken_bytes(self.folder / path)

    def create(self, path: str, size_bytes: int, create: Create) -> None:
        """Makes a file of that size, its content undefined until written.

        Raises:
            NoSpaceError: If the place has no room for it.
            OutputError: If it cannot be made.
            UnsafePathError: If it would lie outside the output.
        """
        check_relative(path, str(self._named))
        file = self.folder / path
        with translated(self._named, size_bytes):
            file.parent.mkdir(parents=True, exist_ok=True)
            create(file, size_bytes, self._capabilities)
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
        with translated(self._named, data.nbytes), self._pool.use(path) as file:
            file.write_at(start, data.cast("B"))

    def write_runs(self, path: str, starts: Sequence[int], data: memoryview) -> None:
        """Writes data that is cut into as many equal runs, each at its own byte of a file.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be written.
            ValueError: If a run is not inside a file that was created.
        """
        length = data.nbytes // len(starts)
        if min(starts) < 0 or max(starts) + length > self._sizes.get(path, -1):
            raise ValueError(f"runs from byte {min(starts)} on are not all in file {path!r}")
        with translated(self._named, data.nbytes), self._pool.use(path) as file:
            for number, start in enumerate(starts):
                file.write_at(start, data[number * length : (number + 1) * length])

    def sync(self) -> None:
        """Makes everything that was written durable, and closes it.

        Raises:
            OSError: If something cannot be made durable.
        """
        with ThreadPoolExecutor(SYNC_THREADS) as threads:
            for _ in threads.map(self._sync_file, self._sizes):
                pass
        self._pool.close()
        folders = [path for path in self.folder.rglob("*") if path.is_dir()]
        for folder in (*folders, self.folder):
            sync_directory(folder, self._capabilities)

    def close(self) -> None:
        """Closes the files."""
        self._pool.close()

    def _open(self, path: str) -> StagedFile:
        return StagedFile(self.folder / path, self._sizes[path], self._capabilities)

    def _sync_file(self, path: str) -> None:
        with self._pool.use(path) as file:
            file.sync()


class StagedFile:
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
        may_be_direct = self._direct_works and len(data) >= MIN_DIRECT_BYTES
        head, tail = _whole_pages(start, data) if may_be_direct else (0, 0)
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


@contextmanager
def translated(named: Path, size_bytes: int = 0) -> Iterator[None]:
    """Turns what the system says of an output into our errors.

    Args:
        named: The output, as the user named it.
        size_bytes: How much was to be written.

    Raises:
        NoSpaceError: If the disk is full.
        OutputError: If it cannot be written for another reason.
    """  # noqa: DOC501  `_no_space` makes it
    try:
        yield
    except OSError as error:
        if is_out_of_space(error):
            raise _no_space(named, size_bytes) from error
        reason = (error.strerror or str(error)).lower()
        name = f" (at {error.filename!r})" if error.filename else ""
        raise OutputError(f"cannot be written: {reason}{name}", where=str(named)) from error


def _no_space(named: Path, size_bytes: int) -> NoSpaceError:
    free = free_bytes(named.absolute())
    place = str(named.parent)
    if free > size_bytes > 0:
        text = f"the disk or a quota is full, although {free:,} bytes are free at {place!r}"
    else:
        text = f"needs {size_bytes:,} bytes more, but {free:,} are free at {place!r}"
    return NoSpaceError(text, where=str(named), hint="free some space, or name a place with more")


def write_small(path: Path, data: bytes, capabilities: Capabilities) -> None:
    """Makes a small file, durable with its entry in the folder, unless another process has.

    Raises:
        OSError: If it cannot be written.
    """
    join_file(path, len(data), capabilities)
    file = open_for_writing(path, capabilities)
    try:
        file.write_at(0, memoryview(data))
        file.sync()
    finally:
        file.close()
    sync_directory(path.parent, capabilities)


def free_bytes(path: Path) -> int:
    """Returns the room on the disk that holds `path`, or will."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def taken_bytes(path: Path) -> int:
    """Returns the room that a file takes on its disk; 0 for a folder."""
    if not path.is_file():
        return 0
    status = path.stat()
    return getattr(status, "st_blocks", 0) * 512 or status.st_size
