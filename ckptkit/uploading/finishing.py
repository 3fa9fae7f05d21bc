"""Making a step of which all nodes have uploaded their files a whole one: the manifest last."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, parse_manifest
from ckptkit.layouts.dcp_metadata import METADATA_NAME, write_metadata
from ckptkit.uploading.sending import Sender
from ckptkit.uploading.steps import (
    check_run,
    is_in_use,
    note_newest,
    remove_step,
    remove_unfinished,
)
from ckptkit.uploading.store import Entry, Store
from ckptkit.writer.commit import manifest_bytes, without
from ckptkit.writer.gathering import Gathering, Patience, crc_digest
from ckptkit.writer.merge import Unit, few_collections
from ckptkit.writer.messages import Committed
from ckptkit.writer.upload_messages import Finish
from ckptkit.writer.watching import Tally


def finish(request: Finish, store: Store, tally: Tally) -> Committed:
    """Finishes a step whose ranks have all given proof, then removes what it retires.

    Until the manifest is put nothing takes the step for a whole one.

    Args:
        request: What to finish.
        store: The run.
        tally: Is told of bytes read and written.

    Returns:
        What is now there, and what is gone.

    Raises:
        CkptkitError: If something is missing, late, garbled or contradictory, if another job has
            opened the run since, or if the store refuses.
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
