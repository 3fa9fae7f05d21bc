"""Writing an output to S3: uploads in parts that become objects all at the end.

Nothing is renamed, since S3 cannot: until the commit there are only unfinished uploads, which no
reader sees, and a small object that names them, by which the next run knows what a killed one
left behind. The commit completes the uploads, and writes the manifest last.

Whether a store copies parts of objects, and proves what it copied: tried, and not assumed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ckptkit.core.crc import crc32
from ckptkit.core.errors import OutputError
from ckptkit.core.object_parts import CopiedRange, ObjectPart
from ckptkit.storage.base import CopySource
from ckptkit.storage.local.names import WORK_INFIX, check_relative
from ckptkit.storage.remote.errors import Writing, quietly
from ckptkit.storage.remote.s3 import ObjectSums
from ckptkit.storage.remote.s3_commit import S3Commit, mark_of
from ckptkit.storage.remote.s3_object import S3Object
from ckptkit.storage.remote.s3_uploads import S3Uploads, SentPart

PROBE_BYTES = 1024
_LOG = logging.getLogger(__name__)


def why_no_copies(store: S3Uploads, key: str, source: CopySource) -> str:
    """Copies a few bytes into an object that is removed again.

    Args:
        store: The bucket.
        key: Of that object.
        source: An object of `PROBE_BYTES` at least.

    Returns:
        Why parts are not to be copied by the store; empty if they are.
    """
    if not store.has_checksums:
        return "checksums are switched off in the options of the store"
    upload = ""
    try:
        upload = store.begin(key)
        part = store.copy(key, upload, 1, source, (0, PROBE_BYTES))
        expected = crc32(store.get(source.path, 0, PROBE_BYTES))
        store.complete(key, upload, [SentPart(1, part.etag, expected)])
        told, upload = store.head(key).told, ""
        store.delete([key])
    except Exception as error:  # noqa: BLE001  whatever it is, the bytes can go through here
        _LOG.debug("the store was asked for a copy: %s", type(error).__name__)
        _abort(store, key, upload)
        return f"the store does not copy parts of objects ({type(error).__name__})"
    if told is None or not ObjectSums.of([(expected, PROBE_BYTES)]).agree_with(told):
        return "the store tells no CRC-32 of what it copied"
    return ""


def _abort(store: S3Uploads, key: str, upload: str) -> None:
    if not upload:
        return
    try:
        store.abort(key, upload)
    except Exception as error:  # noqa: BLE001  it holds next to nothing
        _LOG.debug("an upload of %s was left: %s", key, type(error).__name__)


class S3Target:
    """A prefix of a bucket that holds a whole output once it is committed."""

    def __init__(
        self,
        store: S3Uploads,
        prefix: str,
        location: str,
        writing: Writing,
        *,
        overwrite: bool,
    ) -> None:
        """Looks at what is there, and removes what a killed run left of its uploads.

        Args:
            store: The bucket.
            prefix: Of the keys, with the slash at its end; empty for the bucket itself.
            location: What messages call it.
            writing: A context that makes errors of ours of what the store raises.
            overwrite: Whether an earlier output is replaced by the commit.
        """
        self._store = store
        self._prefix = prefix
        self._location = location
        self._writing = writing
        self._objects: dict[str, S3Object] = {}
        self._mark = f"{prefix}{WORK_INFIX}{store.writer}"
        self._uploads: list[tuple[str, str]] = []
        self._planned: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._commit = S3Commit(store, location, writing, overwrite=overwrite)
        self._commit.sweep()

    @property
    def location(self) -> str:
        return self._location

    def free_bytes(self) -> int | None:
        """Returns None: a bucket has no limit that anybody could ask for."""
        return None

    def create(self, path: str, size_bytes: int) -> None:
        self.create_copied(path, size_bytes, ())

    def create_copied(self, path: str, size_bytes: int, copies: Sequence[CopiedRange]) -> None:
        """Takes note of a file of which the store copies ranges, when `copy` asks it to.

        Args:
            path: The file.
            size_bytes: Its size.
            copies: The ranges, as `choose_copies` chose them; they are not to be written.
        """
        check_relative(path, self._location)
        if path in self._objects:
            raise OutputError(f"the file {path!r} is there already", where=self._location)
        key = self._prefix + path
        self._objects[path] = S3Object(self._store, key, size_bytes, copies, begun=self._note)

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Takes bytes of a created file, and sends every part that they complete."""
        item = self._objects.get(path)
        if item is None or start < 0 or start + data.nbytes > item.size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        with self._writing():
            item.write(start, data)

    def copied_parts(self, path: str) -> tuple[ObjectPart, ...]:
        return self._objects[path].copied_parts

    def copy(self, path: str, part: ObjectPart, source: CopySource) -> None:
        with self._writing():
            self._objects[path].copy(part, source)

    def why_no_copies(self, source: CopySource) -> str:
        """Tries to have a few bytes copied; returns why that is of no use, empty if it is.

        Args:
            source: The object to copy from, of `PROBE_BYTES` at least.
        """
        if source.store is not self._store.store:
            return "source and output are not in one store, with the same options"
        return why_no_copies(self._store, f"{self._mark}-probe", source)

    def commit(self, last: str) -> None:
        """Makes everything visible, the file `last` after all others.

        Readers of what is replaced lose its `last` file first, and so never take old for new.
        """
        if last not in self._objects:
            raise ValueError(f"file {last!r} was not created")
        lacking = [path for path, item in self._objects.items() if not item.is_whole]
        if lacking:
            raise ValueError(f"bytes are missing of {lacking[0]!r}")
        items = [item for path, item in sorted(self._objects.items()) if path != last]
        try:
            self._commit.run(items, self._objects[last], self._has_mark)
        except BaseException:
            self.abandon()
            raise
        self._objects.clear()
        self.abandon()

    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit."""
        objects = list(self._objects.values())
        self._objects.clear()
        for item in objects:
            quietly(self._writing, item.remove)
        if self._planned:
            self._uploads.clear()
            self._planned = frozenset()
            quietly(self._writing, lambda: self._store.delete([self._mark]))
        self._commit.release()

    def _note(self, key: str, upload: str) -> None:
        """Writes down that an upload is ours, before it begins and before it holds any bytes."""
        with self._lock:
            if upload:
                self._uploads.append((key, upload))
            elif key in self._planned:
                return
            self._planned = frozenset(item.key for item in self._objects.values())
            data = mark_of(self._uploads, self._planned)
            self._store.put(self._mark, data, crc32(data))

    def _has_mark(self) -> bool:
        """Tells whether no other run has removed what was written down, and the uploads."""
        path = self._store.url(self._mark).removeprefix("s3://")
        return not self._planned or self._store.store.look_up(path) is not None
