"""What killed runs left of their uploads to S3, found by what they wrote down, and removed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Sequence

from ckptkit.storage.names import WORK_INFIX
from ckptkit.storage.s3_uploads import S3Uploads

NONCE_BYTES = 8
UPLOADS = "uploads"
"""In a mark or a note: key and name of each upload; and the folder of such notes."""
_PLANNED = "planned"
_LOG = logging.getLogger(__name__)


def mark_of(uploads: Sequence[tuple[str, str]], planned: Collection[str] = ()) -> bytes:
    """Returns an object's content that tells the next run of uploads.

    Args:
        uploads: Key and name of each.
        planned: Keys of uploads that are about to begin, whose names are not known yet.
    """
    return json.dumps({UPLOADS: list(uploads), _PLANNED: sorted(planned)}).encode()


def _planned_in(mark: bytes) -> frozenset[str]:
    try:
        return frozenset(str(key) for key in json.loads(mark)[_PLANNED])
    except (ValueError, TypeError, KeyError):
        return frozenset()


def uploads_in(mark: bytes) -> Iterator[tuple[str, str]]:
    """Yields key and name of the uploads that a mark tells of; of one that is damaged, none."""
    try:
        for key, upload in json.loads(mark)[UPLOADS]:
            yield str(key), str(upload)
    except (ValueError, TypeError, KeyError):
        return


def has_leftovers(store: S3Uploads, prefix: str, *, kept: str = "") -> bool:
    """Tells whether `sweep_uploads` would find something to remove."""
    if any(not (kept and key.startswith(kept)) for key in _marks(store, prefix, prefix)):
        return True
    work = f"{prefix}{WORK_INFIX}"
    return any(not (kept and key.startswith(kept)) for key, _ in _unfinished(store, work))


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

    found = _marks(store, prefix, only or prefix)
    marks = [key for key in found if goes(key)]
    planned: set[str] = set()
    for mark in marks:
        name = found[mark]
        if name is None or f"{UPLOADS}/" in name:
            planned |= _abort_all(store, mark, prefix)
    work = f"{prefix}{WORK_INFIX}"
    for key, upload in _unfinished(store, prefix if planned else only or work):
        if key in planned or (key.startswith(work) and goes(key)):
            store.abort(key, upload)
    if marks:  # last: without them nothing tells of the uploads
        store.delete(marks)


def _marks(store: S3Uploads, prefix: str, below: str) -> dict[str, str | None]:
    """Returns the keys of marks, of notes and of what was tried, with the names of notes."""
    own = re.compile(
        re.escape(f"{prefix}{WORK_INFIX}")
        + f"[0-9a-f]{{{2 * NONCE_BYTES}}}(?:(?P<probe>-probe)|/(?P<name>.*))?",
        re.DOTALL,
    )
    found = ((key, own.fullmatch(key)) for key in store.keys(below))
    return {key: one["probe"] or one["name"] for key, one in found if one is not None}


def _unfinished(store: S3Uploads, prefix: str) -> list[tuple[str, str]]:
    """Returns the uploads below a prefix; none where they may not be listed."""
    try:
        return list(store.unfinished(prefix))
    except OSError as error:
        _LOG.debug("unfinished uploads were not looked for: %s", type(error).__name__)
        return []


def _abort_all(store: S3Uploads, mark: str, prefix: str) -> frozenset[str]:
    """Removes the uploads that a mark tells of; returns the keys of those that had no name yet."""
    try:
        data = store.get(store.url(mark).removeprefix("s3://"))
    except FileNotFoundError:  # another process sweeps here too
        return frozenset()
    for key, upload in uploads_in(data):
        if key.startswith(prefix):
            _LOG.info("removing an unfinished upload of an earlier run: %s", key)
            store.abort(key, upload)
    return frozenset(key for key in _planned_in(data) if key.startswith(prefix))
