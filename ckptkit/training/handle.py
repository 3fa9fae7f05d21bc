"""Handles and reports of what goes on in the background: saves, exports and pushes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.core.text import size_text
from ckptkit.training.save.staging import Staged
from ckptkit.training.step_names import name_save

Report = TypeVar("Report", "PushReport", "SaveReport", "ExportReport")
_OF_CKPTKIT = frozenset(
    {"add_copy", "call_at_end", "fail", "follow", "free", "mark_known", "set_local", "succeed"}
)
"""Methods of results that the threads call which make them."""


class BackgroundResult(Generic[Report]):
    """The result of a save, an export or a push: a report, or an error."""

    def __init__(self, what: str) -> None:
        """Takes its name for messages, such as "the save of step 3"."""
        self._what = what
        self._future: Future[Report] = Future()
        self._asked = False

    def __repr__(self) -> str:
        state = "under way"
        if self._future.done():
            error = self._future.exception()
            state = f"done: {self._future.result().path}" if error is None else f"failed: {error}"
        return f"<{type(self).__name__} of {self._what}: {state}>"

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - _OF_CKPTKIT)

    def done(self) -> bool:
        """Returns whether it has ended, with success or not."""
        return self._future.done()

    @check_names
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has ended, with success or not, and returns whether it has."""
        try:
            self._future.exception(timeout)
        except TimeoutError:
            return False
        return True

    @check_names
    def result(self, timeout: float | None = None) -> Any:
        """Waits until all ranks are done and the directory exists.

        Args:
            timeout: Seconds to wait at most; it ends within a bounded time by itself.

        Returns:
            The directory, a `Path`; for a run at a URL that of the step, a `Place`: a text with the
            options of its storage.

        Raises:
            TimeoutError: If it has not ended by then.
            CkptkitError: If it failed, on this rank or on another one.
        """
        return self.report(timeout).path

    @check_names
    def report(self, timeout: float | None = None) -> Report:
        """Waits as `result` does, and returns the report.

        Raises:
            TimeoutError: If it has not ended by then.
            CkptkitError: If it failed.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self._what} has not ended after {timeout} s")
        self._asked = True
        return self._future.result()

    @check_names
    def exception(self, timeout: float | None = None) -> CkptkitError | None:
        """Waits as `result` does, and returns the error instead of raising it."""
        try:
            self.report(timeout)
        except CkptkitError as error:
            return error
        return None

    @property
    def error(self) -> CkptkitError | None:
        """The error, if it has ended with one."""
        error = self._future.exception() if self._future.done() else None
        return error if isinstance(error, CkptkitError) else None

    @property
    def unheard_error(self) -> CkptkitError | None:
        """The error, if it has one and the caller has not asked for the result."""
        return None if self._asked else self.error

    def mark_known(self) -> None:
        """Records that the caller knows the result."""
        self._asked = True

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Calls a function once it has ended, at once if it has."""
        self._future.add_done_callback(lambda _: call())

    def succeed(self, report: Report) -> None:
        """Ends it with success."""
        self._future.set_result(report)

    def fail(self, error: CkptkitError) -> None:
        """Ends it with an error."""
        self._future.set_exception(error)


class PushReport(Struct, frozen=True):
    """A step that was pushed to the Hub.

    Attributes:
        step: The training step.
        path: Its directory in the run, a `Path`; a `Place` if that is at a URL.
        repo_id: The repository.
        commit: The hash of its commit.
        tag: The tag that points to it.
        url: Of its page.
    """

    step: int
    path: Any
    repo_id: str
    commit: str
    tag: str
    url: str


class Push(BackgroundResult[PushReport]):
    """The push of a step, under way or done."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the push of step {step}")
        self.step = step


_SHOWN_SECONDS = 0.01
_SHOWN_SHARE = 0.005  # of the copy limit, since a tiny state would show 0 %


class SkippedError(SaveError):
    """The save was skipped, because an earlier one was still being written."""

    code = "save-skipped"
    usual_hint = "save less often, or let it wait with in_flight='wait'"


class SaveReport(Struct, frozen=True):
    """What one save cost on this rank.

    Attributes:
        step: The training step.
        path: The committed directory, a `Path`; for a run at a URL that of the step, a `Place`: a
            text with the options of its storage.
        size_bytes: Bytes that this rank wrote.
        total_bytes: Bytes of all files of the step.
        blocked_seconds: How long `save` blocked the training thread.
        bytes_per_second: Staged bytes over the blocked time, without the wait for an earlier save.
        copy_limit_share: That rate over the rate of a plain warm copy, measured by `prepare`;
            0 if it was not measured.
        durable_seconds: From the call of `save` until this rank's files were durable.
        committed_seconds: From the call until the step was committed.
        writer_cpu_seconds: Processor time that the writer process took.
        notes: What the user should know, such as that direct I/O was refused.
        waited_seconds: How much of the blocked time it waited for an earlier save to be freed.
        linked_bytes: Bytes of frozen weights that this rank linked instead of writing them again.
        local_seconds: From the call until the step was durable on the nodes' own disks; 0 without
            such a tier.
        lost: What could not be saved with the step, by its name in the state, with the reason:
            optimizers, which do not fail the step.
    """

    step: int
    path: Any
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
    linked_bytes: int = 0
    local_seconds: float = 0.0
    lost: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<SaveReport: {self}>"

    def __str__(self) -> str:
        share = f", {self.copy_limit_share:.0%} of the copy limit"
        share = share if self.copy_limit_share >= _SHOWN_SHARE else ""
        waited = self.waited_seconds
        linked = f", {size_text(self.linked_bytes)} linked" if self.linked_bytes else ""
        waiting = f", {waited:.2f} s of it for an earlier save" if waited >= _SHOWN_SECONDS else ""
        local = f", on the nodes' disks after {self.local_seconds:.2f} s"
        local = local if self.local_seconds else ""
        without = f" WITHOUT {', '.join(sorted(self.lost))}" if self.lost else ""
        return (
            f"{name_save(self.step, self.path)} saved{without} in {self.path}:"
            f" {size_text(self.total_bytes)} ({size_text(self.size_bytes)} by this rank{linked}),"
            f" blocked {self.blocked_seconds * 1e3:.0f} ms"
            f" ({size_text(self.bytes_per_second)}/s{share}{waiting}), durable after"
            f" {self.durable_seconds:.2f} s{local}, committed after {self.committed_seconds:.2f} s"
        )


class SaveHandle(BackgroundResult[SaveReport]):
    """A save under way; any thread may use it.

    Attributes:
        step: The training step.
        blocked_seconds: As in `SaveReport`, once `save` has returned; so is `waited_seconds`.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the save of step {step}")
        self.step = step
        self.blocked_seconds = self.waited_seconds = 0.0
        self._freed = threading.Event()
        self._kept = threading.Event()
        self._local_path: Path | None = None
        self._staged: list[Staged] = []
        self._push: Push | None = None
        self._future.add_done_callback(self._release)

    def wait_staged(self) -> None:
        """Waits until devices have copied their part of the state; the CPU has copied its part.

        Optimizer steps, replays of CUDA graphs and loads of state dicts wait for that by
        themselves. Call this before parameters are changed in place in any other way.
        """
        for staged in self._staged:
            staged.wait()

    @property
    def freed(self) -> bool:
        """Whether the next save may begin, though this one may not have ended."""
        return self._freed.is_set()

    @check_names
    def wait_freed(self, timeout: float | None = None) -> bool:
        """Waits until the next save may begin, and returns whether it may."""
        return self._freed.wait(timeout)

    @check_names
    def local_result(self, timeout: float | None = None) -> Path:
        """Waits until the step is durable on the nodes' own disks; without these as `result` does.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            This node's part of it, or the committed directory if it was not written there.

        Raises:
            TimeoutError: If it is not durable by then.
            SaveError: If the save failed, on this rank or on another one.
        """
        if not self._kept.wait(timeout):
            raise TimeoutError(f"step {self.step} is not durable on any disk after {timeout} s")
        committed: Path = self._local_path or self.result(0)
        return committed

    @check_names
    def pushed(self, timeout: float | None = None) -> PushReport | None:
        """Waits until the step is pushed to the Hub, if `push_to_hub` is set.

        Args:
            timeout: Seconds to wait at most, for the save and again for the push.

        Returns:
            The push; None on ranks other than 0, and if this step is not pushed.

        Raises:
            TimeoutError: If it has not ended by then.
            SaveError: If the save failed, on this rank or on another one.
            CkptkitError: If the push failed.
        """
        self.report(timeout)
        return None if self._push is None else self._push.report(timeout)

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped because an earlier one was still being written."""
        return isinstance(self.error, SkippedError)

    @property
    def unheard_error(self) -> CkptkitError | None:
        """The error, if it has one and the caller has not asked for the result."""
        return None if self.skipped else super().unheard_error

    def add_copy(self, staged: Staged) -> None:
        """Adds a copy that is under way."""
        self._staged.append(staged)

    def follow(self, push: Push) -> None:
        """Sets the push of the step."""
        self._push = push

    def set_local(self, path: Path) -> None:
        """Marks the step as durable on the nodes' own disks."""
        self._local_path = path
        self._kept.set()

    def free(self) -> None:
        """Lets the next save begin."""
        self._freed.set()

    def _release(self, _: object) -> None:
        self._kept.set()
        self._freed.set()


class ExportReport(Struct, frozen=True):
    """What one export cost on this rank.

    Attributes:
        path: The directory that was written.
        size_bytes: Bytes of tensors that this rank wrote.
        total_bytes: Bytes of all files but the manifest.
        durable_seconds: From the call of `export` until this rank's bytes were durable, which is
            how long it blocked.
        committed_seconds: From the call until the directory was there.
        command: Empty if `path` is the model folder. Otherwise its storage does not accept ranges
            from several machines: `path` is a sharded checkpoint, and this command makes the folder
            of it.
    """

    path: Path
    size_bytes: int
    total_bytes: int
    durable_seconds: float
    committed_seconds: float
    command: str = ""

    def __repr__(self) -> str:
        return f"<ExportReport: {self}>"

    def __str__(self) -> str:
        if self.command:
            return f"exported as shards in {self.path}; to make a folder of them: {self.command}"
        return (
            f"exported to {self.path}: {size_text(self.total_bytes)}"
            f" ({size_text(self.size_bytes)} by this rank), durable after"
            f" {self.durable_seconds:.2f} s, committed after {self.committed_seconds:.2f} s"
        )


class ExportHandle(BackgroundResult[ExportReport]):
    """An export whose own bytes are durable; any thread may use it.

    `result` returns the directory; see `ExportReport.command` for the one exception.

    Attributes:
        out: The directory to be.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(f"the export to {out}")
        self.out = out
