"""From a plan to an output: room, bytes, proof and commit, the same for every command."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.core.errors import NoSpaceError, SourceChangedError
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord
from ckptkit.execution.budget import WORKER_BYTES, ExecutionSettings, settle_workers
from ckptkit.execution.events import Committed, Listener, Planned
from ckptkit.execution.executor import Digests, Executor, Inputs
from ckptkit.pipeline.opening import Opened, PathLike
from ckptkit.planning.plan import Compute, Copy, Plan, Segment
from ckptkit.planning.requests import Resources
from ckptkit.storage.base import Target
from ckptkit.storage.machine import memory_in_use_bytes, usable_cores
from ckptkit.version import __version__


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an execution will take.

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
class Prepared:
    """A plan with everything that is needed to execute it.

    Attributes:
        sources: The checkpoints that it reads; the first is what the output is made from.
        plan: What is to be written.
        inputs: The opened files of the plan's origins.
        settings: How it may use the machine.
        estimate: What it will take.
        kind: Of the output, as its manifest says it.
        options: The options that differ from their defaults, as JSON values.
        facts: What the manifest says of the source besides where it lies.
        versions: The libraries besides ours that the output follows from, with their versions.
    """

    sources: tuple[Opened, ...]
    plan: Plan
    inputs: Inputs
    settings: ExecutionSettings
    estimate: Estimate
    kind: str
    options: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Opened:
        """What the output is made from."""
        return self.sources[0]


def estimated(plan: Plan, settings: ExecutionSettings, out: Path, *, bytes_read: int) -> Estimate:
    """Returns what executing a plan will take."""
    return Estimate(
        bytes_read=bytes_read,
        bytes_written=plan.bytes_written,
        bytes_free=_free_bytes(out),
        peak_bytes=memory_in_use_bytes() + settings.workers * WORKER_BYTES,
    )


def settings_for(resources: Resources) -> ExecutionSettings:
    """Chooses how many workers fit into what the user allows.

    Raises:
        NoSpaceError: If not even one does.
    """
    workers = settle_workers(
        resources.workers,
        cores=usable_cores(),
        budget_bytes=resources.memory_budget_bytes,
        limit_bytes=resources.memory_limit_bytes,
        used_bytes=memory_in_use_bytes(),
    )
    return ExecutionSettings(workers)


def write_output(prepared: Prepared, target: Target, listener: Listener) -> Manifest:
    """Executes a plan and commits what it wrote, whole or not at all.

    Returns:
        The manifest, as it lies in the output.

    Raises:
        InputError: If a source is damaged; nothing is left behind.
        NoSpaceError: If the disk has not enough room.
        SourceChangedError: If a source changed meanwhile.
    """
    listener(Planned(prepared.plan.notes))
    _refuse_full_disk(prepared, target)
    executor = Executor(prepared.plan, prepared.inputs, target, prepared.settings, listener)
    digests = executor.run()
    for source in prepared.sources:
        _refuse_changed(source)
    manifest = _manifest(prepared, digests)
    _commit(manifest, target)
    listener(Committed(target.location))
    return manifest


def _refuse_full_disk(prepared: Prepared, target: Target) -> None:
    needed, free = prepared.estimate.bytes_written, target.free_bytes()
    if free is not None and needed > free:
        raise NoSpaceError(
            f"the output needs {needed:,} bytes and {free:,} are free",
            where=target.location,
            hint="choose another disk, or a smaller --dtype",
        )


def _refuse_changed(source: Opened) -> None:
    found = [file for file in source.index.files if file.size_bytes >= 0]  # others were never read
    changed = source.source.changed(found)
    if changed is not None:
        raise SourceChangedError(
            f"{changed.path!r} changed while it was read",
            where=source.path,
            hint="wait until the save has finished, then run again",
        )


def _commit(manifest: Manifest, target: Target) -> None:
    data = manifest.to_json()
    target.create(MANIFEST_NAME, len(data))
    target.write(MANIFEST_NAME, 0, memoryview(data))
    target.commit(last=MANIFEST_NAME)


def _manifest(prepared: Prepared, digests: Digests) -> Manifest:
    checkpoint = prepared.checkpoint
    unverified = {
        (name, key) for name, origin in prepared.inputs.origins.items() for key in origin.unverified
    }
    facts: dict[str, Any] = {
        "path": checkpoint.path,
        "format": checkpoint.index.format,
        "step": checkpoint.index.run.step,
        "world_size": checkpoint.index.run.world_size,
    }
    return Manifest(
        kind=prepared.kind,
        source=facts | dict(prepared.facts),
        options=prepared.options,
        versions={"ckptkit": __version__, **prepared.versions},
        tensors={
            spec.name: TensorRecord(
                dtype=spec.dtype.name,
                shape=spec.shape,
                file=file.path,
                digest=digests.of_tensor(spec.name),
                proof="unverified" if unverified & set(_reads(segment)) else "crc32",
            )
            for file, segment, spec in prepared.plan.specs()
        },
        tied={str(target): str(source) for target, source in prepared.plan.dropped.items()},
        files={
            file.path: FileRecord(
                file.size_bytes,
                digests.of_file(file.path) if len(file.segments) == 1 else "",
            )
            for file in prepared.plan.files
        },
    )


def _reads(segment: Segment) -> Iterable[tuple[str, str]]:
    if isinstance(segment.body, Copy):
        return ((segment.body.origin, segment.body.key),)
    if isinstance(segment.body, Compute):
        return segment.body.reads
    return ()


def _free_bytes(out: PathLike) -> int | None:
    place = Path(out).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
