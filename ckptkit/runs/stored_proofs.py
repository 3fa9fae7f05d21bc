"""What the manifest of a folder proves: the files that readers parse, and the bytes of tensors.

safetensors files have no checksums. Those of the manifest go into the index, so that what is read
of such a file is compared as records of torch's archives are, whatever reads it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from ckptkit.core.checksums import digest_like, leaf_ranges
from ckptkit.core.errors import ChecksumError, InputError
from ckptkit.core.index import Problem, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from ckptkit.formats.base import Candidate
from ckptkit.formats.safetensors.reader import SafetensorsReader
from ckptkit.storage.base import Source
from ckptkit.storage.locations import relative_path

_HINT = (
    "the file was damaged or changed after it was written; write it again, or remove"
    f" {MANIFEST_NAME} if the change is meant"
)


def digest_problems(
    source: Source, folder: str, manifest: Manifest, *, leaving_out: Collection[str]
) -> Iterator[Problem]:
    """Yields the files that have another digest than in a manifest, or cannot be read."""
    for name, record in manifest.files.items():
        path = posixpath.join(folder, name)
        if not record.digest or path in leaving_out:
            continue
        try:
            if not _has_digest(source, path, record):
                message = f"has another {_name_of(record)} than the manifest"
                yield Problem(ChecksumError.code, path, message)
        except InputError as error:
            yield Problem(error.code, path, error.message)


def check_file(source: Source, path: str, manifest: Manifest, name: str) -> None:
    """Compares a file with the digest that a manifest has for it, if it has one."""
    record = manifest.files.get(name)
    if record is None or not record.digest or _has_digest(source, path, record):
        return
    raise ChecksumError(
        f"has another {_name_of(record)} than {MANIFEST_NAME}",
        where=posixpath.join(source.location, path),
        hint=_HINT,
    )


def prove_index(
    source: Source, folder: str, manifest: Manifest, candidate: Candidate, index: TensorIndex
) -> TensorIndex:
    """Compares what was parsed with a manifest, and adds the checksums that the format lacks."""
    for path in candidate.files:
        check_file(source, path, manifest, relative_path(path, folder))
    if index.format != SafetensorsReader.name or not manifest.tensors:
        return index
    records = index.records
    paths = [relative_path(file.path, folder) for file in index.files]
    crc32s, digests = records.crc32.copy(), dict[int, str]()
    left = {name for name, record in manifest.tensors.items() if record.file in paths}
    for entry in index.tensors.values():
        (number,) = entry.chunks.record.tolist()
        name, path = str(entry.key_path[0]), paths[int(records.file[number])]
        if path not in manifest.files:
            continue
        record = manifest.tensors.get(name)
        found = f"is {entry.dtype.name} {list(entry.shape)} in {path!r}"
        if record is None:
            raise _differs(source, folder, name, f"{found} against no such tensor")
        if (record.dtype, record.shape, record.file) != (entry.dtype.name, entry.shape, path):
            expected = f"{record.dtype} {list(record.shape)} in {record.file!r}"
            raise _differs(source, folder, name, f"{found} against {expected}")
        left.discard(name)
        if record.crc32 is None:
            digests[number] = record.digest
        else:
            crc32s[number] = record.crc32
    if left:
        raise _differs(source, folder, min(left), "is in no file")
    return replace(index, records=records.with_sums(crc32s, digests))


def _differs(source: Source, folder: str, name: str, message: str) -> ChecksumError:
    where = f"{posixpath.join(source.location, folder)}, tensor {name!r}"
    return ChecksumError(f"{message} in {MANIFEST_NAME}", where=where, hint=_HINT)


def _has_digest(source: Source, path: str, record: FileRecord) -> bool:
    if source.stat(path).size_bytes != record.size_bytes:
        return False
    digest = digest_like(record.digest)
    for leaf, (start, stop) in enumerate(leaf_ranges(record.size_bytes)):
        digest.add(leaf, memoryview(source.read(path, start, stop)))
    return digest.value(record.size_bytes) == record.digest


def _name_of(record: FileRecord) -> str:
    return "CRC-32" if record.digest.startswith("crc32:") else "digest"
