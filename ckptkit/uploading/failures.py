"""What a store answers when it refuses, as errors that tell no secret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError, OutputError, SaveError
from ckptkit.storage.remote_errors import is_transient, status_of, told

_DENIED = frozenset({401, 403})
_REFUSED = "see whether the credentials are right, have not expired, and may read, write and delete"
_AWAY = "see whether the store can be reached from this node; the step stays on the node's disk"


def as_failure(error: BaseException, where: str, options: Mapping[str, Any]) -> CkptkitError:
    """Turns what a store's client raised into an error of ours.

    Args:
        error: What was raised.
        where: The object or prefix concerned.
        options: Of the storage; none of their values is in the error.
    """
    if isinstance(error, CkptkitError):
        return error
    said = f"{type(error).__name__}: {told(error, options)}"
    if _is_denied(error):
        return OutputError(f"the store refused access: {said}", where=where, hint=_REFUSED)
    if isinstance(error, FileNotFoundError):
        return OutputError(
            f"the store has no such bucket: {said}",
            where=where,
            hint="make the bucket first, or correct the URL",
        )
    if isinstance(error, ImportError | ValueError | TypeError) and not is_transient(error):
        return OutputError(
            f"nothing can be written there: {said}",
            where=where,
            hint="install what fsspec needs for such URLs (ckptkit-toolkit[s3] for s3://), and see"
            " whether the options are those of that library",
        )
    return SaveError(f"the store did not answer well: {said}", where=where, hint=_AWAY)


def _is_denied(error: BaseException) -> bool:
    named = "Credential" in type(error).__name__
    return named or isinstance(error, PermissionError) or status_of(error) in _DENIED
