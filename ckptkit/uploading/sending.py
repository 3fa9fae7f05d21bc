"""Sending files part by part: a few parts at a time, so that memory stays bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from ckptkit.core.errors import TruncatedFileError
from ckptkit.core.object_parts import PART_BYTES, cut_into_parts
from ckptkit.storage.s3_object import S3Object
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.uploading.store import Store
from ckptkit.writer.watching import Tally

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

        Raises:
            TruncatedFileError: If it is shorter.
            CkptkitError: If the store does not take it.
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
    """Yields the parts of a file, each with its first byte.

    Raises:
        TruncatedFileError: If it ends before it should.
    """
    for part in cut_into_parts(size_bytes) if size_bytes else ():
        data = file.read_bytes(part.start, part.stop - part.start)
        if len(data) != part.stop - part.start:
            raise TruncatedFileError("it was cut short", where="a file that is uploaded")
        yield part.start, data
