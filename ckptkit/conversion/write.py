"""Writing a planned output: the steps that every command shares, and where an output may go.

`write_output` runs them in one order: reserve room and announce the plan, execute, compare names
with the model, commit. A `WriteStrategy` says how each step is done.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import xxhash

from ckptkit.conversion.compare_names import Comparison
from ckptkit.conversion.source.open import OpenedCheckpoint, check_path, describe_sources
from ckptkit.conversion.source.stored_digests import StoredDigest, read_stored_digests
from ckptkit.core.checksums import DIGEST_SCHEME
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    NoSpaceError,
    RefusedError,
    SourceChangedError,
)
from ckptkit.core.manifest import (
    BY_MANIFEST,
    BY_STORE,
    MANIFEST_NAME,
    UNVERIFIED,
    FileRecord,
    Manifest,
    TensorRecord,
)
from ckptkit.core.object_parts import choose_part_bytes
from ckptkit.core.threads import memory_in_use_bytes, usable_cores
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
from ckptkit.engine.outcome import Digests, Listener, OutputCommitted, Planned
from ckptkit.engine.prefetch import READ_AHEAD_BYTES
from ckptkit.engine.remote_reads import with_store_copies
from ckptkit.engine.segment_reader import Inputs
from ckptkit.formats.dcp.megatron import INTEGRITY, check_integrity
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.options import Resources
from ckptkit.plan.plan import TASK_BYTES, Compute, Copy, Plan, RawCopy, Segment, ServerCopy
from ckptkit.runs.run_paths import hold_at_stores
from ckptkit.storage.base import Target
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.target import free_bytes, output_exists_error
from ckptkit.storage.local.workdir import is_free
from ckptkit.storage.locations import S3_PROTOCOLS, current_directory
from ckptkit.storage.manifests import refuse_unnamed_in
from ckptkit.storage.place_identity import PlaceRelation, find_overlap
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of
from ckptkit.version import __version__

if TYPE_CHECKING:  # which needs what speaks to S3
    from ckptkit.storage.remote.s3_target import SharedOutput

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes and memory that an execution needs.

    Attributes:
        bytes_read: Tensor bytes read from the sources.
        bytes_written: Size of the output.
        bytes_free: Room at the destination, or None where that is unknown.
        peak_bytes: Memory of the whole process at its peak.
    """

    bytes_read: int
    bytes_written: int
    bytes_free: int | None
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """A plan with everything that is needed to execute it.

    Attributes:
        sources: The checkpoints that it reads; the output is made from the first.
        plan: What is to be written.
        inputs: The open files of the plan's origins.
        settings: Workers and memory of the execution.
        estimate: Bytes and memory that the execution needs.
        kind: Kind of the output in its manifest.
        options: The options that differ from their defaults, as JSON values.
        facts: Further entries of the manifest's `source`.
        versions: Libraries other than ckptkit that the output depends on, with their versions.
        comparison: Compares names and shapes with the model of the configuration.
    """

    sources: tuple[OpenedCheckpoint, ...]
    plan: Plan
    inputs: Inputs
    settings: ExecutionSettings
    estimate: Estimate
    kind: str
    options: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    comparison: Comparison | None = None

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
    """Estimates the bytes and the memory that executing a plan needs.

    Args:
        plan: The plan.
        settings: Workers and memory of the execution.
        out: The output; None if nothing is written.
        bytes_read: Tensor bytes that it reads.
        besides_bytes: Memory in addition to that of the workers.
    """
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
    """Chooses how many workers fit into the user's limits.

    Args:
        resources: The limits.
        plan: The plan, if there is one yet.
        sources: The checkpoints that it reads.
        out: The output; None if nothing is written.
    """
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
    return ExecutionSettings(workers, resources.bytes_per_second, needed, task_bytes)


class WriteStrategy(ABC, Generic[R]):
    """How an output is written; `write_output` calls the methods in this order.

    A strategy is made before the output is planned: it claims the place. As a context manager it
    releases it.
    """

    @abstractmethod
    def start(self, planned: PlannedOutput) -> R | None:
        """Makes sure that there is room, and announces the plan.

        Returns:
            None, or the result where the output exists already.
        """

    @abstractmethod
    def execute(self) -> None:
        """Writes the files, and makes sure that the sources did not change meanwhile."""

    def reject(self, error: CkptkitError) -> None:
        """Is called when the comparison of names refuses the output."""

    @abstractmethod
    def commit(self) -> R:
        """Makes the output visible, or returns what is missing."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Releases the place.

        Args:
            error: What ended the writing early, or None.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)


def write_output(planned: PlannedOutput, strategy: WriteStrategy[R], listener: Listener) -> R:
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
    """Writes an output in this process; an interrupted run leaves nothing.

    Attributes:
        make_manifest: Makes the manifest of what was written.
    """

    def __init__(self, target: Target, listener: Listener) -> None:
        self.make_manifest = build_manifest
        self._target = target
        self._listener = listener

    def start(self, planned: PlannedOutput) -> None:
        refuse_full_disk(planned, self._target)
        # What the store copies does not pass through here, where it could be checked.
        if self._target.copies_objects and not planned.settings.check:
            plan = with_store_copies(planned.plan, planned.inputs.origins, self._target)
            planned = replace(planned, plan=plan)
        self._planned = planned
        self._listener(Planned(planned.plan.notes))

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

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002  success and failure alike
        self._target.abandon()


def refuse_full_disk(planned: PlannedOutput, target: Target | SharedOutput) -> None:
    """Refuses to begin where there is no room for the output."""
    needed, free = planned.estimate.bytes_written, target.free_bytes()
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
    """Returns the manifest of an output whose files are completely written.

    Raises:
        ChecksumError: If a tensor is other than the manifest of the folder that it is from says.
    """
    unverified = {
        (name, key) for name, origin in planned.inputs.origins.items() for key in origin.unverified
    }
    stored = find_stored_digests(planned)
    for name, one in stored.items():
        one.compare(digests.of_tensor(name))
    return Manifest(
        kind=planned.kind,
        source=describe_sources(planned.sources) | dict(planned.facts),
        options=planned.options,
        versions={"ckptkit": __version__, **planned.versions},
        tensors={
            spec.name: TensorRecord(
                dtype=spec.dtype.name,
                shape=spec.shape,
                file=file.path,
                digest=digests.of_tensor(spec.name),
                proof=_proof(segment, unverified, is_compared=str(spec.name) in stored),
                crc32=digests.crc32_of_tensor(spec),
            )
            for file, segment, spec in planned.plan.specs()
        },
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


def _proof(segment: Segment, unverified: AbstractSet[tuple[str, str]], *, is_compared: bool) -> str:
    body = segment.body
    reads: Iterable[tuple[str, str]] = body.reads if isinstance(body, Compute) else ()
    if isinstance(body, (Copy, ServerCopy)):
        reads = ((body.origin, body.key),)
    if is_compared:
        return BY_MANIFEST
    if not unverified.isdisjoint(reads):
        return UNVERIFIED
    return BY_STORE if isinstance(body, ServerCopy) else "crc32"


def check_destination(
    src: PathLike,
    out: PathLike,
    *,
    overwrite: bool,
    also: Sequence[PathLike] = (),
    base: PathLike | None = None,
    like: PathLike | None = None,
) -> None:
    """Refuses destinations that could not be written, before any work is done.

    Args:
        src: The source.
        out: The output.
        overwrite: Whether an output that holds something is replaced.
        also: Further directories of the source.
        base: The base model that is read too, or None.
        like: The model whose file names are kept, or None; the output may replace it.
    """
    check_path(src, "SRC")
    check_path(out, "OUT")
    read = [(path, "source") for path in (src, *also)]
    if base is not None:
        read.append((base, "base"))
    for place, what in read:
        _refuse_nested(place_of(place), place_of(out), what, overwrite=overwrite)
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
    here = current_directory()
    if here is not None and (target == here or target in here.parents):
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
