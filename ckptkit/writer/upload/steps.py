"""Where the objects of a run's steps lie, and in which order they come and go.

RUN/STEP/ckptkit.json         the manifest: a step is whole while it is there, so it is put last
                              and removed first
RUN/STEP/.ranks/uploading     put first: tells that a save of ours is under way, or was broken off
RUN/STEP/.ranks/R.json        the record of rank R, after its files; removed once the step is whole
RUN/.ckptkit/in-use/STEP/     marks of those that read a step, see ckptkit.runs.remote
RUN/.ckptkit/newest           names the step that became whole last, for listings may lag behind
RUN/.ckptkit/identity         tells the run from all others, also from an earlier one of its URL
RUN/.ckptkit/job              the nonce of the job that opened the run last

What of a step was uploaded already: a list beside its files on the node's own disk.

It only saves work: an entry counts where the store still has the very object.

Making a step of which all nodes have uploaded their files a whole one: the manifest last.
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
from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, write_metadata
from ckptkit.runs.marks import MARKS_FOLDER
from ckptkit.writer.commit import manifest_bytes, without
from ckptkit.writer.failures import Tally
from ckptkit.writer.gathering import Gathering, Patience, crc_digest
from ckptkit.writer.merge import Unit, few_collections
from ckptkit.writer.messages import Committed, Finish
from ckptkit.writer.record import FOLDER
from ckptkit.writer.upload.store import Entry, Sender, Store

UPLOADING = f"{FOLDER}/uploading"
_IDENTITY = f"{MARKS_FOLDER}/identity"
_JOB = f"{MARKS_FOLDER}/job"
_NEWEST = f"{MARKS_FOLDER}/newest"
_IDENTITY_BYTES = 8
IN_USE = f"{MARKS_FOLDER}/in-use"
MARK_SECONDS = 3600.0
"""After which a mark that was not renewed is that of a dead process."""


def claim_step(store: Store, step: str, attempt: str) -> None:
    """Makes a step's folder ready for the objects of a save; every rank may call this.

    A whole step that is replaced stops being one here, and not in the middle of what follows.
    """
    manifest, mark = f"{step}/{MANIFEST_NAME}", f"{step}/{UPLOADING}"
    is_whole = store.look(manifest) is not None
    if not is_whole and store.entries(step) and store.look(mark) is None:
        raise OutputExistsError(
            f"something without a {MANIFEST_NAME} was found where the step was to go",
            where=store.where(step),
            hint="it may be another tool's checkpoint; move it away, or save to another URL",
        )
    # Before the manifest goes: other ranks look for one of the two.
    store.put(mark, attempt.encode())
    if is_whole:
        store.remove(manifest)


def is_in_use(store: Store, step: str) -> bool:
    return store.has_younger(f"{IN_USE}/{step}", MARK_SECONDS)


def remove_step(store: Store, step: str) -> None:
    """Removes a step: first the manifest, so that no half of it looks whole."""
    store.remove(f"{step}/{MANIFEST_NAME}")
    store.remove_all(tuple(store.entries(step)))
    store.remove_all(store.folder_markers(step))


def remove_unfinished(store: Store, step: str) -> None:
    """Removes what a save of ours left of a step that it could not finish, if it did."""
    if store.look(f"{step}/{UPLOADING}") is None or store.look(f"{step}/{MANIFEST_NAME}"):
        return
    mark = f"{step}/{UPLOADING}"
    store.remove_all([path for path in store.entries(step) if path != mark])
    store.remove(mark)  # last: without it nobody would know whose the rest is


def unfinished_steps(paths: Collection[str]) -> list[str]:
    steps = {path.partition("/")[0] for path in paths if path.endswith(f"/{UPLOADING}")}
    return sorted(step for step in steps if f"{step}/{MANIFEST_NAME}" not in paths)


def note_newest(store: Store, step: str) -> None:
    store.put(_NEWEST, step.encode())


def newest_step(store: Store) -> str:
    """Returns the step that became whole last, if it still is; else an empty text."""
    step = (store.get(_NEWEST) or b"").decode(errors="replace").strip()
    return step if step and store.look(f"{step}/{MANIFEST_NAME}") is not None else ""


def run_identity(store: Store) -> str:
    """Returns what tells a run from all others; a run that has none is given one."""
    found = store.get(_IDENTITY)
    if found:
        return found.decode(errors="replace").strip()
    identity = secrets.token_hex(_IDENTITY_BYTES)
    store.put(_IDENTITY, identity.encode())
    return identity


def take_run(store: Store, nonce: str) -> None:
    """Notes which job writes to a run; an earlier one that still does will find that out."""
    store.put(_JOB, nonce.encode())


def check_run(store: Store, nonce: str) -> None:
    """Sees that no other job has opened a run since."""
    found = store.get(_JOB)
    if found is not None and found != nonce.encode():
        raise RefusedError(
            "another job has opened the run since, and saves to it",
            where=store.location,
            hint="give every job a URL of its own; this one's steps stay on the nodes' disks",
        )


_SUFFIX = ".uploaded"
_DAMAGED = (OSError, ValueError, LookupError, TypeError)


@dataclass(slots=True)
class Ledger:
    """The list of one process; it reads those of others, too.

    Attributes:
        path: The file.
        entries: What was uploaded, by URL.
    """

    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, record: str) -> Ledger:
        """Opens the list of a node's copy of a step.

        Args:
            folder: The copy.
            record: The path, in it, of the first record that the process uploads.
        """
        ledger = cls(folder / f"{record}{_SUFFIX}")
        for path in sorted((folder / FOLDER).glob(f"*{_SUFFIX}")):
            with suppress(*_DAMAGED):  # a kill may have cut the last line
                for line in path.read_text(encoding="utf-8").splitlines():
                    url, size_bytes, identity = json.loads(line)
                    ledger.entries[str(url)] = Entry(int(size_bytes), str(identity))
        return ledger

    def add(self, url: str, entry: Entry) -> None:
        """Notes that an object is there as it should be."""
        self.entries[url] = entry
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([url, *entry]) + "\n")


def finish(request: Finish, store: Store, tally: Tally) -> Committed:
    """Finishes a step whose ranks have all given proof, then removes what it retires.

    Until the manifest is put nothing takes the step for a whole one.

    Args:
        request: What to finish.
        store: The run.
        tally: Is told of bytes read and written.

    Returns:
        What is now there, and what is gone.
    """
    began = time.monotonic()
    step = _Step(request, store, tally)
    with few_collections():
        lost = step.write_all()
    size_bytes = step.publish(without(request.manifest, lost))
    # A step that lacks something takes the place of none that has all.
    removed, notes = step.clear(() if lost else request.remove, request.given_up)
    return Committed(
        attempt=request.attempt,
        size_bytes=size_bytes,
        seconds=time.monotonic() - began,
        removed=removed,
        notes=notes,
        lost=lost,
    )


class _Objects:
    """A step's objects, listed once; those that the list lacks are asked for one by one."""

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
        found = self.listed.get(name) or self._store.look(name)
        return None if found is None else found.size_bytes


class _Step:
    """A step on its way to become whole."""

    def __init__(self, request: Finish, store: Store, tally: Tally) -> None:
        self._request = request
        self._store = store
        self._tally = tally
        self._name = request.step
        self._sender = Sender(store, tally)
        records = tuple(proof.path for proof in request.proofs)
        self._objects = _Objects(store, self._name, records)
        self._gathering = Gathering(self._objects, tally, Patience(request.visible_seconds))

    def write_all(self) -> Mapping[str, str]:
        """Sees that everything is there, and adds what no rank has; returns what was lost."""
        request, gathering = self._request, self._gathering
        merged = gathering.merge(request.attempt, request.proofs)
        where = self._store.where(self._name)
        gathering.see(parse_manifest(_text(request.manifest), where=where).files, where)
        # What describes the run is there before any index: no reader takes such a step for one
        # that stands for itself.
        self._put_beside()
        for name, unit in merged.units.items():
            self._put_index(f"{name}/{METADATA_NAME}" if name else METADATA_NAME, unit)
        return merged.lost

    def publish(self, document: Mapping[str, Any]) -> int:
        """Puts the manifest; returns the bytes of all files."""
        path = f"{self._name}/{MANIFEST_NAME}"
        files = self._gathering.files
        manifest = manifest_bytes(document, files, self._store.where(path))
        check_run(self._store, self._request.job)
        self._store.put(path, manifest)
        return sum(file.size_bytes for file in files.values()) + len(manifest)

    def clear(
        self, retired: Sequence[str], given_up: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Removes retired steps, and what uploads left; returns which steps went, and notes."""
        notes: list[str] = []
        removed: list[str] = []
        try:
            note_newest(self._store, self._name)
            kept = {f"{self._name}/{path}" for path in (*self._gathering.files, MANIFEST_NAME)}
            self._store.remove_all(sorted(self._store.entries(self._name).keys() - kept))
            for step in given_up:
                remove_unfinished(self._store, step)
        except CkptkitError as error:
            notes.append(f"what uploads left could not be removed: {error}")
        for step in retired:
            try:
                if is_in_use(self._store, step):
                    notes.append(f"{step} stays for now: somebody reads it")
                    continue
                remove_step(self._store, step)
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
                self._tally.done_bytes += len(data)

    def _put_index(self, path: str, unit: Unit) -> None:
        """Writes an index to the local disk, since it may be large, and uploads it."""
        with tempfile.TemporaryFile(dir=self._request.scratch or None) as file:
            write_metadata(file.write, unit.tensors, unit.objects)
            file.flush()
            size_bytes = file.tell()
            self._sender.send(_Plain(file.fileno()), size_bytes, f"{self._name}/{path}")
        self._gathering.files[path] = FileRecord(size_bytes)


class _Plain:
    """A file that is known by its descriptor alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_bytes(self, start: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, start)


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()
