"""The objects of a run's steps, the order in which they are put and removed, and the commit.

RUN/STEP/ckptkit.json         the manifest: a step is complete while it exists, so it is put last
                              and removed first
RUN/STEP/.ranks/uploading     put first: shows that a save of ours is under way, or was broken off
RUN/STEP/.ranks/R.json        the record of rank R, after its files; removed after the commit
RUN/.ckptkit/in-use/STEP/     marks of readers of a step, see ckptkit.runs.remote
RUN/.ckptkit/newest           names the step that was committed last, since listings may lag behind
RUN/.ckptkit/identity         differs between runs, also from an earlier run at the same URL
RUN/.ckptkit/job              the nonce of the job that opened the run last
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError, OutputExistsError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, parse_manifest
from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.writer.commit import (
    RecordGatherer,
    VisibilityTimeout,
    crc_digest,
    manifest_bytes,
    write_index,
)
from ckptkit.writer.merge import Merged, MergedUnit, few_collections, with_findings
from ckptkit.writer.messages import ByteCounter, FinishUpload, StepCommitted
from ckptkit.writer.record import RECORDS_FOLDER
from ckptkit.writer.upload.run_store import Entry, ObjectSender, Store

UPLOADING = f"{RECORDS_FOLDER}/uploading"
_IDENTITY = f"{MARKS_FOLDER}/identity"
_JOB = f"{MARKS_FOLDER}/job"
_NEWEST = f"{MARKS_FOLDER}/newest"
_IDENTITY_BYTES = 8
IN_USE = f"{MARKS_FOLDER}/in-use"
MARK_SECONDS = 3600.0
"""A mark that was not renewed for so long belongs to a dead process."""


def claim_step(store: Store, step: str, attempt: str) -> None:
    """Prepares a step's folder for the objects of a save; every rank may call this.

    The manifest of a step that is replaced is removed here, before any of its objects change.
    """
    manifest, mark = f"{step}/{MANIFEST_NAME}", f"{step}/{UPLOADING}"
    is_whole = store.look(manifest) is not None
    if not is_whole and store.entries(step) and store.look(mark) is None:
        raise OutputExistsError(
            f"expected a step or nothing, found something without a {MANIFEST_NAME}",
            where=store.where(step),
            hint="it may be a checkpoint of another tool; move it away, or save to another URL",
        )
    # Before the manifest is removed, since other ranks look for one of the two.
    store.put(mark, attempt.encode())
    if is_whole:
        store.remove(manifest)


def remove_unfinished(store: Store, step: str) -> None:
    """Removes what an unfinished save of ours left of a step, if it left something."""
    if store.look(f"{step}/{UPLOADING}") is None or store.look(f"{step}/{MANIFEST_NAME}"):
        return
    mark = f"{step}/{UPLOADING}"
    store.remove_all([path for path in store.entries(step) if path != mark])
    store.remove(mark)  # last: it shows that the rest is ours


def unfinished_steps(paths: Collection[str]) -> list[str]:
    steps = {path.partition("/")[0] for path in paths if path.endswith(f"/{UPLOADING}")}
    return sorted(step for step in steps if f"{step}/{MANIFEST_NAME}" not in paths)


def newest_step(store: Store) -> str:
    """Returns the step that was committed last, if it is still complete; else an empty text."""
    step = (store.get(_NEWEST) or b"").decode(errors="replace").strip()
    return step if step and store.look(f"{step}/{MANIFEST_NAME}") is not None else ""


def run_identity(store: Store) -> str:
    """Returns the identity of a run; a run without one gets a new one."""
    stored = store.get(_IDENTITY)
    if stored:
        return stored.decode(errors="replace").strip()
    identity = secrets.token_hex(_IDENTITY_BYTES)
    store.put(_IDENTITY, identity.encode())
    return identity


def take_run(store: Store, nonce: str) -> None:
    """Stores which job writes to a run, so that an earlier one is refused from now on."""
    store.put(_JOB, nonce.encode())


_SUFFIX = ".uploaded"
_DAMAGED = (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError)


@dataclass(slots=True)
class UploadedFiles:
    """What of a step was uploaded before, in files next to the records on the node's own disk.

    It only saves work: an entry counts if the store still has that very object. Each process writes
    a file of its own and reads those of all others.

    Attributes:
        path: The file of this process.
        entries: What was uploaded, by URL.
    """

    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, record: str) -> UploadedFiles:
        """Reads the entries of a node's copy of a step.

        Args:
            folder: The copy.
            record: The relative path of the first record that the process uploads.
        """
        uploaded = cls(folder / f"{record}{_SUFFIX}")
        for path in sorted((folder / RECORDS_FOLDER).glob(f"*{_SUFFIX}")):
            with suppress(*_DAMAGED):  # a kill may have cut the last line
                for line in path.read_text(encoding="utf-8").splitlines():
                    url, size_bytes, identity = json.loads(line)
                    uploaded.entries[str(url)] = Entry(int(size_bytes), str(identity))
        return uploaded

    def add(self, url: str, entry: Entry) -> None:
        """Adds an object that was uploaded."""
        self.entries[url] = entry
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([url, *entry]) + "\n")


def finish(request: FinishUpload, store: Store, counter: ByteCounter) -> StepCommitted:
    """Commits a step whose ranks have all proved their records, then removes retired steps.

    Before the manifest is put, no reader takes the step for a complete one.

    Args:
        request: What to finish.
        store: The run.
        counter: Counts the bytes read and written.

    Returns:
        The size of the step, and what was removed.
    """
    began = time.monotonic()
    step = _Step(request, store, counter)
    with few_collections():
        merged = step.write_all()
    source = with_findings(request.manifest["source"], merged.lost, merged.notes)
    size_bytes = step.publish({**request.manifest, "source": source})
    # A step with lost values must not retire a complete one.
    removed, notes = step.clear(() if merged.lost else request.remove, request.given_up)
    return StepCommitted(
        attempt=request.attempt,
        size_bytes=size_bytes,
        seconds=time.monotonic() - began,
        removed=removed,
        notes=(*merged.notes, *notes),
        lost=merged.lost,
    )


class _Objects:
    """A step's objects, listed once; objects that the listing lacks are requested one by one."""

    def __init__(self, store: Store, step: str, records: tuple[str, ...]) -> None:
        self.location = store.where(step)
        self._store = store
        self._step = step
        self.listed: Mapping[str, Entry] = store.entries(step)
        paths = [f"{step}/{record}" for record in records]
        self._ahead = dict(zip(records, store.get_many(paths), strict=True))

    def read(self, path: str) -> bytes | None:
        ahead = self._ahead.pop(path, None)
        return self._store.get(f"{self._step}/{path}") if ahead is None else ahead

    def size_bytes(self, path: str) -> int | None:
        name = f"{self._step}/{path}"
        entry = self.listed.get(name) or self._store.look(name)
        return None if entry is None else entry.size_bytes


class _Step:
    """The commit of one step."""

    def __init__(self, request: FinishUpload, store: Store, counter: ByteCounter) -> None:
        self._request = request
        self._store = store
        self._counter = counter
        self._name = request.step
        self._sender = ObjectSender(store, counter)
        records = tuple(proof.path for proof in request.proofs)
        self._objects = _Objects(store, self._name, records)
        self._gathering = RecordGatherer(
            self._objects, counter, VisibilityTimeout(request.visible_seconds)
        )

    def write_all(self) -> Merged:
        """Checks that all files exist, and adds what no rank writes."""
        request, gathering = self._request, self._gathering
        merged = gathering.merge(request.attempt, request.proofs)
        where = self._store.where(self._name)
        document = json.dumps(request.manifest).encode()
        gathering.see(parse_manifest(document, where=where).files, where)
        # The sidecar is put before any index: a reader that found only an index would take the step
        # for a checkpoint of another tool.
        self._put_beside()
        for name, unit in merged.units.items():
            self._put_index(f"{name}/{METADATA_NAME}" if name else METADATA_NAME, unit)
        return merged

    def publish(self, document: Mapping[str, Any]) -> int:
        """Puts the manifest; returns the bytes of all files."""
        path = f"{self._name}/{MANIFEST_NAME}"
        files = self._gathering.files
        manifest = manifest_bytes(document, files, self._store.where(path))
        stored = self._store.get(_JOB)
        if stored is not None and stored != self._request.job.encode():
            raise RefusedError(
                "another job has opened the run since and saves to it",
                where=self._store.location,
                hint="give every job a URL of its own; this job's steps stay on the nodes' disks",
            )
        self._store.put(path, manifest)
        return sum(file.size_bytes for file in files.values()) + len(manifest)

    def clear(
        self, retired: Sequence[str], given_up: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Removes retired steps and leftovers of uploads; returns the removed steps, and notes."""
        notes: list[str] = []
        removed: list[str] = []
        try:
            self._store.put(_NEWEST, self._name.encode())
            kept = {f"{self._name}/{path}" for path in (*self._gathering.files, MANIFEST_NAME)}
            self._store.remove_all(sorted(self._store.entries(self._name).keys() - kept))
            for step in given_up:
                remove_unfinished(self._store, step)
        except CkptkitError as error:
            notes.append(f"leftovers of uploads could not be removed: {error}")
        for step in retired:
            try:
                if self._store.has_younger(f"{IN_USE}/{step}", MARK_SECONDS):
                    notes.append(f"{step} stays for now: it is being read")
                    continue
                # First the manifest, so that no part of the step looks complete.
                self._store.remove(f"{step}/{MANIFEST_NAME}")
                self._store.remove_all(tuple(self._store.entries(step)))
                self._store.remove_all(self._store.folder_markers(step))
            except CkptkitError as error:
                notes.append(f"{step} could not be removed: {error}")
            else:
                removed.append(self._store.where(step))
        return tuple(removed), tuple(notes)

    def _put_beside(self) -> None:
        folder = Path(self._request.beside) if self._request.beside else None
        for path in sorted(folder.rglob("*")) if folder is not None else ():
            if not path.is_dir():
                data = path.read_bytes()
                name = path.relative_to(folder or path).as_posix()
                self._store.put(f"{self._name}/{name}", data)
                self._gathering.files[name] = FileRecord(len(data), crc_digest(crc32(data)))
                self._counter.done_bytes += len(data)

    def _put_index(self, path: str, unit: MergedUnit) -> None:
        """Writes an index, which may be large, to the local disk and uploads it."""
        with tempfile.TemporaryFile(dir=self._request.scratch or None) as file:
            record = write_index(file, unit, ByteCounter())  # what is sent counts
            source = _DescriptorFile(file.fileno())
            self._sender.send(source, record.size_bytes, f"{self._name}/{path}")
        self._gathering.files[path] = record


class _DescriptorFile:
    """A file that is read through its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_bytes(self, start: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, start)
