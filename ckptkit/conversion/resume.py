"""Outputs that an earlier run left: whole ones, and those of a run that was interrupted.

A whole output is compared with the one that a job would write. Of an interrupted run on a disk, a
journal records every file when its last byte is written. A resumed run reads recorded files again
and compares them with what was written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.conversion.source.open import SOURCE_IDENTITY, describe_sources
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    refuse_changed_sources,
    refuse_full_disk,
)
from ckptkit.core.checksums import leaf_digest, leaf_ranges, tree_digest
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    OutputExistsError,
    RefusedError,
    VerificationError,
)
from ckptkit.core.index import Key
from ckptkit.core.manifest import MAP_VERSION, Manifest
from ckptkit.core.text import size_text
from ckptkit.core.threads import run_crew
from ckptkit.engine.decompress import decoding_bytes
from ckptkit.engine.executor import Executor
from ckptkit.engine.outcome import (
    BytesWritten,
    Digests,
    Listener,
    Outcome,
    OutputKept,
    Planned,
    Started,
    WorkKept,
    can_be_proven,
    is_proven,
)
from ckptkit.engine.segment_reader import Inputs
from ckptkit.options import Resources
from ckptkit.plan.plan import Literal, OutputFile, RawCopy
from ckptkit.storage.base import Sink
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.target import LocalTarget, translate_errors
from ckptkit.storage.local.workdir import Entry, Journal, read_journal
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, open_source

if TYPE_CHECKING:
    from ckptkit.conversion.prepare import ConversionJob


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
        self._finished = frozenset[str]()  # files of an interrupted run that are as it wrote them
        self._outcome = Outcome()  # their digests, and which records were not verified

    def start(self, planned: PlannedOutput) -> None:
        refuse_full_disk(planned, self._target)
        self._planned = planned
        self._fingerprint = planned.fingerprint()
        notes: tuple[str, ...] = ()
        if self._resume:
            found = _find_finished_files(planned, self._target, self._fingerprint, self._listener)
            self._finished, self._outcome, notes = found
        self._listener(Planned((*planned.plan.notes, *notes)))

    def execute(self) -> None:
        planned, target = self._planned, self._target
        finished, outcome = self._finished, self._outcome
        target.keep(finished)
        with translate_errors(Path(target.location)):
            head = {_PLAN: self._fingerprint}
            journal = Journal(target.journal, head, is_new=not finished)
        with closing(journal):
            for name, origin in planned.inputs.origins.items():
                origin.unverified.update(map(Key, outcome.unverified.get(name, ())))
                origin.adopt(outcome.open_records.get(name, {}))
            files = tuple(f for f in planned.plan.files if f.path not in finished)
            plan = replace(planned.plan, files=files)
            sink = _JournaledSink(planned, target, journal)
            executor = Executor(plan, planned.inputs, sink, planned.settings, self._listener)
            sink.digests = executor.digests
            self._digests = executor.run()
            refuse_changed_sources(planned)
            self._digests.update(outcome.digests)

    def reject(self, error: CkptkitError) -> None:
        if isinstance(error, RefusedError):
            self._target.has_finished = False  # no later run can finish what is refused

    def close(self, error: BaseException | None) -> None:
        target = self._target
        if error is not None and self._resume and target.has_finished and not target.is_filled:
            target.leave()
            self._listener(WorkKept(str(target.folder)))
        target.abandon()


def _find_finished_files(
    planned: PlannedOutput, target: LocalTarget, fingerprint: str, listener: Listener
) -> tuple[frozenset[str], Outcome, tuple[str, ...]]:
    """Reads the files that an interrupted run recorded.

    Returns:
        The paths of those that are as it wrote them, their outcome, and notes for the user.
    """
    entries = read_journal(target.journal)
    if not entries:
        return frozenset(), Outcome(), ("--resume found no interrupted run: all is written",)
    if entries[0].get(_PLAN) != fingerprint:
        return frozenset(), Outcome(), (_OTHER_PLAN,)
    recorded = {entry[_FILE]: entry[_OUTCOME] for entry in entries if _FILE in entry}
    outcomes = {path: Outcome.from_json(value) for path, value in recorded.items()}
    files = [file for file in planned.plan.files if file.path in outcomes and can_be_proven(file)]
    listener(Started(sum(file.size_bytes for file in files)))
    intact: set[str] = set()

    def work(shared: Iterator[OutputFile]) -> None:
        for file in shared:
            if _is_intact(file, outcomes[file.path].digests, target):
                intact.add(file.path)
            listener(BytesWritten(file.size_bytes))

    run_crew(planned.settings.workers, iter(files), work)
    joined = Outcome()
    for path, outcome in outcomes.items():
        if path in intact:
            joined.digests.update(outcome.digests)
        for origin, keys in outcome.unverified.items():
            joined.unverified.setdefault(origin, set()).update(keys)
    if recorded:  # of open source records only the newest entry counts
        joined.open_records = Outcome.from_json(entries[-1][_OUTCOME]).open_records
    size = sum(file.size_bytes for file in files if file.path in intact)
    proven = (
        f"{len(intact):,} of {len(planned.plan.files):,} files ({size_text(size)}) were finished by"
        " the interrupted run, and are proven to be as it wrote them"
    )
    damaged = (
        f"{file.path!r} is not as the interrupted run wrote it, and is written again"
        for file in files
        if file.path not in intact
    )
    return frozenset(intact), joined, (proven, *damaged)


def _is_intact(file: OutputFile, digests: Digests, target: LocalTarget) -> bool:
    try:
        staged = LOCAL_DISK.open_for_reading(target.staged(file.path))
    except OSError:
        return False
    try:
        has_size = staged.status().st_size == file.size_bytes
        return has_size and is_proven(file, digests, staged.read_at)
    except OSError:  # the disk cannot read it back
        return False
    finally:
        staged.close()


_OTHER_PLAN = (
    "--resume found a run of another plan: the source, an option or the version of ckptkit was"
    " another one; all is written anew"
)


class _JournaledSink(Sink):
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


def verify_existing_output(job: ConversionJob, listener: Listener) -> Manifest | None:
    """Verifies an output that exists: it has the same source and options, and no damage.

    The source's headers are read, and all of the output, which is compared with its digests.

    Returns:
        Its manifest, or None where there is no output of ckptkit.
    """
    manifest = read_output_manifest(job.destination)
    if manifest is None:
        return None
    with job.plan_output() as planned:
        difference = next(_differences(planned, manifest), "")
        notes = planned.plan.notes
    where = os.fspath(job.destination)
    if difference:
        raise OutputExistsError(
            f"another output is there: {difference}",
            where=where,
            hint="name another directory, or have this one replaced: --overwrite, overwrite=True",
        )
    listener(Planned(notes))
    from ckptkit.conversion.verify import run_verification

    verification = run_verification(job.destination, listener=listener)
    if not verification.ok:
        problems = verification.problems
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise VerificationError(
            f"the output that is there is damaged: {problems[0]}{more}",
            where=where,
            hint="have it written anew with --overwrite",
        )
    listener(OutputKept(where))
    return manifest


def find_written_output(planned: PlannedOutput, out: PathLike) -> Manifest | None:
    """Returns the manifest of an output that a plan would write, by its manifest and file sizes.

    The content of its files is not read. None where there is another output, or none.
    """
    try:
        manifest = read_output_manifest(out)
        if manifest is None or next(_differences(planned, manifest), None) is not None:
            return None
        with open_source(out) as source:
            sizes = {path: source.stat(path).size_bytes for path in manifest.files}
    except (FormatError, MissingFileError):
        return None
    whole = all(sizes[path] == record.size_bytes for path, record in manifest.files.items())
    return manifest if whole else None


def read_output_manifest(out: PathLike) -> Manifest | None:
    """Returns the manifest of an output of ckptkit; None where there is none."""
    try:
        with open_source(out) as source:
            return read_manifest(source)
    except (MissingFileError, NotACheckpointError):
        return None


def _differences(planned: PlannedOutput, manifest: Manifest) -> Iterator[str]:
    """Yields in words how an output differs from the planned one."""
    if manifest.kind != planned.kind:
        yield f"its kind is {manifest.kind!r} against {planned.kind!r}"
    was, asked = manifest.options, planned.options
    for name in sorted(was.keys() | asked.keys()):
        if was.get(name) != asked.get(name):
            value = was.get(name, "left at its default")
            yield f"option {name} was {value} against {asked.get(name, 'its default')}"
    yield from _other_sources(planned, manifest)
    expected = {
        str(spec.name): (spec.dtype.name, spec.shape, file.path)
        for file, _, spec in planned.plan.specs()
    }
    actual = {name: (t.dtype, t.shape, t.file) for name, t in manifest.tensors.items()}
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            ours, theirs = _shown(expected.get(name)), _shown(actual.get(name))
            yield f"tensor {name!r} is {theirs} against {ours}"
    yield from _other_files(planned, manifest)


def _other_sources(planned: PlannedOutput, manifest: Manifest) -> Iterator[str]:
    for name, version in planned.versions.items():
        # A map file of the same path, names and shapes may take other rows. Libraries do not.
        if name.startswith(MAP_VERSION) and manifest.versions.get(name) != version:
            yield f"{name} had another content"
    # The path of the source may be another one, such as the run's or the step's.
    read, source = manifest.source, describe_sources(planned.sources)
    for name in ("format", "step", "world_size"):
        if read.get(name) != source[name]:
            yield f"the source's {name} was {read.get(name)} against {source[name]}"
    if read.get(SOURCE_IDENTITY) != source[SOURCE_IDENTITY]:
        yield (
            f"its source {read.get('path')!r} had other files, or was written again since,"
            f" against {source['path']!r}"
        )


def _shown(tensor: tuple[str, tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])} in {tensor[2]}"


def _other_files(planned: PlannedOutput, manifest: Manifest) -> Iterator[str]:
    expected = {file.path: file for file in planned.plan.files}
    for path in sorted(expected.keys() | manifest.files.keys()):
        if path not in manifest.files or path not in expected:
            yield f"file {path!r} is {'absent' if path in expected else 'there, not expected'}"
            continue
        record, file = manifest.files[path], expected[path]
        if record.size_bytes != file.size_bytes:
            yield f"file {path!r} has {record.size_bytes:,} bytes against {file.size_bytes:,}"
        elif record.digest and record.digest != (_digest(file, planned.inputs) or record.digest):
            yield f"file {path!r} had another content"


def _digest(file: OutputFile, inputs: Inputs) -> str:
    """Returns the digest of a file that is copied or held by the plan; empty for other files."""
    if len(file.segments) != 1:
        return ""
    body = file.segments[0].body
    if isinstance(body, Literal):
        data = body.data
    elif isinstance(body, RawCopy):
        source = inputs.folders[body.origin]
        data = source.read(body.path, body.start, body.start + file.size_bytes)
    else:
        return ""
    view = memoryview(data)
    return tree_digest([leaf_digest(view[a:b]) for a, b in leaf_ranges(len(view))])
