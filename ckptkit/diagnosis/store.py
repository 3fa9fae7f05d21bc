"""The store that a run is saved to: a trial of what commits there rely on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError
from ckptkit.diagnosis.findings import Finding
from ckptkit.storage.places import Place

if TYPE_CHECKING:
    from ckptkit.storage.remote.s3 import S3Uploads

_FOLDER = ".ckptkit-doctor"
_COUNTED = 1000
_LIFECYCLE_RULE = (
    "give the bucket a lifecycle rule that removes them after two days"
    " (AbortIncompleteMultipartUpload)"
)


def examine_store(place: Place, *, writes: bool) -> list[Finding]:
    """Lists a place in a store and, if `writes`, writes and removes three small objects there."""
    from ckptkit.storage.remote.errors import error_translator
    from ckptkit.storage.remote.s3 import S3Uploads
    from ckptkit.storage.remote.s3_target import S3Notes
    from ckptkit.storage.remote.store import get_store

    listed = Finding("store", "ok", place.location, "can be listed; nothing was written")
    try:
        store = get_store(place)
        translate_errors = error_translator(place.location, place.options)
        with translate_errors():
            root = store.path_of(place.location)
            if not store.is_s3 or not writes:
                store.list_folders(root, ())
            if not store.is_s3:
                return [listed]
            uploads = S3Uploads(store, root)
            unfinished = _count(islice(uploads.list_uploads(uploads.prefix), _COUNTED))
            findings = [] if writes else [listed]
            if writes:
                prefix = f"{uploads.prefix}{_FOLDER}/"
                notes = S3Notes(uploads, prefix, translate_errors)
                problem, keeps = notes.why_no_conditions(), _keeps_checksum(uploads, prefix)
                findings = judge_trial(place.location, problem, keeps_checksum=keeps)
    except CkptkitError as error:
        return [store_problem(place.location, error.message, error.hint)]
    if unfinished:
        count = f"{unfinished:,}" if unfinished < _COUNTED else f"{_COUNTED:,} or more"
        found = f"{count} unfinished uploads, which cost storage and are in no listing"
        findings.append(
            Finding("store-uploads", "warning", place.location, found, "none", _LIFECYCLE_RULE)
        )
    return findings


def _count(uploads: Iterator[object]) -> int | None:
    try:
        return sum(1 for _ in uploads)
    except OSError:  # the right to list uploads is apart from others
        return None


def _keeps_checksum(uploads: S3Uploads, prefix: str) -> bool | None:
    """Sends an object in parts, as weights are sent, and asks for its checksum."""
    from ckptkit.storage.remote.s3 import ObjectSums

    if not uploads.has_checksums:
        return None
    key, data = f"{prefix}checksum-{os.urandom(8).hex()}", b"checksum"
    upload = uploads.begin(key)
    try:
        part = uploads.send(key, upload, 1, BytesIO(data), crc32(data))
        uploads.complete(key, upload, [part])
        stored = uploads.head(key).checksum
    except OSError:
        uploads.abort(key, upload)
        raise
    finally:
        uploads.delete([key])
    return stored is not None and ObjectSums.of([(crc32(data), len(data))]).matches(stored)


def store_problem(where: str, problem: str, advice: str) -> Finding:
    expected = "a place that can be listed, written and removed"
    return Finding("store", "error", where, problem, expected, advice)


def judge_trial(where: str, no_conditions: str, *, keeps_checksum: bool | None) -> list[Finding]:
    """Judges what writing has shown."""
    conditions = Finding("store-conditions", "ok", where, "If-None-Match is obeyed")
    if no_conditions:
        conditions = Finding(
            "store-conditions",
            "warning",
            where,
            no_conditions,
            "If-None-Match is obeyed",
            "start one job for a place at a time, and do not use --slice with it",
        )
    if keeps_checksum is None:
        return [conditions]
    checksums = Finding("store-checksums", "ok", where, "the CRC-32 of an object is kept")
    if not keeps_checksum:
        checksums = Finding(
            "store-checksums",
            "warning",
            where,
            "the store keeps no CRC-32 of objects",
            "the checksum that was sent",
            "what arrives is not proven: run `ckptkit verify URL` after an upload",
        )
    return [conditions, checksums]
