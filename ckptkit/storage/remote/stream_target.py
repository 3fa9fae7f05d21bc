"""Writing an output to a URL; stores other than S3 through any file system of fsspec.

All that fsspec promises of every store is a file that is opened, written in order and closed, and
that readers see when it is committed. So files stay open until the commit, which closes them one
by one, the manifest last. In a bucket of the Hub they are sent under hidden names once they are
whole, and the commit has the Hub copy them. Threads write in about the order of files and bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import OutputError, RefusedError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.threads import call_to_end
from ckptkit.storage.base import Target
from ckptkit.storage.locations import (
    S3_PROTOCOLS,
    WORK_INFIX,
    check_relative,
    is_hub_bucket,
    is_read_only,
    is_work_folder,
)
from ckptkit.storage.manifests import EarlierOutput, refuse_newer, refuse_unnamed
from ckptkit.storage.remote.errors import (
    ErrorTranslator,
    clean_up,
    error_translator,
    lost_place_error,
    output_exists_error,
)
from ckptkit.storage.remote.s3_target import NONCE_BYTES, S3Target, open_s3_prefix
from ckptkit.storage.remote.store import ObjectInfo, OutputClaim, RemoteStore, get_store

if TYPE_CHECKING:
    from ckptkit.storage.places import Place


WAITING_BYTES = 16 << 20
"""How many bytes of all files may wait in memory for their turn."""


class PendingMemory:
    """The memory in which writes wait for their turn.

    A write without room waits for those before it. This ends as long as writes are begun in the
    order of files and bytes, since the first of them never waits.
    """

    def __init__(self, limit_bytes: int = WAITING_BYTES) -> None:
        self.changed = threading.Condition()
        self.left_bytes = limit_bytes
        self.is_given_up = False

    def give_up(self) -> None:
        """Ends all waits, and accepts nothing any more."""
        with self.changed:
            self.is_given_up = True
            self.changed.notify_all()


class Stream:
    def __init__(
        self,
        opened: Callable[[], Any],
        size_bytes: int,
        room: PendingMemory,
        *,
        is_sent_early: bool = False,
    ) -> None:
        """Prepares a file; `opened` opens it for writing with its first bytes.

        `is_sent_early`: it is closed as soon as it is whole.
        """
        self._opened = opened
        self._is_sent_early = is_sent_early
        self.size_bytes = size_bytes
        self._room = room
        self._file: Any = None
        self._position = 0
        self._early: dict[int, bytes] = {}

    @property
    def is_whole(self) -> bool:
        return self._position == self.size_bytes

    def write(self, start: int, data: memoryview) -> None:
        """Writes bytes, at once or when those before them are there."""
        if not data.nbytes or not self._is_next(start, data):
            return
        now: bytes | memoryview | None = data
        while now is not None:
            if self._file is None:
                self._file = self._opened()
            self._file.write(now)
            now = self._advance(len(now))
        if self._is_sent_early and self.is_whole:
            self._file.close()

    def publish(self) -> None:
        if self._file is None:
            self._file = self._opened()
        self._file.close()
        self._file.commit()

    def discard(self) -> None:
        if self._file is None:
            return
        try:
            self._file.discard()
        finally:
            with suppress(AttributeError):
                self._file.closed = (
                    True  # else its finaliser would write the rest, and make it visible
                )

    def _is_next(self, start: int, data: memoryview) -> bool:
        """Says whether it is the turn of a write; keeps its bytes for later otherwise."""
        room = self._room
        with room.changed:
            room.changed.wait_for(
                lambda: (
                    room.is_given_up or start == self._position or data.nbytes <= room.left_bytes
                )
            )
            if room.is_given_up:
                return False
            if start == self._position:
                return True
            self._early[start] = bytes(data)
            room.left_bytes -= data.nbytes
            return False

    def _advance(self, count: int) -> bytes | None:
        """Counts written bytes; returns those that follow them if they are kept."""
        room = self._room
        with room.changed:
            self._position += count
            following = self._early.pop(self._position, None)
            if following is not None:
                room.left_bytes += len(following)
            room.changed.notify_all()
            return None if room.is_given_up else following


_BLOCK_BYTES = 8 << 20


class StreamTarget(Target):
    """A folder of a store that holds a whole output once it is committed.

    Writes have to come in about the order of files and bytes, as an execution's tasks do.
    """

    _sends_early = False

    def __init__(self, place: Place, *, overwrite: bool) -> None:
        """Looks at the place, and refuses one that holds files unless they are replaced."""
        # A client of its own: the files of a transaction are those of its file system.
        self._store = RemoteStore(place.protocol, place.options, place.location)
        self._filesystem = self._store.filesystem
        self.location = place.location
        self._translate_errors: ErrorTranslator = error_translator(
            place.location, self._store.options
        )
        self._overwrite = overwrite
        self._nonce = os.urandom(NONCE_BYTES).hex()
        self._streams: dict[str, Stream] = {}
        self._published: list[str] = []
        self._room = PendingMemory()
        with self._translate_errors():
            self._path = self._store.path_of(place.location)
            # Not by the client of the transaction, which shows nothing before its end.
            self._claim = OutputClaim(
                get_store(place), self._path, self.location, self._translate_errors
            )
            self._claim.refuse_taken()
            self._seen = _list_output(self._store, self._path)
            self._refuse_filled(self._seen)
        self._filesystem.start_transaction()

    def create(self, path: str, size_bytes: int) -> None:
        check_relative(path, self.location)
        if path in self._streams:
            raise OutputError(f"the file {path!r} is there already", where=self.location)
        self._streams[path] = Stream(
            lambda: self._open(path), size_bytes, self._room, is_sent_early=self._sends_early
        )

    def write(self, path: str, start: int, data: memoryview) -> None:
        stream = self._streams.get(path)
        if stream is None or start < 0 or start + data.nbytes > stream.size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        with self._translate_errors():
            stream.write(start, data.cast("B"))

    def give_up(self) -> None:
        self._room.give_up()

    def commit(self, last: str) -> None:
        """Makes everything visible, the file `last` after all others.

        Readers of what is replaced lose its `last` file first, and so never take old for new.
        """
        if last not in self._streams:
            raise ValueError(f"file {last!r} was not created")
        lacking = [path for path, stream in self._streams.items() if not stream.is_whole]
        if lacking:
            raise ValueError(f"bytes are missing of {lacking[0]!r}")
        try:
            with self._translate_errors():
                self._claim.take()
                old = _list_output(self._store, self._path)
                replaced = self._refuse_changed(old, last)
                self._claim.add_names({*replaced, *self._streams})
                self._claim.check()
                if last in old:
                    self._store.delete(self._path, [last])
                self._publish(sorted(self._streams.keys() - {last}))
                self._publish([last])
        except BaseException:
            self.abandon()
            raise
        written = set(self._streams)
        self._streams.clear()
        self._published.clear()
        self._filesystem.transaction.files.clear()
        self._clear(replaced - written)
        clean_up(self._translate_errors, partial(self._remove_sent, ""))
        self._claim.release(is_clean=True)

    def abandon(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            clean_up(self._translate_errors, stream.discard)
        published, self._published = self._published, []
        self._clear(published)  # the last one of a commit that failed may be visible or not
        self._filesystem.transaction.files.clear()
        if streams:
            clean_up(self._translate_errors, partial(self._remove_sent, self._nonce))
        if self._claim.is_held:
            clean_up(self._translate_errors, self._release)

    def _release(self) -> None:
        """Releases the claim; files without a manifest stay named in it."""
        left = _list_output(self._store, self._path)
        self._claim.release(is_clean=not left or MANIFEST_NAME in left)

    def _publish(self, paths: Sequence[str]) -> None:
        """Makes some files visible."""
        for path in paths:
            self._claim.check()
            self._published.append(path)
            call_to_end(self._streams[path].publish)

    def _remove_sent(self, nonce: str) -> None:
        """Removes what was sent under hidden names: by this output, or by all if empty."""

    def _open(self, path: str) -> Any:
        name = f"{self._path}/{path}"
        try:
            return self._filesystem.open(name, "wb", block_size=_BLOCK_BYTES)
        except FileNotFoundError:  # a store with folders that have to be made
            self._filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            return self._filesystem.open(name, "wb", block_size=_BLOCK_BYTES)

    def _clear(self, paths: Collection[str]) -> None:
        at_once = [sorted(paths)] if self._store.is_bucket else [[path] for path in sorted(paths)]
        for names in at_once:
            clean_up(self._translate_errors, partial(self._store.delete, self._path, names))

    def _refuse_filled(self, paths: Collection[str]) -> None:
        if paths and not self._overwrite:
            raise output_exists_error(self.location)

    def _refuse_changed(self, objects: Mapping[str, ObjectInfo], last: str) -> set[str]:
        """Refuses what must not be replaced; returns the files that are removed with it."""
        self._refuse_filled(objects)
        refuse_newer(objects.get(last), self._seen.get(last), self.location)
        if objects and last == MANIFEST_NAME:
            path = f"{self._path}/{last}"
            data = self._store.get_small(path) if last in objects else None
            earlier = EarlierOutput.from_manifest(data, self.location)
            refuse_unnamed(set(objects), earlier, self.location, self._claim.names)
            return earlier.removable(set(objects), self._claim.names)
        return set(objects)


class BucketTarget(StreamTarget):
    """The same in a bucket of the Hub.

    OUT/.ckptkit-NONCE/   the files of an output that is not committed
    """

    _sends_early = True

    def _open(self, path: str) -> Any:
        return super()._open(f"{WORK_INFIX}{self._nonce}/{path}")

    def _publish(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._streams[path].publish()  # sends what is empty, too
        if not paths:
            return
        hidden = f"{self._path}/{WORK_INFIX}{self._nonce}"
        self._claim.check()
        self._published += paths
        try:
            copies = {f"{hidden}/{path}": f"{self._path}/{path}" for path in paths}
            call_to_end(
                lambda: self._store.retry(partial(self._filesystem.copy_files, copies), hidden)
            )
        except FileNotFoundError:
            why = "another run has removed what this one had sent"
            raise lost_place_error(why, self.location) from None

    def _remove_sent(self, nonce: str) -> None:
        sent = self._store.list_objects(self._path)
        names = [path for path in sent if path.startswith(f"{WORK_INFIX}{nonce}") and "/" in path]
        self._store.delete(self._path, names)


def _list_output(store: RemoteStore, root: str) -> dict[str, ObjectInfo]:
    listed = store.list_objects(root).items()
    return {path: entry for path, entry in listed if not is_work_folder(path.split("/")[0])}


_BUCKETS = S3_PROTOCOLS | {"abfs", "abfss", "az", "gcs", "gs", "oci", "oss"}


def check_remote_target(place: Place, *, overwrite: bool) -> None:
    """Refuses a place that `open_remote_target` would refuse, and writes nothing."""
    if is_read_only(place):
        raise RefusedError(
            f"nothing is written to {place.protocol}:// URLs",
            where=place.location,
            hint="write to a folder or a bucket, of the Hub hf://buckets/ORG/NAME/FOLDER; `ckptkit"
            " push` uploads a model folder to a repository",
        )
    store = get_store(place)
    translate_errors = error_translator(place.location, store.options)
    with translate_errors():
        path = store.path_of(place.location)
        if not path.strip("/"):
            raise UsageError("names no place in the store", where=place.location)
        is_whole = "/" not in path.strip("/") if place.protocol in _BUCKETS else False
        is_whole = is_whole or (store.is_bucket and path.count("/") == 1)
        if overwrite and is_whole:
            raise RefusedError(
                "the output would replace a whole bucket",
                where=place.location,
                hint="name a prefix in it",
            )
        names = _list_output(store, path).keys()
        if not overwrite and names:
            raise output_exists_error(place.location, is_whole_bucket=is_whole)
        left = OutputClaim(store, path, place.location, translate_errors).refuse_taken()
        if names:
            manifest = store.get_small(f"{path}/{MANIFEST_NAME}")
            earlier = EarlierOutput.from_manifest(manifest, place.location)
            refuse_unnamed(names, earlier, place.location, left)


def open_remote_target(place: Place, *, overwrite: bool) -> Target:
    if place.protocol not in S3_PROTOCOLS:
        kind = BucketTarget if is_hub_bucket(place) else StreamTarget
        return kind(place, overwrite=overwrite)
    store = open_s3_prefix(place, writer=os.urandom(NONCE_BYTES).hex())
    return S3Target(store, overwrite=overwrite)
