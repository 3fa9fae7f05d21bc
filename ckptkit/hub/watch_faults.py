"""Which failures pass by themselves, which are a step's own, and how long to wait for the others.

What is neither, such as wrong credentials, ends a watch: no step could ever be pushed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    HubUnavailableError,
    InputError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    RefusedError,
    StorageError,
    VerificationError,
)


def is_passing(error: CkptkitError) -> bool:
    """Tells whether another try may succeed though nobody has changed anything."""
    if isinstance(error, AccessError):
        return False
    return isinstance(error, HubUnavailableError | NoSpaceError | InputError)


def is_of_the_step(error: CkptkitError) -> bool:
    """Tells whether a step cannot be pushed as it is, while others may well be."""
    if isinstance(error, AccessError | NoSpaceError | OutputError | StorageError):
        return False
    return isinstance(error, InputError | RefusedError | OutputExistsError | VerificationError)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long is waited after a try that failed.

    Attributes:
        first_seconds: After the first one; each further pause is twice as long.
        most_seconds: The longest pause.
        last_tries: How many tries in a row may fail once the watch is to end.
    """

    first_seconds: float = 2.0
    most_seconds: float = 300.0
    last_tries: int = 6

    def pause(self, tries: int) -> float:
        """Returns how long to wait after that many tries in a row have failed.

        >>> [Backoff().pause(tries) for tries in (1, 2, 3, 20)]
        [2.0, 4.0, 8.0, 300.0]
        """
        return float(min(self.first_seconds * 2.0 ** min(tries - 1, 60), self.most_seconds))
