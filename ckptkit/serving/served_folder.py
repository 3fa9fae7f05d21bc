"""A planned output that is read without being written, by many threads.

Bytes leave `FolderReader.fill` after these proofs: each stored checksum of a record that they were
made from was compared with the whole record, and after the last read each file still was the one
that was planned with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from ckptkit.conversion.write import (
    PlannedOutput,
    refuse_other_files,
    refuse_resized_side_files,
)
from ckptkit.core.crc import crc32
from ckptkit.core.errors import AccessError, CkptkitError, SourceChangedError, StorageError
from ckptkit.core.index import FileRange, FileRef
from ckptkit.engine.checksum_tracker import READ_BYTES
from ckptkit.engine.kernels import Preparations
from ckptkit.engine.prefetch import READ_AHEAD_BYTES
from ckptkit.engine.reader import RUN_BYTES, Origin
from ckptkit.engine.segment_reader import Inputs, SegmentReader
from ckptkit.plan.plan import Literal, OutputFile, RawCopy
from ckptkit.runs.run_paths import hold_at_stores
from ckptkit.serving.served_objects import ServedObject, list_tasks, make_etag
from ckptkit.storage.base import Source
from ckptkit.storage.places import place_of

_MOST_KERNELS = 16
TEMPORARY = (AccessError, StorageError)  # a later request may find the store well again
Refused = Callable[[CkptkitError], None]


class WatchedSource(Source):
    """A source that remembers which files each thread has read, until these are compared."""

    def __init__(self, source: Source, files: Sequence[FileRef]) -> None:
        """Takes an open source, and its files as they were when the output was planned."""
        self.location = source.location
        self.is_remote = source.is_remote
        self._source = source
        self._files = {file.path: file for file in files}
        self._read = threading.local()

    def walk(self, depth: int) -> Iterator[str]:
        return self._source.walk(depth)

    def stat(self, path: str) -> FileRef:
        return self._source.stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`."""
        self._note(path)
        return self._source.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on."""
        self._note(path)
        self._source.read_into(path, start, target)

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        """Fills many buffers, each from its range."""
        for wanted, _ in reads:
            self._note(wanted.path)
        self._source.fetch(reads)

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        self._source.prefetch(ranges)

    def refuse_changes(self) -> None:
        """Compares the files that this thread has read since the last call."""
        read: set[str] = getattr(self._read, "paths", set())
        self._read.paths = set()
        for path in read & self._files.keys():
            planned = self._files[path]
            try:
                is_same = self._source.stat(path).identity == planned.identity
            except TEMPORARY:
                raise
            except CkptkitError:
                is_same = False
            if not is_same:
                raise SourceChangedError(
                    f"{path!r} changed while it was served",
                    where=self.location,
                    hint="start the server again once the source is complete",
                )

    def _note(self, path: str) -> None:
        paths: set[str] | None = getattr(self._read, "paths", None)
        if paths is None:
            paths = self._read.paths = set()
        paths.add(path)


class ServedFolder:
    """A planned output below a prefix of the bucket; it is closed after its last use.

    Attributes:
        name: The prefix, without a slash at its end.
        objects: Its files, by key.
        failure: Why it is no longer served, or None.
        is_reported: Whether the user knows of the failure.
        notes: Messages for the user.
        path: Of the source.
    """

    def __init__(self, stack: ExitStack, name: str, planned: PlannedOutput) -> None:
        """Takes a plan with its open sources, and a stack for what is opened in addition."""
        for source in planned.sources:
            refuse_other_files(source)
        saved = [source for source in planned.sources if source.manifest is not None]
        stack.enter_context(hold_at_stores([place_of(s.location).beside(s.path) for s in saved]))
        self.name = name
        self.failure: CkptkitError | None = None
        self.is_reported = False
        self.notes = planned.plan.notes
        self.path = planned.checkpoint.path
        self.inputs = _watch(planned)
        refuse_resized_side_files(planned)
        self.preparations = stack.enter_context(Preparations(most_kernels=_MOST_KERNELS))
        self.objects = _list_objects(name, planned, self.inputs.folders)
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._users = 1

    def keep(self, stack: ExitStack) -> None:
        """Takes over the stack that closes the sources."""
        self._stack = stack

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.objects.values())

    def is_remote(self) -> bool:
        """Returns whether something is read from an object store."""
        origins = self.inputs.origins.values()
        return any(origin.source.is_remote for origin in origins)

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
                self.release()

    def release(self) -> None:
        """Ends one use, the first one included, which is that of the bucket."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._stack.close()

    def refuse(self, error: CkptkitError) -> None:
        """Records why nothing is served any more; the first reason stays."""
        with self._lock:
            self.failure = self.failure or error


class ServedBucket:
    """The folders that are served at the moment; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[str, ServedFolder] = {}
        self._objects: tuple[ServedObject, ...] = ()
        self._is_closed = False

    def objects(self) -> Sequence[ServedObject]:
        """Returns all objects in the order of their keys."""
        return self._objects

    def find(self, key: str) -> ServedObject | None:
        """Returns an object by its key."""
        folder = self.folder_of(key)
        return None if folder is None else folder.objects.get(key)

    def folder_of(self, key: str) -> ServedFolder | None:
        with self._lock:
            folders = list(self._folders.values())
        return next((folder for folder in folders if key in folder.objects), None)

    def put(self, folder: ServedFolder) -> None:
        """Adds a folder, or replaces the one of its name."""
        self._exchange(folder.name, folder)

    def drop(self, name: str) -> None:
        """Removes a folder, whose sources are closed once nothing reads them any more."""
        self._exchange(name, None)

    def is_remote(self) -> bool:
        """Returns whether something is read from an object store."""
        return any(folder.is_remote() for folder in self._folders.values())

    def close(self) -> None:
        """Removes all folders, and what is added later."""
        with self._lock:
            self._is_closed = True
        for name in list(self._folders):
            self.drop(name)

    def _exchange(self, name: str, folder: ServedFolder | None) -> None:
        with self._lock:
            before = self._folders.pop(name, None)
            if folder is not None:
                self._folders[name] = folder
            listed = (entry for one in self._folders.values() for entry in one.objects.values())
            self._objects = tuple(sorted(listed, key=lambda entry: entry.key))
            is_late = folder is not None and self._is_closed
        if before is not None:
            before.release()
        if is_late and folder is not None:
            self.drop(folder.name)


class FolderReader:
    """Reads the files of a folder for one thread."""

    def __init__(self, folder: ServedFolder) -> None:
        self.folder = folder
        self._segments = SegmentReader(folder.inputs, folder.preparations)

    def fill(self, file: OutputFile, start: int, views: Sequence[memoryview]) -> None:
        """Fills buffers with the bytes of a file from `start` on, and proves them.

        Raises:
            CkptkitError: If they cannot be read, or are not proven; the buffers are of no use.
        """
        if self.folder.failure is not None:
            raise self.folder.failure
        try:
            try:
                for view in views:
                    self._segments.fill_range(file, start, start + len(view), view)
                    start += len(view)
                self._prove()
            finally:
                # Of a file that changed, this is the better message.
                self._refuse_changes()
        except CkptkitError as error:
            if not isinstance(error, TEMPORARY):
                self.folder.refuse(error)
            raise

    def _prove(self) -> None:
        for origin in self.folder.inputs.origins.values():
            origin.decoded.prove()
            # What was fetched ahead of a store is freed by then, and leaves as much memory.
            is_remote = origin.source.is_remote
            origin.checksums.prove(READ_AHEAD_BYTES if is_remote else READ_BYTES)

    def _refuse_changes(self) -> None:
        inputs = self.folder.inputs
        sources = [origin.source for origin in inputs.origins.values()]
        for source in (*sources, *inputs.folders.values()):
            if isinstance(source, WatchedSource):
                source.refuse_changes()


def _watch(planned: PlannedOutput) -> Inputs:
    """Returns the inputs of a plan with sources that notice changes."""
    origins = {
        name: Origin(name, WatchedSource(origin.source, origin.index.files), origin.index)
        for name, origin in planned.inputs.origins.items()
    }
    copied: dict[str, set[str]] = {name: set() for name in planned.inputs.folders}
    for file in planned.plan.files:
        for segment in file.segments:
            if isinstance(segment.body, RawCopy):
                copied[segment.body.origin].add(segment.body.path)
    folders = {
        name: WatchedSource(source, [source.stat(path) for path in sorted(copied[name])])
        for name, source in planned.inputs.folders.items()
    }
    return Inputs(origins, folders)


def _list_objects(
    name: str, planned: PlannedOutput, folders: Mapping[str, Source]
) -> dict[str, ServedObject]:
    fingerprint = planned.fingerprint()
    modified = datetime.now(UTC)
    objects = {}
    for file in planned.plan.files:
        key, crc = f"{name}/{file.path}", _compute_known_crc(file, folders)
        content = f"{fingerprint}\n{file.path}\n{crc}"
        etag = make_etag(content, file.size_bytes)
        objects[key] = ServedObject(key, etag, modified, file, list_tasks(file), crc)
    return objects


def _compute_known_crc(file: OutputFile, folders: Mapping[str, Source]) -> int | None:
    """Returns the CRC-32 of a file that holds no tensors, or None."""
    crc = 0
    for segment in file.segments:
        body = segment.body
        if isinstance(body, Literal) and segment.spec is None and len(file.segments) == 1:
            crc = crc32(memoryview(body.data), crc)
        elif isinstance(body, RawCopy):
            source = folders[body.origin]
            stop = body.start + segment.stop - segment.start
            for start in range(body.start, stop, RUN_BYTES):
                data = source.read(body.path, start, min(start + RUN_BYTES, stop))
                crc = crc32(memoryview(data), crc)
        else:
            return None
    return crc
