"""Writing an output to S3: uploads in parts that become objects at the commit.

S3 cannot rename objects. Until the commit there are only unfinished uploads, which no reader sees,
and a mark: a small object that names them, so that the next run can remove what a killed run left.

A commit holds a claim on the place, so that of two runs one wins as a whole. It removes the old
manifest, completes the uploads, checks that the objects at the place are those that it wrote, and
writes the new manifest if there is none. Uploads of another run are removed only under the claim,
and a run whose uploads were removed cannot commit.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptkit.core.crc import crc32
from ckptkit.core.errors import OutputError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.object_parts import CopiedRange, ObjectPart
from ckptkit.storage.base import CopySource, Target
from ckptkit.storage.locations import WORK_INFIX, check_relative, is_work_folder
from ckptkit.storage.manifests import EarlierOutput, refuse_newer, refuse_unnamed
from ckptkit.storage.output_claim import OutputClaim
from ckptkit.storage.remote.errors import (
    ErrorTranslator,
    clean_up,
    error_translator,
    lost_place_error,
    output_exists_error,
)
from ckptkit.storage.remote.s3 import ObjectSums, S3Uploads, SentPart
from ckptkit.storage.remote.s3_object import S3Object
from ckptkit.storage.remote.store import get_store

if TYPE_CHECKING:
    from ckptkit.storage.places import Place

NONCE_BYTES = 8
PROBE_BYTES = 1024
UPLOADS = "uploads"
"""In a mark or a note: key and name of each upload; and the folder of such notes."""
_PLANNED = "planned"
_OTHER_MANIFEST = "another run has put its manifest there"
logger = logging.getLogger(__name__)


def encode_mark(uploads: Sequence[tuple[str, str]], planned: Collection[str] = ()) -> bytes:
    """Returns the content of a mark: key and name of uploads, and keys of those not yet begun."""
    return json.dumps({UPLOADS: list(uploads), _PLANNED: sorted(planned)}).encode()


def parse_uploads(mark: bytes) -> Iterator[tuple[str, str]]:
    """Yields key and name of the uploads in a mark; none if it is damaged."""
    try:
        for key, upload in json.loads(mark)[UPLOADS]:
            yield str(key), str(upload)
    except (ValueError, TypeError, KeyError, RecursionError):
        return


def has_leftovers(store: S3Uploads, prefix: str, *, kept: str = "") -> bool:
    """Says whether `sweep_uploads` would find something to remove."""
    if any(not (kept and key.startswith(kept)) for key in _list_marks(store, prefix, prefix)):
        return True
    work = f"{prefix}{WORK_INFIX}"
    return any(not (kept and key.startswith(kept)) for key, _ in _list_unfinished(store, work))


def sweep_uploads(store: S3Uploads, prefix: str, *, only: str = "", kept: str = "") -> None:
    """Removes the marks and notes of earlier runs below a prefix, and their uploads.

    Args:
        store: The bucket.
        prefix: Of the output, with the slash at its end.
        only: The prefix of what is removed, where that is not all.
        kept: The prefix of what stays.
    """

    def is_removed(key: str) -> bool:
        return key.startswith(only) and not (kept and key.startswith(kept))

    names = _list_marks(store, prefix, only or prefix)
    marks = [key for key in names if is_removed(key)]
    planned: set[str] = set()
    for mark in marks:
        name = names[mark]
        if name is None or f"{UPLOADS}/" in name:
            planned |= _abort_all(store, mark, prefix)
    work = f"{prefix}{WORK_INFIX}"
    for key, upload in _list_unfinished(store, prefix if planned else only or work):
        if key in planned or (key.startswith(work) and is_removed(key)):
            store.abort(key, upload)
    if marks:  # last: the next run finds the uploads by them
        store.delete(marks)


def _list_marks(store: S3Uploads, prefix: str, below: str) -> dict[str, str | None]:
    """Returns the keys of marks, of notes and of what was tried, with the names of notes."""
    own = re.compile(
        re.escape(f"{prefix}{WORK_INFIX}")
        + f"[0-9a-f]{{{2 * NONCE_BYTES}}}(?:(?P<probe>-probe)|/(?P<name>.*))?",
        re.DOTALL,
    )
    matches = ((key, own.fullmatch(key)) for key in store.list_objects(below))
    return {key: match["probe"] or match["name"] for key, match in matches if match is not None}


def _list_unfinished(store: S3Uploads, prefix: str) -> list[tuple[str, str]]:
    """Returns the uploads below a prefix; none where they may not be listed."""
    try:
        return list(store.list_uploads(prefix))
    except OSError as error:
        logger.debug("unfinished uploads were not looked for: %s", type(error).__name__)
        return []


def _abort_all(store: S3Uploads, mark: str, prefix: str) -> frozenset[str]:
    """Removes the uploads in a mark; returns the keys of those that had no name yet."""
    try:
        data = store.get(store.url(mark).removeprefix("s3://"))
    except FileNotFoundError:  # another process sweeps here too
        return frozenset()
    for key, upload in parse_uploads(data):
        if key.startswith(prefix):
            logger.info("removing an unfinished upload of an earlier run: %s", key)
            store.abort(key, upload)
    try:
        planned = frozenset(str(key) for key in json.loads(data)[_PLANNED])
    except (ValueError, TypeError, KeyError, RecursionError):
        return frozenset()
    return frozenset(key for key in planned if key.startswith(prefix))


_PUBLISHED_AT_ONCE = 8  # a store may take minutes to complete a large upload


class Publishable(Protocol):
    """An object that becomes visible at the commit."""

    key: str
    etag: str

    def publish(self) -> None:
        """Makes it visible, and notes its ETag."""
        ...


@dataclass(frozen=True, slots=True)
class S3Prefix:
    """A prefix of a bucket to which an output is written.

    Attributes:
        store: The requests of its bucket.
        location: The URL, for messages.
        translate_errors: A context that turns errors of the client into ours.
    """

    store: S3Uploads
    location: str
    translate_errors: ErrorTranslator


def open_s3_prefix(place: Place, *, writer: str = "") -> S3Prefix:
    """Connects to the bucket of a place; all written objects carry the name `writer`."""
    store = get_store(place)
    translate_errors = error_translator(place.location, store.options)
    with translate_errors():
        root = store.path_of(place.location)
        if not root:
            raise UsageError("names no bucket", where=place.location)
        return S3Prefix(S3Uploads(store, root, writer=writer), place.location, translate_errors)


class S3Commit:
    """The commit of one run to a place."""

    def __init__(self, place: S3Prefix, *, overwrite: bool) -> None:
        """Looks at the place, and refuses one that holds files unless they are replaced."""
        store, location, translate_errors = place.store, place.location, place.translate_errors
        self._store, self._location = store, location
        self._translate_errors = translate_errors
        self._overwrite = overwrite
        self.claim = OutputClaim(store.store, store.root, location, translate_errors)
        self._is_dirty = False
        self._manifest = store.prefix + MANIFEST_NAME
        with translate_errors():
            self.claim.refuse_taken()
            self._seen = self.list_objects()
            self._refuse_filled(self._seen)

    def list_objects(self) -> dict[str, str]:
        """Returns keys and ETags of the objects of the place, without marks and folder markers."""
        start = len(self._store.prefix)
        return {
            key: etag
            for key, etag in self._store.list_objects(self._store.prefix).items()
            if key[start:]
            and not key.endswith("/")
            and not is_work_folder(key[start:].partition("/")[0])
        }

    def _refuse_filled(self, objects: Collection[str]) -> None:
        """Refuses a place that holds something, if that is not to be replaced."""
        if objects and not self._overwrite:
            raise output_exists_error(self._location)

    @property
    def seen(self) -> str:
        """The ETag of the manifest that a commit may replace; empty where there was none."""
        return self._seen.get(self._manifest, "")

    @seen.setter
    def seen(self, etag: str) -> None:
        self._seen[self._manifest] = etag

    def sweep(self, *, kept: str = "") -> None:
        """Removes the uploads of earlier runs and of runs in progress, except below `kept`."""
        with self._translate_errors():
            if not has_leftovers(self._store, self._store.prefix, kept=kept):
                return
            self.claim.take()
            try:
                sweep_uploads(self._store, self._store.prefix, kept=kept)
            finally:
                self.claim.release(is_clean=not self.claim.names)

    def run(
        self, items: Sequence[Publishable], last: S3Object | bytes, still_ours: Callable[[], bool]
    ) -> None:
        """Commits an output, its manifest last.

        The claim is held until `release`, also where this fails.

        Args:
            items: All files but the manifest.
            last: The manifest, or its content.
            still_ours: Says whether no other run has removed the uploads.
        """
        with self._translate_errors():
            self._manifest = last.key if not isinstance(last, bytes) else self._manifest
            self.claim.take()
            if not still_ours():
                why = "another run for the same place has removed the uploads of this one"
                raise lost_place_error(why, self._location)
            old = self.list_objects()
            self._is_dirty = bool(self.claim.names)
            manifest, replaced = self._check_replaced(old)
            written = {self._manifest, *(item.key for item in items)}
            start = len(self._store.prefix)
            self.claim.add_names({*replaced, *(key[start:] for key in written)})
            self._replace(items, last, manifest)
            self._is_dirty = False
        kept = {key[start:] for key in written}
        rest = sorted(self._store.prefix + name for name in replaced - kept)
        clean_up(self._translate_errors, lambda: self._delete(rest))

    def release(self) -> None:
        """Releases the claim, if it is held."""
        if self.claim.is_held and self._is_dirty:
            clean_up(self._translate_errors, self._find_rest)
        self.claim.release(is_clean=not self._is_dirty)

    def _find_rest(self) -> None:
        """Notes whether the place holds files that only the claim names as those of an output."""
        objects = self.list_objects()
        self._is_dirty = bool(objects) and self._manifest not in objects

    def _check_replaced(self, old: dict[str, str]) -> tuple[bytes | None, set[str]]:
        """Returns the manifest that is replaced, and the files that are removed with it."""
        self._refuse_filled(old)
        etag = old.get(self._manifest, "")
        refuse_newer(etag, self.seen, self._location)
        start = len(self._store.prefix)
        name = self._manifest[start:]
        manifest = self._store.store.get_small(f"{self._store.root}/{name}") if etag else None
        names = {key[start:] for key in old}
        if name != MANIFEST_NAME:
            return manifest, names
        earlier = EarlierOutput.from_manifest(manifest, self._location)
        refuse_unnamed(names, earlier, self._location, self.claim.names)
        return manifest, earlier.removable(names, self.claim.names)

    def _replace(
        self, items: Sequence[Publishable], last: S3Object | bytes, manifest: bytes | None
    ) -> None:
        if manifest is not None:
            self.claim.check()
            self._store.delete([self._manifest])
        begun: list[bool] = []
        try:
            self._publish(items, begun)
            self._check_published(items)
            self.claim.check()
            self._put_last(last)
        except BaseException:
            if manifest is not None and not begun:  # the earlier output is whole
                put = self._store.put_new
                clean_up(
                    self._translate_errors,
                    lambda: put(self._manifest, manifest, crc32(manifest), in_parts=False),
                )
            raise

    def _publish(self, items: Sequence[Publishable], begun: list[bool]) -> None:
        """Publishes objects, many at a time; at the first error no further one is begun."""

        def one(item: Publishable) -> None:
            self.claim.check()
            begun.append(True)
            self._is_dirty = True
            item.publish()

        with ThreadPoolExecutor(_PUBLISHED_AT_ONCE, thread_name_prefix="ckptkit-publish") as pool:
            futures = [pool.submit(one, item) for item in items]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def _check_published(self, items: Sequence[Publishable]) -> None:
        """Checks that the objects of the place are those that this run wrote."""
        now = self.list_objects()
        for item in items:
            if item.etag and now.get(item.key) != item.etag:
                why = f"{item.key!r} was replaced or removed by another writer"
                raise lost_place_error(why, self._location)
        if self._manifest in now:
            raise lost_place_error(_OTHER_MANIFEST, self._location)

    def _put_last(self, last: S3Object | bytes) -> None:
        if not isinstance(last, bytes):
            last.publish_new()
            return
        key = self._manifest
        is_put = self._store.put_new(key, last, crc32(last), in_parts=False)
        path = f"{self._store.root}/{MANIFEST_NAME}"
        if not is_put and self._store.store.get_small(path) != last:  # an answer may be lost
            raise lost_place_error(_OTHER_MANIFEST, self._location)

    def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            self.claim.check()
            self._store.delete(keys)


def why_no_copies(store: S3Uploads, key: str, source: CopySource) -> str:
    """Copies a few bytes into an object `key` that is removed again.

    Returns why the store cannot copy parts of `source`, which has at least `PROBE_BYTES`; empty if
    it can.
    """
    if not store.has_checksums:
        return "checksums are switched off in the options of the store"
    upload = ""
    try:
        upload = store.begin(key)
        part = store.copy(key, upload, 1, source, (0, PROBE_BYTES))
        expected = crc32(store.get(source.path, 0, PROBE_BYTES))
        store.complete(key, upload, [SentPart(1, part.etag, expected)])
        checksum, upload = store.head(key).checksum, ""
        store.delete([key])
    except Exception as error:  # noqa: BLE001  whatever it is, the bytes can go through here
        logger.debug("the store was asked for a copy: %s", type(error).__name__)
        try:
            if upload:
                store.abort(key, upload)
        except Exception as left:  # noqa: BLE001  it holds next to nothing
            logger.debug("an upload of %s was left: %s", key, type(left).__name__)
        return f"the store does not copy parts of objects ({type(error).__name__})"
    if checksum is None or not ObjectSums.of([(expected, PROBE_BYTES)]).matches(checksum):
        return "the store reports no CRC-32 of what it copied"
    return ""


class S3Target(Target):
    """A prefix of a bucket that holds a whole output once it is committed."""

    copies_objects = True

    def __init__(self, place: S3Prefix, *, overwrite: bool) -> None:
        """Looks at the place, and removes the uploads that killed runs left there."""
        store = place.store
        self._store, self.location = store, place.location
        self._translate_errors = place.translate_errors
        self._objects: dict[str, S3Object] = {}
        self._mark = f"{store.prefix}{WORK_INFIX}{store.writer}"
        self._uploads: list[tuple[str, str]] = []
        self._planned: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._commit = S3Commit(place, overwrite=overwrite)
        self._commit.sweep()

    def create(self, path: str, size_bytes: int) -> None:
        self.create_copied(path, size_bytes, ())

    def create_copied(self, path: str, size_bytes: int, copies: Sequence[CopiedRange]) -> None:
        """Prepares a file. The store copies the ranges in `copy`; they are not written here."""
        check_relative(path, self.location)
        if path in self._objects:
            raise OutputError(f"the file {path!r} is there already", where=self.location)
        key = self._store.prefix + path
        self._objects[path] = S3Object(self._store, key, size_bytes, copies, begun=self._note)

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Takes bytes of a created file, and sends every part that they complete."""
        item = self._objects.get(path)
        if item is None or start < 0 or start + data.nbytes > item.size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        with self._translate_errors():
            item.write(start, data)

    def copied_parts(self, path: str) -> tuple[ObjectPart, ...]:
        return self._objects[path].copied_parts

    def copy(self, path: str, part: ObjectPart, source: CopySource) -> None:
        with self._translate_errors():
            self._objects[path].copy(part, source)

    def why_no_copies(self, source: CopySource) -> str:
        """Tries to copy a few bytes of an object; returns why the store cannot, empty if it can."""
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
            clean_up(self._translate_errors, item.remove)
        if self._planned:
            self._uploads.clear()
            self._planned = frozenset()
            clean_up(self._translate_errors, lambda: self._store.delete([self._mark]))
        self._commit.release()

    def _note(self, key: str, upload: str) -> None:
        """Writes an upload into the mark, before it begins and before it holds any bytes."""
        with self._lock:
            if upload:
                self._uploads.append((key, upload))
            elif key in self._planned:
                return
            self._planned = frozenset(item.key for item in self._objects.values())
            data = encode_mark(self._uploads, self._planned)
            self._store.put(self._mark, data, crc32(data))

    def _has_mark(self) -> bool:
        """Says whether the mark exists: another run removes it together with the uploads."""
        path = self._store.url(self._mark).removeprefix("s3://")
        return not self._planned or self._store.store.look_up(path) is not None
