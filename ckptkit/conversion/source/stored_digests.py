"""The digests that ckptkit has written beside the tensors of a folder, in its manifest.

They prove tensors for which the format itself has no checksum, as safetensors.
"""

from __future__ import annotations

import posixpath
from contextlib import suppress
from dataclasses import dataclass

from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.errors import ChecksumError, MissingFileError
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, Manifest, TensorRecord
from ckptkit.storage.manifests import read_manifest


@dataclass(frozen=True, slots=True)
class StoredDigest:
    """What the manifest of a folder says of a tensor.

    Attributes:
        name: The tensor.
        record: Its entry in the manifest.
        location: The folder.
    """

    name: str
    record: TensorRecord
    location: str

    def compare(self, found: str) -> None:
        """Compares the digest of what was read."""
        if found != self.record.digest:
            raise ChecksumError(
                f"has digest {found} against {self.record.digest} in {MANIFEST_NAME}",
                where=f"{self.location}, tensor {self.name!r}",
                hint="the file was damaged or changed after it was written; write it again, or"
                f" remove {MANIFEST_NAME} if the change is meant",
            )


def read_stored_digests(
    checkpoint: OpenedCheckpoint, *, without_crc32: bool = False
) -> dict[str, StoredDigest]:
    """Returns the digests of tensors by their names on disk; none where ckptkit wrote none."""
    manifest = read_model_manifest(checkpoint)
    if manifest is None:
        return {}
    records = manifest.tensors.items()
    return {
        name: StoredDigest(name, record, checkpoint.path)
        for name, record in records
        if not without_crc32 or record.crc32 is None
    }


def read_model_manifest(checkpoint: OpenedCheckpoint) -> Manifest | None:
    """Returns the manifest of a folder that ckptkit wrote as a whole; None for others."""
    units = checkpoint.units  # an adapter has none
    folder = units[0].candidate.folder if units else checkpoint.folder
    paths = checkpoint.paths
    # A source that is one file lists that file alone, and its manifest is beside it.
    if len(paths) > 1 and posixpath.join(folder, MANIFEST_NAME) not in paths:
        return None
    with suppress(MissingFileError):
        manifest = read_manifest(checkpoint.source, folder)
        return None if manifest.kind == TRAINING else manifest
    return None
