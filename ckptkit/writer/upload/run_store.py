"""The objects of a run: requests with retries, uploads in parts, and errors without secrets."""

from __future__ import annotations

import posixpath
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError, OutputError, SaveError, TruncatedFileError
from ckptkit.core.object_parts import PART_BYTES, cut_into_parts
from ckptkit.storage.remote.errors import RetryPolicy, describe_error, is_transient, status_of
from ckptkit.storage.remote.s3 import S3Object, S3Uploads
from ckptkit.storage.remote.store import ObjectInfo, RemoteStore
from ckptkit.writer.messages import ByteCounter, Remote

_DENIED = frozenset({401, 403})
_REFUSED = "check that the credentials are valid, and allow to read, write and delete"
_AWAY = "check that the store can be reached from this node; the step stays on the node's disk"


def as_failure(error: BaseException, where: str, options: Mapping[str, Any]) -> CkptkitError:
    """Turns what a store's client raised into an error of ours.

    Args:
        error: What was raised.
        where: The object or prefix.
        options: Of the storage; the error shows none of their values.
    """
    if isinstance(error, CkptkitError):
        return error
    text = f"{type(error).__name__}: {describe_error(error, options)}"
    is_denied = isinstance(error, PermissionError) or status_of(error) in _DENIED
    if is_denied or "Credential" in type(error).__name__:
        return OutputError(f"the store refused access: {text}", where=where, hint=_REFUSED)
    if isinstance(error, FileNotFoundError):
        return OutputError(
            f"the store has no such bucket: {text}",
            where=where,
            hint="create the bucket first, or correct the URL",
        )
    if isinstance(error, ImportError | ValueError | TypeError) and not is_transient(error):
        return OutputError(
            f"the store cannot be written to: {text}",
            where=where,
            hint="install what fsspec needs for such URLs (`pip install s3fs` for s3://), check"
            " that the options are those of that library",
        )
    return SaveError(f"the store failed: {text}", where=where, hint=_AWAY)


UPLOAD_RETRIES = RetryPolicy(attempts=9, longest_wait_seconds=16.0)
"""About 40 seconds in all for each request."""
_THREADS = 8
_T = TypeVar("_T")


class Entry(NamedTuple):
    """An object of a store.

    Attributes:
        size_bytes: Its length.
        identity: Changes with its content.
    """

    size_bytes: int
    identity: str


class Store:
    """The objects below a URL. All methods raise errors of ours that show no option's value.

    Attributes:
        location: The URL, without a slash at its end.
        filesystem: fsspec's.
    """

    def __init__(self, remote: Remote, retry_policy: RetryPolicy = UPLOAD_RETRIES) -> None:
        """Imports the store's client; connects with the first request.

        Args:
            remote: The URL and the options of its storage.
            retry_policy: How often requests are repeated.
        """
        self.location = remote.url.rstrip("/")
        protocol = self.location.partition("://")[0]
        self._options = remote.options
        self._store = RemoteStore(protocol, remote.options, self.location)
        self._store.retry_policy = retry_policy
        self.filesystem: Any = self._store.filesystem
        self._root = self._made("", lambda: self._store.path_of(self.location))

    @cached_property
    def s3(self) -> S3Uploads | None:
        """Requests of S3, None for other stores."""
        if not self._store.is_s3:
            return None
        return self._made("", lambda: S3Uploads(self._store, self._root))

    def address(self, path: str) -> str:
        return posixpath.join(self._root, path) if path else self._root

    def key(self, path: str) -> str:
        return self.address(path).partition("/")[2]

    def where(self, path: str) -> str:
        return posixpath.join(self.location, path) if path else self.location

    def perform(self, path: str, operation: Callable[[], _T]) -> _T:
        """Runs an operation on an object, and translates its errors.

        Args:
            path: The object, for messages.
            operation: Repeats its requests itself.
        """
        try:
            return operation()
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  any error may show secrets
            raise as_failure(error, self.where(path), self._options) from None

    def entries(self, folder: str = "") -> dict[str, Entry]:
        """Returns all objects below a folder, by their paths below the root."""
        listing = partial(self._store.list_objects, self.address(folder))
        objects = self.perform(folder, listing)
        return {posixpath.join(folder, path): _entry(entry) for path, entry in objects.items()}

    def has_younger(self, folder: str, seconds: float) -> bool:
        """Returns whether an object below a folder was written within the last seconds."""
        objects = self.perform(folder, partial(self._store.list_objects, self.address(folder)))
        oldest = time.time() - seconds
        return any(not entry.modified or entry.modified > oldest for entry in objects.values())

    def look(self, path: str) -> Entry | None:
        """Requests one object's size and identity; None if it does not exist."""
        entry = self.perform(path, partial(self._store.look_up, self.address(path)))
        return None if entry is None else _entry(entry)

    def get(self, path: str) -> bytes | None:
        return self.perform(path, partial(self._store.get_small, self.address(path)))

    def get_many(self, paths: Collection[str]) -> Iterator[bytes | None]:
        """Yields small objects in order, with several requests at a time."""
        rest = list(paths)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-get") as pool:
            while rest:
                now, rest = rest[:_THREADS], rest[_THREADS:]
                yield from pool.map(self.get, now)

    def put(self, path: str, data: bytes) -> None:
        """Puts a small object, which becomes visible as a whole."""
        s3 = self.s3
        if s3 is not None:
            self.perform(path, partial(s3.put, self.key(path), data, crc32(data)))
        else:
            self.perform(path, partial(self._store.put_small, self.address(path), data))

    def copy(self, source: str, target: str) -> None:
        """Has the store copy an object; S3 copies one above 5 GB in parts."""
        addresses = self.address(source), self.address(target)
        self._made(target, partial(self.filesystem.cp_file, *addresses))

    def remove(self, path: str) -> None:
        self.remove_all([path])

    def remove_all(self, paths: Collection[str]) -> None:
        """Removes the objects that exist."""
        names = list(paths)
        where = names[0] if len(names) == 1 else ""
        self.perform(where, partial(self._store.delete, self._root, names))

    def folder_markers(self, folder: str) -> list[str]:
        ask = partial(self._store.list_folder_markers, self.address(folder))
        return [f"{folder}/{name}" for name in self.perform(folder, ask)]

    def abort_unfinished(self) -> int:
        """Removes the parts of unfinished uploads, and returns how many uploads there were.

        No other process may be uploading there.
        """
        s3 = self.s3
        if s3 is None:
            return 0
        uploads = self.perform("", lambda: list(s3.list_uploads(s3.prefix)))
        for key, upload in uploads:
            self.perform("", partial(s3.abort, key, upload))
        return len(uploads)

    def _made(self, path: str, ask: Callable[[], _T]) -> _T:
        again = partial(self._store.retry, ask, self.where(path))
        return self.perform(path, again)


def _entry(stored: ObjectInfo) -> Entry:
    return Entry(stored.size_bytes, stored.identity)


_PARTS_AT_ONCE = 4


class ReadableFile(Protocol):
    """A local file."""

    def read_bytes(self, start: int, count: int) -> bytes:
        """Returns `count` bytes, fewer at the end of the file."""
        ...


class ObjectSender:
    """Uploads files; at most `_PARTS_AT_ONCE` + 1 parts are in memory."""

    def __init__(self, store: Store, counter: ByteCounter) -> None:
        self._store = store
        self._counter = counter

    def send(self, file: ReadableFile, size_bytes: int, path: str) -> None:
        """Uploads a file, which becomes visible as a whole.

        Args:
            file: The file, open.
            size_bytes: Its size.
            path: Of the object.
        """
        s3 = self._store.s3
        if s3 is None:
            self._store.perform(path, lambda: self._stream(file, size_bytes, path))
        else:
            self._store.perform(path, lambda: self._send_parts(s3, file, size_bytes, path))

    def _send_parts(self, s3: S3Uploads, file: ReadableFile, size_bytes: int, path: str) -> None:
        before = self._counter.done_bytes
        key = self._store.key(path)
        sent = S3Object.of_size(
            s3, key, size_bytes, lambda sums: s3.begin(key, sums_parts=sums), sums_parts=False
        )
        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="ckptkit-part") as pool:
                self._fill(sent, pool, file, size_bytes)
            sent.publish()
        except BaseException:
            self._counter.done_bytes = before
            with suppress(Exception):  # the next job that opens the run removes leftovers
                sent.remove()
            raise

    def _fill(
        self, sent: S3Object, pool: ThreadPoolExecutor, file: ReadableFile, size_bytes: int
    ) -> None:
        under_way: deque[Future[None]] = deque()
        try:
            for start, data in _read(file, size_bytes):
                if len(under_way) >= _PARTS_AT_ONCE:
                    under_way.popleft().result()
                under_way.append(pool.submit(self._write, sent.write, start, data))
            while under_way:
                under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()

    def _write(self, write: Callable[[int, memoryview], None], start: int, data: bytes) -> None:
        write(start, memoryview(data))
        self._counter.done_bytes += len(data)

    def _stream(self, file: ReadableFile, size_bytes: int, path: str) -> None:
        """Uploads a file in order, through fsspec's file object."""
        address, before = self._store.address(path), self._counter.done_bytes
        target: Any = self._store.filesystem.open(address, "wb", block_size=PART_BYTES)
        try:
            for _, data in _read(file, size_bytes):
                target.write(data)
                self._counter.done_bytes += len(data)
            target.close()
        except BaseException:
            self._counter.done_bytes = before
            with suppress(Exception):  # or the garbage collector would complete the upload
                target.closed = True
            with suppress(Exception):
                target.discard()
            with suppress(Exception):  # some stores show an object from its first byte on
                self._store.remove(path)
            raise


def _read(file: ReadableFile, size_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the parts of a file, each with its offset."""
    for part in cut_into_parts(size_bytes) if size_bytes else ():
        data = file.read_bytes(part.start, part.stop - part.start)
        if len(data) != part.stop - part.start:
            raise TruncatedFileError("it was cut short", where="a file that is uploaded")
        yield part.start, data
