"""What the manifest of a merged model says of where it came from."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.adapters.changes import Source
from ckptkit.adapters.identity import found_at
from ckptkit.core.errors import InputError
from ckptkit.core.index import Span, TensorEntry
from ckptkit.core.manifest import LEAF_BYTES, MANIFEST_NAME, Manifest, parse_manifest
from ckptkit.execution.tensors import Origin, TensorReader
from ckptkit.kernels.checksums import digest_of, join_leaves, leaf_digest
from ckptkit.pipeline.adapters.merge_base import BaseSource
from ckptkit.pipeline.adapters.sources import OpenedAdapter
from ckptkit.pipeline.source_places import resolved


@dataclass(frozen=True, slots=True)
class SourceAdapter:
    """An adapter to be merged.

    Attributes:
        found: The adapter, opened.
        source: Who its changes stem from.
        origin: Its checkpoint, opened for reading tensors.
        weight: What its scaling is multiplied by.
    """

    found: OpenedAdapter
    source: Source
    origin: Origin
    weight: float

    @classmethod
    def of(cls, found: OpenedAdapter, position: int, weight: float) -> SourceAdapter:
        """Takes an opened adapter as the one at a position."""
        name = f"adapter{position}"
        opened = found.opened
        origin = Origin(name, opened.source, opened.index)
        return cls(found, Source(position, name, opened.path), origin, weight)


def source_facts(
    adapters: Sequence[SourceAdapter], base: BaseSource, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what the manifest says of the adapters and the base.

    Args:
        adapters: The adapters, in the order of merging.
        base: The base.
        quantization: What is known of packed weights; empty where none were.

    Raises:
        InputError: If an adapter cannot be read.
    """
    facts = {
        "adapters": [
            {
                "path": one.found.opened.path,
                "name": one.found.adapter.name,
                "weight": one.weight,
                "config": one.found.config_path,
                "digest": _digest_of(one),
            }
            for one in adapters
        ],
        "base": _base_facts(base),
    }
    return facts | ({"quantization": dict(quantization)} if quantization else {})


def _digest_of(adapter: SourceAdapter) -> str:
    """Digests an adapter: names, element types, shapes and bytes of its tensors."""
    origin = adapter.origin
    reader = TensorReader(Origin(origin.name, origin.source, origin.index))
    lines = [
        f"{name} {entry.dtype.name} {list(entry.shape)} {_tensor_digest(reader, entry)}\n"
        for name, entry in sorted(adapter.found.adapter.tensors.items())
    ]
    return digest_of(memoryview("".join(lines).encode()))


def _tensor_digest(reader: TensorReader, entry: TensorEntry) -> str:
    step = LEAF_BYTES // entry.dtype.itemsize
    leaves = {}
    for leaf, start in enumerate(range(0, entry.elements, step)):
        stop = min(start + step, entry.elements)
        data = memoryview(bytearray((stop - start) * entry.dtype.itemsize))
        reader.fill(entry.key, Span(start, stop), data)
        leaves[leaf] = leaf_digest(data)
    return join_leaves(leaves)


def _base_facts(base: BaseSource) -> dict[str, Any]:
    found = found_at(resolved(base.opened.path), base.config)
    manifest = _manifest_of(base)
    told = {
        "path": base.opened.path,
        "format": base.opened.index.format,
        "repository": found.repository,
        "commit": found.commit,
        "files": {
            file.path: file.size_bytes for file in base.opened.index.files if file.size_bytes >= 0
        },
    }
    if manifest is not None:
        lines = sorted(f"{name} {t.digest}\n" for name, t in manifest.tensors.items())
        told["digest"] = digest_of(memoryview("".join(lines).encode()))
    return {key: value for key, value in told.items() if value}


def _manifest_of(base: BaseSource) -> Manifest | None:
    """Returns the manifest of a base that ckptkit wrote."""
    if base.opened.manifest is not None:
        return base.opened.manifest
    where = posixpath.join(base.opened.location, MANIFEST_NAME)
    source = base.opened.source
    try:
        size = source.stat(MANIFEST_NAME).size_bytes
    except InputError:
        return None
    return parse_manifest(source.read(MANIFEST_NAME, 0, size), where=where)
