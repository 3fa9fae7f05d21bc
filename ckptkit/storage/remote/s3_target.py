"""Writing an output to S3: uploads in parts that become objects at the commit.

S3 cannot rename objects. Until the commit there are only unfinished uploads, which no reader sees,
and notes, small objects that name them, so that the next run can remove what a killed run left:

    .ckptkit-0123456789abcdef/
        plan                  what all processes that fill one output do; without it none can commit
        NAME/uploads/PATH     the upload of a file
        NAME/…                other notes of the processes

A commit holds a claim on the place, so that of two runs one wins as a whole. It removes the old
manifest, completes the uploads, checks that the objects at the place are those that it wrote, and
writes the new manifest if there is none. Uploads of another run are removed only under the claim,
and a run whose uploads were removed cannot commit.

Where several processes fill one output, each sends its own parts of common uploads, and one of them
commits.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.errors import OutputError, OutputExistsError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.object_parts import CopiedRange, ObjectPart
from ckptkit.core.threads import call_to_end
from ckptkit.storage.base import (
    CopySource,
    Cut,
    OutputAttempt,
    SentRows,
    Sink,
    Target,
    encode_plan_note,
    parse_plan,
    parse_seen,
)
from ckptkit.storage.local.target import SharedTarget
from ckptkit.storage.locations import WORK_INFIX, check_relative, is_work_folder
from ckptkit.storage.manifests import EarlierOutput, refuse_newer, refuse_unnamed
from ckptkit.storage.remote.errors import (
    ErrorTranslator,
    clean_up,
    error_translator,
    lost_place_error,
    output_exists_error,
)
from ckptkit.storage.remote.s3 import ObjectSums, S3Object, S3Uploads, SentPart
from ckptkit.storage.remote.store import OutputClaim, get_store

if TYPE_CHECKING:
    from ckptkit.storage.places import Place

NONCE_BYTES = 8
PROBE_BYTES = 1024
_UPLOADS = "uploads"  # the folder of such notes
_OTHER_MANIFEST = "another run has put its manifest there"
logger = logging.getLogger(__name__)


class UploadMark(Struct, frozen=True):
    """The content of a mark, or of the note of an upload."""

    uploads: Sequence[tuple[str, str]] = ()  # the key and the name of each
    planned: Sequence[str] = ()  # keys of those that have no name yet

    @classmethod
    def parse(cls, data: bytes, prefix: str = "") -> UploadMark:
        """Returns what is below a prefix; nothing where the mark is damaged."""
        try:
            mark = msgspec.json.decode(data, type=cls)
        except (ValueError, RecursionError):
            return cls()
        uploads = [(key, name) for key, name in mark.uploads if key.startswith(prefix)]
        return cls(uploads, [key for key in mark.planned if key.startswith(prefix)])


def encode_mark(uploads: Sequence[tuple[str, str]] = (), planned: Sequence[str] = ()) -> bytes:
    return msgspec.json.encode(UploadMark(uploads, planned))


def sweep_uploads(store: S3Uploads, prefix: str, *, only: str = "", kept: str = "") -> None:
    """Removes the marks and notes of earlier runs below a prefix, and their uploads.

    `only` is the prefix of what is removed, where that is not all, `kept` that of what stays.
    """

    def is_removed(key: str) -> bool:
        return key.startswith(only) and not (kept and key.startswith(kept))

    names = _list_marks(store, prefix, only or prefix)
    marks = [key for key in names if is_removed(key)]
    planned: set[str] = set()
    for mark in marks:
        name = names[mark]
        if name is None or f"{_UPLOADS}/" in name:
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
        data = store.get(store.path(mark))
    except FileNotFoundError:  # another process sweeps here too
        return frozenset()
    left = UploadMark.parse(data, prefix)
    for key, upload in left.uploads:
        logger.info("removing an unfinished upload of an earlier run: %s", key)
        store.abort(key, upload)
    return frozenset(left.planned)


_PUBLISHED_AT_ONCE = 8  # a store may take minutes to complete a large upload


def open_s3_prefix(place: Place, *, writer: str = "") -> S3Uploads:
    """Connects to the bucket of a place; all written objects carry the name `writer`."""
    store = get_store(place)
    with error_translator(place.location, store.options)():
        root = store.path_of(place.location)
        if not root:
            raise UsageError("names no bucket", where=place.location)
        return S3Uploads(store, root, writer=writer, location=place.location)


class S3Commit:
    def __init__(self, store: S3Uploads, *, overwrite: bool) -> None:
        """Looks at the place, and refuses one that holds files unless they are replaced."""
        self._store, self._location = store, store.location
        self._translate_errors = store.translate_errors
        self._overwrite = overwrite
        self.claim = OutputClaim(store.store, store.root, store.location, store.translate_errors)
        self._is_dirty = False
        self._manifest = store.prefix + MANIFEST_NAME
        with self._translate_errors():
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
        store, prefix = self._store, self._store.prefix
        with self._translate_errors():
            left = [*_list_marks(store, prefix, prefix)]
            if all(kept and key.startswith(kept) for key in left):
                left = [key for key, _ in _list_unfinished(store, f"{prefix}{WORK_INFIX}")]
            if all(kept and key.startswith(kept) for key in left):
                return
            try:
                self.claim.take()
                sweep_uploads(store, prefix, kept=kept)
            finally:
                self.claim.release(is_clean=not self.claim.names)

    def run(
        self, items: Sequence[S3Object], last: S3Object | bytes, still_ours: Callable[[], bool]
    ) -> None:
        """Commits an output, its manifest last, unless another run has removed the uploads.

        The claim is held until `release`, also where this fails.
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
        if self.claim.is_held and self._is_dirty:
            clean_up(self._translate_errors, self._find_rest)
        self.claim.release(is_clean=not self._is_dirty)

    def _find_rest(self) -> None:
        """Notes whether the place holds files that only the claim names as those of an output."""
        objects = self.list_objects()
        self._is_dirty = bool(objects) and self._manifest not in objects

    def _check_replaced(self, old: dict[str, str]) -> tuple[bytes | None, set[str]]:
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
        self, items: Sequence[S3Object], last: S3Object | bytes, manifest: bytes | None
    ) -> None:
        if manifest is not None:
            self.claim.check()
        begun: list[bool] = []
        try:
            if manifest is not None:
                call_to_end(lambda: self._store.delete([self._manifest]))
            self._publish(items, begun)
            self._check_published(items)
            self.claim.check()
            call_to_end(lambda: self._put_last(last))
        except BaseException:
            if manifest is not None and not begun:  # the earlier output is whole
                put = self._store.put_new
                clean_up(
                    self._translate_errors,
                    lambda: put(self._manifest, manifest, crc32(manifest), in_parts=False),
                )
            raise

    def _publish(self, items: Sequence[S3Object], begun: list[bool]) -> None:
        """Publishes objects, many at a time; at the first error no further one is begun."""

        def one(item: S3Object) -> None:
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

    def _check_published(self, items: Sequence[S3Object]) -> None:
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


class _S3Output(Sink):
    """Objects of an output, and the notes that name their uploads until the commit."""

    def __init__(self, store: S3Uploads, name: str, *, overwrite: bool) -> None:
        """Looks at the place; `name` is that of the notes, below the name of the writer."""
        self._store, self.location = store, store.location
        self._translate_errors = store.translate_errors
        self._objects: dict[str, S3Object] = {}
        self._folder = f"{store.prefix}{WORK_INFIX}{store.writer}/"
        self.notes = S3Notes(store, f"{self._folder}{name}/", self._translate_errors)
        self._commit = S3Commit(store, overwrite=overwrite)

    def write(self, path: str, start: int, data: memoryview) -> None:
        item = self._objects.get(path)
        if item is None or start < 0 or start + data.nbytes > item.size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        with self._translate_errors():
            item.write(start, data)

    def _plan(self, path: str, keys: Collection[str]) -> None:
        """Notes uploads that are about to begin, that of a file first, for a run after a kill."""
        self.notes.leave(f"{_note_name(path)}{_PLANNED}", encode_mark(planned=sorted(keys)))

    def _begin_planned(self, path: str, *, sums_parts: bool = True) -> str:
        """Begins an upload, which is in a note before it holds any bytes."""
        key = self._store.prefix + path
        upload = self._store.begin(key, sums_parts=sums_parts)
        self.notes.leave(_note_name(path), encode_mark([(key, upload)]))
        return upload


class S3Target(_S3Output, Target):
    """A prefix of a bucket that holds a whole output once it is committed."""

    copies_objects = True

    def __init__(self, store: S3Uploads, *, overwrite: bool) -> None:
        """Looks at the place, and removes the uploads that killed runs left there."""
        super().__init__(store, "all", overwrite=overwrite)
        self._planned: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._commit.sweep()

    def create(self, path: str, size_bytes: int) -> None:
        self.create_copied(path, size_bytes, ())

    def create_copied(self, path: str, size_bytes: int, copies: Sequence[CopiedRange]) -> None:
        """Prepares a file. The store copies the ranges in `copy`; they are not written here."""
        check_relative(path, self.location)
        if path in self._objects:
            raise OutputError(f"the file {path!r} is there already", where=self.location)
        key = self._store.prefix + path
        self._objects[path] = S3Object.of_size(
            self._store,
            key,
            size_bytes,
            lambda sums_parts: self._begin(path, sums_parts=sums_parts),
            copies,
        )

    def copied_parts(self, path: str) -> tuple[ObjectPart, ...]:
        return self._objects[path].copied_parts

    def copy(self, path: str, part: ObjectPart, source: CopySource) -> None:
        with self._translate_errors():
            self._objects[path].copy(part, source)

    def why_no_copies(self, source: CopySource) -> str:
        if source.store is not self._store.store:
            return "source and output are not in one store, with the same options"
        store, key = self._store, f"{self._folder.rstrip('/')}-probe"
        if not store.has_checksums:
            return "checksums are switched off in the options of the store"
        return call_to_end(partial(_try_to_copy, store, key, source))

    def commit(self, last: str) -> None:
        """Makes everything visible, the file `last` after all others.

        Readers of what is replaced lose its `last` file first, and so never take old for new.
        """
        if last not in self._objects:
            raise ValueError(f"file {last!r} was not created")
        lacking = [path for path, item in self._objects.items() if item.missing()]
        if lacking:
            raise ValueError(f"bytes are missing of {lacking[0]!r}")
        items = [item for path, item in sorted(self._objects.items()) if path != last]
        try:
            self._commit.run(items, self._objects[last], self._has_notes)
        except BaseException:
            self.abandon()
            raise
        self._objects.clear()
        self.abandon()

    def abandon(self) -> None:
        call_to_end(self._remove_unpublished)

    def _remove_unpublished(self) -> None:
        objects = list(self._objects.values())
        self._objects.clear()
        for item in objects:
            clean_up(self._translate_errors, item.remove)
        notes, self.notes.left = self.notes.left, []
        if notes:
            clean_up(self._translate_errors, lambda: self._store.delete(notes))
        self._commit.release()

    def _begin(self, path: str, *, sums_parts: bool) -> str:
        with self._lock:
            if self._store.prefix + path not in self._planned:
                self._planned = frozenset(item.key for item in self._objects.values())
                self._plan(path, self._planned)
        return self._begin_planned(path, sums_parts=sums_parts)

    def _has_notes(self) -> bool:
        """Says whether the notes exist: another run removes them together with the uploads."""
        left = self.notes.left
        return not left or self._store.store.look_up(self._store.path(left[0])) is not None


def _try_to_copy(store: S3Uploads, key: str, source: CopySource) -> str:
    """Returns why the store does not copy a part into an object, empty if it does."""
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


_ATTEMPTS = 10
_WAIT_SECONDS = 0.2


class S3Notes:
    """Notes as small objects below a prefix; the first one of a name wins.

    The store sees to that: it writes an object only if there is none (`If-None-Match`). Stores
    differ in the requests that know this condition, so it is tried.

    Source:
        https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
    """

    def __init__(self, store: S3Uploads, prefix: str, translate_errors: ErrorTranslator) -> None:
        self._store = store
        self._prefix = prefix
        self._translate_errors = translate_errors
        self._in_parts: bool | None = None
        self.left: list[str] = []  # keys that this process wrote

    def put(self, name: str, data: bytes) -> bytes:
        if self.why_no_conditions():
            raise OutputError(self.why_no_conditions(), where=self._store.url(self._prefix))
        key = self._prefix + name
        for _ in range(_ATTEMPTS):
            with self._translate_errors():
                self._store.put_new(key, data, crc32(data), in_parts=bool(self._in_parts))
            content = self.get(name)
            if content is not None:
                return content
            time.sleep(_WAIT_SECONDS)  # the other note was not written, or was removed
        raise OutputError(
            f"the note {name!r} is removed again and again", where=self._store.url(self._prefix)
        )

    def leave(self, name: str, data: bytes) -> None:
        """Writes a note whose name only this process uses."""
        self.left.append(self._prefix + name)
        with self._translate_errors():
            self._store.put(self._prefix + name, data, crc32(data))

    def get(self, name: str) -> bytes | None:
        with self._translate_errors():
            try:
                return self._store.get(self._store.path(self._prefix + name))
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, name: str, owner: str) -> Iterator[bool]:
        """Yields whether `owner` was the first to ask, now or earlier."""
        yield self.put(name, owner.encode()) == owner.encode()

    def why_no_conditions(self) -> str:
        """Tries to write an object twice; returns why conditions do not work, empty if they do."""
        if self._in_parts is None:
            for in_parts in (False, True):
                if self._is_refused(in_parts=in_parts):
                    self._in_parts = in_parts
                    return ""
            return "the store writes over an object that is to be written only if there is none"
        return ""

    def _is_refused(self, *, in_parts: bool) -> bool:
        key, data = f"{self._prefix}probe-{os.urandom(8).hex()}", b"probe"
        with self._translate_errors():
            self._store.put(key, data, crc32(data))
            try:
                return not self._store.put_new(key, data, crc32(data), in_parts=in_parts)
            except OSError:  # the answer of a store without such a condition
                return False
            finally:
                self._store.delete([key])


_PLAN = "plan"
_PLANNED = ".planned"
_REQUESTS_AT_A_TIME = 8


class S3SharedTarget(_S3Output):
    """One process's view of an output on S3 that several processes write."""

    takes_parts = True

    def __init__(self, place: S3Uploads, attempt: OutputAttempt, cut: Cut) -> None:
        """Looks at the place; `cut` cuts a file into parts, alike in all processes."""
        store = S3Uploads(place.store, place.root, writer=attempt.nonce, location=place.location)
        super().__init__(store, attempt.name, overwrite=attempt.overwrite)
        self._attempt, self._cut = attempt, cut
        self._common = S3Notes(store, self._folder, self._translate_errors)
        self.removal = f"aws s3 rm '{store.url(self._folder + _PLAN)}'"
        if attempt.seen is not None:
            self._commit.seen = attempt.seen

    def plan(self) -> bytes | None:
        note = self._common.get(_PLAN)
        return None if note is None else parse_plan(note)

    def agree(self, plan: bytes) -> bytes:
        seen = self._commit.seen if self._attempt.overwrite else None
        return parse_plan(self._common.put(_PLAN, encode_plan_note(plan, seen)))

    def free_bytes(self) -> int | None:
        return None

    def why_no_ranges(self) -> str:
        return self._common.why_no_conditions() if self._attempt.is_agreed else ""

    def sweep(self) -> None:
        self._commit.sweep(kept=f"{self._folder}{self._attempt.name}/")

    def create(self, path: str, size_bytes: int) -> None:
        """Prepares a file of that size; parts of it that were not sent are dropped."""
        check_relative(path, self.location)
        key = self._store.prefix + path
        parts = self._cut(path) if size_bytes else ()
        self._objects[path] = S3Object(self._store, key, parts, lambda _: self._join_upload(path))

    def begin(self) -> None:
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as threads:
            for _ in threads.map(self._begin_one, self._objects):
                pass

    def sync(self) -> None: ...

    def sent(self) -> SentRows:
        return {path: item.rows() for path, item in self._objects.items() if item.rows()}

    def adopt(self, sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Adds what other processes have sent; returns the missing parts, by file."""
        for path, rows in sent.items():
            self._objects[path].adopt(rows)
        missing = {path: item.missing() for path, item in self._objects.items()}
        return {path: parts for path, parts in missing.items() if parts}

    def commit(self, last: str, data: bytes) -> None:
        if last != MANIFEST_NAME:
            raise ValueError(f"{last!r} is no manifest")
        agreed = parse_seen(self._common.get(_PLAN))
        if agreed is not None:
            self._commit.seen = agreed
        try:
            self._commit.run(list(self._objects.values()), data, self._has_uploads)
            call_to_end(lambda: clean_up(self._translate_errors, self._remove))
        except OutputExistsError:
            if self._attempt.overwrite:  # else each further try would be refused
                self.abandon()
            raise
        finally:
            self._commit.release()

    def leave(self) -> None: ...

    def abandon(self) -> None:
        clean_up(self._translate_errors, self._remove)

    def _remove(self) -> None:
        """Removes the notes, first the plan, without which none can commit, and the uploads."""
        self._store.delete([self._folder + _PLAN])
        sweep_uploads(self._store, self._store.prefix, only=self._folder)

    def _has_uploads(self) -> bool:
        """Says whether the notes of the uploads exist: another run removes both together."""
        with_parts = [path for path, item in self._objects.items() if item.rows()]
        return not with_parts or self.notes.get(_note_name(with_parts[0])) is not None

    def _begin_one(self, path: str) -> None:
        with self._translate_errors():
            self._plan(path, [self._store.prefix + path])
            self._begin_planned(path)

    def _join_upload(self, path: str) -> str:
        """Returns the upload of a file, which the first process that needs it begins."""
        note = self.notes.get(_note_name(path))
        if note is None and self._attempt.is_agreed:
            key = self._store.prefix + path
            self._plan(path, [key])
            mine = self._store.begin(key)
            own = encode_mark([(key, mine)])
            note = self.notes.put(_note_name(path), own)
            if note != own:
                self._store.abort(key, mine)
        for _, upload in UploadMark.parse(note or b"").uploads:
            return upload
        raise lost_place_error(f"the upload of {path!r} was removed by another run", self.location)


def _note_name(path: str) -> str:
    return f"{_UPLOADS}/{path}"


SharedOutput = SharedTarget | S3SharedTarget
"""One process's view of an output that several fill, invisible until one of them commits it.

Where `takes_parts` is true, what is written is taken in parts of objects, as `object_parts` cuts
them.
"""
