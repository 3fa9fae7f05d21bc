"""Copying what some ranks wrote on their node's own disk to the place that all nodes share.

What ranks wrote on their node's own disk, as it is read again to be brought elsewhere.
"""

from __future__ import annotations

import mmap
import posixpath
import time
from collections.abc import Mapping
from pathlib import Path

from ckptkit.core.errors import MissingFileError, OutputError, TruncatedFileError
from ckptkit.storage.local.disk import BLOCK_BYTES, Disk, OpenFile, is_refused
from ckptkit.storage.local.names import check_relative
from ckptkit.writer.commit import make_folders, put_file
from ckptkit.writer.failures import Tally, naming
from ckptkit.writer.messages import Drain, Written
from ckptkit.writer.record import FOLDER, WrittenFile, parse_record

Mark = tuple[int, ...]
"""What changes with a file."""

_GONE = "nothing was found there"


def shared_mark(path: Path, *, names: int = 1) -> Mark | None:
    """Returns what changes with a file.

    Args:
        path: The file.
        names: How many it has to have: those that steps have in common have two at least.

    Returns:
        None where it is not there, or has fewer names.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_nlink < names:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_small(folder: Path, path: str) -> bytes:
    """Returns a small file as a whole.

    Args:
        folder: Where it lies.
        path: Its path from there.
    """
    check_relative(path, str(folder))
    try:
        return (folder / path).read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(_GONE, where=str(folder / path)) from error


def recorded_files(folder: Path, records: Mapping[str, bytes]) -> list[WrittenFile]:
    """Returns the files that ranks' records name.

    Args:
        folder: Where they lie.
        records: What was read of the records, by path.
    """
    return [
        file
        for path, data in records.items()
        for file in parse_record(data, where=str(folder / path)).files
    ]


def open_written(path: Path, size_bytes: int, disk: Disk) -> OpenFile:
    """Opens a file of which the length is known, to be read in order; it has to be closed."""
    try:
        file = disk.open_for_reading(path)
    except FileNotFoundError as error:
        raise MissingFileError(_GONE, where=str(path)) from error
    found = file.status().st_size
    if found != size_bytes:
        file.close()
        raise TruncatedFileError(
            f"{found:,} bytes were found where {size_bytes:,} were written", where=str(path)
        )
    file.advise_sequential()
    return file


BESIDE = f"{FOLDER}/beside"
"""Where in a working folder the files lie that no record names, until the commit."""

_STRIDE_BYTES = 8 << 20
_SYNC_BYTES = 256 << 20  # cached at most, so that the last sync is no long one


class Drainer:
    """Copies the files of one step after another."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        # Of files with several names, as frozen weights have: marks of source and copy, by path.
        self._shared: dict[str, tuple[Mark | None, Mark | None]] = {}

    def drain(self, request: Drain, tally: Tally) -> Written:
        """Copies files, then the records that prove them; all of it is durable at the end.

        Args:
            request: What to copy.
            tally: Is told of every stride.

        Returns:
            What was copied.
        """
        began, processor = time.monotonic(), time.process_time()
        folder, target = Path(request.folder), Path(request.target)
        _check_place(target.parent)
        records = {path: read_small(folder, path) for path in request.records}
        listed = recorded_files(folder, records)
        extra = {posixpath.join(BESIDE, path): read_small(folder, path) for path in request.further}
        goals = {posixpath.dirname(p) for p in (*(file.path for file in listed), *extra, *records)}
        made = make_folders(target, goals, self._disk)
        copier = _Copier(self._disk, tally)
        linked_bytes = sum(self._bring(file, request, copier) for file in listed)
        for path, data in extra.items():
            put_file(target / path, data)
        for parent in made:
            self._disk.sync_directory(parent)
        for path, data in records.items():
            put_file(target / path, data)
        self._disk.sync_directory(target / FOLDER)
        size_bytes = sum(file.size_bytes for file in listed) - linked_bytes
        return Written(
            attempt=request.attempt,
            size_bytes=size_bytes + sum(map(len, (*extra.values(), *records.values()))),
            seconds=time.monotonic() - began,
            cpu_seconds=time.process_time() - processor,
            linked_bytes=linked_bytes,
        )

    def _bring(self, file: WrittenFile, request: Drain, copier: _Copier) -> int:
        """Copies or links a file; returns how many bytes were linked."""
        source, target = Path(request.folder, file.path), Path(request.target, file.path)
        mark = shared_mark(source, names=2)
        known = self._shared.pop(file.path, None)
        if mark is not None and request.earlier:
            earlier = Path(request.earlier, file.path)
            if known == (mark, shared_mark(earlier)) and self._linked(earlier, target):
                self._shared[file.path] = mark, shared_mark(target)
                return file.size_bytes
        copier.copy(source, target, file.size_bytes)
        if mark is not None:
            self._shared[file.path] = mark, shared_mark(target)
        return 0

    def _linked(self, earlier: Path, target: Path) -> bool:
        try:
            self._disk.link_file(earlier, target)
        except OSError:  # refused, or it has as many names as it may have
            return False
        return True


def _check_place(run: Path) -> None:
    """Refuses to make what is no longer there: below it may be a mount point and a small disk."""
    if not run.is_dir():
        raise OutputError(
            "the directory of the run is not there any more",
            where=str(run),
            hint="see whether it is mounted; the step stays on the node's own disk meanwhile",
        )


class _Copier:
    """Copies files through one aligned buffer, past the page cache where that is possible."""

    def __init__(self, disk: Disk, tally: Tally) -> None:
        self._disk = disk
        self._tally = tally
        self._buffer = mmap.mmap(-1, _STRIDE_BYTES)  # direct I/O wants an aligned address

    def copy(self, source: Path, target: Path, size_bytes: int) -> None:
        """Copies a file of which the length is known, durably but for its entry in the folder."""
        padded = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        with naming(source):
            read = open_written(source, size_bytes, self._disk)
        try:
            with naming(target):
                self._disk.create_file(target, padded)
                self._fill(read, source, target, size_bytes)
        finally:
            read.close()

    def _fill(self, read: OpenFile, source: Path, target: Path, size_bytes: int) -> None:
        direct = self._disk.open_direct(target)
        write = direct or self._disk.open_for_writing(target)
        cached = 0
        try:
            with memoryview(self._buffer) as buffer:
                for start in range(0, size_bytes, _STRIDE_BYTES):
                    wanted = min(_STRIDE_BYTES, size_bytes - start)
                    if read.read_at(start, buffer[:wanted]) != wanted:
                        raise TruncatedFileError("it was cut short", where=str(source))
                    data = buffer[: -(-wanted // BLOCK_BYTES) * BLOCK_BYTES]
                    write = self._put(write, target, start, data)
                    self._tally.done_bytes += wanted
                    cached += wanted
                    if direct is None and cached >= _SYNC_BYTES:
                        write.sync()
                        cached = 0
            write.truncate(size_bytes)
            write.sync()
        finally:
            write.close()

    def _put(self, write: OpenFile, target: Path, start: int, data: memoryview) -> OpenFile:
        """Writes a stride; returns the file, another one where the first refused direct I/O."""
        try:
            write.write_at(start, data)
        except OSError as error:
            if not is_refused(error):
                raise
            write.close()
            write = self._disk.open_for_writing(target)
            write.write_at(start, data)
        return write
