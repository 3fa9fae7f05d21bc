"""The digests that ckptkit has written beside the tensors of a folder, in its manifest.

They prove tensors for which the format itself has no checksum, as safetensors.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.errors import ChecksumError
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, TensorRecord
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
        """Compares the digest of what was read.

        Raises:
            ChecksumError: If it is another.
        """
        if found != self.record.digest:
            raise ChecksumError(
                f"has digest {found} against {self.record.digest} in {MANIFEST_NAME}",
                where=f"{self.location}, tensor {self.name!r}",
                hint="the file was damaged or changed after it was written; write it again, or"
                f" remove {MANIFEST_NAME} if the change is meant",
            )


def read_stored_digests(checkpoint: OpenedCheckpoint) -> dict[str, StoredDigest]:
    """Returns the digests of tensors by their names on disk; none where ckptkit wrote none."""
    if posixpath.join(checkpoint.folder, MANIFEST_NAME) not in checkpoint.paths:
        return {}
    manifest = read_manifest(checkpoint.source, checkpoint.folder)
    if manifest.kind == TRAINING:
        return {}
    records = manifest.tensors.items()
    return {name: StoredDigest(name, record, checkpoint.path) for name, record in records}
