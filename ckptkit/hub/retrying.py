"""What errors of the client stand for, and how long to wait before asking again."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from ckptkit.core.errors import HubError

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses that another attempt may not meet."""
ATTEMPTS = 7
FIRST_ATTEMPTS = 3
"""Of a Hub that has never been reached: most likely this machine is offline."""
UNAUTHORIZED, NOT_FOUND = 401, 404
_CONFLICT = 412
_HTTP_LIBRARIES = frozenset({"httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_LONGEST_ASKED = 900.0  # a Hub that asks for more is not waited for
_RESET = re.compile(r"\bt=(\d+)")  # of a `RateLimit` header, in seconds
_LOG = logging.getLogger("ckptkit.hub")


def underlying(error: Exception) -> Exception:
    """Returns what the client wrapped: what a server said, or that none was reached."""
    inner = error.__cause__ or error.__context__
    if status_of(error) is None and not is_network(error) and isinstance(inner, Exception):
        return inner if status_of(inner) is not None or is_network(inner) else error
    return error


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of the client stands for, if it stands for one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_conflict(error: BaseException) -> bool:
    """Tells whether somebody else committed meanwhile."""
    return status_of(error) == _CONFLICT


def is_absent(error: HubError) -> bool:
    """Tells whether there is nothing, or nothing that the token may see."""
    return error.__cause__ is not None and status_of(error.__cause__) in {UNAUTHORIZED, NOT_FOUND}


def is_network(error: BaseException) -> bool:
    """Tells whether no answer came, for whatever reason."""
    library = type(error).__module__.partition(".")[0]
    return status_of(error) is None and (library in _HTTP_LIBRARIES or _is_timeout(error))


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, (ConnectionError, TimeoutError)) and not is_offline(error)


def is_offline(error: BaseException) -> bool:
    """Tells whether the client was told to stay offline."""
    return type(error).__name__ == "OfflineModeIsEnabled"


def is_lost(error: BaseException) -> bool:
    """Tells whether a request may have been done all the same: gateways say 5xx for a late one."""
    status = status_of(error)
    return is_network(error) or (status is not None and status >= 500)  # noqa: PLR2004  HTTP


def pause_before(error: BaseException, attempt: int, *, reached: bool = True) -> float | None:
    """Returns how long to wait before asking again, in seconds; None where that is no use.

    Args:
        error: What the last attempt ended with.
        attempt: How many there were.
        reached: Whether the Hub was reached before.
    """
    most = ATTEMPTS if reached else min(ATTEMPTS, FIRST_ATTEMPTS)
    pause = None if attempt >= most else _pause(error, attempt)
    if pause is not None:
        status = status_of(error)
        what = "was not reached" if status is None else f"answered {status}"
        _LOG.warning("the Hub %s; asking again in %.1f s", what, pause)
    return pause


def _pause(error: BaseException, attempt: int) -> float | None:
    response = getattr(error, "response", None)
    if status_of(error) in TRANSIENT:
        asked = _asked_pause(getattr(response, "headers", {}))
        if asked is not None:
            return asked if asked <= _LONGEST_ASKED else None
    elif not is_network(error) and not _is_garbled(error):
        return None
    return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)))


def _is_garbled(error: BaseException) -> bool:
    """Tells of a page of a gateway where JSON was expected."""
    return type(error).__name__ == "JSONDecodeError"


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    after = headers.get("Retry-After", "")
    if after.strip().isdigit():
        return float(after)
    reset = _RESET.search(headers.get("RateLimit", ""))
    return float(reset[1]) if reset else None
