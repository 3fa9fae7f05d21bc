"""What `export` gives back: the outcome of one export, and what it cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.core.texts import size_text


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What one export cost on this rank.

    Attributes:
        path: The directory that was written.
        size_bytes: Bytes of tensors that this rank wrote.
        total_bytes: Bytes of all files but the manifest.
        durable_seconds: From the call of `export` until this rank's bytes were durable, which is
            how long it blocked.
        committed_seconds: From the call until the directory was there.
        command: Empty where `path` is the model folder. Otherwise its storage does not take
            ranges from several machines: `path` is a sharded checkpoint, and this command makes
            the folder of it.
    """

    path: Path
    size_bytes: int
    total_bytes: int
    durable_seconds: float
    committed_seconds: float
    command: str = ""

    def __str__(self) -> str:
        if self.command:
            return f"exported as shards in {self.path}; to be merged by: {self.command}"
        return (
            f"exported to {self.path}: {size_text(self.total_bytes)}"
            f" ({size_text(self.size_bytes)} by this rank), durable after"
            f" {self.durable_seconds:.2f} s, committed after {self.committed_seconds:.2f} s"
        )


class ExportHandle:
    """An export whose own bytes are durable; it may be asked from any thread.

    Attributes:
        out: The directory to be.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._finished = threading.Event()
        self._report: ExportReport | None = None
        self._error: CkptkitError | None = None
        self._asked = False

    def done(self) -> bool:
        """Tells whether the export has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the export to end, well or not, and tells whether it has."""
        return self._finished.wait(timeout)

    def result(self, timeout: float | None = None) -> Path:
        """Waits until all ranks are done and the directory is there.

        Args:
            timeout: Seconds to wait at most; every export ends within a bounded time by itself.

        Returns:
            The directory; see `ExportReport.command` for the one exception.

        Raises:
            TimeoutError: If the export has not ended by then.
            CkptkitError: If it failed, on this rank or on another one.
        """
        return self.report(timeout).path

    def report(self, timeout: float | None = None) -> ExportReport:
        """Waits as `result` does, and returns what the export cost.

        Raises:
            TimeoutError: If the export has not ended by then.
            CkptkitError: If it failed.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the export to {self.out} has not ended after {timeout} s")
        self._asked = True
        if self._report is None:
            raise self._error or SaveError("was given up", where=str(self.out))
        return self._report

    def exception(self, timeout: float | None = None) -> CkptkitError | None:
        """Waits as `result` does, and returns what went wrong instead of raising it."""
        try:
            self.report(timeout)
        except CkptkitError as error:
            return error
        return None

    @property
    def unheard_error(self) -> CkptkitError | None:
        """What went wrong, if something did and nobody has asked for the result."""
        return None if self._asked else self._error

    def succeed(self, report: ExportReport) -> None:
        """Ends the export well."""
        self._report = report
        self._finished.set()

    def fail(self, error: CkptkitError) -> None:
        """Ends the export with an error."""
        self._error = error
        self._finished.set()
