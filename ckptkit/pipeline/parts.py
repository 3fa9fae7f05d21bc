"""Shares of a plan, run by processes that see one file system, and what makes them one output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.execution.events import Committed, Listener, ignore
from ckptkit.execution.executor import Executor, Inputs
from ckptkit.execution.outcome import Outcome
from ckptkit.execution.tensors import Origin
from ckptkit.pipeline.writing import Prepared, manifest_of, refuse_changed
from ckptkit.planning.plan import OutputFile, Plan, Task
from ckptkit.planning.shares import Share, tasks_of
from ckptkit.storage.places import PathLike, is_url, local_path
from ckptkit.storage.shared_target import SharedTarget


class Job(Protocol):
    """A command's plan in the making: values that can be sent to another process."""

    def prepared(self) -> AbstractContextManager[Prepared]:
        """Opens the sources and plans; the same, wherever they are the same."""
        ...


def shared_folder(out: PathLike, option: str) -> Path:
    """Returns the directory that several processes are to fill.

    Raises:
        RefusedError: If it is none.
    """
    if is_url(out):
        raise RefusedError(
            f"a URL was found where {option} needs a directory that all processes see",
            where=os.fspath(out),
            hint="write to a shared disk and copy the finished output, or leave the option out:"
            " one process writes to a URL without a local disk",
        )
    return local_path(out)


def refuse_no_ranges(target: SharedTarget) -> None:
    """Refuses a directory to whose files several processes cannot write at once.

    Raises:
        RefusedError: If it is one.
    """
    reason = target.why_no_ranges()
    if reason:
        raise RefusedError(
            f"several processes cannot write parts of one file there: {reason}",
            where=target.location,
            hint="choose a directory on a shared file system, or run in one process",
        )


def files_of(plan: Plan, tasks: Iterator[Task]) -> list[OutputFile]:
    """Returns the files that tasks write to."""
    return [plan.files[number] for number in sorted({task.file for task in tasks})]


def run_share(
    prepared: Prepared, target: SharedTarget, share: Share, listener: Listener
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
    # Ledgers of its own: what one share leaves open must not be handed on with the next.
    origins = {
        name: Origin(name, origin.source, origin.index)
        for name, origin in prepared.inputs.origins.items()
    }
    inputs = Inputs(origins, prepared.inputs.folders)
    executor = Executor(plan, inputs, target, prepared.settings, listener)
    outcome = executor.run_part(tasks_of(plan, share))
    target.sync()
    return outcome


def commit_shares(
    prepared: Prepared, target: SharedTarget, outcome: Outcome, listener: Listener
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
        digests = executor.complete(outcome)
        for source in prepared.sources:  # all processes found the same files when they began
            refuse_changed(source)
    manifest = manifest_of(prepared, digests)
    target.sync()
    target.commit(MANIFEST_NAME, manifest.to_json())
    listener(Committed(target.location))
    return manifest


@contextmanager
def _removed_if_damaged(target: SharedTarget) -> Iterator[None]:
    try:
        yield
    except InputError:
        target.abandon()
        raise
