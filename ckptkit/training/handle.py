"""What `save` gives back: the outcome of one save, and what it cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.core.texts import size_text
from ckptkit.training.staging import Staged

_MENTIONED = 0.01  # seconds


class SkippedError(SaveError):
    """The save was skipped, because an earlier one was still being written."""

    code = "save-skipped"
    usual_hint = "save less often, or let it wait with in_flight='wait'"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one save cost on this rank.

    Attributes:
        step: The training step.
        path: The committed directory.
        size_bytes: Bytes that this rank wrote.
        total_bytes: Bytes of all files of the step.
        blocked_seconds: How long `save` kept the training thread.
        bytes_per_second: Staged bytes over the blocked time, without that for an earlier save.
        copy_limit_share: That rate over the rate of a plain warm copy, measured by `prepare`;
            0 where it was not measured.
        durable_seconds: From the call of `save` until this rank's files were durable.
        committed_seconds: From the call until the step was committed.
        writer_cpu_seconds: Processor time that the writer process took.
        notes: What is worth knowing, such as that direct I/O was refused.
        waited_seconds: How much of the blocked time it waited for an earlier save to end.
    """

    step: int
    path: Path
    size_bytes: int
    total_bytes: int
    blocked_seconds: float
    bytes_per_second: float
    copy_limit_share: float
    durable_seconds: float
    committed_seconds: float
    writer_cpu_seconds: float
    notes: tuple[str, ...] = ()
    waited_seconds: float = 0.0

    def __str__(self) -> str:
        share = f", {self.copy_limit_share:.0%} of the copy limit" if self.copy_limit_share else ""
        waited = self.waited_seconds
        waiting = f", {waited:.2f} s of it for an earlier save" if waited >= _MENTIONED else ""
        return (
            f"step {self.step} saved in {self.path}: {size_text(self.total_bytes)}"
            f" ({size_text(self.size_bytes)} by this rank), blocked"
            f" {self.blocked_seconds * 1e3:.0f} ms"
            f" ({size_text(self.bytes_per_second)}/s{share}{waiting}), durable after"
            f" {self.durable_seconds:.2f} s, committed after {self.committed_seconds:.2f} s"
        )


class SaveHandle:
    """A save under way; it may be asked from any thread.

    Attributes:
        step: The training step.
        blocked_seconds: How long `save` kept the training thread.
        waited_seconds: How much of that it waited for an earlier save to end.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.blocked_seconds = 0.0
        self._finished = threading.Event()
        self._report: SaveReport | None = None
        self._error: CkptkitError | None = None
        self.waited_seconds = 0.0
        self._asked = False
        self._staged: list[Staged] = []

    def wait_staged(self) -> None:
        """Waits until devices have copied their part of the state; on the CPU that is done.

        Steps of the optimizers and the loading of state dicts wait for that by themselves. Call
        this before parameters are changed in place in any other way.
        """
        for staged in self._staged:
            staged.wait()

    def done(self) -> bool:
        """Tells whether the save has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the save to end, well or not, and tells whether it has."""
        return self._finished.wait(timeout)

    def result(self, timeout: float | None = None) -> Path:
        """Waits for the save to be committed.

        Args:
            timeout: Seconds to wait at most; every save ends within a bounded time by itself.

        Returns:
            The committed directory.

        Raises:
            TimeoutError: If the save has not ended by then.
            SaveError: If it failed, on this rank or on another one.
        """
        return self.report(timeout).path

    def report(self, timeout: float | None = None) -> SaveReport:
        """Waits as `result` does, and returns what the save cost.

        Raises:
            TimeoutError: If the save has not ended by then.
            SaveError: If it failed.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} has not ended after {timeout} s")
        self._asked = True
        if self._report is None:
            raise self._error or SaveError(f"the save of step {self.step} was given up")
        return self._report

    def exception(self, timeout: float | None = None) -> CkptkitError | None:
        """Waits as `result` does, and returns what went wrong instead of raising it."""
        try:
            self.report(timeout)
        except CkptkitError as error:
            return error
        return None

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped because an earlier one was still being written."""
        return isinstance(self._error, SkippedError)

    @property
    def unheard_error(self) -> CkptkitError | None:
        """What went wrong, if something did and nobody has asked for the result."""
        return None if self._asked or self.skipped else self._error

    def heard(self) -> None:
        """Notes that the caller knows how it ends."""
        self._asked = True

    def staging(self, staged: Staged) -> None:
        """Notes a copy that is under way."""
        self._staged.append(staged)

    def succeed(self, report: SaveReport) -> None:
        """Ends the save well."""
        self._report = report
        self._finished.set()

    def fail(self, error: CkptkitError) -> None:
        """Ends the save with an error."""
        self._error = error
        self._finished.set()
