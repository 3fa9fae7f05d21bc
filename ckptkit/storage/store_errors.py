"""What a store refuses while an output is written, as errors that say what to do."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
)
from ckptkit.storage.remote_errors import as_input_error, told

_LOG = logging.getLogger(__name__)
Writing = Callable[[], AbstractContextManager[None]]
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def writing_to(location: str, options: Mapping[str, Any]) -> Writing:
    """Returns a context in which what the client of a store raises becomes an error of ours.

    Args:
        location: The place, for messages.
        options: What the client was given, whose values no message shows.
    """

    @contextmanager
    def writing() -> Iterator[None]:
        try:
            yield
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  the clients of stores raise what they like
            raise _output_error(error, location, options) from None

    return writing


def quietly(writing: Writing, action: Callable[[], object]) -> None:
    """Clears something away, and says it on the log where that fails."""
    try:
        with writing():
            action()
    except CkptkitError as error:
        _LOG.warning("something was left behind: %s", error)


def output_there(location: str) -> OutputExistsError:
    """Returns the error for a place that holds something already."""
    return OutputExistsError(
        "holds files where none were expected",
        where=location,
        hint="name another place, or have what is there replaced: --overwrite, overwrite=True",
    )


def _output_error(error: Exception, location: str, options: Mapping[str, Any]) -> CkptkitError:
    read = as_input_error(error, where=location, options=options)
    if isinstance(read, AccessError):
        return read
    text = told(error, options)
    if getattr(error, "errno", None) in _FULL:
        return NoSpaceError(text, where=location)
    hint = "see whether the store can be reached; no reader sees what was sent so far"
    if isinstance(error, FileNotFoundError):
        hint = "see whether the bucket exists, and whether another run writes to the same place"
    return OutputError(f"cannot be written: {text}", where=location, hint=hint)
