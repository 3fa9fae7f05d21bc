"""A run at a URL: its objects, how files become objects, and the commit of a step.

RUN/STEP/ckptkit.json         the manifest: a step is complete while it exists, so it is put last
                              and removed first
RUN/STEP/.ranks/uploading     put first: shows that a save of ours is under way, or was broken off
RUN/STEP/.ranks/R.json        the record of rank R, after its files; removed after the commit
RUN/.ckptkit/in-use/STEP/     marks of readers of a step, see ckptkit.runs.remote_run
RUN/.ckptkit/newest           names the step that was committed last, since listings may lag behind
RUN/.ckptkit/identity         differs between runs, also from an earlier run at the same URL
RUN/.ckptkit/job              the nonce of the job that opened the run last
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError, OutputExistsError, RefusedError, TruncatedFileError
from ckptkit.core.manifest import MANIFEST_NAME, UPLOADING, FileRecord, parse_manifest
from ckptkit.core.object_parts import PART_BYTES, cut_into_parts
from ckptkit.core.threads import few_collections, repeat
from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME
from ckptkit.storage.locations import MARKS_FOLDER, Place
from ckptkit.storage.remote.errors import RetryPolicy, as_upload_error
from ckptkit.storage.remote.s3 import S3Object, S3Uploads
from ckptkit.storage.remote.store import ObjectInfo, RemoteFolder
from ckptkit.writer.commit import AttemptFiles, crc_digest, manifest_bytes, write_index
from ckptkit.writer.merge import with_findings
from ckptkit.writer.messages import ByteCounter, FinishUpload, Remote, StepCommitted
from ckptkit.writer.record import RECORDS_FOLDER

UPLOAD_RETRIES = RetryPolicy(attempts=9, longest_wait_seconds=16.0)
"""About 40 seconds in all for each request."""
_THREADS = 8


class RunStore(RemoteFolder):
    def __init__(self, remote: Remote, retry_policy: RetryPolicy = UPLOAD_RETRIES) -> None:
        """Imports the store's client; connects with the first request."""

        def as_error(error: Exception, where: str, _verb: str) -> CkptkitError:
            return as_upload_error(error, where=where, options=remote.options)

        super().__init__(Place(remote.url, remote.options), as_error, retry_policy=retry_policy)
        self.filesystem: Any = self.store.filesystem

    @cached_property
    def s3(self) -> S3Uploads | None:
        if not self.store.is_s3:
            return None
        return self.perform("", lambda: S3Uploads(self.store, self.root))

    def key(self, path: str) -> str:
        return self.address(path).partition("/")[2]

    def has_younger(self, folder: str, seconds: float) -> bool:
        oldest = time.time() - seconds
        entries = self.entries(folder).values()
        return any(not entry.modified or entry.modified > oldest for entry in entries)

    def get_many(self, paths: Collection[str]) -> Iterator[bytes | None]:
        """Yields small objects in order, with several requests at a time."""
        rest = list(paths)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-get") as pool:
            while rest:
                now, rest = rest[:_THREADS], rest[_THREADS:]
                yield from pool.map(self.get, now)

    def put(self, path: str, data: bytes) -> None:
        s3 = self.s3
        if s3 is None:
            super().put(path, data)
        else:
            self.perform(path, lambda: s3.put(self.key(path), data, crc32(data)))

    def put_file(self, source: Path, path: str, counter: ByteCounter) -> None:
        """Sends a file to a bucket of the Hub, whose client reads it by itself.

        The client reports no progress, so the bytes that this process reads are counted.
        """
        before, read, size_bytes = counter.done_bytes, _read_bytes(), source.stat().st_size

        def count() -> None:
            counter.done_bytes = before + min(size_bytes, _read_bytes() - read)

        ask = partial(self.filesystem.put_file, source, self.address(path))
        ended = repeat(_COUNT_SECONDS, count, "ckptkit-sent")
        try:
            self.perform(path, lambda: self.store.retry(ask, self.where(path)))
        except BaseException:
            counter.done_bytes = before
            raise
        finally:
            ended.set()
        counter.done_bytes = before + size_bytes

    def copy(self, source: str, target: str) -> None:
        """Has the store copy an object; S3 copies one above 5 GB in parts."""
        ask = partial(self.filesystem.cp_file, self.address(source), self.address(target))
        self.perform(target, lambda: self.store.retry(ask, self.where(target)))

    def abort_unfinished(self, folder: str = "") -> int:
        """Removes the parts of unfinished uploads, and returns how many uploads there were.

        No other process may be uploading there.
        """
        s3 = self.s3
        if s3 is None:
            return 0
        prefix = f"{self.key(folder)}/" if folder else s3.prefix
        uploads = self.perform("", lambda: list(s3.list_uploads(prefix)))
        for key, upload in uploads:
            self.perform("", partial(s3.abort, key, upload))
        return len(uploads)


def _read_bytes() -> int:
    """Returns how many bytes this process has read of anything; 0 where that is not known."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/io").read_text().split()[1])
    return 0


_COUNT_SECONDS = 5.0
_PARTS_AT_ONCE = 4


def send_file(
    store: RunStore,
    counter: ByteCounter,
    read: Callable[[int, int], bytes],
    size_bytes: int,
    path: str,
) -> None:
    """Uploads a file, which becomes visible as a whole.

    `read` takes a start and a count. At most `_PARTS_AT_ONCE` + 1 parts are in memory.
    """

    def parts() -> Iterator[tuple[int, bytes]]:
        for part in cut_into_parts(size_bytes) if size_bytes else ():
            data = read(part.start, part.stop - part.start)
            if len(data) != part.stop - part.start:
                raise TruncatedFileError("it was cut short", where="a file that is uploaded")
            yield part.start, data

    s3, before = store.s3, counter.done_bytes
    try:
        if s3 is None:
            store.perform(path, lambda: _stream(store, counter, parts(), path))
        else:
            key = store.key(path)
            store.perform(path, lambda: _send_parts(s3, counter, parts(), key, size_bytes))
    except BaseException:
        counter.done_bytes = before
        raise


def _send_parts(
    s3: S3Uploads,
    counter: ByteCounter,
    parts: Iterator[tuple[int, bytes]],
    key: str,
    size_bytes: int,
) -> None:
    sent = S3Object.of_size(
        s3, key, size_bytes, lambda sums: s3.begin(key, sums_parts=sums), sums_parts=False
    )

    def write(start: int, data: bytes) -> None:
        sent.write(start, memoryview(data))
        counter.done_bytes += len(data)

    under_way: deque[Future[None]] = deque()
    try:
        with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="ckptkit-part") as pool:
            try:
                for part in parts:
                    if len(under_way) >= _PARTS_AT_ONCE:
                        under_way.popleft().result()
                    under_way.append(pool.submit(write, *part))
                while under_way:
                    under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()
        sent.publish()
    except BaseException:
        with suppress(Exception):  # the next job that opens the run removes leftovers
            sent.remove()
        raise


def _stream(
    store: RunStore, counter: ByteCounter, parts: Iterator[tuple[int, bytes]], path: str
) -> None:
    """Uploads a file in order, through fsspec's file object."""
    target: Any = store.filesystem.open(store.address(path), "wb", block_size=PART_BYTES)
    try:
        for _, data in parts:
            target.write(data)
            counter.done_bytes += len(data)
        target.close()
    except BaseException:
        with suppress(Exception):  # or the garbage collector would complete the upload
            target.closed = True
        with suppress(Exception):
            target.discard()
        with suppress(Exception):  # some stores show an object from its first byte on
            store.remove(path)
        raise


_IDENTITY = f"{MARKS_FOLDER}/identity"
_JOB = f"{MARKS_FOLDER}/job"
_NEWEST = f"{MARKS_FOLDER}/newest"
_IDENTITY_BYTES = 8
IN_USE = f"{MARKS_FOLDER}/in-use"
MARK_SECONDS = 3600.0
"""A mark that was not renewed for so long belongs to a dead process."""


def claim_step(store: RunStore, step: str, attempt: str, job: str) -> None:
    """Prepares a step's folder for the objects of a save; every rank may call this.

    The manifest of a step that is replaced is removed here, before any of its objects change. A job
    after which another one has opened the run changes nothing, since that one may have saved the
    same step.
    """
    _refuse_earlier_job(store, job)
    manifest, mark = f"{step}/{MANIFEST_NAME}", f"{step}/{UPLOADING}"
    is_whole = store.look_up(manifest) is not None
    if job and not is_whole and store.entries(step) and store.look_up(mark) is None:
        raise OutputExistsError(
            f"expected a step or nothing, found something without a {MANIFEST_NAME}",
            where=store.where(step),
            hint="it may be a checkpoint of another tool; move it away, or save to another URL",
        )
    # Before the manifest is removed, since other ranks look for one of the two.
    store.put(mark, attempt.encode())
    if is_whole:
        store.remove(manifest)
    if not job:  # stock torch would read the index of before with files of now
        store.remove(f"{step}/{METADATA_NAME}")


def remove_unfinished(store: RunStore, step: str) -> None:
    """Removes what an unfinished save of ours left of a step, if it left something."""
    if store.look_up(f"{step}/{UPLOADING}") is None or store.look_up(f"{step}/{MANIFEST_NAME}"):
        return
    mark = f"{step}/{UPLOADING}"
    store.remove(*(path for path in store.entries(step) if path != mark))
    store.remove(mark)  # last: it shows that the rest is ours


def unfinished_steps(paths: Collection[str]) -> list[str]:
    steps = {path.partition("/")[0] for path in paths if path.endswith(f"/{UPLOADING}")}
    return sorted(step for step in steps if f"{step}/{MANIFEST_NAME}" not in paths)


def newest_step(store: RunStore) -> str:
    """Returns the step that was committed last, if it is still complete; else an empty text."""
    step = (store.get(_NEWEST) or b"").decode(errors="replace").strip()
    return step if step and store.look_up(f"{step}/{MANIFEST_NAME}") is not None else ""


def run_identity(store: RunStore) -> str:
    stored = store.get(_IDENTITY)
    if stored:
        return stored.decode(errors="replace").strip()
    identity = secrets.token_hex(_IDENTITY_BYTES)
    store.put(_IDENTITY, identity.encode())
    return identity


def take_run(store: RunStore, nonce: str) -> None:
    """Stores which job writes to a run, so that an earlier one is refused from now on."""
    store.put(_JOB, nonce.encode())


def _refuse_earlier_job(store: RunStore, job: str) -> None:
    if job and store.get(_JOB) not in {None, job.encode()}:
        raise RefusedError(
            "another job has opened the run since and saves to it",
            where=store.location,
            hint="give every job a URL of its own; this job's steps stay on the nodes' disks",
        )


_SUFFIX = ".uploaded"
_DAMAGED = (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError)


class UploadedFiles(Struct):
    """What of a step was uploaded before, in files next to the records on the node's own disk.

    It only saves work: an entry counts if the store still has that very object. Each process writes
    a file of its own and reads those of all others.

    Attributes:
        path: The file of this process.
        identities: Of the objects, by URL.
    """

    path: Path
    identities: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, record: str) -> UploadedFiles:
        """Reads the entries of a node's copy of a step; `record` is the first of this process."""
        uploaded = cls(folder / f"{record}{_SUFFIX}")
        for path in sorted((folder / RECORDS_FOLDER).glob(f"*{_SUFFIX}")):
            with suppress(*_DAMAGED):  # a kill may have cut the last line
                for line in path.read_text(encoding="utf-8").splitlines():
                    url, _, identity = json.loads(line)
                    uploaded.identities[str(url)] = str(identity)
        return uploaded

    def add(self, url: str, entry: ObjectInfo) -> None:
        self.identities[url] = entry.identity
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([url, entry.size_bytes, entry.identity]) + "\n")


def finish(request: FinishUpload, store: RunStore, counter: ByteCounter) -> StepCommitted:
    """Commits a step whose ranks have all proved their records, then removes retired steps.

    Before the manifest is put, no reader takes the step for a complete one.
    """
    began, step = time.monotonic(), request.step
    attempt = _Objects(request, store, counter)
    with few_collections():
        merged = attempt.merge(request.attempt, request.proofs)
        document = json.dumps(request.manifest).encode()
        for path, record in parse_manifest(document, where=store.where(step)).files.items():
            attempt.check(path, record, store.where(step))
        # The sidecar is put before any index: a reader that found only an index would take the step
        # for a checkpoint of another tool.
        folder = Path(request.beside)
        for file in sorted(folder.rglob("*")) if request.beside else ():
            if not file.is_dir():
                data, name = file.read_bytes(), file.relative_to(folder).as_posix()
                store.put(f"{step}/{name}", data)
                attempt.files[name] = FileRecord(len(data), crc_digest(crc32(data)))
                counter.done_bytes += len(data)
        for unit, content in merged.units.items():
            path = f"{unit}/{METADATA_NAME}" if unit else METADATA_NAME
            with tempfile.TemporaryFile(dir=request.scratch or None) as index:  # it may be large
                record = write_index(index, content, ByteCounter())  # what is sent counts
                read = partial(_read_at, index.fileno())
                send_file(store, counter, read, record.size_bytes, f"{step}/{path}")
            attempt.files[path] = record
    path = f"{step}/{MANIFEST_NAME}"
    source = with_findings(request.manifest["source"], merged.lost, merged.notes, merged.digests)
    manifest = manifest_bytes(
        {**request.manifest, "source": source}, attempt.files, store.where(path)
    )
    _refuse_earlier_job(store, request.job)
    store.put(path, manifest)
    # A step with lost values must not retire a complete one.
    kept = {f"{step}/{path}" for path in (*attempt.files, MANIFEST_NAME)}
    removed, notes = _clear(request, store, kept, () if merged.lost else request.remove)
    return StepCommitted(
        attempt=request.attempt,
        size_bytes=sum(file.size_bytes for file in attempt.files.values()) + len(manifest),
        seconds=time.monotonic() - began,
        removed=tuple(removed),
        notes=(*merged.notes, *notes),
        lost=merged.lost,
    )


# What an earlier save left in a folder where other files may be.
_OF_A_SAVE = re.compile(rf"{re.escape(RECORDS_FOLDER)}/|__\d+_\d+\.distcp\Z")


def _read_at(descriptor: int, start: int, count: int) -> bytes:
    return os.pread(descriptor, count, start)


class _Objects(AttemptFiles):
    """A step's objects, listed once; objects that the listing lacks are requested one by one."""

    def __init__(self, request: FinishUpload, store: RunStore, counter: ByteCounter) -> None:
        super().__init__(store.where(request.step), counter, request.visible_seconds)
        self._store = store
        self._step = request.step
        self._listed: Mapping[str, ObjectInfo] = store.entries(request.step)
        records = [proof.path for proof in request.proofs]
        contents = store.get_many([f"{request.step}/{record}" for record in records])
        self._ahead = dict(zip(records, contents, strict=True))

    def read(self, path: str) -> bytes | None:
        ahead = self._ahead.pop(path, None)
        return self._store.get(f"{self._step}/{path}") if ahead is None else ahead

    def size_bytes(self, path: str) -> int | None:
        name = f"{self._step}/{path}"
        entry = self._listed.get(name) or self._store.look_up(name)
        return None if entry is None else entry.size_bytes


def _clear(
    request: FinishUpload, store: RunStore, kept: Collection[str], retired: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Removes retired steps and leftovers of uploads; returns the removed steps, and notes."""
    notes: list[str] = []
    removed: list[str] = []
    try:
        left = sorted(store.entries(request.step).keys() - kept)
        if request.job:
            store.put(_NEWEST, request.step.encode())
        else:
            left = [path for path in left if _OF_A_SAVE.match(path, len(request.step) + 1)]
            store.abort_unfinished(request.step)
        store.remove(*left)
        for step in request.given_up:
            remove_unfinished(store, step)
    except CkptkitError as error:
        notes.append(f"leftovers of uploads could not be removed: {error}")
    for step in retired:
        try:
            if store.has_younger(f"{IN_USE}/{step}", MARK_SECONDS):
                notes.append(f"{step} stays for now: it is being read")
                continue
            # First the manifest, so that no part of the step looks complete.
            store.remove(f"{step}/{MANIFEST_NAME}")
            store.remove(*store.entries(step))
            store.remove(*store.folder_markers(step))
        except CkptkitError as error:
            notes.append(f"{step} could not be removed: {error}")
        else:
            removed.append(store.where(step))
    return removed, notes
