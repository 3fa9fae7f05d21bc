"""When a request that failed is repeated, and how long to wait before."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 529})
"""HTTP statuses that the next request may not get."""
_MOST_DOUBLINGS = 60  # more would overflow
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is made, and how long to wait in between.

    Attributes:
        attempts: The most requests, the first one included.
        first_wait_seconds: Before the second request; each further wait is twice as long.
        longest_wait_seconds: Of a single wait.
        jitter: The random share of each wait, from 0 to 1. Many workers whose requests failed
            together would otherwise repeat them together.
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


def call_with_retries(
    ask: Callable[[], T],
    wait_before: Callable[[Exception, int], float | None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Calls `ask` until it succeeds.

    Args:
        ask: Makes the request; a repetition after a failure must do no harm.
        wait_before: Takes the error and the number of failures. Returns how many seconds to wait
            before the next call, or None to raise the error.
        sleep: Waits.

    Returns:
        What `ask` returned.
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
