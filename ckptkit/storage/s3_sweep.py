"""What killed runs left of their uploads to S3, found by what they wrote down, and removed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator

from ckptkit.storage.names import WORK_INFIX
from ckptkit.storage.s3_uploads import S3Uploads

NONCE_BYTES = 8
UPLOADS = "uploads"
"""In a mark or a note: key and name of each upload; and the folder of such notes."""
_LOG = logging.getLogger(__name__)


def mark_of(uploads: list[tuple[str, str]]) -> bytes:
    """Returns an object's content that tells the next run of uploads."""
    return json.dumps({UPLOADS: uploads}).encode()


def uploads_in(mark: bytes) -> Iterator[tuple[str, str]]:
    """Yields key and name of the uploads that a mark tells of; of one that is damaged, none."""
    try:
        for key, upload in json.loads(mark)[UPLOADS]:
            yield str(key), str(upload)
    except (ValueError, TypeError, KeyError):
        return


def sweep_uploads(store: S3Uploads, prefix: str, *, only: str = "", kept: str = "") -> None:
    """Removes what earlier runs wrote down below a prefix, and the uploads that it tells of.

    Args:
        store: The bucket.
        prefix: Of the output, with the slash at its end.
        only: The prefix of what is removed, where that is not all.
        kept: The prefix of what stays.
    """

    def goes(key: str) -> bool:
        return key.startswith(only) and not (kept and key.startswith(kept))

    own = re.compile(
        re.escape(f"{prefix}{WORK_INFIX}") + f"[0-9a-f]{{{2 * NONCE_BYTES}}}(/(?P<name>.*))?",
        re.DOTALL,
    )
    found = {key: one for key in store.keys(only or prefix) if (one := own.fullmatch(key))}
    marks = [key for key in found if goes(key)]
    for mark in marks:
        name = found[mark]["name"]
        if name is None or f"{UPLOADS}/" in name:
            _abort_all(store, mark, prefix)
    if marks:
        store.delete(marks)
    _abort_notes(store, only or f"{prefix}{WORK_INFIX}", goes)


def _abort_notes(store: S3Uploads, prefix: str, goes: Callable[[str], bool]) -> None:
    """Removes uploads that were to become notes."""
    try:
        for key, upload in list(store.unfinished(prefix)):
            if goes(key):
                store.abort(key, upload)
    except OSError as error:  # they hold next to nothing, and not everybody may list them
        _LOG.debug("uploads of notes were not looked for: %s", type(error).__name__)


def _abort_all(store: S3Uploads, mark: str, prefix: str) -> None:
    try:
        data = store.get(store.url(mark).removeprefix("s3://"))
    except FileNotFoundError:  # another process sweeps here too
        return
    for key, upload in uploads_in(data):
        if key.startswith(prefix):
            _LOG.info("removing an unfinished upload of an earlier run: %s", key)
            store.abort(key, upload)
