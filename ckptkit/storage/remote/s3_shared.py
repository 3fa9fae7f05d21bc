"""An output on S3 that several processes fill at once: parts of common uploads, completed by one.

Below the output is, until it is committed,

    .ckptkit-0123456789abcdef/
        plan                  what all processes do; without it none of them can commit
        ATTEMPT/uploads/PATH  the upload of a file; every process sends its own parts
        ATTEMPT/…             other notes of the processes

No reader sees the uploads, and the next run finds them by these notes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import OutputError, OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.base import (
    Cut,
    OutputAttempt,
    SentRows,
    Sink,
    encode_plan_note,
    parse_plan,
    parse_seen,
)
from ckptkit.storage.local.shared_target import SharedTarget
from ckptkit.storage.locations import WORK_INFIX, check_relative
from ckptkit.storage.remote.errors import ErrorTranslator, clean_up, lost_place_error
from ckptkit.storage.remote.s3 import ObjectSums, S3Uploads, SentPart
from ckptkit.storage.remote.s3_object import (
    MultipartUpload,
    PartBuffers,
    check_object,
    complete_upload,
)
from ckptkit.storage.remote.s3_target import (
    UPLOADS,
    S3Commit,
    S3Prefix,
    encode_mark,
    parse_uploads,
    sweep_uploads,
)

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
        """Takes a prefix of keys, with the slash at its end."""
        self._store = store
        self._prefix = prefix
        self._translate_errors = translate_errors
        self._in_parts: bool | None = None

    def put(self, name: str, data: bytes) -> bytes:
        """Writes a note unless there is one of that name; returns the content of the note."""
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
        with self._translate_errors():
            self._store.put(self._prefix + name, data, crc32(data))

    def get(self, name: str) -> bytes | None:
        """Returns the content of a note, None where there is none."""
        path = self._store.url(self._prefix + name).removeprefix("s3://")
        with self._translate_errors():
            try:
                return self._store.get(path)
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


class S3SharedObject:
    """An object to which several processes send parts, as one of them sees it; threads share it.

    Attributes:
        key: What it will be called.
        etag: Of the object, once it is published.
    """

    def __init__(
        self,
        store: S3Uploads,
        key: str,
        parts: Sequence[ObjectPart],
        upload: Callable[[], str],
    ) -> None:
        """Takes the parts of an object, and a function that returns its common upload."""
        self.key = key
        self.etag = ""
        self._store = store
        self._parts = {part.number: part for part in parts}
        self._buffers = PartBuffers(parts)
        self._upload = upload
        self._name = ""
        self._lock = threading.Lock()
        self._rows: dict[int, tuple[int, str, int]] = {}

    def write(self, start: int, data: memoryview) -> None:
        """Takes bytes from `start` on, and sends every part that they complete."""
        for part, whole in self._buffers.add(start, data.cast("B")):
            with whole.getbuffer() as view:
                checksum = crc32(view)
            sent = self._store.send(self.key, self._get_upload(), part.number, whole, checksum)
            self._rows[part.number] = part.number, sent.etag, checksum

    def rows(self) -> list[Sequence[Any]]:
        return [self._rows[number] for number in sorted(self._rows)]

    def adopt(self, rows: Sequence[Sequence[Any]]) -> None:
        for number, etag, checksum in rows:
            self._rows[number] = number, etag, checksum

    def missing(self) -> list[ObjectPart]:
        return [part for number, part in self._parts.items() if number not in self._rows]

    def publish(self) -> None:
        """Makes it visible, and compares what the store has with what it was given."""
        if not self._parts:
            self.etag = self._store.put(self.key, b"", 0)
            return
        if self.missing():
            raise ValueError(f"{self.key!r} lacks {len(self.missing())} parts")
        size, parts, sums = 0, [], []
        for number, part in self._parts.items():
            _, etag, checksum = self._rows[number]
            sums.append((checksum, part.stop - part.start))
            size = part.stop
            parts.append(SentPart(number, etag, checksum if self._store.has_checksums else None))
        upload = MultipartUpload(self.key, self._get_upload(), size)
        complete_upload(self._store, upload, parts)
        self.etag = check_object(self._store, upload, ObjectSums.of(sums)).etag

    def _get_upload(self) -> str:
        with self._lock:
            if not self._name:
                self._name = self._upload()
            return self._name


_PLAN = "plan"
_PLANNED = ".planned"
_REQUESTS_AT_A_TIME = 8


class S3SharedTarget(Sink):
    """One process's view of an output on S3 that several processes write.

    Attributes:
        location: The URL, for messages.
        removal: The shell command with which a user discards what other processes have begun.
        notes: Of what the processes have done.
    """

    takes_parts = True

    def __init__(self, place: S3Prefix, attempt: OutputAttempt, cut: Cut) -> None:
        """Looks at the place; `cut` cuts a file into parts, alike in all processes."""
        store = S3Uploads(place.store.store, place.store.root, writer=attempt.nonce)
        self.location = place.location
        self._attempt, self._cut = attempt, cut
        self._store = store
        self._translate_errors = place.translate_errors
        self._folder = f"{store.prefix}{WORK_INFIX}{attempt.nonce}/"
        self._common = S3Notes(self._store, self._folder, self._translate_errors)
        self.notes = S3Notes(self._store, f"{self._folder}{attempt.name}/", self._translate_errors)
        self._objects: dict[str, S3SharedObject] = {}
        self.removal = f"aws s3 rm '{store.url(self._folder + _PLAN)}'"
        self._commit = S3Commit(replace(place, store=store), overwrite=attempt.overwrite)
        if attempt.seen is not None:
            self._commit.seen = attempt.seen

    def plan(self) -> bytes | None:
        note = self._common.get(_PLAN)
        return None if note is None else parse_plan(note)

    def agree(self, plan: bytes) -> bytes:
        """Proposes a plan unless another process has; returns the plan that was agreed on."""
        seen = self._commit.seen if self._attempt.overwrite else None
        return parse_plan(self._common.put(_PLAN, encode_plan_note(plan, seen)))

    def free_bytes(self) -> int | None:
        """Returns None: a bucket has no limit that could be queried."""
        return None

    def why_no_ranges(self) -> str:
        """Returns why processes cannot agree on uploads there, empty if they can."""
        return self._common.why_no_conditions() if self._attempt.is_agreed else ""

    def sweep(self) -> None:
        """Removes what killed and given up attempts left behind; for one of the processes."""
        self._commit.sweep(kept=f"{self._folder}{self._attempt.name}/")

    def create(self, path: str, size_bytes: int) -> None:
        """Prepares a file of that size; parts of it that were not sent are dropped."""
        check_relative(path, self.location)
        key = self._store.prefix + path
        parts = self._cut(path) if size_bytes else ()
        self._objects[path] = S3SharedObject(
            self._store, key, parts, lambda: self._join_upload(path)
        )

    def begin(self) -> None:
        """Begins the uploads of all created files, and writes their notes."""
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as threads:
            for _ in threads.map(self._begin_one, self._objects):
                pass

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Takes bytes of a created file, and sends every part that they complete."""
        item = self._objects.get(path)
        if item is None:
            raise ValueError(f"file {path!r} was not created")
        with self._translate_errors():
            item.write(start, data)

    def sync(self) -> None:
        """Does nothing: what was sent is durable."""

    def sent(self) -> SentRows:
        return {path: item.rows() for path, item in self._objects.items() if item.rows()}

    def adopt(self, sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Adds what other processes have sent; returns the missing parts, by file."""
        for path, rows in sent.items():
            self._objects[path].adopt(rows)
        missing = {path: item.missing() for path, item in self._objects.items()}
        return {path: parts for path, parts in missing.items() if parts}

    def commit(self, last: str, data: bytes) -> None:
        """Makes the output visible, the file `last` after all others; for one process."""
        if last != MANIFEST_NAME:
            raise ValueError(f"{last!r} is no manifest")
        agreed = parse_seen(self._common.get(_PLAN))
        if agreed is not None:
            self._commit.seen = agreed
        try:
            self._commit.run(list(self._objects.values()), data, self._has_uploads)
            clean_up(self._translate_errors, self._remove)
        except OutputExistsError:
            if self._attempt.overwrite:  # else each further try would be refused
                self.abandon()
            raise
        finally:
            self._commit.release()

    def leave(self) -> None:
        """Ends this process's part; the output stays as it is."""

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it."""
        clean_up(self._translate_errors, self._remove)

    def _remove(self) -> None:
        """Removes the notes, first the plan, without which none can commit, and the uploads."""
        self._store.delete([self._folder + _PLAN])
        sweep_uploads(self._store, self._store.prefix, only=self._folder)

    def _has_uploads(self) -> bool:
        """Says whether the notes of the uploads exist: another run removes both together."""
        with_parts = [path for path, item in self._objects.items() if item.rows()]
        return not with_parts or self.notes.get(_note_name(with_parts[0])) is not None

    def _plan_one(self, path: str) -> None:
        """Notes an upload that is about to begin, for the next run after a kill."""
        key = self._store.prefix + path
        self.notes.leave(f"{_note_name(path)}{_PLANNED}", encode_mark([], [key]))

    def _begin_one(self, path: str) -> None:
        with self._translate_errors():
            key = self._store.prefix + path
            self._plan_one(path)
            upload = self._store.begin(key)
            self.notes.leave(_note_name(path), encode_mark([(key, upload)]))

    def _join_upload(self, path: str) -> str:
        """Returns the upload of a file, which the first process that needs it begins."""
        note = self.notes.get(_note_name(path))
        if note is None and self._attempt.is_agreed:
            key = self._store.prefix + path
            self._plan_one(path)
            mine = self._store.begin(key)
            note = self.notes.put(_note_name(path), encode_mark([(key, mine)]))
            if note != encode_mark([(key, mine)]):
                self._store.abort(key, mine)
        for _, upload in parse_uploads(note or b""):
            return upload
        raise lost_place_error(f"the upload of {path!r} was removed by another run", self.location)


def _note_name(path: str) -> str:
    return f"{UPLOADS}/{path}"


SharedOutput = SharedTarget | S3SharedTarget
"""One process's view of an output that several fill, invisible until one of them commits it.

Where `takes_parts` is true, what is written is taken in parts of objects, as `object_parts` cuts
them.
"""
