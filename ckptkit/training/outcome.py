"""How something ends that goes on in the background, to be asked from any thread."""

from __future__ import annotations

import threading
from typing import Any, Generic, Protocol, TypeVar

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import CkptkitError, SaveError


class Reported(Protocol):
    """What is known of something that ended well."""

    @property
    def path(self) -> Any:
        """The directory that was made."""


Report = TypeVar("Report", bound=Reported)


class Outcome(Generic[Report]):
    """What a save or an export comes to: a report, or an error."""

    def __init__(self, what: str) -> None:
        """Takes what it is called in messages, such as "the save of step 3"."""
        self._what = what
        self._finished = threading.Event()
        self._report: Report | None = None
        self._error: CkptkitError | None = None
        self._asked = False

    def done(self) -> bool:
        """Tells whether it has ended, well or not."""
        return self._finished.is_set()

    @check_names
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has ended, well or not, and tells whether it has."""
        return self._finished.wait(timeout)

    @check_names
    def result(self, timeout: float | None = None) -> Any:
        """Waits until all ranks are done and the directory is there.

        Args:
            timeout: Seconds to wait at most; it ends within a bounded time by itself.

        Returns:
            The directory, as a `Path`; of a run at a URL that of the step, as a `Place`: a text
            that carries what its storage has to be told.

        Raises:
            TimeoutError: If it has not ended by then.
            CkptkitError: If it failed, on this rank or on another one.
        """
        return self.report(timeout).path

    @check_names
    def report(self, timeout: float | None = None) -> Report:
        """Waits as `result` does, and returns what it cost.

        Raises:
            TimeoutError: If it has not ended by then.
            CkptkitError: If it failed.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self._what} has not ended after {timeout} s")
        self._asked = True
        if self._report is None:
            raise self._error or SaveError(f"{self._what} was given up")
        return self._report

    @check_names
    def exception(self, timeout: float | None = None) -> CkptkitError | None:
        """Waits as `result` does, and returns what went wrong instead of raising it."""
        try:
            self.report(timeout)
        except CkptkitError as error:
            return error
        return None

    @property
    def error(self) -> CkptkitError | None:
        """What went wrong, if it has ended and something did."""
        return self._error

    @property
    def unheard_error(self) -> CkptkitError | None:
        """What went wrong, if something did and nobody has asked for the result."""
        return None if self._asked else self._error

    def heard(self) -> None:
        """Notes that the caller knows how it ends."""
        self._asked = True

    def succeed(self, report: Report) -> None:
        """Ends it well."""
        self._report = report
        self._end()

    def fail(self, error: CkptkitError) -> None:
        """Ends it with an error."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._finished.set()
