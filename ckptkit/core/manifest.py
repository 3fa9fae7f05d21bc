"""The manifest `ckptkit.json`: what a committed output holds, and the proof of its bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ckptkit.core.crc import crc32
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.errors import ChecksumError, FormatError, UnsafePathError
from ckptkit.core.text import a_kind, counted, size_text

if TYPE_CHECKING:  # the writer process reads manifests without numpy
    from ckptkit.core.index import Shape

MANIFEST_NAME = "ckptkit.json"
MANIFEST_VERSION = 1
TRAINING = "training"
"""The kind of a manifest that proves a step of a training run."""
NODE_RANKS = "node_ranks"
"""In the source of such a manifest: the ranks whose files are there, if these are not all."""
NODE_RUN = "node_run"
"""In the same place: the identity of the run that they belong to, and its path."""
THINNED = "thinned"
"""In the same place: the `files` of the optimizer that a pruning has removed from the step, and the
`digest` by which a watch has known the step before."""
SEALED = "sealed"
"""In the same place, where another saver wrote the step: the digests of its data files."""
DIGESTS = "digests"
"""In the same place, where ckptkit saved files that readers read in parts: their digests."""
SIDE_FOLDER = "ckptkit"
"""The folder of a step with the files that describe the run."""
RUN_FACTS = f"{SIDE_FOLDER}/run.json"
UPLOADING = ".ranks/uploading"
"""The object that comes first where a step is saved to a URL, and goes after its manifest came."""
FLAT_LAYOUT = f"{SIDE_FOLDER}/flat_parameters.json"
BY_STORE = "store-crc32"
"""The proof of a tensor if the store copied bytes of it that ckptkit did not read."""
BY_SOURCE = "stored-crc32"
"""The same if it shares blocks with its source, whose checksums were taken as they are."""
BY_MANIFEST = "digest"
"""The proof of a tensor with the digest that the manifest of its source, or a delta, has for it."""
UNVERIFIED = "unverified"
MAP_VERSION = "map "
"""What the name of a name map among the versions begins with; its digest is the version."""
LEAF_BYTES = 8 << 20  # digests are trees over leaves of this many bytes of a tensor
CRC32_SCHEME = "crc32"
CHECKSUM = "checksum"
"""In a manifest: the checksum of all its other content."""
_MAX_MANIFEST_BYTES = 256 << 20


class TensorRecord(Struct, frozen=True):
    """A written tensor.

    Attributes:
        dtype: torch's name of the element type.
        shape: In elements.
        file: The file of the output that holds it.
        digest: Digest of its bytes, see `ckptkit.core.checksums`.
        proof: `crc32` when every source byte was checked against a stored checksum,
            `store-crc32` when the store copied some by itself, and its own CRC-32 of the file was
            compared with those stored, `stored-crc32` when it has blocks of the source that were
            not read, `digest` when ckptkit wrote the source, or a delta, and
            the digest there is the same, `unverified` when the source had none of these, `live`
            when it was the memory of training.
        crc32: CRC-32 of its bytes, which readers compare of parts that they read in any order;
            None in what ckptkit 0.1 wrote, unless it is the digest.
    """

    dtype: str
    shape: Shape
    file: str
    digest: str
    proof: str
    crc32: int | None = None


class FileRecord(Struct, frozen=True):
    """A written file; `digest` is that of its bytes, empty for weight files."""

    size_bytes: int
    digest: str = ""


class Manifest(Displayed, Struct, frozen=True):
    """What was written, from what, and how it was asked for.

    Attributes:
        kind: `model`, `adapter`, `torch` or `dcp`, `delta` for what changed between two models, or
            `training` for a step of a run.
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

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def is_sealed(self) -> bool:
        """Whether `ckptkit seal` wrote it beside a step that another saver wrote."""
        return isinstance(self.source.get(SEALED), Mapping)

    @property
    def unverified(self) -> list[str]:
        return [name for name, t in self.tensors.items() if t.proof == UNVERIFIED]

    def _facts(self) -> Facts:
        files = f"{counted(len(self.files), 'file')}, {size_text(self.size_bytes)}"
        tensors = counted(len(self.tensors), "tensor")
        lines = [("kind", self.kind), ("tensors", tensors), ("files", files)]
        rows = [(path, size_text(file.size_bytes)) for path, file in self.files.items()]
        return Facts(str(self.source.get("path", "")), lines, ("file", "size"), rows)

    def to_json(self) -> bytes:
        """Returns the file's bytes: sorted, indented JSON, the same for the same content.

        The checksum in it is that of all other content.
        """
        document = self.to_document()
        document[CHECKSUM] = _compute_checksum(document)
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
        return f"{text}\n".encode()

    def to_document(self) -> dict[str, Any]:
        """Returns the content as plain values, without the checksum.

        JSON has no numbers that are not finite: in `source` and `options` they become null.
        """
        return {
            "ckptkit_manifest": MANIFEST_VERSION,
            "kind": self.kind,
            "source": _make_finite(dict(self.source)),
            "options": _make_finite(dict(self.options)),
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
                | ({} if t.crc32 is None else {"crc32": f"{t.crc32:08x}"})
                for name, t in self.tensors.items()
            },
        }


def source_of_all(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in source.items() if key not in {NODE_RANKS, NODE_RUN}}


def check_manifest_size(size_bytes: int, *, where: str) -> None:
    """Refuses a file that is too large to be read as a manifest."""
    if size_bytes > _MAX_MANIFEST_BYTES:
        raise FormatError(
            f"{size_bytes:,} bytes were found against at most {_MAX_MANIFEST_BYTES:,} in a"
            " ckptkit manifest",
            where=where,
        )


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    check_manifest_size(len(data), where=where)
    try:
        document = _check_table(json.loads(data), "the file")
        version, manifest = document["ckptkit_manifest"], None
        if version == MANIFEST_VERSION:
            _check_checksum(document, where)
            manifest = _parse_document(document)
    except KeyError as error:
        raise FormatError(f"not a ckptkit manifest: it lacks {error}", where=where) from error
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise FormatError(f"not a ckptkit manifest: {error}", where=where) from error
    if manifest is None:
        raise FormatError(
            f"manifest version {version!r} found against {MANIFEST_VERSION}",
            where=where,
            hint="it was written by another ckptkit; use that version to verify it",
        )
    for path in manifest.files:
        # What `check_relative` refuses, which is in a layer above.
        parts = [part for part in path.replace("\\", "/").split("/") if part not in {"", "."}]
        if not parts or ".." in parts or path.startswith(("/", "\\")) or "\0" in path:
            raise UnsafePathError(
                f"the file name {path!r:.200} was found where a path inside the folder was"
                " expected",
                where=where,
            )
    return manifest


def _compute_checksum(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"{CRC32_SCHEME}:{crc32(text.encode()):08x}"


def _check_checksum(document: dict[str, Any], where: str) -> None:
    """Compares the checksum of the content, which ckptkit 0.1 did not write."""
    if CHECKSUM not in document:
        return
    expected = document.pop(CHECKSUM)
    found = _compute_checksum(document)
    if found != expected:
        raise ChecksumError(
            f"has checksum {found} against {expected!r:.40} stored in it",
            where=where,
            hint="the file was damaged or edited after it was written; take it from a copy, or"
            f" remove {MANIFEST_NAME} to read the folder without its proofs",
        )


def _parse_document(document: Mapping[str, Any]) -> Manifest:
    tied = _check_table(document["tied"], "'tied'")
    files = _check_table(document["files"], "'files'")
    tensors = _check_table(document["tensors"], "'tensors'")
    versions = _check_table(document["versions"], "'versions'")
    return Manifest(
        kind=str(document["kind"]),
        source=_check_table(document["source"], "'source'"),
        options=_check_table(document["options"], "'options'"),
        versions={name: str(version) for name, version in versions.items()},
        tied={name: str(other) for name, other in tied.items()},
        files={path: _parse_file(path, record) for path, record in files.items()},
        tensors={name: _parse_tensor(name, record) for name, record in tensors.items()},
    )


def _parse_file(path: str, value: object) -> FileRecord:
    record = _check_table(value, repr(path))
    return FileRecord(_check_count(record["size_bytes"]), str(record.get("digest", "")))


def _parse_tensor(name: str, value: object) -> TensorRecord:
    record = _check_table(value, repr(name))
    digest = str(record["digest"])
    crc = record.get("crc32", digest.removeprefix(f"{CRC32_SCHEME}:"))
    is_known = "crc32" in record or crc != digest
    return TensorRecord(
        dtype=str(record["dtype"]),
        shape=tuple(_check_count(size) for size in record["shape"]),
        file=str(record["file"]),
        digest=digest,
        proof=str(record["proof"]),
        crc32=_check_count(int(str(crc), 16)) if is_known else None,
    )


def _check_table(value: object, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} is {a_kind(value)} where an object was expected")


def _check_count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{value!r:.100} was found where a number of things was expected")


def _make_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _make_finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_finite(inner) for inner in value]
    return value
