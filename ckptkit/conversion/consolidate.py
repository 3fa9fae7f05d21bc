"""`ckptkit.consolidate`: from shards to a folder that loads, with proof of every byte."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ckptkit.conversion.prepare import prepared
from ckptkit.conversion.ray import write_on_ray
from ckptkit.conversion.resume import refuse_resuming, write_resumably
from ckptkit.conversion.slices import SliceDone, run_slice
from ckptkit.conversion.source.open import PathLike
from ckptkit.conversion.write import Prepared, check_destination, write_output
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.options import ConsolidateRequest, Resources
from ckptkit.plan.load_report import CONSOLIDATE, Advice
from ckptkit.plan.shares import Share
from ckptkit.storage.places import is_url, local_path, open_target


@dataclass(frozen=True, slots=True)
class Consolidation:
    """What a consolidation is made from, as values; see `run_consolidation`.

    `advice` says which options there are where the output would not load.
    """

    src: PathLike
    out: PathLike
    request: ConsolidateRequest
    base: str | None = None
    also: tuple[PathLike, ...] = ()
    resources: Resources = field(default_factory=Resources)
    advice: Advice = CONSOLIDATE

    def prepared(self) -> AbstractContextManager[Prepared]:
        """Opens the sources and plans; writes nothing."""
        return prepared(
            *(self.src, self.out, self.request),
            base=self.base,
            resources=self.resources,
            also=self.also,
            advice=self.advice,
        )


def run_consolidation(  # noqa: PLR0913  what the command takes, sorted by stage
    src: PathLike,
    out: PathLike,
    request: ConsolidateRequest,
    *,
    base: str | None = None,
    overwrite: bool = False,
    resources: Resources | None = None,
    listener: Listener | None = None,
    also: Sequence[PathLike] = (),
    resume: bool = False,
) -> Manifest:
    """Writes what a request asks for into the directory `out`, whole or not at all.

    With `resume`, an interrupted run is gone on with, and what is finished stays if this one is
    interrupted too.

    Returns:
        The manifest, as it lies in the output.
    """
    check_destination(src, out, overwrite=overwrite, also=also, base=base, like=request.like)
    resources = resources or Resources()
    job = Consolidation(src, out, request, base, tuple(also), resources)
    listener = listener or ignore
    if resume:
        refuse_resuming(out, resources)
    if resources.engine == "ray":
        return write_on_ray(job, out, resources, overwrite=overwrite, listener=listener)
    if not is_url(out):
        return write_resumably(job, local_path(out), listener, overwrite=overwrite, resume=resume)
    target = open_target(out, overwrite=overwrite)
    try:
        with job.prepared() as plan:
            return write_output(plan, target, listener)
    finally:
        target.abandon()


def run_consolidation_slice(
    job: Consolidation, share: Share, *, overwrite: bool = False, listener: Listener | None = None
) -> SliceDone:
    """Writes one part of an output, and puts the whole in place if all others are written.

    Returns:
        What was done, and what is missing.
    """
    like = job.request.like
    check_destination(
        job.src, job.out, overwrite=overwrite, also=job.also, base=job.base, like=like
    )
    return run_slice(job, job.out, share, overwrite=overwrite, listener=listener or ignore)
