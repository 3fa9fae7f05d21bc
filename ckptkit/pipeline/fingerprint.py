"""What makes two plans the same, wherever and whenever they were made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from ckptkit.pipeline.writing import Prepared
from ckptkit.planning.plan import Body, Compute
from ckptkit.version import __version__


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
