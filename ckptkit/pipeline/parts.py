"""Shares of a plan, run by processes that see one place, and what makes them one output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.execution.events import Committed, Listener, ignore
from ckptkit.execution.executor import Executor, Inputs
from ckptkit.execution.outcome import Outcome
from ckptkit.execution.tensors import Origin
from ckptkit.pipeline.writing import Prepared, manifest_of, refuse_changed
from ckptkit.planning.plan import TASK_BYTES, OutputFile, Plan, Task
from ckptkit.planning.shares import Share, object_parts, tasks_of, tasks_within
from ckptkit.storage.shared_output import Cut, SharedOutput


class Job(Protocol):
    """A command's plan in the making: values that can be sent to another process."""

    def prepared(self) -> AbstractContextManager[Prepared]:
        """Opens the sources and plans; the same, wherever they are the same."""
        ...


def refuse_no_ranges(target: SharedOutput) -> None:
    """Refuses a place to whose files several processes cannot write at once.

    Raises:
        RefusedError: If it is one.
    """
    reason = target.why_no_ranges()
    if reason:
        raise RefusedError(
            f"several processes cannot write parts of one file there: {reason}",
            where=target.location,
            hint="choose a directory on a shared file system, or run in one process"
            f"{', or with --engine ray' if target.takes_parts else ''}",
        )


def files_of(plan: Plan, tasks: Iterator[Task]) -> list[OutputFile]:
    """Returns the files that tasks write to."""
    return [plan.files[number] for number in sorted({task.file for task in tasks})]


def cut_of(plan: Plan) -> Cut:
    """Returns how the files of a plan are cut into parts, where a store takes nothing else."""
    files = {file.path: file for file in plan.files}
    return lambda path: object_parts(files[path])


def run_share(
    prepared: Prepared, target: SharedOutput, share: Share, listener: Listener
) -> Outcome:
    """Runs the tasks of one share, and makes what they wrote durable; the target is used up.

    Returns:
        What whoever commits has to know.

    Raises:
        CkptkitError: If a source is damaged, or if something cannot be written.
    """
    plan = prepared.plan
    for file in files_of(plan, tasks_of(plan, share)):
        target.create(file.path, file.size_bytes)
    outcome = _own_executor(prepared, target, listener).run_part(tasks_of(plan, share))
    target.sync()
    outcome.sent = target.sent()
    return outcome


def commit_shares(
    prepared: Prepared, target: SharedOutput, outcome: Outcome, listener: Listener
) -> Manifest:
    """Completes an output of which all shares were run, and makes it visible; for one process.

    Args:
        prepared: The plan.
        target: A view of the output with which nothing was written yet.
        outcome: Of all shares together.
        listener: Is told of the commit.

    Returns:
        The manifest, as it lies in the output.

    Raises:
        InputError: If a source was damaged; then what was written is removed.
        CkptkitError: If something cannot be written.
    """
    executor = Executor(prepared.plan, prepared.inputs, target, prepared.settings, ignore)
    with _removed_if_damaged(target):
        executor.create_files()
        missing = target.adopt(outcome.sent)
        if missing:  # parts with checksums of several shares in them
            tasks = tasks_within(prepared.plan, missing)
            _own_executor(prepared, target, ignore).run_again(tasks, outcome)
        digests = executor.complete(outcome, has_trailers=target.takes_parts)
        for source in prepared.sources:  # all processes found the same files when they began
            refuse_changed(source)
    manifest = manifest_of(prepared, digests)
    target.sync()
    target.commit(MANIFEST_NAME, manifest.to_json())
    listener(Committed(target.location))
    return manifest


def _own_executor(prepared: Prepared, target: SharedOutput, listener: Listener) -> Executor:
    """Returns one with ledgers of its own: what one share leaves open is not the next one's."""
    origins = {
        name: Origin(name, origin.source, origin.index)
        for name, origin in prepared.inputs.origins.items()
    }
    inputs = Inputs(origins, prepared.inputs.folders)
    settings = prepared.settings
    if target.takes_parts:
        settings = settings.with_more(TASK_BYTES)  # what a part may have beyond the usual
    return Executor(prepared.plan, inputs, target, settings, listener)


@contextmanager
def _removed_if_damaged(target: SharedOutput) -> Iterator[None]:
    try:
        yield
    except InputError:
        target.abandon()
        raise
