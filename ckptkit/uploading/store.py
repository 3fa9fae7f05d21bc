"""A run in an object store: requests that are repeated while that may help, and tell no secret."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError
from ckptkit.storage.remote_store import RemoteStore, StoredObject
from ckptkit.storage.retries import Patience, retried
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.uploading.failures import as_failure
from ckptkit.writer.upload_messages import Remote

PATIENCE = Patience(attempts=9, longest_wait_seconds=16.0)
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

    def __init__(self, remote: Remote, patience: Patience = PATIENCE) -> None:
        """Connects to nothing yet, but finds what speaks to such a store.

        Args:
            remote: The URL, and what its storage is told.
            patience: How often requests are repeated.

        Raises:
            CkptkitError: If nothing does, or the options are not its own.
        """
        self.location = remote.url.rstrip("/")
        protocol = self.location.partition("://")[0]
        self._options = remote.options
        self._store = RemoteStore(protocol, remote.options, self.location)
        self._store.patience = patience
        self.filesystem: Any = self._store.filesystem
        self._root = self._made("", lambda: self._store.path_of(self.location))

    @cached_property
    def s3(self) -> S3Uploads | None:
        """The requests of S3; None where the store is another one."""
        if not self._store.is_s3:
            return None
        return self._made("", lambda: S3Uploads(self._store, self._root))

    def address(self, path: str) -> str:
        """Returns the name by which fsspec knows an object."""
        return posixpath.join(self._root, path) if path else self._root

    def key(self, path: str) -> str:
        """Returns the name of an object in its bucket."""
        return self.address(path).partition("/")[2]

    def where(self, path: str) -> str:
        """Returns the URL of an object, for messages."""
        return posixpath.join(self.location, path) if path else self.location

    def perform(self, path: str, operation: Callable[[], _T]) -> _T:
        """Does something with an object, and tells what goes wrong.

        Args:
            path: The object, for messages.
            operation: What to do; it repeats its requests itself.

        Returns:
            What it returned.

        Raises:
            CkptkitError: If it cannot be done.
        """  # noqa: DOC501
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
        """Returns a small object, None where there is none."""
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
        """Removes an object, if it is there."""
        self.remove_all([path])

    def remove_all(self, paths: Collection[str]) -> None:
        """Removes objects, as far as they are there."""
        some = list(paths)
        where = some[0] if len(some) == 1 else ""
        self.perform(where, partial(self._store.delete, self._root, some))

    def folder_markers(self, folder: str) -> list[str]:
        """Returns the empty objects that stand for a folder and for those in it, by their paths."""
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
        """Makes one request, again and again while that may help."""
        again = partial(retried, ask, self._store.patience, what=self.where(path))
        return self.perform(path, again)


def _entry(found: StoredObject) -> Entry:
    return Entry(found.size_bytes, found.identity)
