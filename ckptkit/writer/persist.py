"""Writing one rank's files of an attempt, and last the record that says so.

Writing one file image from the shared buffer, and summing up its blobs on the way.

Files that several steps have in common: kept under another name, and linked from there.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

from ckptkit.core.crc import crc32
from ckptkit.core.errors import SaveError
from ckptkit.storage.local.disk import BLOCK_BYTES, Disk, OpenFile, is_refused
from ckptkit.storage.local.names import check_relative
from ckptkit.writer.commit import make_folders, put_file
from ckptkit.writer.failures import Tally, naming
from ckptkit.writer.messages import Blob, Image, Link, Persist, Proof, Written
from ckptkit.writer.record import WrittenFile, record_bytes

STRIDE_BYTES = 8 << 20
"""What is summed up and written at a time: large enough for any device, small beside a file."""

_CRC_BYTES = 4
_SYNC_BYTES = 1 << 30  # cached at most: a last sync of all of a large file would look like a hang


class Behind:
    """A thread that does one thing at a time while its owner prepares the next."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[Exception | None] = SimpleQueue()
        self._busy = False
        self._thread = Thread(target=self._run, name="ckptkit-disk", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], None]) -> None:
        """Waits for the previous job and starts this one; raises what the previous one raised."""
        self.wait()
        self._busy = True
        self._jobs.put(job)

    def wait(self) -> None:
        """Waits for the job under way; raises what it raised."""
        if self._busy:
            error = self._ends.get()
            self._busy = False
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the thread after its job."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  raised again by `wait`
                self._ends.put(error)
            else:
                self._ends.put(None)


class _Output:
    """A file that is being written, past the page cache as long as that is possible."""

    def __init__(self, path: Path, size_bytes: int, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        with naming(path):
            disk.create_file(path, size_bytes)
            direct = disk.open_direct(path)
            self._file: OpenFile = direct or disk.open_for_writing(path)
        self.direct = direct is not None
        self._cached_bytes = 0

    def write(self, at: int, data: memoryview) -> None:
        """Writes at a byte of the file; address, place and length are multiples of a block."""
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
            if not self.direct and self._cached_bytes >= _SYNC_BYTES:
                self._file.sync()
                self._cached_bytes = 0

    def end(self, size_bytes: int) -> None:
        """Cuts off the padding and makes the file durable."""
        with naming(self._path):
            self._file.truncate(size_bytes)
            self._file.sync()
        self._file.close()

    def close(self) -> None:
        self._file.close()


class ImageWriter:
    """Writes images one after another; they are durable when the block is left.

    While one stride of an image is on its way to the disk, the next one is summed up.

    Args:
        disk: The file operations of the platform.
        tally: Is told of every stride.
    """

    def __init__(self, disk: Disk, tally: Tally) -> None:
        self._disk = disk
        self._tally = tally
        self._behind = Behind()
        self._outputs: list[_Output] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._behind.wait()
        finally:
            self._behind.close()
            for output in self._outputs:
                output.close()

    @property
    def refused(self) -> bool:
        return any(not output.direct for output in self._outputs)

    def write(self, path: Path, image: Image, buffer: memoryview) -> None:
        """Writes an image, and begins to make it durable.

        Args:
            path: Where it goes; nothing lies there yet.
            image: What it holds.
            buffer: The whole shared buffer, writable.
        """
        stop = _checked(image, len(buffer))
        output = _Output(path, stop - image.start, self._disk)
        self._outputs.append(output)
        sums = _Sums(image.blobs, buffer)
        for start in range(image.start, stop, STRIDE_BYTES):
            data = buffer[start : min(start + STRIDE_BYTES, stop)]
            sums.advance(start + len(data))
            self._behind.start(partial(self._put, output, start - image.start, data))
        self._behind.start(partial(output.end, image.size_bytes))

    def _put(self, output: _Output, at: int, data: memoryview) -> None:
        output.write(at, data)
        self._tally.done_bytes += len(data)


class _Sums:
    """Sums up blobs in order, and puts each sum where it belongs."""

    def __init__(self, blobs: tuple[Blob, ...], buffer: memoryview) -> None:
        self._left = iter(blobs)
        self._blob = next(self._left, None)
        self._buffer = buffer
        self._at = self._blob.start if self._blob else 0
        self._crc = 0

    def advance(self, stop: int) -> None:
        """Sums up what lies before `stop`; a sum's places come after its data."""
        while self._blob is not None and self._blob.start < stop:
            end = min(stop, self._blob.stop)
            self._crc = crc32(self._buffer[self._at : end], self._crc)
            self._at = end
            if end < self._blob.stop:
                return
            self._place()

    def _place(self) -> None:
        assert self._blob is not None  # noqa: S101  narrows the type
        for at in self._blob.crc_at:
            self._buffer[at : at + _CRC_BYTES] = self._crc.to_bytes(_CRC_BYTES, "little")
        self._blob = next(self._left, None)
        self._at, self._crc = self._blob.start if self._blob else 0, 0


def _checked(image: Image, buffer_bytes: int) -> int:
    """Returns where the image ends in the buffer, with its padding."""
    end = image.start + image.size_bytes
    stop = -(-end // BLOCK_BYTES) * BLOCK_BYTES
    fits = image.start >= 0 and image.size_bytes >= 0 and stop <= buffer_bytes
    at = image.start
    for blob in image.blobs:
        fits &= at <= blob.start <= blob.stop
        fits &= all(blob.stop <= place <= end - _CRC_BYTES for place in blob.crc_at)
        at = blob.stop
    if image.start % BLOCK_BYTES or not fits or at > end:
        raise SaveError(
            f"the image at [{image.start:,}, {end:,}) was found to lie unaligned or outside of the"
            f" buffer of {buffer_bytes:,} bytes, or its blobs outside of it",
            where=image.path,
            hint="this is a fault of ckptkit; please report it with this text",
        )
    return stop


class Links:
    """The links of one attempt's folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    def take(self, links: Sequence[Link]) -> None:
        """Gives files that are kept their names in the folder."""
        for link in links:
            path = self._folder / link.path
            with naming(path):
                self._disk.link_file(Path(link.kept), path)
                size_bytes = path.stat().st_size
            if size_bytes != link.size_bytes:
                raise SaveError(
                    f"{size_bytes:,} bytes were found where an earlier save wrote"
                    f" {link.size_bytes:,}",
                    where=link.kept,
                    hint="leave the files of a running job alone; the next save writes it anew",
                )

    def keep(self, links: Sequence[Link]) -> str:
        """Gives durable files in the folder the names under which they are kept.

        Returns:
            Why not all of them have them now; empty where they have.
        """
        try:
            for link in links:
                kept = Path(link.kept)
                kept.parent.mkdir(parents=True, exist_ok=True)
                self._disk.link_file(self._folder / link.path, kept)
        except OSError as error:
            return (
                f"hard links were refused ({error.strerror or error}): frozen weights are written"
                " again with every save"
            )
        return ""


_MOST_ATTEMPTS = 8  # in flight at once; of those that failed the oldest is forgotten


class Persister:
    """Persists what lies in a shared buffer, wave after wave."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._buffer: mmap.mmap | None = None
        self._problem = "no shared buffer was announced"
        self._files: dict[str, list[WrittenFile]] = {}  # of all waves, by attempt

    def attach(self, descriptor: int, size_bytes: int) -> None:
        """Maps the buffer behind a descriptor, in place of an earlier one."""
        try:
            self.detach("")
            if size_bytes:
                self._buffer = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def detach(self, problem: str) -> None:
        """Gives up the buffer; requests that need it fail with the problem."""
        self._problem = problem
        self._buffer = None  # unmapped when nobody looks into it any more

    def persist(self, request: Persist, tally: Tally) -> Written:
        """Writes the files of a wave and makes them durable, and then the record.

        Returns:
            What was written.
        """
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        files = self._files_of(request.attempt)
        new: list[WrittenFile] = []
        for path in (*_paths(request), *(link.path for link in request.keeps)):
            check_relative(path, request.folder)
        made = make_folders(folder, self._parents(request), self._disk)
        links = Links(folder, self._disk)
        links.take(request.links)
        notes = self._write_images(request, folder, tally)
        note = links.keep(request.keeps)
        new += [WrittenFile(image.path, image.size_bytes, None) for image in request.images]
        for inline in request.inline:
            put_file(folder / inline.path, inline.data)
            tally.done_bytes += len(inline.data)
            new.append(WrittenFile(inline.path, len(inline.data), crc32(inline.data)))
        for parent in made:
            self._disk.sync_directory(parent)
        linked = [WrittenFile(link.path, link.size_bytes, None) for link in request.links]
        files += [*new, *linked]
        proof = self._record(request, files) if request.record is not None else None
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
            sums=() if note else self._sums(request, tally),
        )

    def _files_of(self, attempt: str) -> list[WrittenFile]:
        if attempt not in self._files and len(self._files) >= _MOST_ATTEMPTS:
            del self._files[next(iter(self._files))]
        return self._files.setdefault(attempt, [])

    def _parents(self, request: Persist) -> Iterable[str]:
        paths = _paths(request)
        if request.record is not None:
            check_relative(request.record_path, request.folder)
            paths.append(request.record_path)
        return {os.path.dirname(path) for path in paths}  # noqa: PTH120  a key, not a place

    def _write_images(self, request: Persist, folder: Path, tally: Tally) -> tuple[str, ...]:
        if not request.images:
            return ()
        if self._buffer is None:
            raise SaveError(
                self._problem,
                where=request.folder,
                hint="see whether /dev/shm is large enough; the writer is asked again next time",
            )
        with memoryview(self._buffer) as buffer:
            with ImageWriter(self._disk, tally) as writer:
                for image in request.images:
                    writer.write(folder / image.path, image, buffer)
            refused = writer.refused
        if not refused:
            return ()
        return (f"direct I/O was refused for {folder.parent}: written through the page cache",)

    def _sums(self, request: Persist, tally: Tally) -> tuple[int, ...]:
        """Sums up what the trainer wants to recognise later; `_write_images` saw the buffer."""
        if self._buffer is None:
            return ()
        sums = []
        with memoryview(self._buffer) as buffer:
            for start, stop in request.ranges:
                sums.append(crc32(buffer[start:stop]))
                tally.done_bytes += stop - start
        return tuple(sums)

    def _record(self, request: Persist, files: list[WrittenFile]) -> Proof:
        assert request.record is not None  # noqa: S101  narrows the type
        data = record_bytes(request.record, files)
        del self._files[request.attempt]  # even if that fails now: the same may be asked again
        path = Path(request.folder, request.record_path)
        put_file(path, data)
        self._disk.sync_directory(path.parent)
        rank = int(request.record["rank"])
        return Proof(rank, request.record_path, len(data), crc32(data))


def _paths(request: Persist) -> list[str]:
    """Returns the files that are made, but for the record."""
    paths = [image.path for image in request.images]
    paths += [inline.path for inline in request.inline]
    return [*paths, *(link.path for link in request.links)]
