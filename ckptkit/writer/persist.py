"""Writing one rank's files of an attempt, and last the record that says so."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ckptkit.core.crc import crc32
from ckptkit.core.errors import SaveError
from ckptkit.storage.names import check_relative
from ckptkit.storage.syscalls import Capabilities, sync_directory
from ckptkit.writer.durable import make_folders, put_file
from ckptkit.writer.images import ImageWriter
from ckptkit.writer.links import Links
from ckptkit.writer.messages import Persist, Proof, Written
from ckptkit.writer.record import WrittenFile, record_bytes
from ckptkit.writer.watching import Tally

_MOST_ATTEMPTS = 8  # in flight at once; of those that failed the oldest is forgotten


class Persister:
    """Persists what lies in a shared buffer, wave after wave."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._buffer: mmap.mmap | None = None
        self._problem = "no shared buffer was announced"
        self._files: dict[str, list[WrittenFile]] = {}  # of all waves, by attempt

    def attach(self, descriptor: int, size_bytes: int) -> None:
        """Maps the buffer behind a descriptor, in place of an earlier one.

        Raises:
            OSError: If it cannot be mapped.
            ValueError: If it is shorter than it should be.
        """
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

        Raises:
            SaveError: If the request cannot be right.
            OSError: If something cannot be written.
        """
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        files = self._files_of(request.attempt)
        new: list[WrittenFile] = []
        for path in (*_paths(request), *(link.path for link in request.keeps)):
            check_relative(path, request.folder)
        made = make_folders(folder, self._parents(request), self._capabilities)
        links = Links(folder, self._capabilities)
        links.take(request.links)
        notes = self._write_images(request, folder, tally)
        note = links.keep(request.keeps)
        new += [WrittenFile(image.path, image.size_bytes, None) for image in request.images]
        for inline in request.inline:
            put_file(folder / inline.path, inline.data)
            tally.done_bytes += len(inline.data)
            new.append(WrittenFile(inline.path, len(inline.data), crc32(inline.data)))
        for parent in made:
            sync_directory(parent, self._capabilities)
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
            with ImageWriter(self._capabilities, tally) as writer:
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
        sync_directory(path.parent, self._capabilities)
        rank = int(request.record["rank"])
        return Proof(rank, request.record_path, len(data), crc32(data))


def _paths(request: Persist) -> list[str]:
    """Returns the files that are made, but for the record."""
    paths = [image.path for image in request.images]
    paths += [inline.path for inline in request.inline]
    return [*paths, *(link.path for link in request.links)]
