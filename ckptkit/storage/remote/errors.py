"""Errors of the clients of object stores: which are worth a retry, and what they are reported as.

Errors are recognised by the names of their classes, so that no client has to be imported.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckptkit.core.retries import TRANSIENT_STATUSES, RetryPolicy
from ckptkit.core.text import without_url_secrets
from ckptkit.storage.locations import hide_values

logger = logging.getLogger(__name__)

_DENIED = frozenset({401, 403, 407})
_GONE = frozenset({404, 410})
_CHANGED = 412
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


def is_transient(error: BaseException) -> bool:
    """Says whether the same request may succeed the next time."""
    if _has_type(error, {_OFFLINE}) or _is_denied(error):
        return False
    if type(error).__name__ in _BROKEN:  # whose cause may have a status that the client made up
        return True
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT_STATUSES or bool(_codes(error) & _TRANSIENT_CODES)
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    return isinstance(error, (TimeoutError, ConnectionError, EOFError)) or _has_type(error, _BROKEN)


def is_without_bucket(error: BaseException) -> bool:
    """Says whether a request failed because its bucket does not exist."""
    return "NoSuchBucket" in _codes(error)


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


def as_input_error(
    error: BaseException, *, where: str, options: Mapping[str, Any], attempts: int = 1
) -> CkptkitError:
    """Returns the error of ours for a failed read; its text shows no option's value."""
    text = describe_error(error, options)
    kind, message, hint = _kind_of(error, text)
    if kind is StorageError and attempts > 1 and is_transient(error):
        message = f"cannot be read after {attempts} attempts: {text}"
    if where.startswith("hf://") and not hint and kind in {AccessError, MissingFileError}:
        hint = _LOG_IN
    return kind(message, where=where, hint=hint)


def _kind_of(error: BaseException, text: str) -> tuple[type[CkptkitError], str, str]:
    """Returns the class of the error, its message, and its hint."""
    status = status_of(error)
    is_missing = isinstance(error, FileNotFoundError) or status in _GONE
    is_misused = isinstance(error, (TypeError, ValueError)) and status is None
    cases: tuple[tuple[bool, type[CkptkitError], str, str], ...] = (
        (_has_type(error, {_OFFLINE}), AccessError, f"cannot be reached: {text}", _GO_ONLINE),
        (_is_denied(error), AccessError, f"the storage does not let us in: {text}", ""),
        (is_without_bucket(error), NotACheckpointError, "there is no such bucket", _LOOK_AT_BUCKET),
        (is_missing, MissingFileError, "nothing was found there", ""),
        (status == _CHANGED, SourceChangedError, _REPLACED, _WAIT),
        (is_misused, UsageError, f"cannot be opened: {text}", _LOOK_AT_OPTIONS),
        (True, StorageError, f"cannot be read: {text}", ""),
    )
    return next(case[1:] for case in cases if case[0])


_GO_ONLINE = "HF_HUB_OFFLINE is set; unset it, or give a local copy"
_REPLACED = "is no longer the object that was listed: it was replaced while it was being read"
_WAIT = "wait until the save is finished, then run again"
_LOOK_AT_BUCKET = "see whether its name and the endpoint are right"
_LOOK_AT_OPTIONS = "see whether the URL and the names and forms of the options are right"


def describe_error(error: BaseException, options: Mapping[str, Any]) -> str:
    """Returns the first line of an error's text, without secrets."""
    lines = str(error).strip().splitlines() or [""]
    text = without_url_secrets(_QUERY.sub(r"\1?…", hide_values(lines[0], options)))
    text = text.rstrip(". ")
    return text[:_LONGEST] or type(error).__name__


def _is_denied(error: BaseException) -> bool:
    if isinstance(error, PermissionError) or _has_type(error, _NO_CREDENTIALS):
        return True
    if isinstance(error, FileNotFoundError):
        return False
    return status_of(error) in _DENIED or bool(_codes(error) & _DENIED_CODES)


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
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
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
            raise _output_error(error, location, options) from None

    return translate_errors


def clean_up(translate_errors: ErrorTranslator, action: Callable[[], object]) -> None:
    """Removes something, and logs a warning where that fails."""
    try:
        with translate_errors():
            action()
    except CkptkitError as error:
        logger.warning("something was left behind: %s", error)


def output_exists_error(location: str) -> OutputExistsError:
    """Returns the error for a place that holds files already."""
    return OutputExistsError(
        "holds files where none were expected",
        where=location,
        hint="name another place, or have what is there replaced: --overwrite, overwrite=True",
    )


def _output_error(error: Exception, location: str, options: Mapping[str, Any]) -> CkptkitError:
    read = as_input_error(error, where=location, options=options)
    if isinstance(read, AccessError):
        return read
    text = describe_error(error, options)
    if getattr(error, "errno", None) in _FULL:
        return NoSpaceError(text, where=location)
    hint = "see whether the store can be reached; no reader sees what was sent so far"
    if isinstance(error, FileNotFoundError):
        hint = "see whether the bucket exists, and whether another run writes to the same place"
    return OutputError(f"cannot be written: {text}", where=location, hint=hint)


def wait_before_retry(
    error: Exception, failures: int, policy: RetryPolicy, what: str
) -> float | None:
    """Returns how long to wait before a request to a store is repeated; None for no repetition."""
    if failures >= policy.attempts or not is_transient(error):
        return None
    wait = policy.wait_seconds(failures)
    level = logging.WARNING if failures == _WARNED_FAILURES else logging.INFO
    kind = type(error).__name__
    logger.log(level, "%s: %s, asking again in %.1f s", without_url_secrets(what), kind, wait)
    return wait
