"""The manifest `ckptkit.json`: what a committed output holds, and the proof of its bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape

MANIFEST_NAME = "ckptkit.json"
MANIFEST_VERSION = 1
LEAF_BYTES = 8 << 20  # digests are trees over leaves of this many bytes of a tensor
_MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A written tensor.

    Attributes:
        dtype: torch's name of the element type.
        shape: In elements.
        file: The file of the output that holds it.
        digest: Digest of its bytes, see `ckptkit.kernels.checksums`.
        proof: `crc32` when every source byte was checked against a stored checksum,
            `unverified` when the source had none.
    """

    dtype: str
    shape: Shape
    file: str
    digest: str
    proof: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A written file; `digest` is that of its bytes, empty for weight files."""

    size_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was written, from what, and how it was asked for.

    Attributes:
        kind: `model`, `torch` or `dcp`.
        source: Where it came from: path, format, step, world size.
        options: The options that differ from their defaults.
        versions: Of ckptkit and what shaped the bytes.
        tensors: Every tensor written, by name.
        tied: Names left out because another name holds the same bytes.
        files: Every file written except the manifest itself.
    """

    kind: str
    source: Mapping[str, Any]
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    tensors: Mapping[str, TensorRecord]
    tied: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Returns the file's bytes: sorted, indented JSON, the same for the same content."""
        document = {
            "ckptkit_manifest": MANIFEST_VERSION,
            "kind": self.kind,
            "source": dict(self.source),
            "options": dict(self.options),
            "versions": dict(self.versions),
            "tied": dict(self.tied),
            "files": {
                path: {"size_bytes": f.size_bytes} | ({"digest": f.digest} if f.digest else {})
                for path, f in self.files.items()
            },
            "tensors": {
                name: {
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "file": t.file,
                    "digest": t.digest,
                    "proof": t.proof,
                }
                for name, t in self.tensors.items()
            },
        }
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Reads a manifest back.

    Returns:
        The manifest.

    Raises:
        FormatError: If the bytes are not a manifest of a version that is known.
    """
    if len(data) > _MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest of {len(data):,} bytes is no manifest", where=where)
    try:
        document = json.loads(data)
        version = document["ckptkit_manifest"]
        manifest = _from_document(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"not a ckptkit manifest: {error!r}", where=where) from error
    if version != MANIFEST_VERSION:
        raise FormatError(
            f"manifest version {version!r} found against {MANIFEST_VERSION}",
            where=where,
            hint="it was written by another ckptkit; use that version to verify it",
        )
    return manifest


def _from_document(document: Mapping[str, Any]) -> Manifest:
    return Manifest(
        kind=str(document["kind"]),
        source=dict(document["source"]),
        options=dict(document["options"]),
        versions=dict(document["versions"]),
        tied={str(k): str(v) for k, v in document["tied"].items()},
        files={
            str(path): FileRecord(int(f["size_bytes"]), str(f.get("digest", "")))
            for path, f in document["files"].items()
        },
        tensors={
            str(name): TensorRecord(
                dtype=str(t["dtype"]),
                shape=tuple(int(n) for n in t["shape"]),
                file=str(t["file"]),
                digest=str(t["digest"]),
                proof=str(t["proof"]),
            )
            for name, t in document["tensors"].items()
        },
    )
