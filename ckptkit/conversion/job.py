"""Runs a conversion job for the library and the commands: plans, then writes by a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.write import (
    Resumable,
    SingleProcess,
    WriteStrategy,
    refuse_resuming,
    verify_existing_output,
    write_output,
)
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.storage.places import is_url, local_path, open_target

if TYPE_CHECKING:
    from ckptkit.conversion.delete_source import SourceRemoval


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job.

    Attributes:
        manifest: The manifest of the output; None for a slice that was not the last.
        missing: The slices that are not written yet, by number.
        removal: What was removed of the source; None if nothing was, or an earlier run removed it.
    """

    manifest: Manifest | None
    missing: tuple[int, ...] = ()
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

        manifest, removal = write_and_remove(job, partial(_write, job, listener), listener)
        return JobResult(manifest, removal=removal)
    if job.if_exists == "verify":
        existing = verify_existing_output(job, listener)
        if existing is not None:
            return JobResult(existing)
    if job.share is None:
        return JobResult(_write(job, listener))
    from ckptkit.conversion.distribute import Slice

    job.check_places()
    with (
        Slice(job.destination, job.share, listener, overwrite=job.overwrite) as strategy,
        job.plan_output() as planned,
    ):
        written = write_output(planned, strategy, listener)
    return JobResult(None, written) if isinstance(written, tuple) else JobResult(written)


def _write(job: ConversionJob, listener: Listener) -> Manifest:
    job.check_places()
    assert job.out is not None  # noqa: S101  which would have been refused
    if job.resume:
        refuse_resuming(job.out, job.resources)
    strategy: WriteStrategy[Manifest]
    if job.resources.engine == "ray":
        from ckptkit.conversion.distribute import RayCluster

        strategy = RayCluster(job, job.out, job.resources, listener, overwrite=job.overwrite)
    elif is_url(job.out):
        strategy = SingleProcess(open_target(job.out, overwrite=job.overwrite), listener)
    else:
        out = local_path(job.out)
        strategy = Resumable(out, listener, overwrite=job.overwrite, resume=job.resume)
    with strategy, job.plan_output() as planned:
        return write_output(planned, strategy, listener)
