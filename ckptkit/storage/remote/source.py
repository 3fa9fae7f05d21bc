"""Reading a prefix of an object store as a directory: ranges of objects, many at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    MissingFileError,
    NotACheckpointError,
)
from ckptkit.core.index import FileRange, FileRef
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.base import CopySource, Source, truncated_error
from ckptkit.storage.locations import check_relative, is_work_folder
from ckptkit.storage.remote.errors import as_input_error
from ckptkit.storage.remote.store import (
    CLAIM_NAME,
    CONNECTIONS,
    ObjectInfo,
    RemoteFolder,
    get_store,
)

if TYPE_CHECKING:
    from ckptkit.storage.places import Place


_HEADER_BYTES = 64 << 10
_LEAST_BYTES = 4 << 10
_HEADER_SHARE = 256  # one byte in so many may be read in vain at each end of a file
_KEPT_BYTES = 1 << 20  # of a range that may be read again, such as a directory at the end of a file
_KEPT_TOGETHER_BYTES = 16 << 20


class RemoteSource(Source):
    """A prefix of an object store that is read and never changed.

    The files come from one listing; a file that it lacks is looked up by its name, since the
    listing of a store may lag behind what was written. Every read requires the listed version of
    the object, where the store has such conditions.
    """

    is_remote = True

    def __init__(
        self,
        place: Place,
        *,
        listed: Mapping[str, ObjectInfo] | None = None,
        folder: RemoteFolder | None = None,
    ) -> None:
        self.place = place
        self.location = place.location
        self._folder = folder or RemoteFolder(place, partial(_as_error, place))
        self._listed = listed
        self._looked_up: dict[str, ObjectInfo | None] = {}
        self._kept = _KeptRanges()
        self._lock = threading.Lock()
        self._crew: ThreadPoolExecutor | None = None

    def walk(self, depth: int) -> Iterator[str]:
        yield from sorted(path for path in self._objects() if path.count("/") <= depth)

    def stat(self, path: str) -> FileRef:
        entry = self._get_entry(path)
        return FileRef(path, entry.size_bytes, entry.identity, entry.modified)

    def read(self, path: str, start: int, stop: int) -> bytes:
        entry = self._get_entry(path)
        if stop > entry.size_bytes:
            raise truncated_error(self._folder.where(path), start, stop, entry.size_bytes)
        kept = self._kept.find(path, start, stop)
        if kept is not None:
            return kept
        first, last = _widen(start, stop, entry.size_bytes)
        data = bytearray(last - first)
        self._fill(path, first, memoryview(data))
        if len(data) <= _KEPT_BYTES:
            self._kept.keep(path, first, bytes(data), wide=last - first > stop - start)
        return bytes(memoryview(data)[start - first : stop - first])

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if not target.nbytes:
            return
        view = target.cast("B")
        entry = self._get_entry(path)
        if start + len(view) > entry.size_bytes:
            raise truncated_error(
                self._folder.where(path), start, start + len(view), entry.size_bytes
            )
        self._fill(path, start, view)

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        if len(reads) == 1:
            self.read_into(reads[0][0].path, reads[0][0].start, reads[0][1])
            return
        futures = [
            self._pool().submit(self.read_into, wanted.path, wanted.start, view)
            for wanted, view in reads
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        """Reads small ranges and keeps them; an empty one only looks up its file."""
        futures: list[Future[Any]] = []
        for wanted in ranges:
            if not wanted.size_bytes:
                futures.append(self._pool().submit(self.stat, wanted.path))
            elif wanted.size_bytes <= _KEPT_BYTES:
                read = partial(self.read, wanted.path, wanted.start, wanted.stop)
                futures.append(self._pool().submit(read))
        for future in futures:
            future.exception()  # raised again when the bytes are read

    def copy_source(self, path: str) -> CopySource | None:
        entry = self._get_entry(path)
        return CopySource(self._folder.store, self._folder.address(path), entry.etag)

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        now = self._list()
        for ref in refs:
            entry = now.get(ref.path) or self._look_up(ref.path)
            if entry is None or entry.identity != ref.identity:
                return ref
        return None

    def below(self, folder: str) -> RemoteSource:
        """Returns a folder of this prefix as a source of its own; nothing is listed again."""
        prefix = f"{folder}/"
        listed = {
            path.removeprefix(prefix): entry
            for path, entry in self._objects().items()
            if path.startswith(prefix)
        }
        place = self.place.beside(self._folder.where(folder))
        return RemoteSource(place, listed=listed, folder=self._folder.below(folder))

    def above(self, location: str, *, folders: Collection[str]) -> RemoteSource:
        """Returns another prefix of the store, with the files right in it and in some folders."""
        other = RemoteSource(self.place.beside(location))
        found = other._folder
        listed = found.perform("", lambda: found.store.list_folders(found.root, folders))
        other._listed = other._drop_unfinished(listed)
        return other

    def close(self) -> None:
        if self._crew is not None:
            self._crew.shutdown(cancel_futures=True)

    def _objects(self) -> Mapping[str, ObjectInfo]:
        if self._listed is None:
            self._listed = self._list()
        return self._listed

    def _list(self) -> Mapping[str, ObjectInfo]:
        return self._drop_unfinished(self._folder.entries())

    def _drop_unfinished(self, listed: Mapping[str, ObjectInfo]) -> dict[str, ObjectInfo]:
        """Leaves out outputs that are being committed, which may be incomplete."""
        claims = (path for path in listed if path.rpartition("/")[2] == CLAIM_NAME)
        folders = [path.removesuffix(CLAIM_NAME) for path in claims]
        begun = tuple(path for path in folders if f"{path}{MANIFEST_NAME}" not in listed)
        if "" in begun:
            raise NotACheckpointError(
                "an output is not finished there: a run is putting it in place, or was interrupted",
                where=self.location,
                hint="wait for that run, or run its command again with --overwrite",
            )
        kept = {}
        for path, entry in listed.items():
            parts = path.split("/")
            # Without outputs that are being staged, and keys that no path could have.
            is_hidden = any(is_work_folder(part) or part in {"", ".", ".."} for part in parts)
            if not is_hidden and not path.startswith(begun):
                kept[path] = entry
        return kept

    def _get_entry(self, path: str) -> ObjectInfo:
        check_relative(path, self.location)
        entry = self._objects().get(path)
        if entry is None:
            if path not in self._looked_up:
                self._looked_up[path] = self._look_up(path)
            entry = self._looked_up[path]
        if entry is None:
            raise MissingFileError("nothing was found there", where=self._folder.where(path))
        return entry

    def _look_up(self, path: str) -> ObjectInfo | None:
        try:
            return self._folder.look_up(path)
        except AccessError:
            return None  # the answer of S3 for an absent key where only a part may be listed

    def _fill(self, path: str, start: int, view: memoryview) -> None:
        full, entry = self._folder.address(path), self._get_entry(path)
        self._folder.perform(path, lambda: self._folder.store.read_into(full, start, view, entry))

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._crew is None:
                self._crew = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ckptkit-reads")
            return self._crew


def _as_error(place: Place, error: Exception, where: str, _verb: str) -> CkptkitError:
    attempts = get_store(place).retry_policy.attempts
    return as_input_error(error, where=where, options=place.options, attempts=attempts)


def _widen(start: int, stop: int, size_bytes: int) -> tuple[int, int]:
    """Returns the range to ask for where a header, or a directory at a file's end, is read.

    Its length is next to it: one request reads both. A small file is read as a whole, since its
    other parts will be read next.
    """
    if size_bytes <= _HEADER_BYTES:
        return 0, size_bytes
    least = min(_HEADER_BYTES, max(_LEAST_BYTES, size_bytes // _HEADER_SHARE))
    if start == 0:
        return 0, max(stop, least)
    if stop == size_bytes:
        return min(start, size_bytes - least), stop
    return start, stop


class _KeptRanges:
    """The small ranges that were read last; several threads share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_file: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._wide: dict[str, set[int]] = {}
        self._size_bytes = 0

    def find(self, path: str, start: int, stop: int) -> bytes | None:
        """Returns the bytes of a range that begins where a kept one does, or is in a wide one."""
        with self._lock:
            for begin in (start, *self._wide.get(path, ())):
                data = self._by_file.get((path, begin))
                if data is not None and begin <= start and stop <= begin + len(data):
                    return data[start - begin : stop - begin]
        return None

    def keep(self, path: str, start: int, data: bytes, *, wide: bool) -> None:
        with self._lock:
            if wide:
                self._wide.setdefault(path, set()).add(start)
            self._size_bytes += len(data) - len(self._by_file.pop((path, start), b""))
            self._by_file[path, start] = data
            while self._size_bytes > _KEPT_TOGETHER_BYTES:
                _, oldest = self._by_file.popitem(last=False)
                self._size_bytes -= len(oldest)
