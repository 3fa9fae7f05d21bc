"""Copies what some ranks wrote to their node's own disk to the shared storage."""

from __future__ import annotations

import mmap
import posixpath
import time
from collections.abc import Mapping
from pathlib import Path

from ckptkit.core.errors import MissingFileError, OutputError, TruncatedFileError
from ckptkit.storage.local.disk import BLOCK_BYTES, Disk, OpenFile
from ckptkit.storage.local.durable import make_folders, naming, put_file
from ckptkit.storage.locations import check_relative, unstaged_path
from ckptkit.writer.messages import ByteCounter, Drain, Written
from ckptkit.writer.persist import DirectFile
from ckptkit.writer.record import RECORDS_FOLDER, WrittenFile, parse_record

Mark = tuple[int, ...]
"""Numbers that change when a file is replaced or modified."""

_GONE = "the file does not exist"


def shared_mark(path: Path, *, names: int = 1) -> Mark | None:
    """Returns the mark of a file, None if it does not exist or has fewer links."""
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_nlink < names:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_small(folder: Path, path: str) -> bytes:
    """Returns a small file as a whole."""
    check_relative(path, str(folder))
    try:
        return (folder / path).read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(_GONE, where=unstaged_path(str(folder / path))) from error


def recorded_files(folder: Path, records: Mapping[str, bytes]) -> list[WrittenFile]:
    """Returns the files that records of ranks name."""
    return [
        file
        for path, data in records.items()
        for file in parse_record(data, where=str(folder / path)).files
    ]


def open_written(path: Path, size_bytes: int, disk: Disk) -> OpenFile:
    """Opens a file of known size for reading in order; the caller closes it."""
    try:
        file = disk.open_for_reading(path)
    except FileNotFoundError as error:
        raise MissingFileError(_GONE, where=unstaged_path(str(path))) from error
    current_bytes = file.status().st_size
    if current_bytes != size_bytes:
        file.close()
        raise TruncatedFileError(
            f"expected {size_bytes:,} bytes, found {current_bytes:,}",
            where=unstaged_path(str(path)),
        )
    file.advise_sequential()
    return file


BESIDE = f"{RECORDS_FOLDER}/beside"
"""The folder in a working folder that has the files that no record names, until the commit."""

_STRIDE_BYTES = 8 << 20
_SYNC_BYTES = 256 << 20  # cached at most, so that the last sync is short


class Drainer:
    """Copies the files of one step after another."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._buffer = mmap.mmap(-1, _STRIDE_BYTES)  # direct I/O needs an aligned address
        # Marks of source and copy of files with several links, such as frozen weights, by path.
        self._shared: dict[str, tuple[Mark | None, Mark | None]] = {}

    def drain(self, request: Drain, counter: ByteCounter) -> Written:
        """Copies files, then the records that prove them; everything is durable afterwards."""
        began, processor = time.monotonic(), time.process_time()
        folder, target = Path(request.folder), Path(request.target)
        if not target.parent.is_dir():  # a new one might be on the disk below a mount point
            raise OutputError(
                "the directory of the run does not exist any more",
                where=str(target.parent),
                hint="check that it is mounted; the step stays on the node's own disk meanwhile",
            )
        records = {path: read_small(folder, path) for path in request.records}
        listed = recorded_files(folder, records)
        extra = {posixpath.join(BESIDE, path): read_small(folder, path) for path in request.further}
        goals = {posixpath.dirname(p) for p in (*(file.path for file in listed), *extra, *records)}
        made = make_folders(target, goals, self._disk)
        linked_bytes = sum(self._link_or_copy(file, request, counter) for file in listed)
        for path, data in extra.items():
            put_file(target / path, data)
        for parent in made:
            self._disk.sync_directory(parent)
        for path, data in records.items():
            put_file(target / path, data)
        self._disk.sync_directory(target / RECORDS_FOLDER)
        size_bytes = sum(file.size_bytes for file in listed) - linked_bytes
        return Written(
            attempt=request.attempt,
            size_bytes=size_bytes + sum(map(len, (*extra.values(), *records.values()))),
            seconds=time.monotonic() - began,
            cpu_seconds=time.process_time() - processor,
            linked_bytes=linked_bytes,
        )

    def _link_or_copy(self, file: WrittenFile, request: Drain, counter: ByteCounter) -> int:
        """Returns how many bytes were linked; a copy is durable, its entry in the folder is not."""
        source, target = Path(request.folder, file.path), Path(request.target, file.path)
        mark = shared_mark(source, names=2)
        known = self._shared.pop(file.path, None)
        if mark is not None and request.earlier:
            earlier = Path(request.earlier, file.path)
            if known == (mark, shared_mark(earlier)):
                try:
                    self._disk.link_file(earlier, target)
                except OSError:  # refused, or the file has the maximum number of links
                    pass
                else:
                    self._shared[file.path] = mark, shared_mark(target)
                    return file.size_bytes
        with naming(source):
            read = open_written(source, file.size_bytes, self._disk)
        try:
            padded_bytes = -(-file.size_bytes // BLOCK_BYTES) * BLOCK_BYTES
            write = DirectFile(target, padded_bytes, self._disk, sync_bytes=_SYNC_BYTES)
            try:
                self._copy(read, write, source, file.size_bytes, counter)
                write.end(file.size_bytes)
            finally:
                write.close()
        finally:
            read.close()
        if mark is not None:
            self._shared[file.path] = mark, shared_mark(target)
        return 0

    def _copy(
        self,
        read: OpenFile,
        write: DirectFile,
        source: Path,
        size_bytes: int,
        counter: ByteCounter,
    ) -> None:
        with memoryview(self._buffer) as buffer:
            for start in range(0, size_bytes, _STRIDE_BYTES):
                stride_bytes = min(_STRIDE_BYTES, size_bytes - start)
                with naming(source):
                    read_bytes = read.read_at(start, buffer[:stride_bytes])
                if read_bytes != stride_bytes:
                    raise TruncatedFileError("it was cut short", where=str(source))
                write.write(start, buffer[: -(-stride_bytes // BLOCK_BYTES) * BLOCK_BYTES])
                counter.done_bytes += stride_bytes
