"""Calls of a Checkpointer: one at a time, and what they leave behind when it is closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckptkit.core.errors import CkptkitError, SaveError


def first_of(errors: Sequence[CkptkitError | None]) -> CkptkitError | None:
    """Returns the first error, which says how many more there are."""
    found = [error for error in errors if error is not None]
    more = len(found) - 1
    if more < 1:
        return found[0] if found else None
    first = found[0]
    return type(first)(
        f"{first.message}; {more} later save{'s' if more > 1 else ''} failed as well",
        where=first.where,
        hint=first.hint,
    )


class OneCall:
    """Refuses a call while another thread is in one."""

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self._lock = lock
        self._what = what

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise SaveError(
                "another thread is saving or resuming at this moment",
                where=f"Checkpointer.{self._what}",
                hint="call the Checkpointer from one thread, in the same order on every rank",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
