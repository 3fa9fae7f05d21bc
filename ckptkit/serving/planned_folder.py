"""A planned output that is read without being written, by many threads.

Bytes leave `PlannedFolder.read_into` after these proofs: each stored checksum of a record that they
were made from was compared with the whole record, and after the last read each file still was the
one that was planned with.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import chain

import xxhash
from msgspec import Struct

from ckptkit.conversion.write import (
    PlannedOutput,
    refuse_other_files,
    refuse_resized_side_files,
)
from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.crc import crc32
from ckptkit.core.errors import AccessError, CkptkitError, SourceChangedError, StorageError
from ckptkit.core.index import FileRange, FileRef
from ckptkit.core.text import Closing
from ckptkit.core.threads import Throttle, WorkerThread, memory_in_use_bytes, usable_cores
from ckptkit.engine.checksum_tracker import READ_BYTES
from ckptkit.engine.executor import settle_workers
from ckptkit.engine.kernels import Preparations
from ckptkit.engine.locate import READ_AHEAD_BYTES
from ckptkit.engine.outcome import Listener
from ckptkit.engine.reader import RUN_BYTES, Origin
from ckptkit.engine.segment_reader import Inputs, SegmentReader
from ckptkit.options import Resources
from ckptkit.plan.plan import TASK_BYTES, Compute, Literal, OutputFile, RawCopy, cut_into_tasks
from ckptkit.runs.local_run import hold_at_stores
from ckptkit.serving.plans import ServePlan
from ckptkit.storage.base import Source
from ckptkit.storage.places import place_of

_MOST_KERNELS = 16
PART_BYTES = TASK_BYTES
"""What is made in one step at most: a leaf of a tensor."""
TEMPORARY = (AccessError, StorageError)  # a later read may find the store well again


class PlannedFile(Struct, frozen=True):
    """A file of a planned output.

    Attributes:
        file: The planned file.
        etag: Its version, with the quotes; not an MD5, which a hyphen shows.
        modified: When it was planned. Other options, or an older source, may give other bytes of
            the same size: who compares times has to see a newer one.
        starts: Where the parts begin that are each made in one step.
        crc32: The CRC-32 of its bytes where they are known without reading tensors, else None.
    """

    file: OutputFile
    etag: str
    modified: datetime
    starts: Sequence[int] = ()
    crc32: int | None = None

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cuts the bytes `[start, stop)` where the parts begin: a leaf is not computed twice."""
        at = bisect_right(self.starts, start)
        while start < stop:
            end = min(self.starts[at], stop) if at < len(self.starts) else stop
            yield start, end
            start, at = end, at + 1


def make_etag(content: str, size_bytes: int) -> str:
    """Returns the ETag of a file whose bytes follow from `content`.

    It has the form of an object that was uploaded in parts, which no client takes for an MD5.

    >>> make_etag("a", 10)
    '"a96faf705af16834e6c632b61e964e1f-1"'
    """
    parts = max(1, -(-size_bytes // PART_BYTES))
    return f'"{xxhash.xxh3_128_hexdigest(content.encode())}-{parts}"'


class IdleReaders:
    """The readers that nothing uses at the moment, with their buffers, of any folders.

    A thread takes one of its folder, or else frees another one: so there are never more of them,
    idle and in use, than threads that read at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Inputs, SegmentReader]] = []  # longest idle first

    def take(self, inputs: Inputs, preparations: Preparations) -> SegmentReader:
        with self._lock:
            at = next((n for n, one in enumerate(self._idle) if one[0] is inputs), 0)
            taken = self._idle.pop(at) if self._idle else None
        if taken is not None and taken[0] is inputs:
            return taken[1]
        del taken  # its buffers are freed before others are made
        return SegmentReader(inputs, preparations)

    def put(self, inputs: Inputs, reader: SegmentReader) -> None:
        with self._lock:
            self._idle.append((inputs, reader))


class PlannedFolder(Closing):
    """A planned output whose sources are open until it is closed and nothing uses it any more.

    Attributes:
        path: Of the source.
        files: By relative path.
        notes: Messages for the user.
        is_remote: Whether something is read from an object store.
        failure: Why nothing is read any more, or None.
    """

    def __init__(
        self, plan: ServePlan, listener: Listener, again: str, readers: IdleReaders
    ) -> None:
        """Plans, and checks what is known before tensors are read.

        The listener receives notes; `again` is the hint to a user whose source has changed. Folders
        that are read by the same threads share `readers`.
        """
        with ExitStack() as stack:
            planned = stack.enter_context(plan.open(listener))
            for source in planned.sources:
                refuse_other_files(source)
            saved = [source for source in planned.sources if source.manifest is not None]
            held = [place_of(source.location).beside(source.path) for source in saved]
            stack.enter_context(hold_at_stores(held))
            self.path, self.notes = planned.checkpoint.path, planned.plan.notes
            self.failure: CkptkitError | None = None
            self._inputs = _watch(planned, again)
            refuse_resized_side_files(planned)
            self._preparations = stack.enter_context(Preparations(most_kernels=_MOST_KERNELS))
            self._readers = readers
            origins = self._inputs.origins.values()
            self.is_remote = any(origin.source.is_remote for origin in origins)
            self.files = _list_files(planned, self._inputs.folders)
            self._lock, self._users = threading.Lock(), 1
            self._stack = stack.pop_all()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Keeps the sources open in the block; yields False if they are closed already."""
        with self._lock:
            is_open = self._users > 0
            self._users += is_open
        try:
            yield is_open
        finally:
            if is_open:
                self.close()

    def close(self) -> None:
        """Ends one use, the first one included; the last one closes the sources."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._stack.close()

    def read_into(self, planned: PlannedFile, start: int, view: memoryview) -> None:
        """Fills a buffer with the bytes of a file from `start` on, and proves them, or raises."""
        if self.failure is not None:
            raise self.failure
        segments = self._readers.take(self._inputs, self._preparations)
        try:
            try:
                segments.fill_range(planned.file, start, start + len(view), view)
                self._prove()
            finally:
                # Of a file that changed, this is the better message.
                for source in self._sources():
                    source.refuse_changes()
        except CkptkitError as error:
            self._note_failure(error)
            raise
        self._readers.put(self._inputs, segments)

    def _note_failure(self, error: CkptkitError) -> None:
        with self._lock:
            if not isinstance(error, TEMPORARY):
                self.failure = self.failure or error

    def _prove(self) -> None:
        for origin in self._inputs.origins.values():
            origin.decoded.prove()
            # What was fetched ahead of a store is freed by then, and leaves as much memory.
            origin.checksums.prove(READ_AHEAD_BYTES if origin.source.is_remote else READ_BYTES)

    def _sources(self) -> Iterator[_WatchedSource]:
        origins = (origin.source for origin in self._inputs.origins.values())
        for source in (*origins, *self._inputs.folders.values()):
            if isinstance(source, _WatchedSource):
                yield source


def divide_memory(resources: Resources, *, is_remote: bool) -> tuple[int, int]:
    """Returns how many threads may read, and how many parts memory has room for."""
    budget = resources.memory_budget_bytes
    # Gather scratch, the memory of kernels, and the leaf that was computed last.
    each = RUN_BYTES + (4 << 20) + TASK_BYTES + (READ_AHEAD_BYTES if is_remote else 0)
    threads = settle_workers(
        resources.workers,
        cores=usable_cores(),
        budget_bytes=budget,
        limit_bytes=resources.memory_limit_bytes,
        used_bytes=memory_in_use_bytes(),
        worker_bytes=each + PART_BYTES,
    )
    return threads, (budget - threads * each) // PART_BYTES


class PartMaker(Closing):
    """Makes parts of folders in threads of its own, as many as fit into memory; for one event loop.

    Attributes:
        waiting: How many bodies wait for memory.
    """

    def __init__(self, resources: Resources, *, is_remote: bool) -> None:
        threads, parts = divide_memory(resources, is_remote=is_remote)
        self._throttle = Throttle(resources.bytes_per_second)
        self._parts, self._buffers = asyncio.Semaphore(parts), list[memoryview]()
        self._workers = [WorkerThread(f"ckptkit-reader-{n}") for n in range(threads)]
        self._idle: asyncio.LifoQueue[WorkerThread] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self.waiting = 0

    def close(self) -> None:
        """Ends the threads, without waiting for what they read."""
        self._throttle.stopped.set()
        for worker in self._workers:
            worker.stop()

    async def read(
        self, folder: PlannedFolder, planned: PlannedFile, start: int, stop: int
    ) -> AsyncGenerator[memoryview, None]:
        """Yields the proven bytes `[start, stop)` in parts; while one is used, the next are made.

        A part is valid until the next one is asked for.
        """
        made: deque[tuple[int, asyncio.Task[memoryview]]] = deque()
        try:
            for part in chain(planned.cut(start, stop), [None]):
                # Who holds a part must not wait for another one.
                while made and (not part or self._parts.locked() or len(made) > len(self._workers)):
                    size, task = made[0]
                    yield (await asyncio.shield(task))[:size]
                    self._give_back(made.popleft()[1])
                if part:
                    self.waiting += 1
                    try:
                        await self._parts.acquire()
                    finally:
                        self.waiting -= 1
                    making = self._make(folder, planned, *part)
                    made.append((part[1] - part[0], asyncio.create_task(making)))
        finally:
            for _, task in made:
                task.add_done_callback(self._give_back)

    def _give_back(self, task: asyncio.Task[memoryview]) -> None:
        """Frees the buffer of a part; of errors, that of the first part was raised."""
        if not task.cancelled() and task.exception() is None:
            self._buffers.append(task.result())
        self._parts.release()

    async def _make(
        self, folder: PlannedFolder, planned: PlannedFile, start: int, stop: int
    ) -> memoryview:
        buffer = self._buffers.pop() if self._buffers else aligned_buffer(PART_BYTES)
        worker = await self._idle.get()

        def fill() -> None:
            self._throttle.take(stop - start)
            folder.read_into(planned, start, buffer[: stop - start])

        try:
            await asyncio.wrap_future(worker.submit(fill))
        finally:
            self._idle.put_nowait(worker)
        return buffer


class _WatchedSource(Source):
    """A source that remembers which files each thread has read, until these are compared."""

    def __init__(self, source: Source, files: Sequence[FileRef], again: str) -> None:
        """Takes an open source, its files as they were planned with, and a hint."""
        self.location, self.is_remote = source.location, source.is_remote
        self._source, self._again = source, again
        self._files = {file.path: file for file in files}
        self._read = threading.local()

    def walk(self, depth: int) -> Iterator[str]:
        return self._source.walk(depth)

    def stat(self, path: str) -> FileRef:
        return self._source.stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        self._paths().add(path)
        return self._source.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        self._paths().add(path)
        self._source.read_into(path, start, target)

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        self._paths().update(wanted.path for wanted, _ in reads)
        self._source.fetch(reads)

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        self._source.prefetch(ranges)

    def refuse_changes(self) -> None:
        """Compares the files that this thread has read since the last call."""
        read, self._read.paths = self._paths(), set()
        for path in read & self._files.keys():
            try:
                is_same = self._source.stat(path).identity == self._files[path].identity
            except TEMPORARY:
                raise
            except CkptkitError:
                is_same = False
            if not is_same:
                raise SourceChangedError(
                    f"{path!r} changed while it was served",
                    where=self.location,
                    hint=self._again,
                )

    def _paths(self) -> set[str]:
        paths: set[str] = self._read.__dict__.setdefault("paths", set())
        return paths


def _watch(planned: PlannedOutput, again: str) -> Inputs:
    """Returns the inputs of a plan with sources that notice changes."""
    origins = {
        name: Origin(name, _WatchedSource(origin.source, origin.index.files, again), origin.index)
        for name, origin in planned.inputs.origins.items()
    }
    copied: dict[str, set[str]] = {name: set() for name in planned.inputs.folders}
    for file in planned.plan.files:
        for segment in file.segments:
            if isinstance(segment.body, RawCopy):
                copied[segment.body.origin].add(segment.body.path)
    folders = {
        name: _WatchedSource(source, [source.stat(path) for path in sorted(copied[name])], again)
        for name, source in planned.inputs.folders.items()
    }
    return Inputs(origins, folders)


def _list_files(planned: PlannedOutput, folders: Mapping[str, Source]) -> dict[str, PlannedFile]:
    fingerprint, modified = planned.fingerprint(), datetime.now(UTC)
    files = {}
    for file in planned.plan.files:
        crc = _compute_known_crc(file, folders)
        etag = make_etag(f"{fingerprint}\n{file.path}\n{crc}", file.size_bytes)
        files[file.path] = PlannedFile(file, etag, modified, list(_cut_into_parts(file)), crc)
    return files


def _cut_into_parts(file: OutputFile) -> Iterator[int]:
    """Yields where parts begin: leaves of what is computed, and halves of what is copied."""
    for task in cut_into_tasks(0, file):
        is_computed = any(isinstance(part.segment.body, Compute) for part in task.parts)
        yield from range(task.start, task.stop, PART_BYTES if is_computed else PART_BYTES // 2)


def _compute_known_crc(file: OutputFile, folders: Mapping[str, Source]) -> int | None:
    """Returns the CRC-32 of a file that holds no tensors, or None."""
    crc = 0
    for segment in file.segments:
        body = segment.body
        if isinstance(body, Literal) and segment.spec is None and len(file.segments) == 1:
            crc = crc32(memoryview(body.data), crc)
        elif isinstance(body, RawCopy):
            stop = body.start + segment.stop - segment.start
            read = partial(folders[body.origin].read, body.path)
            for start in range(body.start, stop, RUN_BYTES):
                crc = crc32(memoryview(read(start, min(start + RUN_BYTES, stop))), crc)
        else:
            return None
    return crc
