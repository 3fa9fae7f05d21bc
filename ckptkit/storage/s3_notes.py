"""Notes as small objects of a bucket, the first of a name winning over all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.core.crc import crc32
from ckptkit.core.errors import OutputError
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.storage.store_errors import Writing

_ATTEMPTS = 10
_WAIT_SECONDS = 0.2


class S3Notes:
    """The notes below a prefix, each of which is written once.

    That the first one wins is the store's doing: it is told to write an object only if there is
    none (`If-None-Match`). Stores differ in where they know this, so that it is tried.

    Source:
        https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
    """

    def __init__(self, store: S3Uploads, prefix: str, writing: Writing) -> None:
        """Takes a prefix.

        Args:
            store: The bucket.
            prefix: Of the keys, with the slash at its end.
            writing: A context that makes errors of ours of what the store raises.
        """
        self._store = store
        self._prefix = prefix
        self._writing = writing
        self._in_parts: bool | None = None

    def put(self, name: str, data: bytes) -> bytes:
        """Leaves a note unless there is one of that name.

        Returns:
            What the note says: `data`, or what another process was first with.

        Raises:
            OutputError: If it cannot be left, or the store knows no such condition.
        """
        if self.why_no_conditions():
            raise OutputError(self.why_no_conditions(), where=self._store.url(self._prefix))
        for _ in range(_ATTEMPTS):
            with self._writing():
                self._put_new(name, data)
            found = self.get(name)
            if found is not None:
                return found
            time.sleep(_WAIT_SECONDS)  # the other one was not written after all, or is removed
        raise OutputError(
            f"the note {name!r} is removed again and again", where=self._store.url(self._prefix)
        )

    def leave(self, name: str, data: bytes) -> None:
        """Leaves a note that nobody else leaves.

        Raises:
            OutputError: If it cannot be left.
        """
        with self._writing():
            self._store.put(self._prefix + name, data, crc32(data))

    def get(self, name: str) -> bytes | None:
        """Returns what a note says, None where there is none.

        Raises:
            OutputError: If it cannot be read.
        """
        path = self._store.url(self._prefix + name).removeprefix("s3://")
        with self._writing():
            try:
                return self._store.get(path)
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, name: str, owner: str) -> Iterator[bool]:
        """Yields whether `owner` was the first, now or earlier, to ask for it."""
        yield self.put(name, owner.encode()) == owner.encode()

    def why_no_conditions(self) -> str:
        """Tries to write an object twice; returns why that is of no use, empty if it is."""
        if self._in_parts is None:
            for in_parts in (False, True):
                if self._is_refused(in_parts=in_parts):
                    self._in_parts = in_parts
                    return ""
            return "the store writes over an object that is to be written only if there is none"
        return ""

    def _put_new(self, name: str, data: bytes) -> None:
        key = self._prefix + name
        self._store.put_new(key, data, crc32(data), in_parts=bool(self._in_parts))

    def _is_refused(self, *, in_parts: bool) -> bool:
        key, data = f"{self._prefix}probe-{os.urandom(8).hex()}", b"probe"
        with self._writing():
            self._store.put(key, data, crc32(data))
            try:
                return not self._store.put_new(key, data, crc32(data), in_parts=in_parts)
            except OSError:  # what a store says that does not know it at all
                return False
            finally:
                self._store.delete([key])
