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
from pathlib import Path
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import Manifest
from ckptkit.execution.events import BytesWritten, Listener, Planned, Started, ignore
from ckptkit.execution.executor import Executor
from ckptkit.execution.outcome import Outcome
from ckptkit.execution.ray_engine import NodeLimits, RunShare, imported_ray, run_on_ray
from ckptkit.pipeline.fingerprint import fingerprint_of
from ckptkit.pipeline.parts import (
    Job,
    commit_shares,
    refuse_no_ranges,
    run_share,
    shared_folder,
)
from ckptkit.pipeline.writing import Prepared, marked_as_read, refuse_full_disk
from ckptkit.planning.requests import Resources
from ckptkit.planning.shares import Share, shares_for, tasks_of
from ckptkit.storage.places import PathLike
from ckptkit.storage.shared_target import SharedTarget
from ckptkit.storage.workfolder import NONCE_BYTES


@dataclass(frozen=True, slots=True)
class NodeStation:
    """What a node needs to take part.

    Attributes:
        job: What the plan is made from.
        out: The output.
        nonce: Of the attempt.
        overwrite: Whether an output that holds something is replaced by the commit.
        fingerprint: Of the plan.
        are_threads_chosen: Whether the user has said how many threads there are on a node.
    """

    job: Job
    out: str
    nonce: str
    overwrite: bool
    fingerprint: str
    are_threads_chosen: bool

    @contextmanager
    def opened(self, cores: int) -> Iterator[RunShare]:
        """Makes the plan on this node.

        Args:
            cores: Of which there may be a thread each, unless more were asked for.

        Yields:
            What runs shares.

        Raises:
            RefusedError: If it is another one.
        """
        with self.job.prepared() as prepared:
            if fingerprint_of(prepared) != self.fingerprint:
                raise RefusedError(
                    "the plan made here is another one than where the command was started",
                    hint="all nodes need the same ckptkit and libraries, and the same files at the"
                    " same paths, as on a shared file system",
                )

            threads = prepared.settings.workers
            if not self.are_threads_chosen:
                threads = min(threads, cores)
            ready = replace(prepared, settings=replace(prepared.settings, workers=threads))

            def run(share: Share) -> dict[str, Any]:
                target = SharedTarget(Path(self.out), self.nonce, overwrite=self.overwrite)
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

    Raises:
        EngineError: If the cluster cannot be used.
        InputError: If a source is damaged, incomplete, or changes meanwhile.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is there and not empty, and `overwrite` is false.
    """
    folder = shared_folder(out, "--engine ray")
    imported_ray()
    with job.prepared() as prepared:
        listener(Planned(prepared.plan.notes))
        nonce = os.urandom(NONCE_BYTES).hex()
        target = SharedTarget(folder, nonce, overwrite=overwrite)
        try:
            target.sweep()
            refuse_full_disk(prepared, target)
            refuse_no_ranges(target)
            Executor(
                prepared.plan, prepared.inputs, target, prepared.settings, listener
            ).create_files()
            target.sync()
            station = NodeStation(
                job=job,
                out=str(folder),
                nonce=nonce,
                overwrite=overwrite,
                fingerprint=fingerprint_of(prepared),
                are_threads_chosen=resources.workers is not None,
            )
            with marked_as_read(prepared):
                whole = _run(station, prepared, resources, listener)
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
    run_on_ray(station, partial(shares_for, plan), limits, take)
    return whole
