"""Errors of the clients of stores: when a request is repeated, and what they are reported as.

`find_fault` says what kind of trouble an error is; what it is called depends on whether a source is
read, an output written, or a step uploaded. Errors are recognised by the names of their classes, so
that no client has to be imported.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, TypeVar

from msgspec import Struct

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    SaveError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckptkit.core.text import without_url_secrets
from ckptkit.storage.locations import hide_values

logger = logging.getLogger(__name__)
T = TypeVar("T")

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 529})
"""HTTP statuses that the next request may not get."""
_MOST_DOUBLINGS = 60  # more would overflow
_DENIED = frozenset({401, 403, 407})
_GONE = frozenset({404, 410})
_CHANGED = 412
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TRANSIENT_CODES = frozenset(
    {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling"}
)
_DENIED_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"}
)
# Of botocore, aiohttp, httpx and urllib3: a connection that failed, or ended early.
_BROKEN = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProtocolError",
        "ReadTimeoutError",
        "ResponseStreamingError",
        "ServerDisconnectedError",
        "TransportError",
    }
)
_NO_CREDENTIALS = frozenset(
    {
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "GatedRepoError",
        "LocalTokenNotFoundError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "RefreshError",
        "TokenRetrievalError",
    }
)
_OFFLINE = "OfflineModeIsEnabled"
_QUERY = re.compile(r"(\w+://[^\s?'\"]+)\?[^\s'\"]+")  # the query may hold a signature
_LONGEST = 300
_LOG_IN = (
    "see whether the name is right; what is private is shown to those alone who may see it and log"
    " in (`hf auth login`, or HF_TOKEN), what is gated to those who accepted the terms on its page"
)


class Fault(Enum):
    """What kind of trouble the error of a client is."""

    OFFLINE = "the environment forbids to reach the Hub"
    DENIED = "the credentials do not suffice"
    NO_BUCKET = "the bucket does not exist"
    MISSING = "there is no such object"
    CHANGED = "a condition of the request is not met"
    FULL = "the storage is full"
    MISUSED = "the client does not take the URL or the options"
    TRANSIENT = "the same request may succeed the next time"
    OTHER = "anything else"


def find_fault(error: BaseException) -> Fault:
    if _has_type(error, {_OFFLINE}):
        return Fault.OFFLINE
    status, codes = status_of(error), _codes(error)
    is_missing = isinstance(error, FileNotFoundError)
    if isinstance(error, PermissionError) or _has_type(error, _NO_CREDENTIALS):
        return Fault.DENIED
    if not is_missing and (status in _DENIED or codes & _DENIED_CODES):
        return Fault.DENIED
    if "NoSuchBucket" in codes or _has_type(error, {"BucketNotFoundError"}):
        return Fault.NO_BUCKET
    # The cause of a broken connection may have a status that the client made up.
    is_broken = type(error).__name__ in _BROKEN
    if is_missing or (status in _GONE and not is_broken):
        return Fault.MISSING
    if getattr(error, "errno", None) in _FULL:
        return Fault.FULL
    if is_broken or status in TRANSIENT_STATUSES or codes & _TRANSIENT_CODES:
        return Fault.TRANSIENT
    if status is not None:
        return Fault.CHANGED if status == _CHANGED else Fault.OTHER
    kinds = (TimeoutError, ConnectionError, EOFError)
    if isinstance(error, kinds) or _has_type(error, _BROKEN):
        return Fault.TRANSIENT
    is_misused = isinstance(error, ImportError | TypeError | ValueError)
    return Fault.MISUSED if is_misused else Fault.OTHER


def is_transient(error: BaseException) -> bool:
    """Says whether the same request may succeed the next time."""
    return find_fault(error) is Fault.TRANSIENT


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status in an error of any client, or None."""
    for cause in _causes(error):
        answer = getattr(cause, "response", None)
        if isinstance(answer, Mapping):
            answer = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            answer = getattr(answer, "status_code", None)
        for status in (answer, *(getattr(cause, name, None) for name in _STATUS_NAMES)):
            if isinstance(status, int) and 400 <= status < 600:  # noqa: PLR2004  errors of HTTP
                return status
    return None


_STATUS_NAMES = ("status", "status_code", "code")
_GO_ONLINE = "HF_HUB_OFFLINE is set; unset it, or give a local copy"
_READ_ERRORS: Mapping[Fault, tuple[type[CkptkitError], str, str]] = {
    Fault.OFFLINE: (AccessError, "cannot be reached: {text}", _GO_ONLINE),
    Fault.DENIED: (AccessError, "the storage does not let us in: {text}", ""),
    Fault.NO_BUCKET: (
        NotACheckpointError,
        "there is no such bucket",
        "see whether its name and the endpoint are right",
    ),
    Fault.MISSING: (MissingFileError, "nothing was found there", ""),
    Fault.CHANGED: (
        SourceChangedError,
        "is no longer the object that was listed: it was replaced while it was being read",
        "wait until the save is finished, then run again",
    ),
    Fault.MISUSED: (
        UsageError,
        "cannot be opened: {text}",
        "see whether the URL and the names and forms of the options are right",
    ),
}


def as_input_error(
    error: BaseException, *, where: str, options: Mapping[str, Any], attempts: int = 1
) -> CkptkitError:
    """Returns the error of ours for a failed read; its text shows no option's value."""
    text, fault = describe_error(error, options), find_fault(error)
    kind, message, hint = _READ_ERRORS.get(fault, (StorageError, "cannot be read: {text}", ""))
    message = message.format(text=text)
    if fault is Fault.TRANSIENT and attempts > 1:
        message = f"cannot be read after {attempts} attempts: {text}"
    if where.startswith("hf://") and not hint and kind in {AccessError, MissingFileError}:
        hint = _LOG_IN
    return kind(message, where=where, hint=hint)


def as_output_error(
    error: BaseException, *, where: str, options: Mapping[str, Any]
) -> CkptkitError:
    """Returns the error of ours for an output that cannot be written."""
    text, fault = describe_error(error, options), find_fault(error)
    if fault in {Fault.OFFLINE, Fault.DENIED}:
        return as_input_error(error, where=where, options=options)
    if fault is Fault.FULL:
        return NoSpaceError(text, where=where)
    if where.startswith("hf://") and fault is Fault.NO_BUCKET:
        hint = "see whether the name is right; `hf buckets create ORG/NAME` makes one"
        return OutputError("there is no such bucket", where=where, hint=hint)
    hint = "see whether the store can be reached; no reader sees what was sent so far"
    if isinstance(error, FileNotFoundError):
        hint = "see whether the bucket exists, and whether another run writes to the same place"
    return OutputError(f"cannot be written: {text}", where=where, hint=hint)


def as_upload_error(
    error: BaseException, *, where: str, options: Mapping[str, Any]
) -> CkptkitError:
    """Returns the error of ours for a step of a run that cannot be uploaded."""
    if isinstance(error, CkptkitError):
        return error
    fault = find_fault(error)
    if fault is Fault.OFFLINE:
        return as_input_error(error, where=where, options=options)
    text = f"{type(error).__name__}: {describe_error(error, options)}"
    if fault is Fault.DENIED:
        hint = "check that the credentials are valid, and allow to read, write and delete"
        return OutputError(f"the store refused access: {text}", where=where, hint=hint)
    if fault is Fault.NO_BUCKET or isinstance(error, FileNotFoundError):
        hint = "create the bucket first, or correct the URL"
        return OutputError(f"the store has no such bucket: {text}", where=where, hint=hint)
    if fault is Fault.MISUSED:
        return OutputError(
            f"the store cannot be written to: {text}",
            where=where,
            hint="install what fsspec needs for such URLs (`pip install s3fs` for s3://), check"
            " that the options are those of that library",
        )
    hint = "check that the store can be reached from this node"
    return SaveError(f"the store failed: {text}", where=where, hint=hint)


def describe_error(error: BaseException, options: Mapping[str, Any]) -> str:
    """Returns the first line of an error's text, without secrets."""
    lines = str(error).strip().splitlines() or [""]
    text = without_url_secrets(_QUERY.sub(r"\1?…", hide_values(lines[0], options)))
    text = text.rstrip(". ")
    return text[:_LONGEST] or type(error).__name__


def _codes(error: BaseException) -> set[str]:
    """Returns the error codes of S3."""
    answers = (getattr(cause, "response", None) for cause in _causes(error))
    codes = (a.get("Error", {}).get("Code") for a in answers if isinstance(a, Mapping))
    return {code for code in codes if isinstance(code, str)}


def _has_type(error: BaseException, names: frozenset[str] | set[str]) -> bool:
    return any(kind.__name__ in names for cause in _causes(error) for kind in type(cause).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__


ErrorTranslator = Callable[[], AbstractContextManager[None]]
_WARNED_FAILURES = 3  # so many failures of one request are logged as a warning


def error_translator(location: str, options: Mapping[str, Any]) -> ErrorTranslator:
    """Returns a context that turns errors of a client into ours, which show no option's value."""

    @contextmanager
    def translate_errors() -> Iterator[None]:
        try:
            yield
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  the clients of stores raise what they like
            raise as_output_error(error, where=location, options=options) from None

    return translate_errors


def clean_up(translate_errors: ErrorTranslator, action: Callable[[], object]) -> None:
    """Removes something, and logs a warning where that fails."""
    try:
        with translate_errors():
            action()
    except CkptkitError as error:
        logger.warning("something was left behind: %s", error)


def lost_place_error(why: str, where: str) -> OutputError:
    """Returns the error for an output whose place another run has changed meanwhile."""
    hint = "run one command at a time for an output, and this one again"
    return OutputError(why, where=where, hint=hint)


def output_exists_error(location: str, *, is_whole_bucket: bool = False) -> OutputExistsError:
    hint = "name another place, or have what is there replaced: --overwrite, overwrite=True"
    if is_whole_bucket:  # which is never replaced
        hint = "name a prefix in it"
    return OutputExistsError("holds files where none were expected", where=location, hint=hint)


class RetryPolicy(Struct, frozen=True):
    """How often a request is made, and how long to wait in between.

    Each wait is twice as long as the one before. `jitter` is its random share: many workers whose
    requests failed together would otherwise repeat them together.
    """

    attempts: int = 7
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 8.0
    jitter: float = 0.5

    def wait_seconds(self, failures: int) -> float:
        """Returns how long to wait after so many failures in a row.

        >>> policy = RetryPolicy(first_wait_seconds=2.0, longest_wait_seconds=300.0, jitter=0.0)
        >>> [policy.wait_seconds(failures) for failures in (1, 2, 3, 20)]
        [2.0, 4.0, 8.0, 300.0]
        """
        doubled = self.first_wait_seconds * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)
        full = min(doubled, self.longest_wait_seconds)
        return full * (1.0 - self.jitter * random.random())  # noqa: S311  no secret depends on it

    def wait_before(self, error: Exception, failures: int, what: str) -> float | None:
        """Returns how long to wait before a request to a store is repeated; None to give up."""
        if failures >= self.attempts or not is_transient(error):
            return None
        wait = self.wait_seconds(failures)
        level = logging.WARNING if failures == _WARNED_FAILURES else logging.INFO
        kind = type(error).__name__
        logger.log(level, "%s: %s, asking again in %.1f s", without_url_secrets(what), kind, wait)
        return wait


def call_with_retries(
    ask: Callable[[], T],
    wait_before: Callable[[Exception, int], float | None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Calls `ask`, which must do no harm when it is repeated, until it succeeds.

    `wait_before` takes the error and the number of failures. It returns how many seconds to wait
    before the next call, or None to raise the error.
    """
    failures = 0
    while True:
        try:
            return ask()
        except Exception as error:
            failures += 1
            wait = wait_before(error, failures)
            if wait is None:
                raise
        sleep(wait)
