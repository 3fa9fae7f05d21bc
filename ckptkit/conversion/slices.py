"""Independent processes that each write a slice of one output; the last to finish commits it.

They talk through notes in the hidden folder of the output alone: `plan` says which plan it is,
and `slice-I` what slice I has found out, once what it wrote is durable.

Shares of a plan, run by processes that see one place, and what makes them one output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ckptkit.conversion.fingerprint import fingerprint_of, written_already
from ckptkit.conversion.write import (
    Prepared,
    manifest_of,
    marked_as_read,
    refuse_changed,
    refuse_full_disk,
)
from ckptkit.core.errors import CkptkitError, InputError, OutputError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.engine.executor import Executor, Inputs
from ckptkit.engine.outcome import (
    Listener,
    Outcome,
    OutputCommitted,
    OutputKept,
    Planned,
    Started,
    ignore,
)
from ckptkit.engine.reader import Origin
from ckptkit.plan.plan import TASK_BYTES, OutputFile, Plan, Task
from ckptkit.plan.shares import Share, object_parts, tasks_of, tasks_within
from ckptkit.storage.local.workdir import NONCE_BYTES
from ckptkit.storage.places import PathLike, SharedPlace
from ckptkit.storage.shared import Cut, OutputAttempt, SharedOutput


class Job(Protocol):
    """A command's plan in the making: values that can be sent to another process."""

    def prepared(self) -> AbstractContextManager[Prepared]:
        """Opens the sources and plans; the same, wherever they are the same."""
        ...


def refuse_no_ranges(target: SharedOutput) -> None:
    """Refuses a place to whose files several processes cannot write at once."""
    reason = target.why_no_ranges()
    if reason:
        raise RefusedError(
            f"several processes cannot write parts of one file there: {reason}",
            where=target.location,
            hint="choose a directory on a shared file system, or run in one process"
            f"{', or with --engine ray' if target.takes_parts else ''}",
        )


def files_of(plan: Plan, tasks: Iterator[Task]) -> list[OutputFile]:
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
    listener(OutputCommitted(target.location))
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


# The same for all slices of an output, whatever their plans, so that those of different plans
# meet and see it.
_NONCE = "51ce51ce51ce51ce"


@dataclass(frozen=True, slots=True)
class SliceDone:
    """A slice that was written, and durable.

    Attributes:
        share: Which.
        missing: The slices that had not finished then, by number.
        manifest: Of the whole, where this was the last slice; else None.
    """

    share: Share
    missing: tuple[int, ...]
    manifest: Manifest | None


def run_slice(
    job: Job, out: PathLike, share: Share, *, overwrite: bool, listener: Listener
) -> SliceDone:
    """Writes one slice of an output, and commits the whole if all others are written.

    Run again, a slice that was written is not written again; so any slice can be repeated after
    a failure.
    """
    place = SharedPlace(out, "--slice")
    share = replace(share, in_parts=place.takes_parts)
    seen = place.seen() if overwrite else None
    with job.prepared() as prepared:
        listener(Planned(prepared.plan.notes))
        earlier = written_already(prepared, out) if overwrite else None
        if earlier is not None:  # by these slices, as a rule: this one is repeated
            listener(OutputKept(os.fspath(out)))
            return SliceDone(share, (), earlier)
        name = fingerprint_of(prepared)[: 2 * NONCE_BYTES]
        attempt = OutputAttempt(_NONCE, name, overwrite=overwrite, seen=seen)
        target = place.open(attempt, cut_of(prepared.plan))
        try:
            _meet(prepared, target, share)
            prepared.comparison.begin()
            with marked_as_read(prepared):
                _write(prepared, target, share, listener)
                _compare(prepared, target, listener)
                return _end(prepared, target, share, out, listener)
        finally:
            target.leave()


def _meet(prepared: Prepared, target: SharedOutput, share: Share) -> None:
    """Makes sure that all slices are of one plan, and that there is room for it."""
    mine = {"fingerprint": fingerprint_of(prepared), "slices": share.count}
    data = json.dumps(mine).encode()
    if target.plan() is None:
        _check_place(prepared, target)
    found = target.agree(data)
    if found != data:
        theirs = json.loads(found)
        raise RefusedError(
            f"other slices of this output are {_difference(mine, theirs)}",
            where=target.location,
            hint="run all slices with the same options, versions and source; where the others are"
            f" left over from an earlier attempt, remove them: {target.removal}",
        )


def _check_place(prepared: Prepared, target: SharedOutput) -> None:
    try:
        refuse_full_disk(prepared, target)
        refuse_no_ranges(target)
        if target.takes_parts:  # a directory tells by its locks what is in use
            target.sweep()
    except CkptkitError:
        if target.plan() is None:
            target.abandon()
            raise
        # Otherwise another slice has begun meanwhile, and what it reserved is what is missing.


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    if mine["slices"] != theirs["slices"]:
        return f"of {theirs['slices']:,}, and this one is of {mine['slices']:,}"
    return "of another plan: the source, an option or the version of ckptkit is another one"


def _write(prepared: Prepared, target: SharedOutput, share: Share, listener: Listener) -> None:
    name = _note_of(share.number)
    if target.notes.get(name) is None:
        tasks = tasks_of(prepared.plan, share)
        listener(Started(sum(task.stop - task.start for task in tasks)))
        outcome = run_share(prepared, target, share, listener)
        target.notes.put(name, json.dumps(outcome.to_json()).encode())


def _compare(prepared: Prepared, target: SharedOutput, listener: Listener) -> None:
    """Refuses an output that would not load; every slice finds the same, and removes it."""
    try:
        prepared.comparison.finish(listener)
    except CkptkitError:
        target.abandon()
        raise


def _end(
    prepared: Prepared, target: SharedOutput, share: Share, out: PathLike, listener: Listener
) -> SliceDone:
    """Commits if all slices are there."""
    notes = target.notes
    # Its own note last: where that is there, those that were not had not been removed either.
    numbers = sorted(range(share.count), key=lambda number: number == share.number)
    found = {number: notes.get(_note_of(number)) for number in numbers}
    missing = tuple(sorted(number for number, data in found.items() if data is None))
    if share.number in missing:
        if written_already(prepared, out) is not None:  # another slice has committed it by now
            return SliceDone(share, (), None)
        raise OutputError(
            "what this slice has written was removed by another process",
            where=target.location,
            hint="run one command at a time for an output, and this slice again",
        )
    if missing:
        return SliceDone(share, missing, None)
    with notes.alone("commit", str(share.number)) as alone:
        if not alone or target.plan() is None:
            return SliceDone(share, (), None)  # another process does it, or has done it
        whole = Outcome.joined(
            Outcome.from_json(json.loads(data or b"")) for data in found.values()
        )
        manifest = commit_shares(prepared, target, whole, listener)
    return SliceDone(share, (), manifest)


def _note_of(number: int) -> str:
    return f"slice-{number}"
