"""Outputs on a disk that can be gone on with: a journal tells which files were finished.

What is finished is written down as it comes, so that any run that was killed can be continued. A
file counts only after all of it was read again and compared with what was written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ckptkit.conversion.fingerprint import fingerprint_of
from ckptkit.conversion.slices import Job
from ckptkit.conversion.write import (
    Prepared,
    commit_output,
    manifest_of,
    marked_as_read,
    refuse_changed,
    refuse_full_disk,
)
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Key
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import size_text
from ckptkit.core.threads import run_crew
from ckptkit.engine.decompress import decoding_bytes
from ckptkit.engine.executor import Executor, Inputs
from ckptkit.engine.outcome import (
    BytesWritten,
    Digests,
    Listener,
    Outcome,
    Planned,
    Started,
    WorkKept,
    can_be_proven,
    is_proven,
)
from ckptkit.options import Resources
from ckptkit.plan.plan import OutputFile
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.journal import Entry, Journal, read_journal
from ckptkit.storage.local.target import LocalTarget, translate_errors
from ckptkit.storage.places import PathLike, is_url

_PLAN, _FILE, _OUTCOME = "plan", "file", "outcome"


def refuse_resuming(out: PathLike, resources: Resources) -> None:
    """Refuses to go on where nothing is written down of what is finished."""
    where = what = ""
    if is_url(out):
        where, what = os.fspath(out), "a URL was found where --resume needs a directory as OUT"
    elif resources.engine != "local":
        where, what = "--resume", f"--engine {resources.engine} keeps nothing to go on with"
    if what:
        raise RefusedError(
            what,
            where=where,
            hint="leave --resume out; with --slice I/N, on a disk or on S3, slices that are"
            " written are kept, and the others are run again",
        )


def write_resumably(
    job: Job, out: Path, listener: Listener, *, overwrite: bool, resume: bool
) -> Manifest:
    """Writes an output on a disk, with what an earlier run has finished of it.

    Args:
        job: What is to be done.
        out: The directory to be.
        listener: Receives progress events.
        overwrite: Whether an output that holds something is replaced by the commit.
        resume: Whether finished files are looked for, and what is finished stays if this fails.

    Returns:
        The manifest, as it lies in the output.
    """
    target = LocalTarget(out, overwrite=overwrite, resume=resume)
    try:
        with job.prepared() as plan:
            return _write(plan, target, listener, resume=resume)
    except BaseException:
        if resume and target.has_finished and not target.is_filled:
            target.leave()
            listener(WorkKept(str(target.folder)))
        raise
    finally:
        target.abandon()


def _write(
    prepared: Prepared, target: LocalTarget, listener: Listener, *, resume: bool
) -> Manifest:
    """Executes a plan and commits what it wrote."""
    refuse_full_disk(prepared, target)
    fingerprint = fingerprint_of(prepared)
    kept = _Kept()
    if resume:
        kept = _Earlier(prepared, target, fingerprint).proven(listener)
    listener(Planned((*prepared.plan.notes, *kept.notes)))
    prepared.comparison.begin()
    target.keep(kept.paths)
    with _journal(target, fingerprint, is_new=not kept.paths) as journal:
        digests = _write_rest(prepared, _JournaledSink(prepared, target, journal), kept, listener)
    try:
        prepared.comparison.finish(listener)
    except RefusedError:
        target.has_finished = False  # no later run can finish what is refused
        raise
    manifest = manifest_of(prepared, digests)
    commit_output(manifest, target, listener)
    return manifest


def _write_rest(
    prepared: Prepared, sink: _JournaledSink, kept: _Kept, listener: Listener
) -> Digests:
    """Writes what was not kept; returns the digests of all."""
    files = tuple(file for file in prepared.plan.files if file.path not in kept.paths)
    for name, origin in prepared.inputs.origins.items():
        origin.unverified.update(map(Key, kept.outcome.unverified.get(name, ())))
        origin.adopt(kept.outcome.open_records.get(name, {}))
    plan = replace(prepared.plan, files=files)
    executor = Executor(plan, prepared.inputs, sink, prepared.settings, listener)
    sink.digests = executor.digests
    with marked_as_read(prepared):
        digests = executor.run()
        for source in prepared.sources:
            refuse_changed(source)
    digests.update(kept.outcome.digests)
    return digests


@contextmanager
def _journal(target: LocalTarget, fingerprint: str, *, is_new: bool) -> Iterator[Journal]:
    with translate_errors(Path(target.location)):
        journal = Journal(target.journal, {_PLAN: fingerprint}, is_new=is_new)
    try:
        yield journal
    finally:
        journal.close()


@dataclass(frozen=True, slots=True)
class _Kept:
    """What an earlier run has finished, and what it knew then.

    Attributes:
        paths: Of the files.
        outcome: Their digests, and what was still to be proven of the sources.
        notes: What the user should know.
    """

    paths: frozenset[str] = frozenset()
    outcome: Outcome = field(default_factory=Outcome)
    notes: tuple[str, ...] = ()


class _Earlier:
    """The run that was interrupted."""

    def __init__(self, prepared: Prepared, target: LocalTarget, fingerprint: str) -> None:
        self._prepared = prepared
        self._target = target
        entries = read_journal(target.journal)
        self._is_there = bool(entries)
        self._is_same = self._is_there and entries[0].get(_PLAN) == fingerprint
        found = {entry[_FILE]: entry[_OUTCOME] for entry in entries if _FILE in entry}
        self._last = Outcome.from_json(entries[-1][_OUTCOME]) if found and self._is_same else None
        self._outcomes = {path: Outcome.from_json(one) for path, one in found.items()}

    def proven(self, listener: Listener) -> _Kept:
        """Reads what is finished, and returns what of it is as it was written."""
        if not self._is_there:
            return _Kept(notes=("--resume found no interrupted run: all is written",))
        if not self._is_same:
            return _Kept(notes=(_OTHER_PLAN,))
        files = [
            file
            for file in self._prepared.plan.files
            if file.path in self._outcomes and can_be_proven(file)
        ]
        good = self._prove(files, listener)
        return _Kept(frozenset(good), self._joined(good), tuple(self._told(files, good)))

    def _prove(self, files: list[OutputFile], listener: Listener) -> set[str]:
        listener(Started(sum(file.size_bytes for file in files)))
        good: set[str] = set()

        def work(shared: Iterator[OutputFile]) -> None:
            for file in shared:
                if self._is_proven(file):
                    good.add(file.path)
                listener(BytesWritten(file.size_bytes))

        run_crew(self._prepared.settings.workers, iter(files), work)
        return good

    def _is_proven(self, file: OutputFile) -> bool:
        try:
            staged = LOCAL_DISK.open_for_reading(self._target.staged(file.path))
        except OSError:
            return False
        try:
            is_long = staged.status().st_size == file.size_bytes
            digests = self._outcomes[file.path].digests
            return is_long and is_proven(file, digests, staged.read_at)
        except OSError:  # a disk that does not give it back
            return False
        finally:
            staged.close()

    def _joined(self, good: set[str]) -> Outcome:
        """Joins what was known; of what was not proven yet, only the newest word counts."""
        whole = Outcome()
        for path, one in self._outcomes.items():
            if path in good:
                whole.digests.update(one.digests)
            for origin, keys in one.unverified.items():
                whole.unverified.setdefault(origin, set()).update(keys)
        if self._last is not None:
            whole.open_records = self._last.open_records
        return whole

    def _told(self, files: list[OutputFile], good: set[str]) -> Iterator[str]:
        count = len(self._prepared.plan.files)
        size = sum(file.size_bytes for file in files if file.path in good)
        yield (
            f"{len(good):,} of {count:,} files ({size_text(size)}) were finished by the interrupted"
            " run, and are proven to be as it wrote them"
        )
        for file in files:
            if file.path not in good:
                yield f"{file.path!r} is not as the interrupted run wrote it, and is written again"


_OTHER_PLAN = (
    "--resume found a run of another plan: the source, an option or the version of ckptkit was"
    " another one; all is written anew"
)


class _JournaledSink:
    """Hands on what is written, and sees which files are finished by that."""

    def __init__(self, prepared: Prepared, target: LocalTarget, journal: Journal) -> None:
        self.digests = Digests()
        self._target = target
        self._journal = journal
        self._inputs = prepared.inputs
        self._lock = threading.Lock()
        is_open = any(decoding_bytes(one.index) for one in prepared.inputs.origins.values())
        self._files = {
            file.path: file
            for file in prepared.plan.files
            if can_be_proven(file) and not is_open  # what is decoded is proven at the end alone
        }
        self._missing = {path: file.size_bytes for path, file in self._files.items()}

    def create(self, path: str, size_bytes: int) -> None:
        self._target.create(path, size_bytes)

    def write(self, path: str, start: int, data: memoryview) -> None:
        self._target.write(path, start, data)
        if path not in self._files:
            return
        with self._lock:
            self._missing[path] -= data.nbytes
            if self._missing[path]:
                return
        self._target.has_finished = True
        self._journal.add(partial(_entry, self._files[path], self.digests, self._inputs))


def _entry(file: OutputFile, digests: Digests, inputs: Inputs) -> Entry:
    """Returns what has to be known to keep a file, now that all of it is written."""
    names = [str(segment.spec.name) for segment in file.segments if segment.spec is not None]
    origins = inputs.origins.items()
    outcome = Outcome(
        digests=Digests({name: dict(digests.tensors.get(name, {})) for name in names}),
        open_records={name: origin.checksums.open_now() for name, origin in origins},
        unverified={name: {*map(str, origin.unverified.copy())} for name, origin in origins},
    )
    return {_FILE: file.path, _OUTCOME: outcome.to_json()}
