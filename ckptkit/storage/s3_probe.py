"""Whether a store copies parts of objects, and proves what it copied: tried, and not assumed."""

from __future__ import annotations

import logging

from ckptkit.core.crc import crc32
from ckptkit.storage.base import CopySource
from ckptkit.storage.s3_checksums import ObjectSums
from ckptkit.storage.s3_uploads import S3Uploads, SentPart

PROBE_BYTES = 1024
_LOG = logging.getLogger(__name__)


def why_no_copies(store: S3Uploads, key: str, source: CopySource) -> str:
    """Copies a few bytes into an object that is removed again.

    Args:
        store: The bucket.
        key: Of that object.
        source: An object of `PROBE_BYTES` at least.

    Returns:
        Why parts are not to be copied by the store; empty if they are.
    """
    if not store.has_checksums:
        return "checksums are switched off in the options of the store"
    upload = ""
    try:
        upload = store.begin(key)
        part = store.copy(key, upload, 1, source, (0, PROBE_BYTES))
        expected = crc32(store.get(source.path, 0, PROBE_BYTES))
        store.complete(key, upload, [SentPart(1, part.etag, expected)])
        told, upload = store.head(key).told, ""
        store.delete([key])
    except Exception as error:  # noqa: BLE001  whatever it is, the bytes can go through here
        _LOG.debug("the store was asked for a copy: %s", type(error).__name__)
        _abort(store, key, upload)
        return f"the store does not copy parts of objects ({type(error).__name__})"
    if told is None or not ObjectSums.of([(expected, PROBE_BYTES)]).agree_with(told):
        return "the store tells no CRC-32 of what it copied"
    return ""


def _abort(store: S3Uploads, key: str, upload: str) -> None:
    if not upload:
        return
    try:
        store.abort(key, upload)
    except Exception as error:  # noqa: BLE001  it holds next to nothing
        _LOG.debug("an upload of %s was left: %s", key, type(error).__name__)
