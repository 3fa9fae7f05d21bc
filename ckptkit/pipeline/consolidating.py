"""`ckptkit.consolidate`: from shards to a folder that loads, with proof of every byte."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckptkit.core.errors import NoSpaceError, SourceChangedError
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord
from ckptkit.execution.events import Committed, Listener, Planned, ignore
from ckptkit.execution.executor import Digests, Executor
from ckptkit.pipeline.destination import check_destination
from ckptkit.pipeline.opening import PathLike
from ckptkit.pipeline.planning import Prepared, prepared
from ckptkit.planning.plan import SOURCE, Compute, Copy, Segment
from ckptkit.planning.requests import ConsolidateRequest, Resources
from ckptkit.storage.staging import LocalTarget
from ckptkit.version import __version__

_KINDS = {"hf": "model", "torch": "torch", "dcp": "dcp"}


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
) -> Manifest:
    """Writes what a request asks for into the directory `out`, whole or not at all.

    Returns:
        The manifest, as it lies in the output.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is there and not empty, and `overwrite` is false.
    """
    listener = listener or ignore
    check_destination(src, out, overwrite=overwrite, also=also)
    target = LocalTarget(Path(out), overwrite=overwrite)
    try:
        resources = resources or Resources()
        with prepared(src, out, request, base=base, resources=resources, also=also) as plan:
            listener(Planned(plan.plan.notes))
            _refuse_full_disk(plan, target, out)
            manifest = _execute(plan, request, target, listener)
            _commit(manifest, target)
    finally:
        target.abandon()
    listener(Committed(os.fspath(out)))
    return manifest


def _refuse_full_disk(plan: Prepared, target: LocalTarget, out: PathLike) -> None:
    needed, free = plan.estimate.bytes_written, target.free_bytes()
    if needed > free:
        raise NoSpaceError(
            f"the output needs {needed:,} bytes and {free:,} are free",
            where=os.fspath(out),
            hint="choose another disk, or a smaller --dtype",
        )


def _execute(
    plan: Prepared, request: ConsolidateRequest, target: LocalTarget, listener: Listener
) -> Manifest:
    digests = Executor(plan.plan, plan.inputs, target, plan.settings, listener).run()
    changed = plan.checkpoint.source.changed(plan.checkpoint.index.files)
    if changed is not None:
        raise SourceChangedError(
            f"{changed.path!r} changed while it was read",
            where=plan.checkpoint.path,
            hint="wait until the save has finished, then run again",
        )
    return _manifest(plan, request, digests)


def _commit(manifest: Manifest, target: LocalTarget) -> None:
    data = manifest.to_json()
    target.create(MANIFEST_NAME, len(data))
    target.write(MANIFEST_NAME, 0, memoryview(data))
    target.commit(last=MANIFEST_NAME)


def _manifest(plan: Prepared, request: ConsolidateRequest, digests: Digests) -> Manifest:
    unverified = plan.inputs.origins[SOURCE].unverified
    run = plan.checkpoint.index.run
    facts: dict[str, Any] = {
        "path": plan.checkpoint.path,
        "format": plan.checkpoint.index.format,
        "step": run.step,
        "world_size": run.world_size,
    }
    return Manifest(
        kind=_KINDS[request.layout],
        source=facts,
        options=changed_options(request),
        versions={"ckptkit": __version__},
        tensors={
            spec.name: TensorRecord(
                dtype=spec.dtype.name,
                shape=spec.shape,
                file=file.path,
                digest=digests.of_tensor(spec.name),
                proof="unverified" if unverified & set(_keys(segment)) else "crc32",
            )
            for file, segment, spec in plan.plan.specs()
        },
        tied={str(target): str(source) for target, source in plan.plan.dropped.items()},
        files={
            file.path: FileRecord(
                file.size_bytes,
                digests.of_file(file.path) if len(file.segments) == 1 else "",
            )
            for file in plan.plan.files
        },
    )


def _keys(segment: Segment) -> Iterable[str]:
    if isinstance(segment.body, Copy):
        return (segment.body.key,)
    if isinstance(segment.body, Compute):
        return (key for _, key in segment.body.reads)
    return ()


def changed_options(request: ConsolidateRequest) -> Mapping[str, Any]:
    """Returns the options that differ from their defaults, as JSON values."""
    default = ConsolidateRequest()
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields(request)
        if (value := getattr(request, field.name)) != getattr(default, field.name)
    }
