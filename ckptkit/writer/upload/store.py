"""A run in an object store: requests that are repeated while that may help, and tell no secret.

Sending files part by part: a few parts at a time, so that memory stays bounded.

What a store answers when it refuses, as errors that tell no secret.
"""

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
from ckptkit.core.retries import RetryPolicy
from ckptkit.storage.remote.errors import describe_error, is_transient, status_of
from ckptkit.storage.remote.s3 import S3Uploads
from ckptkit.storage.remote.s3_object import S3Object
from ckptkit.storage.remote.store import ObjectInfo, RemoteStore
from ckptkit.writer.failures import Tally
from ckptkit.writer.messages import Remote

_DENIED = frozenset({401, 403})
_REFUSED = "see whether the credentials are right, have not expired, and may read, write and delete"
_AWAY = "see whether the store can be reached from this node; the step stays on the node's disk"


def as_failure(error: BaseException, where: str, options: Mapping[str, Any]) -> CkptkitError:
    """Turns what a store's client raised into an error of ours.

    Args:
        error: What was raised.
        where: The object or prefix concerned.
        options: Of the storage; none of their values is in the error.
    """
    if isinstance(error, CkptkitError):
        return error
    said = f"{type(error).__name__}: {describe_error(error, options)}"
    if _is_denied(error):
        return OutputError(f"the store refused access: {said}", where=where, hint=_REFUSED)
    if isinstance(error, FileNotFoundError):
        return OutputError(
            f"the store has no such bucket: {said}",
            where=where,
            hint="make the bucket first, or correct the URL",
        )
    if isinstance(error, ImportError | ValueError | TypeError) and not is_transient(error):
        return OutputError(
            f"nothing can be written there: {said}",
            where=where,
            hint="install what fsspec needs for such URLs (ckptkit-toolkit[s3] for s3://), and see"
            " whether the options are those of that library",
        )
    return SaveError(f"the store did not answer well: {said}", where=where, hint=_AWAY)


def _is_denied(error: BaseException) -> bool:
    named = "Credential" in type(error).__name__
    return named or isinstance(error, PermissionError) or status_of(error) in _DENIED


UPLOAD_RETRIES = RetryPolicy(attempts=9, longest_wait_seconds=16.0)
"""Some 40 seconds in all, for each request."""
_THREADS = 8
_T = TypeVar("_T")


class Entry(NamedTuple):
    """An object of a store.

    Attributes:
        size_bytes: Its length.
        identity: What changes with its content.
    """

    size_bytes: int
    identity: str


class Store:
    """The objects below a URL. All methods raise errors of ours, in which no option shows.

    Attributes:
        location: The URL, without a slash at its end.
        filesystem: fsspec's.
    """

    def __init__(self, remote: Remote, retry_policy: RetryPolicy = UPLOAD_RETRIES) -> None:
        """Connects to nothing yet, but finds what speaks to such a store.

        Args:
            remote: The URL, and what its storage is told.
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
        """The requests of S3; None where the store is another one."""
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
        """Does something with an object, and tells what goes wrong.

        Args:
            path: The object, for messages.
            operation: What to do; it repeats its requests itself.

        Returns:
            What it returned.

        """
        try:
            return operation()
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, no secret may show
            raise as_failure(error, self.where(path), self._options) from None

    def entries(self, folder: str = "") -> dict[str, Entry]:
        """Returns all objects below a folder, by their paths below the root."""
        listing = partial(self._store.listing, self.address(folder))
        found = self.perform(folder, listing)
        return {posixpath.join(folder, path): _entry(known) for path, known in found.items()}

    def has_younger(self, folder: str, seconds: float) -> bool:
        """Tells whether an object below a folder was written within the last so many seconds."""
        found = self.perform(folder, partial(self._store.listing, self.address(folder)))
        oldest = time.time() - seconds
        return any(not one.modified or one.modified > oldest for one in found.values())

    def look(self, path: str) -> Entry | None:
        """Asks for one object; None where there is none."""
        found = self.perform(path, partial(self._store.look_up, self.address(path)))
        return None if found is None else _entry(found)

    def get(self, path: str) -> bytes | None:
        return self.perform(path, partial(self._store.get_small, self.address(path)))

    def get_many(self, paths: Collection[str]) -> Iterator[bytes | None]:
        """Yields small objects in order, some of them asked for ahead."""
        rest = list(paths)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-get") as pool:
            while rest:
                now, rest = rest[:_THREADS], rest[_THREADS:]
                yield from pool.map(self.get, now)

    def put(self, path: str, data: bytes) -> None:
        """Puts a small object; it is there as a whole or not at all."""
        s3 = self.s3
        if s3 is not None:
            self.perform(path, partial(s3.put, self.key(path), data, crc32(data)))
        else:
            self.perform(path, partial(self._store.put_small, self.address(path), data))

    def copy(self, source: str, target: str) -> None:
        """Has the store copy an object; above 5 GB S3 does so part by part."""
        addresses = self.address(source), self.address(target)
        self._made(target, partial(self.filesystem.cp_file, *addresses))

    def remove(self, path: str) -> None:
        self.remove_all([path])

    def remove_all(self, paths: Collection[str]) -> None:
        """Removes objects, as far as they are there."""
        some = list(paths)
        where = some[0] if len(some) == 1 else ""
        self.perform(where, partial(self._store.delete, self._root, some))

    def folder_markers(self, folder: str) -> list[str]:
        ask = partial(self._store.folder_markers, self.address(folder))
        return [f"{folder}/{name}" for name in self.perform(folder, ask)]

    def abort_unfinished(self) -> int:
        """Removes the parts of uploads that were begun and never ended; returns of how many.

        Nobody else may be uploading there.
        """
        s3 = self.s3
        if s3 is None:
            return 0
        uploads = self.perform("", lambda: list(s3.unfinished(s3.prefix)))
        for key, upload in uploads:
            self.perform("", partial(s3.abort, key, upload))
        return len(uploads)

    def _made(self, path: str, ask: Callable[[], _T]) -> _T:
        again = partial(self._store.retry, ask, self.where(path))
        return self.perform(path, again)


def _entry(found: ObjectInfo) -> Entry:
    return Entry(found.size_bytes, found.identity)


_PARTS_AT_ONCE = 4


class Readable(Protocol):
    """A local file."""

    def read_bytes(self, start: int, count: int) -> bytes:
        """Returns bytes, fewer at the end of the file."""
        ...


class Sender:
    """Sends one file after another; at most `_PARTS_AT_ONCE` parts, and one more, are in memory."""

    def __init__(self, store: Store, tally: Tally) -> None:
        """Starts threads when they are needed.

        Args:
            store: Where the files go.
            tally: Is told of every part.
        """
        self._store = store
        self._tally = tally

    def send(self, file: Readable, size_bytes: int, path: str) -> None:
        """Sends a file, which becomes visible as a whole.

        Args:
            file: The file, open.
            size_bytes: Its length.
            path: What the object is called.
        """
        s3 = self._store.s3
        if s3 is None:
            self._store.perform(path, lambda: self._stream(file, size_bytes, path))
        else:
            self._store.perform(path, lambda: self._send_parts(s3, file, size_bytes, path))

    def _send_parts(self, s3: S3Uploads, file: Readable, size_bytes: int, path: str) -> None:
        before = self._tally.done_bytes
        key = self._store.key(path)
        sent = S3Object(s3, key, size_bytes, begun=lambda *_: None, sums_parts=False)
        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="ckptkit-part") as pool:
                self._fill(sent, pool, file, size_bytes)
            sent.publish()
        except BaseException:
            self._tally.done_bytes = before
            with suppress(Exception):  # what is left is removed when the run is opened next
                sent.remove()
            raise

    def _fill(
        self, sent: S3Object, pool: ThreadPoolExecutor, file: Readable, size_bytes: int
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
        self._tally.done_bytes += len(data)

    def _stream(self, file: Readable, size_bytes: int, path: str) -> None:
        """Sends a file in order, to a store of which only fsspec knows the requests."""
        address, before = self._store.address(path), self._tally.done_bytes
        target: Any = self._store.filesystem.open(address, "wb", block_size=PART_BYTES)
        try:
            for _, data in _read(file, size_bytes):
                target.write(data)
                self._tally.done_bytes += len(data)
            target.close()
        except BaseException:
            self._tally.done_bytes = before
            with suppress(Exception):  # or the garbage collector would finish what was broken off
                target.closed = True
            with suppress(Exception):
                target.discard()
            with suppress(Exception):  # some show it from its first byte on
                self._store.remove(path)
            raise


def _read(file: Readable, size_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the parts of a file, each with its first byte."""
    for part in cut_into_parts(size_bytes) if size_bytes else ():
        data = file.read_bytes(part.start, part.stop - part.start)
        if len(data) != part.stop - part.start:
            raise TruncatedFileError("it was cut short", where="a file that is uploaded")
        yield part.start, data
