"""Writes one rank's files of an attempt, and last the record that lists them.

Files come from the shared buffer, whose archives are checksummed on the way, or from messages.
Files that several steps share are linked.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptkit.core.crc import crc32
from ckptkit.core.errors import SaveError, WriterError
from ckptkit.core.threads import WorkerThread
from ckptkit.storage.local.disk import BLOCK_BYTES, Disk, OpenFile, is_refused
from ckptkit.storage.local.durable import make_folders, naming, put_file
from ckptkit.storage.locations import check_relative, unstaged_path
from ckptkit.writer.messages import (
    ArchiveData,
    ByteCounter,
    Image,
    Link,
    Persist,
    RecordProof,
    Written,
)
from ckptkit.writer.record import WrittenFile, record_bytes

STRIDE_BYTES = 8 << 20
"""What is checksummed and written at a time."""

_CRC_BYTES = 4
_SYNC_BYTES = 1 << 30  # cached at most: one sync of a whole large file would look like a hang


class DirectFile:
    """A new file that is written with direct I/O as long as the file system allows it.

    Attributes:
        direct: Whether direct I/O is still used.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        disk: Disk,
        *,
        sync_bytes: int,
    ) -> None:
        self._path = path
        self._sync_bytes = sync_bytes
        self._disk = disk
        with naming(path):
            disk.create_file(path, size_bytes)
            direct = disk.open_direct(path)
            self._file: OpenFile = direct or disk.open_for_writing(path)
        self.direct = direct is not None
        self._cached_bytes = 0

    def write(self, at: int, data: memoryview) -> None:
        """Writes at an offset; address, offset and length are multiples of `BLOCK_BYTES`."""
        with naming(self._path):
            try:
                self._file.write_at(at, data)
            except OSError as error:
                if not self.direct or not is_refused(error):
                    raise
                self._file.close()
                self._file = self._disk.open_for_writing(self._path)
                self.direct = False
                self._file.write_at(at, data)
            self._cached_bytes += len(data)
            if not self.direct and self._cached_bytes >= self._sync_bytes:
                self._file.sync()
                self._cached_bytes = 0

    def end(self, size_bytes: int) -> None:
        """Cuts off the padding, makes the file durable and closes it."""
        with naming(self._path):
            self._file.truncate(size_bytes)
            self._file.sync()
        self._file.close()

    def close(self) -> None:
        self._file.close()


class ImageWriter:
    """Writes images one after another; they are durable when the `with` block ends.

    While a thread writes one stride of an image, the next one is checksummed.

    Args:
        disk: The file operations of the platform.
        counter: Counts the bytes done.
    """

    def __init__(self, disk: Disk, counter: ByteCounter) -> None:
        self._disk = disk
        self._counter = counter
        self._worker = WorkerThread("ckptkit-disk")
        self._under_way: Future[None] | None = None
        self._outputs: list[DirectFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None and self._under_way is not None:
                self._under_way.result()
        finally:
            self._worker.close()
            for output in self._outputs:
                output.close()

    @property
    def refused(self) -> bool:
        return any(not output.direct for output in self._outputs)

    def write(self, path: Path, image: Image, buffer: memoryview) -> int | None:
        """Writes an image, and starts to make it durable; returns its CRC-32 where it is summed."""
        stop = _check_image(image, len(buffer))
        output = DirectFile(path, stop - image.start, self._disk, sync_bytes=_SYNC_BYTES)
        self._outputs.append(output)
        sums = _Sums(image.archives, buffer)
        crc, end = 0, image.start + image.size_bytes
        for start in range(image.start, stop, STRIDE_BYTES):
            data = buffer[start : min(start + STRIDE_BYTES, stop)]
            sums.advance(start + len(data))
            if image.summed:
                crc = crc32(buffer[start : min(start + len(data), end)], crc)
            self._start(partial(self._put, output, start - image.start, data))
        self._start(partial(output.end, image.size_bytes))
        return crc if image.summed else None

    def _start(self, job: Callable[[], None]) -> None:
        """Starts a job after the current one; raises what the current one raised."""
        if self._under_way is not None:
            self._under_way.result()
        self._under_way = self._worker.submit(job)

    def _put(self, output: DirectFile, at: int, data: memoryview) -> None:
        output.write(at, data)
        self._counter.done_bytes += len(data)


class _Sums:
    """Computes the CRC-32 of each archive in order, and writes it into the buffer."""

    def __init__(self, archives: tuple[ArchiveData, ...], buffer: memoryview) -> None:
        self._left = iter(archives)
        self._archive = next(self._left, None)
        self._buffer = buffer
        self._at = self._archive.start if self._archive else 0
        self._crc = 0

    def advance(self, stop: int) -> None:
        """Adds the data before `stop`; the fields of a checksum come after its data."""
        while self._archive is not None and self._archive.start < stop:
            end = min(stop, self._archive.stop)
            self._crc = crc32(self._buffer[self._at : end], self._crc)
            self._at = end
            if end < self._archive.stop:
                return
            for at in self._archive.crc_at:
                self._buffer[at : at + _CRC_BYTES] = self._crc.to_bytes(_CRC_BYTES, "little")
            self._archive = next(self._left, None)
            self._at, self._crc = self._archive.start if self._archive else 0, 0


def _check_image(image: Image, buffer_bytes: int) -> int:
    """Returns the end of an image in the buffer, including its padding."""
    end = image.start + image.size_bytes
    stop = -(-end // BLOCK_BYTES) * BLOCK_BYTES
    fits = image.start >= 0 and image.size_bytes >= 0 and stop <= buffer_bytes
    at = image.start
    for archive in image.archives:
        fits &= at <= archive.start <= archive.stop
        fits &= all(archive.stop <= place <= end - _CRC_BYTES for place in archive.crc_at)
        at = archive.stop
    if image.start % BLOCK_BYTES or not fits or at > end:
        raise SaveError(
            f"the image at [{image.start:,}, {end:,}) is unaligned or outside of the buffer of"
            f" {buffer_bytes:,} bytes, or its archives are outside of it",
            where=image.path,
            hint="this is a bug of ckptkit; please report it with this text",
        )
    return stop


def link_kept(links: Sequence[Link], folder: Path, disk: Disk) -> None:
    """Links kept files into the folder of an attempt."""
    for link in links:
        path = folder / link.path
        with naming(path):
            disk.link_file(Path(link.kept), path)
            size_bytes = path.stat().st_size
        if size_bytes != link.size_bytes:
            raise SaveError(
                f"expected {link.size_bytes:,} bytes of an earlier save, found {size_bytes:,}",
                where=link.kept,
                hint="do not modify the files of a running job; the next save writes it again",
            )


def keep_links(links: Sequence[Link], folder: Path, disk: Disk) -> str:
    """Links durable files of the folder to the names under which later saves find them.

    Returns:
        Why some of them could not be linked; empty if all were.
    """
    try:
        for link in links:
            kept = Path(link.kept)
            kept.parent.mkdir(parents=True, exist_ok=True)
            disk.link_file(folder / link.path, kept)
    except OSError as error:
        return (
            f"hard links were refused ({error.strerror or error}): frozen weights are written"
            " again with every save"
        )
    return ""


_MOST_ATTEMPTS = 8  # in flight at once; the oldest failed attempt is dropped


class Persister:
    """Writes the waves of attempts from a shared buffer."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._buffer: mmap.mmap | None = None
        self._problem = "no shared buffer was announced"
        # By attempt: the files that are durable, and the CRC-32 of each sample of a replica.
        self._parts: dict[str, tuple[list[WrittenFile], list[int]]] = {}

    def attach(self, descriptor: int, size_bytes: int) -> None:
        """Maps the buffer of a descriptor, instead of an earlier one."""
        try:
            self.detach("")
            if size_bytes:
                self._buffer = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def detach(self, problem: str) -> None:
        """Drops the buffer; requests that need it fail with this problem."""
        self._problem = problem
        self._buffer = None  # unmapped with its last view

    def persist(self, request: Persist, counter: ByteCounter) -> Written:
        """Writes the files of a wave durably, then the record if the request has one."""
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        if request.waves_before and request.attempt not in self._parts:
            raise WriterError(
                "the writer ended in the middle of the save, and does not know what it had written",
                where=unstaged_path(request.folder),
            )
        if request.attempt not in self._parts and len(self._parts) >= _MOST_ATTEMPTS:
            del self._parts[next(iter(self._parts))]
        files, replica_sums = self._parts.setdefault(request.attempt, ([], []))
        paths = [image.path for image in request.images]
        paths += [inline.path for inline in request.inline]
        paths += [link.path for link in request.links]
        for path in (*paths, *(link.path for link in request.keeps)):
            check_relative(path, request.folder)
        if request.record is not None:
            check_relative(request.record_path, request.folder)
            paths.append(request.record_path)
        parents = {os.path.dirname(path) for path in paths}  # noqa: PTH120  a key, not a place
        made = make_folders(folder, parents, self._disk)
        link_kept(request.links, folder, self._disk)
        sums = self._sums(request.replicas, counter)
        new, notes = self._write_images(request, folder, counter)
        note = keep_links(request.keeps, folder, self._disk)
        for inline in request.inline:
            put_file(folder / inline.path, inline.data)
            counter.done_bytes += len(inline.data)
            new.append(WrittenFile(inline.path, len(inline.data), crc32(inline.data)))
        for parent in made:
            self._disk.sync_directory(parent)
        linked = [WrittenFile(link.path, link.size_bytes, None) for link in request.links]
        files += [*new, *linked]  # not before all succeeded: the request may be repeated
        replica_sums += sums
        proof = self._record(request) if request.record is not None else None
        size_bytes = sum(file.size_bytes for file in new)
        return Written(
            attempt=request.attempt,
            size_bytes=size_bytes + (proof.size_bytes if proof else 0),
            seconds=time.monotonic() - began,
            cpu_seconds=time.process_time() - processor,
            proof=proof,
            notes=(*notes, note) if note else notes,
            linked_bytes=sum(file.size_bytes for file in linked),
            kept=not note,
            sums=() if note else self._sums(request.ranges, counter),
        )

    def _write_images(
        self, request: Persist, folder: Path, counter: ByteCounter
    ) -> tuple[list[WrittenFile], tuple[str, ...]]:
        written: list[WrittenFile] = []
        if not request.images:
            return written, ()
        if self._buffer is None:
            raise SaveError(
                self._problem,
                where=unstaged_path(request.folder),
                hint="check that /dev/shm is large enough; the next save tries again",
            )
        with memoryview(self._buffer) as buffer:
            with ImageWriter(self._disk, counter) as writer:
                for image in request.images:
                    crc = writer.write(folder / image.path, image, buffer)
                    written.append(WrittenFile(image.path, image.size_bytes, crc, image.summed))
            refused = writer.refused
        if not refused:
            return written, ()
        note = f"direct I/O was refused for {folder.parent}: written through the page cache"
        return written, (note,)

    def _sums(self, ranges: Sequence[tuple[int, int]], counter: ByteCounter) -> tuple[int, ...]:
        """Checksums ranges of the buffer."""
        if self._buffer is None:
            return ()
        sums = []
        with memoryview(self._buffer) as buffer:
            for start, stop in ranges:
                sums.append(crc32(buffer[start:stop]))
                counter.done_bytes += stop - start
        return tuple(sums)

    def _record(self, request: Persist) -> RecordProof:
        assert request.record is not None  # noqa: S101  narrows the type
        # Removed even if the write fails: the request may be repeated.
        files, sums = self._parts.pop(request.attempt)
        # There are no sums without a buffer, which not every rank needs.
        document = {**request.record, **({"replica_sums": sums} if sums else {"replicas": []})}
        data = record_bytes(document, files)
        path = Path(request.folder, request.record_path)
        put_file(path, data)
        self._disk.sync_directory(path.parent)
        rank = int(request.record["rank"])
        return RecordProof(rank, request.record_path, len(data), crc32(data))
