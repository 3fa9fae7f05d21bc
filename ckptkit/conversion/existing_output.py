"""Outputs that exist already, compared with the one that a job would write."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.conversion.source.open import SOURCE_IDENTITY, PathLike, describe_sources
from ckptkit.conversion.verify import run_verification
from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.checksums import leaf_digest, leaf_ranges, tree_digest
from ckptkit.core.errors import (
    FormatError,
    MissingFileError,
    NotACheckpointError,
    OutputExistsError,
    VerificationError,
)
from ckptkit.core.manifest import Manifest
from ckptkit.engine.executor import Inputs
from ckptkit.engine.outcome import Listener, OutputKept, Planned
from ckptkit.plan.plan import Literal, OutputFile, RawCopy
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import open_source

if TYPE_CHECKING:
    from ckptkit.conversion.prepare import ConversionJob


def verify_existing_output(job: ConversionJob, listener: Listener) -> Manifest | None:
    """Verifies an output that exists: it has the same source and options, and no damage.

    The source's headers are read, and all of the output, which is compared with its digests.

    Returns:
        Its manifest, or None where there is no output of ckptkit.
    """
    manifest = read_output_manifest(job.out)
    if manifest is None:
        return None
    with job.plan_output() as planned:
        difference = next(_differences(planned, manifest), "")
        notes = planned.plan.notes
    where = os.fspath(job.out)
    if difference:
        raise OutputExistsError(
            f"another output is there: {difference}",
            where=where,
            hint="name another directory, or have this one replaced: --overwrite, overwrite=True",
        )
    listener(Planned(notes))
    verification = run_verification(job.out, listener=listener)
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
    yield from _other_options(manifest.options, planned.options)
    yield from _other_sources(manifest.source, describe_sources(planned.sources))
    yield from _other_tensors(planned, manifest)
    yield from _other_files(planned, manifest)


def _other_options(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            value = actual.get(name, "left at its default")
            yield f"option {name} was {value} against {expected.get(name, 'its default')}"


def _other_sources(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Compares what was read: the path may be another one, such as the run's or the step's."""
    for name in ("format", "step", "world_size"):
        if actual.get(name) != expected[name]:
            yield f"the source's {name} was {actual.get(name)} against {expected[name]}"
    if actual.get(SOURCE_IDENTITY) != expected[SOURCE_IDENTITY]:
        yield (
            f"its source {actual.get('path')!r} had other files, or was written again since,"
            f" against {expected['path']!r}"
        )


def _other_tensors(planned: PlannedOutput, manifest: Manifest) -> Iterator[str]:
    expected = {
        str(spec.name): (spec.dtype.name, spec.shape, file.path)
        for file, _, spec in planned.plan.specs()
    }
    actual = {name: (t.dtype, t.shape, t.file) for name, t in manifest.tensors.items()}
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            ours, theirs = _shown(expected.get(name)), _shown(actual.get(name))
            yield f"tensor {name!r} is {theirs} against {ours}"


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
