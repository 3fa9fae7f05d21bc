"""The services of a run: the Hub that it pushes to, and the store that it is saved to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError, HubError, HubUnavailableError
from ckptkit.diagnosis.findings import Finding, Severity
from ckptkit.hub.client import ODD_TOKEN, Hub, quiet_client, status_of, unwrap_error
from ckptkit.storage.places import Place

if TYPE_CHECKING:
    from ckptkit.storage.remote.s3 import S3Uploads

_WRITING = frozenset({"admin", "fineGrained", "write"})
_WRITE = "repo.write"
_FOLDER = ".ckptkit-doctor"
_COUNTED = 1000
_NOT_FOUND = 404


class HubFacts(Struct, frozen=True):
    """What is known of the Hub; no token is in it.

    Attributes:
        endpoint: The address.
        repo_id: That is to be pushed to; empty for none.
        has_token: Whether the client knows one.
        problem: Why it did not answer as hoped; empty if it did.
        is_reached: Whether it answered, or was not asked because of the token.
        user: Whose token it is.
        owners: The user and the organisations.
        role: Of the token: read, write or fineGrained.
        writes_to: Names of owners and repositories that a fine-grained token may write to.
        is_there: Whether the repository exists; None if nothing was asked.
    """

    endpoint: str = ""
    repo_id: str = ""
    has_token: bool = False
    problem: str = ""
    is_reached: bool = False
    user: str = ""
    owners: frozenset[str] = frozenset()
    role: str = ""
    writes_to: frozenset[str] = frozenset()
    is_there: bool | None = None


def gather_hub(repo_id: str) -> HubFacts:
    """Asks the Hub whose token this is, with one request; with a repository, whether it exists."""
    with quiet_client():
        try:
            hub = Hub(repo_id or "ckptkit/doctor", token=None, endpoint=None)
        except HubError as error:
            is_odd = error.message == ODD_TOKEN
            return HubFacts("", repo_id, is_odd, problem=error.message, is_reached=is_odd)
        endpoint = hub.api.endpoint
        if hub.token is None:
            return HubFacts(endpoint, repo_id)
        try:
            answer = hub.api.whoami()
        except Exception as failure:  # noqa: BLE001  the client raises what its libraries raise
            refusal = hub.translate_error(unwrap_error(failure))
            is_reached = not isinstance(refusal, HubUnavailableError)
            return HubFacts(
                endpoint, repo_id, has_token=True, problem=refusal.message, is_reached=is_reached
            )
        return _read_answer(answer, hub, repo_id)


def _read_answer(answer: Mapping[str, Any], hub: Hub, repo_id: str) -> HubFacts:
    user = str(answer.get("name", ""))
    groups = [str(entry.get("name", "")) for entry in answer.get("orgs") or ()]
    token = (answer.get("auth") or {}).get("accessToken") or {}
    scopes = (token.get("fineGrained") or {}).get("scoped") or ()
    writes_to = {
        str((scope.get("entity") or {}).get("name", ""))
        for scope in scopes
        if _WRITE in (scope.get("permissions") or ())
    }
    is_there = None
    if repo_id:
        try:
            hub.api.repo_info(repo_id if "/" in repo_id else f"{user}/{repo_id}")
            is_there = True
        except Exception as failure:  # noqa: BLE001  the same
            is_there = False if status_of(failure) == _NOT_FOUND else None
    return HubFacts(
        hub.api.endpoint,
        repo_id,
        has_token=True,
        is_reached=True,
        user=user,
        owners=frozenset({user, *groups} - {""}),
        role=str(token.get("role", "")),
        writes_to=frozenset(writes_to),
        is_there=is_there,
    )


_LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token of the role `write`"


def judge_hub(facts: HubFacts) -> list[Finding]:
    """Judges the Hub; without a repository to push to, an error there would hurt nothing."""
    found, expected, advice = _hub_access(facts) if not facts.problem else _hub_problem(facts)
    severity: Severity = "ok"
    if expected:
        severity = "error" if facts.repo_id else "warning" if facts.is_reached else "ok"
    where = facts.repo_id or facts.endpoint or "the Hub"
    return [Finding("hub", severity, where, found, expected, advice)]


def _hub_problem(facts: HubFacts) -> tuple[str, str, str]:
    if facts.is_reached:
        return f"the token is not accepted: {facts.problem}", "a valid token", _LOGIN
    advice = "training need not wait for it: push later, from a machine with access"
    return facts.problem, "an answer", advice


def _hub_access(facts: HubFacts) -> tuple[str, str, str]:
    """Returns what was found, and what was expected if that differs, and what to do then."""
    if not facts.has_token:
        return "no token is set; only a push needs one", "a token" if facts.repo_id else "", _LOGIN
    found = f"the token of {facts.user}, role {facts.role or 'unknown'}"
    if not facts.repo_id:
        return f"{found}; --push OWNER/NAME asks whether it may push there", "", ""
    owner, _, name = facts.repo_id.rpartition("/")
    owner = owner or facts.user
    state = {True: "exists", False: "is made at the first push", None: "was not looked up"}
    problem = "", "", ""
    if facts.role == "fineGrained" and not facts.writes_to & {owner, f"{owner}/{name}"}:
        names = ", ".join(sorted(facts.writes_to)) or "nothing"
        problem = f", which may write to {names}", f"write access to {owner}/{name}", _LOGIN
    elif facts.role and facts.role not in _WRITING:
        problem = "", "a token that may write", _LOGIN
    elif owner not in facts.owners and not facts.is_there:
        known = ", ".join(sorted(facts.owners))
        advice = f"push to a repository of {known}, or log in as a member of {owner}"
        problem = f", who is not in {owner}", f"one of {known}", advice
    if problem[1]:
        return f"{found}{problem[0]}", problem[1], problem[2]
    return f"{found}; the repository {state[facts.is_there]}", "", ""


class StoreFacts(Struct, frozen=True):
    """What is known of an object store.

    Attributes:
        where: The URL.
        protocol: Of the URL.
        problem: Why it cannot be used; empty if it can.
        advice: What to do about that.
        was_tried: Whether objects were written.
        no_conditions: Why `If-None-Match` does not work; empty if it does.
        has_checksum: Whether the store keeps the CRC-32 of an object; None if none was sent.
        unfinished: How many uploads below the place are unfinished, 1,000 at most; None if the
            store does not say.
    """

    where: str
    protocol: str = ""
    problem: str = ""
    advice: str = ""
    was_tried: bool = False
    no_conditions: str = ""
    has_checksum: bool | None = None
    unfinished: int | None = None


def gather_store(place: Place, *, writes: bool) -> StoreFacts:
    """Lists a place in a store and, if `writes`, writes and removes three small objects there."""
    from ckptkit.storage.remote.errors import error_translator
    from ckptkit.storage.remote.s3 import S3Uploads
    from ckptkit.storage.remote.s3_target import S3Notes
    from ckptkit.storage.remote.store import get_store

    try:
        store = get_store(place)
        translate_errors = error_translator(place.location, place.options)
        with translate_errors():
            root = store.path_of(place.location)
            if not store.is_s3:
                store.list_folders(root, ())
                return StoreFacts(place.location, place.protocol)
            uploads = S3Uploads(store, root)
            first = islice(uploads.list_uploads(uploads.prefix), _COUNTED)
            unfinished = _count(first)
            if not writes:
                store.list_folders(root, ())
                return StoreFacts(place.location, "s3", unfinished=unfinished)
            prefix = f"{uploads.prefix}{_FOLDER}/"
            notes = S3Notes(uploads, prefix, translate_errors)
            return StoreFacts(
                place.location,
                "s3",
                was_tried=True,
                no_conditions=notes.why_no_conditions(),
                has_checksum=_keeps_checksum(uploads, prefix),
                unfinished=unfinished,
            )
    except CkptkitError as error:
        return StoreFacts(place.location, place.protocol, error.message, error.hint)


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


_RULE = "give the bucket a lifecycle rule that removes them after two days (AbortIncomplete"
_RULE += "MultipartUpload)"


def judge_store(facts: StoreFacts) -> list[Finding]:
    """Judges an object store."""
    if facts.problem:
        expected = "a place that can be listed, written and removed"
        return [Finding("store", "error", facts.where, facts.problem, expected, facts.advice)]
    if facts.protocol != "s3":
        return [Finding("store", "ok", facts.where, "can be listed; nothing was written")]
    return list(_judge_s3(facts))


def _judge_s3(facts: StoreFacts) -> Iterator[Finding]:
    if facts.no_conditions:
        yield Finding(
            "store-conditions",
            "warning",
            facts.where,
            facts.no_conditions,
            "If-None-Match is obeyed",
            "start one job for a place at a time, and do not use --slice with it",
        )
    elif facts.was_tried:
        yield Finding("store-conditions", "ok", facts.where, "If-None-Match is obeyed")
    if facts.has_checksum is False:
        yield Finding(
            "store-checksums",
            "warning",
            facts.where,
            "the store keeps no CRC-32 of objects",
            "the checksum that was sent",
            "what arrives is not proven: run `ckptkit verify URL` after an upload",
        )
    elif facts.has_checksum:
        yield Finding("store-checksums", "ok", facts.where, "the CRC-32 of an object is kept")
    if facts.unfinished:
        count = f"{facts.unfinished:,}" if facts.unfinished < _COUNTED else f"{_COUNTED:,} or more"
        found = f"{count} unfinished uploads, which cost storage and are in no listing"
        yield Finding("store-uploads", "warning", facts.where, found, "none", _RULE)
    if not facts.was_tried:
        yield Finding("store", "ok", facts.where, "can be listed; nothing was written")
