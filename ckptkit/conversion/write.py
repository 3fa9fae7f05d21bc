"""Writing a planned output: the steps that every command shares, and where an output may go.

`write_output` runs them in one order: reserve room and announce the plan, execute, compare names
with the model, commit. A `WriteStrategy` says how each step is done. `Resumable` takes over what an
interrupted run on a disk has finished; a whole output that is there is compared with the plan.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.conversion.compare_names import Comparison
from ckptkit.conversion.source.open import (
    SOURCE_IDENTITY,
    OpenedCheckpoint,
    StoredDigest,
    describe_sources,
    read_model_manifest,
    read_stored_digests,
)
from ckptkit.conversion.source.paths import check_path
from ckptkit.core.checksums import DIGEST_SCHEME, leaf_digest, leaf_ranges, tree_digest
from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    OutputExistsError,
    RefusedError,
    SourceChangedError,
    VerificationError,
)
from ckptkit.core.index import Key
from ckptkit.core.manifest import (
    BY_MANIFEST,
    BY_SOURCE,
    BY_STORE,
    MANIFEST_NAME,
    MAP_VERSION,
    UNVERIFIED,
    FileRecord,
    Manifest,
    TensorRecord,
)
from ckptkit.core.object_parts import choose_part_bytes
from ckptkit.core.text import size_text
from ckptkit.core.threads import memory_in_use_bytes, run_crew, usable_cores
from ckptkit.engine.decompress import decoding_bytes
from ckptkit.engine.executor import (
    REMOTE_WORKERS,
    STRAIGHT_TASK_BYTES,
    STRAIGHT_WORKER_BYTES,
    WORKER_BYTES,
    ExecutionSettings,
    Executor,
    settle_workers,
)
from ckptkit.engine.locate import READ_AHEAD_BYTES
from ckptkit.engine.outcome import (
    BytesWritten,
    Digests,
    Listener,
    Outcome,
    OutputCommitted,
    OutputKept,
    Planned,
    Started,
    WorkKept,
    can_be_proven,
    is_proven,
)
from ckptkit.engine.remote_reads import with_store_copies
from ckptkit.engine.segment_reader import Inputs
from ckptkit.engine.shared_blocks import with_shared_blocks
from ckptkit.formats.dcp.megatron import INTEGRITY, check_integrity
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.options import Resources
from ckptkit.plan.plan import (
    TASK_BYTES,
    Compute,
    Copy,
    Literal,
    OutputFile,
    Plan,
    RawCopy,
)
from ckptkit.runs.local_run import hold_at_stores
from ckptkit.storage.base import Source, Target
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.target import (
    LocalTarget,
    WorkNotes,
    free_bytes,
    output_exists_error,
    translate_errors,
)
from ckptkit.storage.local.workdir import is_free
from ckptkit.storage.locations import S3_PROTOCOLS, is_run_in
from ckptkit.storage.manifests import read_manifest, refuse_unnamed_in
from ckptkit.storage.place_identity import PlaceRelation, find_mount, find_overlap, read_mounts
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit.storage.remote.s3_target import SharedOutput  # which needs what speaks to S3

R_co = TypeVar("R_co", covariant=True)


class Estimate(Struct, frozen=True):
    """Bytes and memory that an execution needs."""

    bytes_read: int
    bytes_written: int
    bytes_free: int | None  # at the destination, where that is known
    peak_bytes: int


class PlannedOutput(Struct, frozen=True):
    """A plan with everything that is needed to execute it."""

    sources: tuple[OpenedCheckpoint, ...]  # what it reads; the output is made from the first
    plan: Plan
    inputs: Inputs  # the open files of the plan's origins
    settings: ExecutionSettings
    estimate: Estimate
    kind: str  # of the output in its manifest
    options: Mapping[str, Any]  # those that differ from their defaults, as JSON values
    facts: Mapping[str, Any] = field(default_factory=dict)  # further entries of the `source` there
    # Libraries other than ckptkit that the output depends on.
    versions: Mapping[str, str] = field(default_factory=dict)
    comparison: Comparison | None = None  # of names and shapes with the model of the configuration

    @property
    def checkpoint(self) -> OpenedCheckpoint:
        return self.sources[0]

    def fingerprint(self) -> str:
        """Returns a digest that is equal for plans that write the same bytes from the same files.

        Files of a source count with their identity (inode and time on a disk, ETag in a store), so
        replaced files give another digest. Their location and the settings do not count.
        """
        lines: list[Any] = [
            [__version__, self.kind, dict(self.versions)],
            [dict(self.options), dict(self.facts)],
        ]
        for source in self.sources:
            lines.append(source.index.format)
            lines += ([file.path, file.size_bytes, file.identity] for file in source.index.files)
        for file in self.plan.files:
            lines.append([file.path, file.size_bytes])
            for segment in file.segments:
                spec, body = segment.spec, segment.body
                tensor = None if spec is None else [spec.name, spec.dtype.name, spec.shape]
                described = repr(body)
                if isinstance(body, Compute):
                    # What a kernel computes follows from the options and the sources.
                    described = f"{type(body.kernel).__name__} of {body.reads!r}"
                lines.append([segment.start, segment.stop, tensor, described])
        lines.append(sorted(map(list, self.plan.dropped.items())))
        digest = xxhash.xxh3_128()
        for line in lines:
            digest.update(json.dumps(line, sort_keys=True, default=str).encode())
            digest.update(b"\n")
        return digest.hexdigest()


def estimate_plan(
    plan: Plan,
    settings: ExecutionSettings,
    out: PathLike | None,
    *,
    bytes_read: int,
    besides_bytes: int = 0,
) -> Estimate:
    """Estimates the bytes and the memory that executing a plan needs."""
    bytes_free = None
    if out is not None and not is_url(out):
        with suppress(OSError):
            bytes_free = free_bytes(local_path(out).absolute())
    return Estimate(
        bytes_read=bytes_read,
        bytes_written=plan.bytes_written,
        bytes_free=bytes_free,
        peak_bytes=memory_in_use_bytes() + settings.workers * settings.worker_bytes + besides_bytes,
    )


def choose_settings(
    resources: Resources,
    plan: Plan | None = None,
    *,
    sources: Iterable[OpenedCheckpoint] = (),
    out: PathLike | None = None,
) -> ExecutionSettings:
    """Chooses how many workers fit into the user's limits."""
    sources = tuple(sources)
    is_remote = any(checkpoint.source.is_remote for checkpoint in sources)
    needed, task_bytes = WORKER_BYTES + (READ_AHEAD_BYTES if is_remote else 0), TASK_BYTES
    if plan is not None and out is not None and is_url(out):
        sent = max((choose_part_bytes(file.size_bytes) for file in plan.files), default=0)
        needed += sent
        is_s3 = place_of(out).protocol in S3_PROTOCOLS
        # Whether anything is computed from what is read, which takes memory.
        bodies = (segment.body for file in plan.files for segment in file.segments)
        entries = (entry for source in sources for entry in source.index.tensors.values())
        computes = any(isinstance(body, Compute) for body in bodies) or any(
            entry.rounded_from is not None or entry.derivation is not None for entry in entries
        )
        if is_remote and is_s3 and not computes:
            # What was fetched in addition to a block is dropped before anything is sent.
            needed = STRAIGHT_WORKER_BYTES + max(READ_AHEAD_BYTES, sent)
            task_bytes = STRAIGHT_TASK_BYTES
    workers = settle_workers(
        resources.workers or (REMOTE_WORKERS if is_remote else None),
        cores=usable_cores(),
        budget_bytes=resources.memory_budget_bytes,
        limit_bytes=resources.memory_limit_bytes,
        used_bytes=memory_in_use_bytes() + sum(decoding_bytes(s.index) for s in sources),
        worker_bytes=needed,
    )
    return ExecutionSettings(
        workers,
        resources.bytes_per_second,
        needed,
        task_bytes,
        sharing=resources.sharing,
        proof=resources.proof,
    )


class WriteStrategy(ABC, Generic[R_co]):
    """How an output is written; `write_output` calls the methods in this order.

    A strategy is made before the output is planned: it claims the place. As a context manager it
    releases it.
    """

    @abstractmethod
    def start(self, planned: PlannedOutput) -> R_co | None:
        """Makes sure that there is room, and announces the plan."""

    @abstractmethod
    def execute(self) -> None:
        """Writes the files, and makes sure that the sources did not change meanwhile."""

    def reject(self, error: CkptkitError) -> None:
        """Is called when the comparison of names refuses the output."""

    @abstractmethod
    def commit(self) -> R_co:
        """Makes the output visible, or returns what is missing."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Releases the place."""


def write_output(planned: PlannedOutput, strategy: WriteStrategy[R_co], listener: Listener) -> R_co:
    """Executes a plan and commits what it wrote, whole or not at all."""
    existing = strategy.start(planned)
    if existing is not None:
        return existing
    for source in planned.sources:
        refuse_other_files(source)
    comparison = planned.comparison
    if comparison is not None:
        comparison.begin()
    # Steps on a disk are marked as being read while they are open; those at a URL from here on.
    saved = [source for source in planned.sources if source.manifest is not None]
    with hold_at_stores([place_of(s.location).beside(s.path) for s in saved]):
        strategy.execute()
        try:
            if comparison is not None:
                comparison.finish(listener)
        except CkptkitError as error:
            strategy.reject(error)
            raise
        return strategy.commit()


def refuse_other_files(checkpoint: OpenedCheckpoint) -> None:
    """Refuses files that do not have the SHA-256 which the save recorded, if it did.

    The archives in a file of another step have CRC-32s of their own, which are right.
    """
    for unit in checkpoint.units:
        if not any(path.endswith(INTEGRITY) for path in unit.candidate.files):
            continue
        _, problems = check_integrity(checkpoint.source, unit.candidate.files)
        if problems:
            raise ChecksumError(
                f"{problems[0]} ({len(problems):,} of the files that {INTEGRITY!r} names differ)",
                where=checkpoint.path,
                hint="the files are of another step, or were damaged: copy them again, or take"
                " another step",
            )


class SingleProcess(WriteStrategy[Manifest]):
    """Writes an output in this process; an interrupted run leaves nothing."""

    def __init__(self, target: Target, listener: Listener) -> None:
        self.make_manifest = build_manifest
        self._target = target
        self._listener = listener

    def start(self, planned: PlannedOutput) -> None:
        self._planned = self._with_shared_blocks(planned)
        # What the store copies does not pass through here, where it could be checked.
        if self._target.copies_objects and not planned.settings.check:
            plan = with_store_copies(planned.plan, planned.inputs.origins, self._target)
            self._planned = replace(planned, plan=plan)
        self._listener(Planned(self._planned.plan.notes))

    def _with_shared_blocks(self, planned: PlannedOutput) -> PlannedOutput:
        """Leaves to the file system what it shares; makes sure that there is room for the rest."""
        trusted = _list_trusted(planned)
        if self._target.shares_blocks:
            why_not, sharing = self._target.why_no_sharing, planned.settings.sharing
            origins = planned.inputs.origins
            plan = with_shared_blocks(planned.plan, origins, why_not, sharing, trusted)
            planned = replace(planned, plan=plan)
        refuse_full_disk(planned, self._target)
        return planned

    def execute(self) -> None:
        planned = self._planned
        self._digests = Executor(
            planned.plan, planned.inputs, self._target, planned.settings, self._listener
        ).run()
        refuse_changed_sources(planned)

    def commit(self) -> Manifest:
        manifest = self.make_manifest(self._planned, self._digests)
        data = manifest.to_json()
        self._target.create(MANIFEST_NAME, len(data))
        self._target.write(MANIFEST_NAME, 0, memoryview(data))
        self._target.commit(last=MANIFEST_NAME)
        self._listener(OutputCommitted(self._target.location))
        return manifest

    def __exit__(self, _kind: object, _error: BaseException | None, _trace: object) -> None:
        self._target.abandon()


# Those that share blocks unless they were made otherwise; others are tried as well.
_SHARING = frozenset({"bcachefs", "btrfs", "ocfs2", "xfs"})


def with_expected_sharing(planned: PlannedOutput, out: PathLike) -> PlannedOutput:
    """Returns a plan, to be shown only, with what the file system of the output may share."""
    trusted = _list_trusted(planned)
    if not out or is_url(out):
        return planned
    mounts = read_mounts()
    there = find_mount(local_path(out).resolve(), mounts)
    if there is None or there.kind not in _SHARING:
        return planned

    def why_not(source: Source, _path: str) -> str:
        here = find_mount(local_path(source.location).resolve(), mounts)
        # Subvolumes of btrfs have one device here, and others in `stat`.
        is_one = here is not None and here.device == there.device
        return "" if is_one else "the source is on another file system than the output"

    origins, sharing = planned.inputs.origins, planned.settings.sharing
    plan = with_shared_blocks(planned.plan, origins, why_not, sharing, trusted)
    return replace(planned, plan=plan)


def _list_trusted(planned: PlannedOutput) -> Collection[str]:
    """Returns the origins whose word is taken: of those that ckptkit has saved or written.

    Raises:
        RefusedError: If it is to be taken, and there is none of these.
    """
    if planned.settings.proof != "stored":
        return ()
    indexes = {
        id(source.index)
        for source in planned.sources
        if source.manifest is not None or read_model_manifest(source) is not None
    }
    names = {name for name, one in planned.inputs.origins.items() if id(one.index) in indexes}
    if not names:
        raise RefusedError(
            "no manifest of ckptkit says that its checksums were computed with its bytes",
            where=f"--proof stored {planned.checkpoint.path}",
            hint="leave it out: all bytes are read and compared then",
        )
    return () if planned.settings.check else names  # what is to be checked has to be read


def refuse_full_disk(planned: PlannedOutput, target: Target | SharedOutput) -> None:
    """Refuses to begin where there is no room for the output."""
    needed = planned.estimate.bytes_written - planned.plan.shared_bytes
    free = target.free_bytes()
    if free is not None and needed > free:
        raise NoSpaceError(
            f"the output needs {needed:,} bytes and {free:,} are free",
            where=target.location,
            hint="choose another disk, or a smaller --dtype",
        )


def refuse_changed_sources(planned: PlannedOutput) -> None:
    """Refuses an output whose source changed while it was read."""
    for source in planned.sources:
        # A negative size means that the file was never read.
        read = [file for file in source.index.files if file.size_bytes >= 0]
        changed = source.source.changed(read)
        if changed is not None:
            raise SourceChangedError(
                f"{changed.path!r} changed while it was read",
                where=source.path,
                hint="wait until the save has finished, then run again",
            )
    refuse_resized_side_files(planned)


def refuse_resized_side_files(planned: PlannedOutput) -> None:
    """Refuses side files that grew or shrank since they were planned: a part would be copied."""
    for file in planned.plan.files:
        for segment in file.segments:
            body = segment.body
            if not isinstance(body, RawCopy):
                continue
            folder, before = planned.inputs.folders[body.origin], segment.stop - segment.start
            now = folder.stat(body.path).size_bytes - body.start
            if now != before:
                raise SourceChangedError(
                    f"{body.path!r} changed while it was read: it has {now:,} bytes now against"
                    f" {before:,} before",
                    where=folder.location,
                    hint="wait until it is written, then run again",
                )


def build_manifest(planned: PlannedOutput, digests: Digests) -> Manifest:
    """Returns the manifest of an output whose files are completely written."""
    unverified = {
        (name, key) for name, origin in planned.inputs.origins.items() for key in origin.unverified
    }
    stored = find_stored_digests(planned)
    for name, one in stored.items():
        one.compare(digests.of_tensor(name))
    tensors: dict[str, TensorRecord] = {}
    for file, segment, spec in planned.plan.specs():
        body = segment.body
        reads: Iterable[tuple[str, str]] = body.reads if isinstance(body, Compute) else ()
        if isinstance(body, Copy):
            reads = ((body.origin, body.key),)
        is_copied = isinstance(body, Copy) and bool(body.copied)
        if is_copied and file.shared:
            proof = BY_SOURCE
        elif str(spec.name) in stored:
            proof = BY_MANIFEST
        elif not unverified.isdisjoint(reads):
            proof = UNVERIFIED
        else:
            proof = BY_STORE if is_copied else "crc32"
        tensors[spec.name] = TensorRecord(
            dtype=spec.dtype.name,
            shape=spec.shape,
            file=file.path,
            digest=digests.of_tensor(spec.name),
            proof=proof,
            crc32=digests.crc32_of_tensor(spec),
        )
    return Manifest(
        kind=planned.kind,
        source=describe_sources(planned.sources) | dict(planned.facts),
        options=planned.options,
        versions={"ckptkit": __version__, **planned.versions},
        tensors=tensors,
        tied={str(target): str(source) for target, source in planned.plan.dropped.items()},
        files={
            file.path: FileRecord(
                file.size_bytes, digests.of_file(file.path) if len(file.segments) == 1 else ""
            )
            for file in planned.plan.files
        },
    )


def find_stored_digests(planned: PlannedOutput) -> dict[str, StoredDigest]:
    """Returns the digests that tensors of an output must have, by their names in the output.

    These are tensors that are taken as they are from a folder that ckptkit wrote before.
    """
    found: dict[str, StoredDigest] = {}
    of_sources = {id(source.index): read_stored_digests(source) for source in planned.sources}
    for _, segment, spec in planned.plan.specs():
        body = segment.body
        origin = planned.inputs.origins.get(body.origin) if isinstance(body, Copy) else None
        if origin is None or not isinstance(body, Copy):
            continue
        name = origin.index.tensors[body.key].name
        stored = of_sources.get(id(origin.index), {}).get(name)
        if stored is not None and stored.record.digest.startswith(DIGEST_SCHEME):
            kind = stored.record.dtype, stored.record.shape
            if kind == (spec.dtype.name, spec.shape):
                found[str(spec.name)] = stored
    return found


def check_destination(
    src: PathLike,
    out: PathLike,
    *,
    overwrite: bool,
    also: Sequence[PathLike] = (),
    base: PathLike | None = None,
    like: PathLike | None = None,
) -> None:
    """Refuses destinations that could not be written, before any work is done."""
    check_path(src, "SRC")
    check_path(out, "OUT")
    for path in (src, *also):
        _refuse_nested(place_of(path), place_of(out), "source", overwrite=overwrite)
    if base is not None:
        _refuse_nested(place_of(base), place_of(out), "base", overwrite=overwrite)
    if like is not None and find_overlap(out, like) is PlaceRelation.AROUND:
        _refuse_around(place_of(out), "model of --like")
    if is_url(out):
        from ckptkit.storage.remote.stream_target import (
            check_remote_target,  # late: it imports fsspec
        )

        check_remote_target(place_of(out), overwrite=overwrite)
        return
    target = local_path(out).resolve()
    if not target.is_dir() or is_free(target, LOCAL_DISK):
        return
    if not overwrite:
        raise output_exists_error(local_path(out))
    if is_run_in(target):
        raise RefusedError(
            "the output would replace the directory that this command runs in",
            where=os.fspath(out),
            hint="name a directory below it",
        )
    refuse_unnamed_in(target, os.fspath(out))


def _refuse_nested(source: Place, out: Place, what: str, *, overwrite: bool) -> None:
    folder, is_single = source, False
    if not is_url(source) and not local_path(source).exists():
        return  # the reader says that it is missing
    if not is_url(source) and local_path(source).is_file():
        path = local_path(source).resolve()
        folder = place_of(path.parent)
        # A file may be converted into a folder in its own, unless it is a part of a checkpoint.
        is_single = path.suffix != ".distcp" and path.name != METADATA
    overlap = find_overlap(out, folder)
    if overlap is PlaceRelation.NONE or (overlap is PlaceRelation.INSIDE and is_single):
        return
    if overlap is PlaceRelation.INSIDE or (overlap is PlaceRelation.SAME and not is_single):
        raise RefusedError(
            f"the output would be inside the {what}",
            where=out.location,
            hint="choose a place beside the checkpoint",
        )
    if overwrite or is_url(out):
        _refuse_around(out, what)


def _refuse_around(out: Place, what: str) -> NoReturn:
    raise RefusedError(
        f"the {what} is inside the output, which is to be replaced",
        where=out.location,
        hint="choose another place",
    )


_PLAN, _FILES, _OUTCOME = "plan", "files", "outcome"
_PART_BYTES = 4 << 20  # files that are smaller share a note


def refuse_resuming(out: PathLike, resources: Resources) -> None:
    """Refuses `--resume` where no notes are kept."""
    where, what = "--resume", f"--engine {resources.engine} keeps nothing to resume from"
    if is_url(out):
        where, what = os.fspath(out), "a URL was found where --resume needs a directory as OUT"
    elif resources.engine == "local":
        return
    raise RefusedError(
        what,
        where=where,
        hint="leave --resume out; with --slice I/N, on a disk or on S3, slices that are written are"
        " kept, and the others are run again",
    )


class Resumable(SingleProcess):
    """Writes an output on a disk part by part, without the parts that an earlier run finished.

    A part is some of the files. As slices do, a finished part leaves a note with its outcome in the
    hidden folder. Files are not synced before their note: each is read again and proven before it
    is taken over.
    """

    _target: LocalTarget

    def __init__(self, out: Path, listener: Listener, *, overwrite: bool, resume: bool) -> None:
        super().__init__(LocalTarget(out, overwrite=overwrite, resume=resume), listener)
        self._resume = resume
        self._finished = frozenset[str]()  # files of an interrupted run that are as it wrote them
        self._outcome = Outcome()  # their digests, and which records were not verified

    def start(self, planned: PlannedOutput) -> None:
        planned = self._planned = self._with_shared_blocks(planned)
        self._fingerprint = planned.fingerprint()
        notes: tuple[str, ...] = ()
        if self._resume:
            found = _find_finished_files(planned, self._target, self._fingerprint, self._listener)
            self._finished, self._outcome, notes = found
        self._listener(Planned((*planned.plan.notes, *notes)))

    def execute(self) -> None:
        planned, target, outcome = self._planned, self._target, self._outcome
        target.keep(self._finished)
        named = Path(target.location)
        with translate_errors(named):
            if not self._finished:
                shutil.rmtree(target.parts, ignore_errors=True)
            target.parts.mkdir(exist_ok=True)
            last = max(_list_parts(target), default=0)
        notes = WorkNotes(target.parts, named, LOCAL_DISK)
        _put_note(notes, _PLAN, {_PLAN: self._fingerprint})
        origins = planned.inputs.origins
        for name, origin in origins.items():
            origin.unverified.update(map(Key, outcome.unverified.get(name, ())))
            origin.adopt(outcome.open_records.get(name, {}))
        files = tuple(f for f in planned.plan.files if f.path not in self._finished)
        plan = replace(planned.plan, files=files)
        executor = Executor(plan, planned.inputs, target, planned.settings, self._listener)
        parts, others = _cut_into_parts(files, planned.inputs)
        for number, _ in enumerate(executor.run_in_parts([*parts, others])):
            if number == len(parts):
                continue  # those that leave no note
            done = [files[at] for at in parts[number]]
            specs = (segment.spec for file in done for segment in file.segments)
            names = [str(spec.name) for spec in specs if spec is not None]
            of_part = Outcome(
                digests=Digests({n: dict(executor.digests.tensors.get(n, {})) for n in names}),
                open_records={n: origin.checksums.open_now() for n, origin in origins.items()},
                unverified={n: {*map(str, origin.unverified)} for n, origin in origins.items()},
            )
            note = {_FILES: [file.path for file in done], _OUTCOME: of_part.to_json()}
            _put_note(notes, str(last + number + 1), note)
            target.has_finished = True
        self._digests = executor.digests
        refuse_changed_sources(planned)
        self._digests.update(outcome.digests)

    def reject(self, error: CkptkitError) -> None:
        if isinstance(error, RefusedError):
            self._target.has_finished = False  # no later run can finish what is refused

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        target = self._target
        if error is not None and self._resume and target.has_finished and not target.is_filled:
            target.leave()
            self._listener(WorkKept(str(target.folder)))
        target.abandon()


def _cut_into_parts(
    files: Sequence[OutputFile], inputs: Inputs
) -> tuple[list[list[int]], list[int]]:
    """Returns the numbers of the files of each part, and those that leave no note."""
    # What is decompressed is verified at the end only.
    is_compressed = any(decoding_bytes(origin.index) for origin in inputs.origins.values())
    parts, others, size_bytes = list[list[int]](), list[int](), _PART_BYTES
    for number, file in enumerate(files):
        if is_compressed or not can_be_proven(file):
            others.append(number)
            continue
        if size_bytes >= _PART_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(number)
        size_bytes += file.size_bytes
    return parts, others


def _list_parts(target: LocalTarget) -> list[int]:
    """Returns the numbers of the parts that left a note, in the order of their writing."""
    return sorted(int(p.name) for p in target.parts.iterdir() if p.name.isdecimal())


def _put_note(notes: WorkNotes, name: str, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, sort_keys=True).encode()
    notes.put(name, b"%08x %s" % (crc32(text), text))


def _get_note(notes: WorkNotes, name: str) -> dict[str, Any]:
    """Returns a note; empty if it is not there, or damaged."""
    checksum, _, text = (notes.get(name) or b"").partition(b" ")
    if checksum == b"%08x" % crc32(text):
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            if isinstance(value, dict):
                return value
    return {}


def _find_finished_files(
    planned: PlannedOutput, target: LocalTarget, fingerprint: str, listener: Listener
) -> tuple[frozenset[str], Outcome, tuple[str, ...]]:
    """Reads the files of the parts that an interrupted run finished.

    Returns:
        The paths of those that are as it wrote them, their outcome, and notes for the user.
    """
    if not target.parts.exists():
        return frozenset(), Outcome(), ("--resume found no interrupted run: all is written",)
    named = Path(target.location)
    notes = WorkNotes(target.parts, named, LOCAL_DISK)
    if _get_note(notes, _PLAN).get(_PLAN) != fingerprint:
        other = (
            "--resume found a run of another plan: the source, an option or the version of ckptkit"
            " was another one; all is written anew"
        )
        return frozenset(), Outcome(), (other,)
    with translate_errors(named):
        read = [_get_note(notes, str(number)) for number in _list_parts(target)]
    recorded = [(note[_FILES], Outcome.from_json(note[_OUTCOME])) for note in read if note]
    outcomes = {path: outcome for paths, outcome in recorded for path in paths}
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
    for _, outcome in recorded:
        joined.digests.update(outcome.digests)
        for origin, keys in outcome.unverified.items():
            joined.unverified.setdefault(origin, set()).update(keys)
        joined.open_records = outcome.open_records  # those of the newest note count
    for file in planned.plan.files:
        if file.path not in intact:
            for segment in file.segments:
                if segment.spec is not None:
                    joined.digests.tensors.pop(str(segment.spec.name), None)
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


def verify_existing_output(job: ConversionJob, listener: Listener) -> Manifest | None:
    """Verifies an output that exists: it has the same source and options, and no damage.

    The source's headers are read, and all of the output, which is compared with its digests.
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
    expected = {
        str(spec.name): f"{spec.dtype.name} {list(spec.shape)} in {file.path}"
        for file, _, spec in planned.plan.specs()
    }
    actual = {
        name: f"{t.dtype} {list(t.shape)} in {t.file}" for name, t in manifest.tensors.items()
    }
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            theirs, ours = actual.get(name, "absent"), expected.get(name, "absent")
            yield f"tensor {name!r} is {theirs} against {ours}"
    files = {file.path: file for file in planned.plan.files}
    for path in sorted(files.keys() | manifest.files.keys()):
        if path not in manifest.files or path not in files:
            yield f"file {path!r} is {'absent' if path in files else 'there, not expected'}"
            continue
        record, file = manifest.files[path], files[path]
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
