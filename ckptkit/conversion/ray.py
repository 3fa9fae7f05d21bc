"""A plan that is run by the nodes of a Ray cluster, each of which makes it again for itself.

Kernels hold functions and sources hold descriptors, so a plan does not travel; what it is made
from does, and its fingerprint tells whether a node has made the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptkit.conversion.fingerprint import fingerprint_of
from ckptkit.conversion.slices import Job, commit_shares, cut_of, refuse_no_ranges, run_share
from ckptkit.conversion.write import Prepared, marked_as_read, refuse_full_disk
from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import Manifest
from ckptkit.engine.executor import Executor
from ckptkit.engine.outcome import BytesWritten, Listener, Outcome, Planned, Started, ignore
from ckptkit.engine.ray import NodeLimits, RunShare, import_ray, run_on_ray
from ckptkit.options import Resources
from ckptkit.plan.shares import Share, shares_for, tasks_of
from ckptkit.storage.base import distant
from ckptkit.storage.local.workdir import NONCE_BYTES
from ckptkit.storage.places import PathLike, SharedPlace, is_url
from ckptkit.storage.shared import OutputAttempt

_OPTION = "--engine ray"


@dataclass(frozen=True, slots=True)
class NodeStation:
    """What a node needs to take part.

    Attributes:
        job: What the plan is made from.
        out: The output.
        attempt: What all nodes have in common.
        fingerprint: Of the plan.
        are_threads_chosen: Whether the user has said how many threads there are on a node.
    """

    job: Job
    out: PathLike
    attempt: OutputAttempt
    fingerprint: str
    are_threads_chosen: bool

    @contextmanager
    def opened(self, cores: int) -> Iterator[RunShare]:
        """Makes the plan on this node.

        Args:
            cores: Of which there may be a thread each, unless more were asked for.

        Yields:
            What runs shares.
        """
        with self.job.prepared() as prepared:
            if fingerprint_of(prepared) != self.fingerprint:
                raise RefusedError(
                    "the plan made here is another one than where the command was started",
                    hint="all nodes need the same ckptkit and libraries, and the same files at the"
                    " same paths, as on a shared file system",
                )

            threads = prepared.settings.workers
            if not self.are_threads_chosen and not _waits_for_a_store(prepared, self.out):
                threads = min(threads, cores)
            place, cut = SharedPlace(self.out, _OPTION), cut_of(prepared.plan)
            ready = replace(prepared, settings=replace(prepared.settings, workers=threads))

            def run(share: Share) -> dict[str, Any]:
                target = place.open(self.attempt, cut)
                try:
                    return run_share(ready, target, share, ignore).to_json()
                finally:
                    target.leave()

            yield run


def write_on_ray(
    job: Job, out: PathLike, resources: Resources, *, overwrite: bool, listener: Listener
) -> Manifest:
    """Writes an output with the nodes of a Ray cluster, whole or not at all.

    Returns:
        The manifest, as it lies in the output; the same as one machine would have written.
    """
    place = SharedPlace(out, _OPTION)
    import_ray()
    seen = place.seen() if overwrite else None
    with job.prepared() as prepared:
        listener(Planned(prepared.plan.notes))
        nonce = os.urandom(NONCE_BYTES).hex()
        attempt = OutputAttempt(nonce, overwrite=overwrite, is_agreed=False, seen=seen)
        target = place.open(attempt, cut_of(prepared.plan))
        try:
            target.sweep()
            refuse_full_disk(prepared, target)
            refuse_no_ranges(target)
            Executor(
                prepared.plan, prepared.inputs, target, prepared.settings, listener
            ).create_files()
            target.begin()
            station = NodeStation(
                job=job,
                out=place.place,
                attempt=attempt,
                fingerprint=fingerprint_of(prepared),
                are_threads_chosen=resources.workers is not None,
            )
            prepared.comparison.begin()
            with marked_as_read(prepared):
                whole = _run(station, prepared, resources, listener)
                prepared.comparison.finish(listener)
                return commit_shares(prepared, target, whole, listener)
        except BaseException:
            target.abandon()
            raise
        finally:
            target.leave()


def _run(
    station: NodeStation, prepared: Prepared, resources: Resources, listener: Listener
) -> Outcome:
    plan, whole = prepared.plan, Outcome()

    def take(share: Share, values: Any) -> None:
        whole.add(Outcome.from_json(values))
        tasks = tasks_of(plan, share)
        listener(BytesWritten(sum(task.stop - task.start for task in tasks)))

    listener(Started(plan.bytes_written))
    limits = NodeLimits(resources.workers, resources.memory_limit_bytes)
    in_parts = SharedPlace(station.out, _OPTION).takes_parts
    run_on_ray(station, partial(shares_for, plan, in_parts=in_parts), limits, take)
    return whole


def _waits_for_a_store(prepared: Prepared, out: PathLike) -> bool:
    return is_url(out) or any(distant(one.source) is not None for one in prepared.sources)
