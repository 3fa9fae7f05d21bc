"""Carries out a conversion job: in one process, in independent slices, or by a Ray cluster.

Of several processes, each makes the plan for itself. A plan cannot be sent, since kernels hold
functions and sources hold descriptors; the job can, and the fingerprint shows whether the plans are
equal.

Slices communicate through notes in the hidden folder of the output alone: `plan` has the
fingerprint, and `slice-I` the outcome of slice I, once what it wrote is durable. The last slice to
finish commits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.write import (
    PlannedOutput,
    Resumable,
    SingleProcess,
    WriteStrategy,
    build_manifest,
    find_written_output,
    refuse_changed_sources,
    refuse_full_disk,
    refuse_resuming,
    verify_existing_output,
    write_output,
)
from ckptkit.core.errors import CkptkitError, InputError, OutputError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.engine.executor import Executor
from ckptkit.engine.outcome import (
    BytesWritten,
    Listener,
    Outcome,
    OutputCommitted,
    OutputKept,
    Planned,
    Started,
    ignore,
)
from ckptkit.engine.ray import RunShare, import_ray, run_on_ray
from ckptkit.plan.plan import (
    TASK_BYTES,
    Plan,
    Share,
    cut_object_parts,
    split_plan,
    tasks_of,
    tasks_of_parts,
)
from ckptkit.storage.base import Cut, OutputAttempt
from ckptkit.storage.local.target import SharedTarget
from ckptkit.storage.local.workdir import NONCE_BYTES
from ckptkit.storage.locations import S3_PROTOCOLS
from ckptkit.storage.manifests import manifest_digest
from ckptkit.storage.places import PathLike, is_url, local_path, open_target, place_of

if TYPE_CHECKING:
    from ckptkit.conversion.delete_source import SourceRemoval
    from ckptkit.storage.remote.s3 import S3Uploads
    from ckptkit.storage.remote.s3_target import SharedOutput


class JobResult(Struct, frozen=True):
    manifest: Manifest | None  # of the output; None for a slice that was not the last
    missing: tuple[int, ...] = ()  # the slices that are not written yet, by number
    # What was removed of the source; None if nothing was, or an earlier run removed it.
    removal: SourceRemoval | None = None

    @property
    def whole(self) -> Manifest:
        """The manifest of an output that was not written in slices."""
        assert self.manifest is not None  # noqa: S101  only slices leave the output incomplete
        return self.manifest


def run_job(job: ConversionJob, listener: Listener = ignore) -> JobResult:
    """Carries out a job: the output is written whole or not at all, as far as it is missing."""
    if job.delete_source:
        from ckptkit.conversion.delete_source import write_and_remove

        manifest, removal = write_and_remove(job, lambda: _write(job, listener).whole, listener)
        return JobResult(manifest, removal=removal)
    if job.if_exists == "verify":
        existing = verify_existing_output(job, listener)
        if existing is not None:
            return JobResult(existing)
    return _write(job, listener)


def is_divided(job: ConversionJob) -> bool:
    """Says whether several processes write the output; these share no blocks."""
    return job.share is not None or job.resources.engine != "local"


def refuse_divided_sharing(job: ConversionJob) -> None:
    """Refuses to share blocks at any rate where that is not done."""
    if job.resources.sharing == "always" and (is_divided(job) or is_url(job.destination)):
        raise RefusedError(
            "only one process that writes to a disk shares blocks with the source",
            where="--share always",
            hint="leave it out, or leave --slice and --engine out and name a directory",
        )


def _write(job: ConversionJob, listener: Listener) -> JobResult:
    job.check_places()
    out = job.destination
    if job.resume:
        refuse_resuming(out, job.resources)
    refuse_divided_sharing(job)
    strategy: WriteStrategy[Manifest | MissingSlices]
    if job.share is not None:
        strategy = Slice(out, job.share, listener, overwrite=job.overwrite)
    elif job.resources.engine == "ray":
        strategy = RayCluster(job, listener)
    elif is_url(out):
        strategy = SingleProcess(open_target(out, overwrite=job.overwrite), listener)
    else:
        folder = local_path(out)
        strategy = Resumable(folder, listener, overwrite=job.overwrite, resume=job.resume)
    with strategy, job.plan_output() as planned:
        written = write_output(planned, strategy, listener)
    return JobResult(None, written) if isinstance(written, tuple) else JobResult(written)


class SharedPlace:
    """A directory that all processes see, or a prefix on S3, connected to once."""

    def __init__(self, out: PathLike, option: str) -> None:
        """Connects to the output; `option` is the option that asked for several processes."""
        self.place = place_of(out)
        self._prefix: S3Uploads | None = None
        if is_url(self.place):
            if self.place.protocol not in S3_PROTOCOLS:
                raise RefusedError(
                    f"a URL was found where {option} needs a directory that all processes see, or"
                    " a place on S3",
                    where=self.place.location,
                    hint="write to a shared disk and copy the finished output, or leave the option"
                    " out: one process writes to such a URL without a local disk",
                )
            from ckptkit.storage.remote.s3_target import open_s3_prefix

            self._prefix = open_s3_prefix(self.place)

    def seen(self) -> str:
        """Returns what identifies the manifest that is there; empty where there is none."""
        if self._prefix is None:
            return manifest_digest(local_path(self.place))
        with self._prefix.translate_errors():
            key = self._prefix.prefix + MANIFEST_NAME
            return self._prefix.list_objects(key).get(key, "")

    @property
    def takes_parts(self) -> bool:
        return self._prefix is not None

    def open(self, attempt: OutputAttempt, cut: Cut) -> SharedOutput:
        """Returns a view of the output; `cut` cuts a file into parts, alike in all processes."""
        if self._prefix is None:
            folder = local_path(self.place)
            return SharedTarget(
                folder, attempt.nonce, overwrite=attempt.overwrite, seen=attempt.seen
            )
        from ckptkit.storage.remote.s3_target import S3SharedTarget

        return S3SharedTarget(self._prefix, attempt, cut)


def _refuse_no_ranges(target: SharedOutput) -> None:
    """Refuses a place where several processes cannot write one file at once."""
    reason = target.why_no_ranges()
    if reason:
        raise RefusedError(
            f"several processes cannot write parts of one file there: {reason}",
            where=target.location,
            hint="choose a directory on a shared file system, or run in one process"
            f"{', or with --engine ray' if target.takes_parts else ''}",
        )


def _cut_by(plan: Plan) -> Cut:
    """Returns the function that cuts files of a plan into the parts that an object store takes."""
    files = {file.path: file for file in plan.files}
    return lambda path: cut_object_parts(files[path])


def run_share(
    planned: PlannedOutput, target: SharedOutput, share: Share, listener: Listener
) -> Outcome:
    """Runs the tasks of one share, and makes what they wrote durable; the target is used up."""
    plan = planned.plan
    for number in sorted({task.file for task in tasks_of(plan, share)}):
        target.create(plan.files[number].path, plan.files[number].size_bytes)
    outcome = _make_executor(planned, target, listener).run_part(tasks_of(plan, share))
    target.sync()
    outcome.sent = target.sent()
    return outcome


def _commit_shares(
    planned: PlannedOutput, target: SharedOutput, outcome: Outcome, listener: Listener
) -> Manifest:
    """Completes an output after all of its shares were run, and makes it visible.

    One process calls it, with a view of the output through which nothing was written.
    """
    executor = Executor(planned.plan, planned.inputs, target, planned.settings, ignore)
    try:
        executor.create_files()
        missing = target.adopt(outcome.sent)
        if missing:  # parts that hold checksums of several shares
            tasks = tasks_of_parts(planned.plan, missing)
            _make_executor(planned, target, ignore).run_again(tasks, outcome)
        digests = executor.complete(outcome, has_trailers=target.takes_parts)
        refuse_changed_sources(planned)  # all processes found the same files when they began
    except InputError:
        target.abandon()
        raise
    manifest = build_manifest(planned, digests)
    target.sync()
    target.commit(MANIFEST_NAME, manifest.to_json())
    listener(OutputCommitted(target.location))
    return manifest


def _make_executor(planned: PlannedOutput, target: SharedOutput, listener: Listener) -> Executor:
    """Returns an executor with ledgers of its own: each share has open records of its own."""
    settings = planned.settings
    if target.takes_parts:
        settings = settings.with_more(TASK_BYTES)  # a part can exceed a task by as much
    inputs = planned.inputs.with_own_checksums()
    return Executor(planned.plan, inputs, target, settings, listener)


# Equal for all slices of an output, whatever their plans, so that slices of different plans use
# the same hidden folder and find out.
_NONCE = "51ce51ce51ce51ce"
MissingSlices = tuple[int, ...]
"""The numbers of slices that are not written yet; empty while another process commits."""


class Slice(WriteStrategy[Manifest | MissingSlices]):
    """Writes one slice of an output, and commits the whole if all others are written.

    Run again, a slice that was written is not written again; so any slice can be repeated after
    a failure.
    """

    def __init__(self, out: PathLike, share: Share, listener: Listener, *, overwrite: bool) -> None:
        """Connects to the place."""
        self._out = out
        self._place = SharedPlace(out, "--slice")
        self._share = replace(share, in_parts=self._place.takes_parts)
        self._seen = self._place.seen() if overwrite else None
        self._overwrite = overwrite
        self._listener = listener
        self._target: SharedOutput | None = None

    def start(self, planned: PlannedOutput) -> Manifest | None:
        self._listener(Planned(planned.plan.notes))
        existing = find_written_output(planned, self._out) if self._overwrite else None
        if existing is not None:  # usually by these slices: this one is repeated
            self._listener(OutputKept(os.fspath(self._out)))
            return existing
        fingerprint = planned.fingerprint()
        name = fingerprint[: 2 * NONCE_BYTES]
        attempt = OutputAttempt(_NONCE, name, overwrite=self._overwrite, seen=self._seen)
        self._planned = planned
        self._target = self._place.open(attempt, _cut_by(planned.plan))
        self._agree_on_plan(self._target, fingerprint)
        return None

    def _agree_on_plan(self, target: SharedOutput, fingerprint: str) -> None:
        """Makes sure that all slices are of one plan, and that there is room for it."""
        own = {"fingerprint": fingerprint, "slices": self._share.count}
        data = json.dumps(own).encode()
        if target.plan() is None:
            self._check_place(target)
        agreed = target.agree(data)
        if agreed != data:
            count = json.loads(agreed)["slices"]
            difference = (
                "of another plan: the source, an option or the version of ckptkit is another one"
                if count == self._share.count
                else f"of {count:,}, and this one is of {self._share.count:,}"
            )
            raise RefusedError(
                f"other slices of this output are {difference}",
                where=target.location,
                hint="run all slices with the same options, versions and source; where the others"
                f" are left over from an earlier attempt, remove them: {target.removal}",
            )

    def _check_place(self, target: SharedOutput) -> None:
        try:
            refuse_full_disk(self._planned, target)
            _refuse_no_ranges(target)
            if target.takes_parts:  # a directory shows by its locks what is in use
                target.sweep()
        except CkptkitError:
            if target.plan() is None:
                target.abandon()
                raise
            # Otherwise another slice has begun meanwhile, and the missing room is what it reserved.

    def execute(self) -> None:
        target, plan = self._target, self._planned.plan
        assert target is not None  # noqa: S101  `start` has opened it
        name = f"slice-{self._share.number}"
        if target.notes.get(name) is None:
            tasks = tasks_of(plan, self._share)
            self._listener(Started(sum(task.stop - task.start for task in tasks)))
            outcome = run_share(self._planned, target, self._share, self._listener)
            target.notes.put(name, json.dumps(outcome.to_json()).encode())

    def reject(self, error: CkptkitError) -> None:  # noqa: ARG002  every slice is refused alike
        if self._target is not None:
            self._target.abandon()

    def commit(self) -> Manifest | MissingSlices:
        """Commits if all slices are there."""
        target, share = self._target, self._share
        assert target is not None  # noqa: S101  `start` has opened it
        # Its own note last: if it exists, no note that was missing before had been removed.
        numbers = sorted(range(share.count), key=lambda number: number == share.number)
        notes = {number: target.notes.get(f"slice-{number}") for number in numbers}
        missing = tuple(sorted(number for number, data in notes.items() if data is None))
        if share.number in missing:
            if find_written_output(self._planned, self._out) is not None:
                return ()  # another slice has committed it by now
            raise OutputError(
                "what this slice has written was removed by another process",
                where=target.location,
                hint="run one command at a time for an output, and this slice again",
            )
        if missing:
            return missing
        with target.notes.alone("commit", str(share.number)) as is_alone:
            if not is_alone or target.plan() is None:
                return ()  # another process commits it, or has done so
            whole = Outcome()
            for data in notes.values():
                whole.add(Outcome.from_json(json.loads(data or b"")))
            return _commit_shares(self._planned, target, whole, self._listener)

    def __exit__(self, *_: object) -> None:  # others may be at work
        if self._target is not None:
            self._target.leave()


_RAY_OPTION = "--engine ray"


@contextmanager
def open_worker(
    job: ConversionJob, attempt: OutputAttempt, fingerprint: str, cores: int
) -> Iterator[RunShare]:
    """Makes the plan on a node that takes part."""
    with job.plan_output() as planned:
        if planned.fingerprint() != fingerprint:
            raise RefusedError(
                "the plan made here is another one than where the command was started",
                hint="all nodes need the same ckptkit and libraries, and the same files at the"
                " same paths, as on a shared file system",
            )

        out, threads = job.destination, planned.settings.workers
        waits_for_a_store = is_url(out) or any(
            checkpoint.source.is_remote for checkpoint in planned.sources
        )
        if job.resources.workers is None and not waits_for_a_store:
            threads = min(threads, cores)
        place, cut = SharedPlace(out, _RAY_OPTION), _cut_by(planned.plan)
        ready = replace(planned, settings=replace(planned.settings, workers=threads))

        def run(share: Share) -> dict[str, Any]:
            target = place.open(attempt, cut)
            try:
                return run_share(ready, target, share, ignore).to_json()
            finally:
                target.leave()

        yield run


class RayCluster(WriteStrategy[Manifest]):
    """Writes an output with the nodes of a Ray cluster; it equals what one machine would write."""

    def __init__(self, job: ConversionJob, listener: Listener) -> None:
        """Connects to the place."""
        self._job = job
        self._place = SharedPlace(job.destination, _RAY_OPTION)
        self._listener = listener
        import_ray()
        seen = self._place.seen() if job.overwrite else None
        nonce = os.urandom(NONCE_BYTES).hex()
        self._attempt = OutputAttempt(nonce, overwrite=job.overwrite, is_agreed=False, seen=seen)
        self._target: SharedOutput | None = None

    def start(self, planned: PlannedOutput) -> None:
        self._listener(Planned(planned.plan.notes))
        self._planned = planned
        target = self._target = self._place.open(self._attempt, _cut_by(planned.plan))
        target.sweep()
        refuse_full_disk(planned, target)
        _refuse_no_ranges(target)
        Executor(
            planned.plan, planned.inputs, target, planned.settings, self._listener
        ).create_files()
        target.begin()

    def execute(self) -> None:
        plan, resources = self._planned.plan, self._job.resources
        self._outcome = Outcome()

        def take(share: Share, values: Any) -> None:
            self._outcome.add(Outcome.from_json(values))
            tasks = tasks_of(plan, share)
            self._listener(BytesWritten(sum(task.stop - task.start for task in tasks)))

        fingerprint = self._planned.fingerprint()
        worker = partial(open_worker, self._job, self._attempt, fingerprint)
        self._listener(Started(plan.bytes_written))
        deal = partial(split_plan, plan, in_parts=self._place.takes_parts)
        memory_bytes = resources.memory_limit_bytes
        run_on_ray(worker, deal, take, cores=resources.workers, memory_bytes=memory_bytes)

    def commit(self) -> Manifest:
        assert self._target is not None  # noqa: S101  `start` has opened it
        return _commit_shares(self._planned, self._target, self._outcome, self._listener)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._target is None:
            return
        try:
            if error is not None:
                self._target.abandon()
        finally:
            self._target.leave()
