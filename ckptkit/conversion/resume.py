"""Outputs on a disk that can be resumed: a journal records which files were finished.

Every file is recorded when its last byte is written, so that any run that was killed can be
resumed. A resumed run reads recorded files again and compares them with what was written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    refuse_changed_sources,
    refuse_full_disk,
)
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.index import Key
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
from ckptkit.storage.local.target import LocalTarget, translate_errors
from ckptkit.storage.local.workdir import Entry, Journal, read_journal
from ckptkit.storage.places import PathLike, is_url

_PLAN, _FILE, _OUTCOME = "plan", "file", "outcome"


def refuse_resuming(out: PathLike, resources: Resources) -> None:
    """Refuses `--resume` where no journal is kept."""
    where = what = ""
    if is_url(out):
        where, what = os.fspath(out), "a URL was found where --resume needs a directory as OUT"
    elif resources.engine != "local":
        where, what = "--resume", f"--engine {resources.engine} keeps nothing to resume from"
    if what:
        raise RefusedError(
            what,
            where=where,
            hint="leave --resume out; with --slice I/N, on a disk or on S3, slices that are"
            " written are kept, and the others are run again",
        )


class Resumable(SingleProcess):
    """Writes an output on a disk, without the files that an interrupted run has finished."""

    _target: LocalTarget

    def __init__(self, out: Path, listener: Listener, *, overwrite: bool, resume: bool) -> None:
        """Claims the place.

        Args:
            out: The directory.
            listener: Receives progress events.
            overwrite: Whether the commit replaces an output that holds something.
            resume: Whether to keep files of an interrupted run, and those of this one if it fails.
        """
        super().__init__(LocalTarget(out, overwrite=overwrite, resume=resume), listener)
        self._resume = resume
        self._finished = _FinishedFiles()

    def start(self, planned: PlannedOutput) -> None:
        refuse_full_disk(planned, self._target)
        self._planned = planned
        self._fingerprint = planned.fingerprint()
        if self._resume:
            run = _InterruptedRun(planned, self._target, self._fingerprint)
            self._finished = run.check_files(self._listener)
        self._listener(Planned((*planned.plan.notes, *self._finished.notes)))

    def execute(self) -> None:
        planned, target, finished = self._planned, self._target, self._finished
        target.keep(finished.paths)
        with translate_errors(Path(target.location)):
            head = {_PLAN: self._fingerprint}
            journal = Journal(target.journal, head, is_new=not finished.paths)
        with closing(journal):
            for name, origin in planned.inputs.origins.items():
                origin.unverified.update(map(Key, finished.outcome.unverified.get(name, ())))
                origin.adopt(finished.outcome.open_records.get(name, {}))
            files = tuple(f for f in planned.plan.files if f.path not in finished.paths)
            plan = replace(planned.plan, files=files)
            sink = _JournaledSink(planned, target, journal)
            executor = Executor(plan, planned.inputs, sink, planned.settings, self._listener)
            sink.digests = executor.digests
            self._digests = executor.run()
            refuse_changed_sources(planned)
            self._digests.update(finished.outcome.digests)

    def reject(self, error: CkptkitError) -> None:
        if isinstance(error, RefusedError):
            self._target.has_finished = False  # no later run can finish what is refused

    def close(self, error: BaseException | None) -> None:
        target = self._target
        if error is not None and self._resume and target.has_finished and not target.is_filled:
            target.leave()
            self._listener(WorkKept(str(target.folder)))
        target.abandon()


@dataclass(frozen=True, slots=True)
class _FinishedFiles:
    """Files of an interrupted run that are as it wrote them.

    Attributes:
        paths: Their paths in the output.
        outcome: Their digests, and which records of the sources were not verified yet.
        notes: Notes for the user.
    """

    paths: frozenset[str] = frozenset()
    outcome: Outcome = field(default_factory=Outcome)
    notes: tuple[str, ...] = ()


class _InterruptedRun:
    """The journal of an interrupted run, and the files that it recorded."""

    def __init__(self, planned: PlannedOutput, target: LocalTarget, fingerprint: str) -> None:
        self._planned = planned
        self._target = target
        entries = read_journal(target.journal)
        self._has_journal = bool(entries)
        self._is_same_plan = self._has_journal and entries[0].get(_PLAN) == fingerprint
        recorded = {entry[_FILE]: entry[_OUTCOME] for entry in entries if _FILE in entry}
        is_usable = recorded and self._is_same_plan
        self._last = Outcome.from_json(entries[-1][_OUTCOME]) if is_usable else None
        self._outcomes = {path: Outcome.from_json(value) for path, value in recorded.items()}

    def check_files(self, listener: Listener) -> _FinishedFiles:
        """Reads the recorded files, and returns those that are as they were written."""
        if not self._has_journal:
            return _FinishedFiles(notes=("--resume found no interrupted run: all is written",))
        if not self._is_same_plan:
            return _FinishedFiles(notes=(_OTHER_PLAN,))
        files = [
            file
            for file in self._planned.plan.files
            if file.path in self._outcomes and can_be_proven(file)
        ]
        listener(Started(sum(file.size_bytes for file in files)))
        intact: set[str] = set()

        def work(shared: Iterator[OutputFile]) -> None:
            for file in shared:
                if self._is_intact(file):
                    intact.add(file.path)
                listener(BytesWritten(file.size_bytes))

        run_crew(self._planned.settings.workers, iter(files), work)
        notes = tuple(self._notes(files, intact))
        return _FinishedFiles(frozenset(intact), self._join_outcomes(intact), notes)

    def _is_intact(self, file: OutputFile) -> bool:
        try:
            staged = LOCAL_DISK.open_for_reading(self._target.staged(file.path))
        except OSError:
            return False
        try:
            has_size = staged.status().st_size == file.size_bytes
            digests = self._outcomes[file.path].digests
            return has_size and is_proven(file, digests, staged.read_at)
        except OSError:  # the disk cannot read it back
            return False
        finally:
            staged.close()

    def _join_outcomes(self, intact: set[str]) -> Outcome:
        """Joins digests of the files; of open source records only the newest entry counts."""
        joined = Outcome()
        for path, outcome in self._outcomes.items():
            if path in intact:
                joined.digests.update(outcome.digests)
            for origin, keys in outcome.unverified.items():
                joined.unverified.setdefault(origin, set()).update(keys)
        if self._last is not None:
            joined.open_records = self._last.open_records
        return joined

    def _notes(self, files: list[OutputFile], intact: set[str]) -> Iterator[str]:
        count = len(self._planned.plan.files)
        size = sum(file.size_bytes for file in files if file.path in intact)
        yield (
            f"{len(intact):,} of {count:,} files ({size_text(size)}) were finished by the"
            " interrupted run, and are proven to be as it wrote them"
        )
        for file in files:
            if file.path not in intact:
                yield f"{file.path!r} is not as the interrupted run wrote it, and is written again"


_OTHER_PLAN = (
    "--resume found a run of another plan: the source, an option or the version of ckptkit was"
    " another one; all is written anew"
)


class _JournaledSink:
    """Passes writes on to a target, and records in the journal which files they finish."""

    def __init__(self, planned: PlannedOutput, target: LocalTarget, journal: Journal) -> None:
        self.digests = Digests()
        self._target = target
        self._journal = journal
        self._inputs = planned.inputs
        self._lock = threading.Lock()
        origins = planned.inputs.origins.values()
        # What is decompressed is verified at the end only, so that no file can be recorded before.
        is_compressed = any(decoding_bytes(origin.index) for origin in origins)
        self._files = {
            file.path: file
            for file in planned.plan.files
            if can_be_proven(file) and not is_compressed
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
    """Returns the journal entry of a file that is completely written."""
    names = [str(segment.spec.name) for segment in file.segments if segment.spec is not None]
    origins = inputs.origins.items()
    outcome = Outcome(
        digests=Digests({name: dict(digests.tensors.get(name, {})) for name in names}),
        open_records={name: origin.checksums.open_now() for name, origin in origins},
        unverified={name: {*map(str, origin.unverified.copy())} for name, origin in origins},
    )
    return {_FILE: file.path, _OUTCOME: outcome.to_json()}
