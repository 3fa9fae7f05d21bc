"""What makes two plans the same, wherever and whenever they were made.

`--if-exists verify`: an output that is there already, proven to be the one asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from ckptkit.conversion.source.identity import IDENTITY, source_facts
from ckptkit.conversion.source.open import PathLike
from ckptkit.conversion.verify import run_verification
from ckptkit.conversion.write import Prepared
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
from ckptkit.engine.outcome import Listener, OutputKept, Planned, ignore
from ckptkit.plan.plan import Body, Compute, Literal, OutputFile, RawCopy
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import open_source
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.conversion.consolidate import Consolidation


def fingerprint_of(prepared: Prepared) -> str:
    """Returns what is equal for plans that write the same bytes from the same files.

    Files of a source count with their identity (inode and time on a disk, ETag in a store), so
    that a plan for files that were replaced is another one. Where they lie does not count, nor
    does how much of a machine may be used.
    """
    digest = xxhash.xxh3_128()
    for line in _lines(prepared):
        digest.update(json.dumps(line, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _lines(prepared: Prepared) -> Iterator[Any]:
    yield [__version__, prepared.kind, _plain(prepared.versions)]
    yield [_plain(prepared.options), _plain(prepared.facts)]
    for source in prepared.sources:
        yield source.index.format
        yield from ([file.path, file.size_bytes, file.identity] for file in source.index.files)
    for file in prepared.plan.files:
        yield [file.path, file.size_bytes]
        for segment in file.segments:
            spec = segment.spec
            made = None if spec is None else [spec.name, spec.dtype.name, spec.shape]
            yield [segment.start, segment.stop, made, _said_of(segment.body)]
    yield sorted(map(list, prepared.plan.dropped.items()))


def _said_of(body: Body) -> str:
    """Describes a body; what a kernel computes follows from the options and the sources."""
    if isinstance(body, Compute):
        return f"{type(body.kernel).__name__} of {body.reads!r}"
    return repr(body)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(values)


def confirmed(job: Consolidation, listener: Listener | None = None) -> Manifest | None:
    """Looks whether an output is there already, made from the same source in the same way.

    The source's headers are read, and all of the output is, to compare it with its digests.

    Returns:
        Its manifest, or None where there is no output of ours yet.
    """
    earlier = earlier_output(job.out)
    if earlier is None:
        return None
    listener = listener or ignore
    with job.prepared() as wanted:
        other = next(_differences(wanted, earlier), "")
        notes = wanted.plan.notes
    where = os.fspath(job.out)
    if other:
        raise OutputExistsError(
            f"another output is there: {other}",
            where=where,
            hint="name another directory, or have this one replaced: --overwrite, overwrite=True",
        )
    listener(Planned(notes))
    found = run_verification(job.out, listener=listener)
    if not found.ok:
        more = f", and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        raise VerificationError(
            f"the output that is there is damaged: {found.problems[0]}{more}",
            where=where,
            hint="have it written anew with --overwrite",
        )
    listener(OutputKept(where))
    return earlier


def written_already(wanted: Prepared, out: PathLike) -> Manifest | None:
    """Returns the manifest of an output that is what a plan would write, as far as it tells.

    Its files are there with their sizes; what is in them is not read.
    """
    try:
        earlier = earlier_output(out)
        if earlier is None or next(_differences(wanted, earlier), None) is not None:
            return None
        with open_source(out) as source:
            sizes = {path: source.stat(path).size_bytes for path in earlier.files}
    except (FormatError, MissingFileError):
        return None
    whole = all(sizes[path] == record.size_bytes for path, record in earlier.files.items())
    return earlier if whole else None


def earlier_output(out: PathLike) -> Manifest | None:
    """Returns the manifest of an output of ours that is there; None for none."""
    try:
        with open_source(out) as source:
            return read_manifest(source)
    except (MissingFileError, NotACheckpointError):
        return None


def _differences(wanted: Prepared, earlier: Manifest) -> Iterator[str]:
    """Yields in words what tells an output from the one that is asked for."""
    if earlier.kind != wanted.kind:
        yield f"its kind is {earlier.kind!r} against {wanted.kind!r}"
    yield from _other_values("option", earlier.options, wanted.options)
    yield from _other_sources(earlier.source, source_facts(wanted.sources))
    yield from _other_tensors(wanted, earlier)
    yield from _other_files(wanted, earlier)


def _other_values(
    what: str, found: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[str]:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            given = found.get(name, "left at its default")
            yield f"{what} {name} was {given} against {expected.get(name, 'its default')}"


def _other_sources(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Compares what was read: the path may be another one, such as the run's or the step's."""
    for name in ("format", "step", "world_size"):
        if found.get(name) != expected[name]:
            yield f"the source's {name} was {found.get(name)} against {expected[name]}"
    if found.get(IDENTITY) != expected[IDENTITY]:
        yield (
            f"its source {found.get('path')!r} had other files, or was written again since,"
            f" against {expected['path']!r}"
        )


def _other_tensors(wanted: Prepared, earlier: Manifest) -> Iterator[str]:
    expected = {
        str(spec.name): (spec.dtype.name, spec.shape, file.path)
        for file, _, spec in wanted.plan.specs()
    }
    found = {name: (one.dtype, one.shape, one.file) for name, one in earlier.tensors.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            yield (
                f"tensor {name!r} is {_shown(found.get(name))} against {_shown(expected.get(name))}"
            )


def _shown(tensor: tuple[str, tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])} in {tensor[2]}"


def _other_files(wanted: Prepared, earlier: Manifest) -> Iterator[str]:
    expected = {file.path: file for file in wanted.plan.files}
    for path in sorted(expected.keys() | earlier.files.keys()):
        if path not in earlier.files or path not in expected:
            yield f"file {path!r} is {'absent' if path in expected else 'there, not expected'}"
            continue
        record, file = earlier.files[path], expected[path]
        if record.size_bytes != file.size_bytes:
            yield f"file {path!r} has {record.size_bytes:,} bytes against {file.size_bytes:,}"
        elif record.digest and record.digest != (_digest(file, wanted.inputs) or record.digest):
            yield f"file {path!r} had another content"


def _digest(file: OutputFile, inputs: Inputs) -> str:
    """Returns the digest of a file whose bytes need no work to be known; empty for others."""
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
