"""Files that attacks put in place: archives of torch with any pickle in them."""

from __future__ import annotations

import io
import zipfile

WITNESS = "ckptkit_test_witness"  # a module that leaves a trace when it is imported


def archive_with(pickled: bytes) -> bytes:
    """Returns an archive as `torch.save` writes it, with a storage of 16 bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()
