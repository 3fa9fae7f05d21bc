"""Asking a store again when it could not answer, and waiting longer each time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptkit.core.texts import without_url_secrets
from ckptkit.storage.remote_errors import is_transient

_log = logging.getLogger(__name__)
_TOLD_AT = 3  # what fails that often is worth a line that users see
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a store is asked, and how long is waited in between.

    Attributes:
        attempts: How often it is asked at most.
        first_wait_seconds: Before the second time; each further wait is twice as long.
        longest_wait_seconds: Of a single wait.
    """

    attempts: int = 7
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 8.0

    def wait_seconds(self, failures: int) -> float:
        """Returns how long to wait after so many failures: half of it for certain, half by lot.

        Many workers that failed together would otherwise come back together.
        """
        full = min(self.first_wait_seconds * 2.0 ** (failures - 1), self.longest_wait_seconds)
        return full * (0.5 + 0.5 * random.random())  # noqa: S311  no secret depends on it


def retried(
    ask: Callable[[], Answer],
    patience: Patience,
    *,
    what: str,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Asks until there is an answer.

    Args:
        ask: Asks once; what was done by a failed attempt must do no harm the second time.
        patience: How often.
        what: What is asked for, for the log.
        sleep: Waits.

    Returns:
        The answer.

    Raises:
        Exception: The last error, or the first that is no passing trouble.
    """
    failures = 0
    while True:
        try:
            return ask()
        except Exception as error:
            failures += 1
            if failures >= patience.attempts or not is_transient(error):
                raise
            wait = patience.wait_seconds(failures)
            kind = type(error).__name__
            level = logging.WARNING if failures == _TOLD_AT else logging.INFO
            _log.log(level, "%s: %s, asking again in %.1f s", without_url_secrets(what), kind, wait)
            sleep(wait)
