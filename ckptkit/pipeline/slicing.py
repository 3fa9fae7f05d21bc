"""Independent processes that each write a slice of one output; the last to finish commits it.

They talk through notes in the hidden folder of the output alone: `plan` says which plan it is,
and `slice-I` what slice I has found out, once what it wrote is durable.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.errors import CkptkitError, OutputError, RefusedError
from ckptkit.core.manifest import Manifest
from ckptkit.execution.events import Kept, Listener, Planned, Started
from ckptkit.execution.outcome import Outcome
from ckptkit.pipeline.existing import written_already
from ckptkit.pipeline.fingerprint import fingerprint_of
from ckptkit.pipeline.parts import Job, commit_shares, cut_of, refuse_no_ranges, run_share
from ckptkit.pipeline.writing import Prepared, marked_as_read, refuse_full_disk
from ckptkit.planning.shares import Share, tasks_of
from ckptkit.storage.places import PathLike
from ckptkit.storage.shared_output import Attempt, SharedOutput
from ckptkit.storage.shared_places import SharedPlace
from ckptkit.storage.workfolder import NONCE_BYTES

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

    Raises:
        InputError: If a source is damaged, incomplete, or changes meanwhile.
        RefusedError: If the request cannot be met, or if other slices follow another plan.
        OutputExistsError: If `out` is there and not empty, and `overwrite` is false.
    """
    place = SharedPlace(out, "--slice")
    share = replace(share, in_parts=place.takes_parts)
    seen = place.seen() if overwrite else None
    with job.prepared() as prepared:
        listener(Planned(prepared.plan.notes))
        earlier = written_already(prepared, out) if overwrite else None
        if earlier is not None:  # by these slices, as a rule: this one is repeated
            listener(Kept(os.fspath(out)))
            return SliceDone(share, (), earlier)
        name = fingerprint_of(prepared)[: 2 * NONCE_BYTES]
        attempt = Attempt(_NONCE, name, overwrite=overwrite, seen=seen)
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
    """Makes sure that all slices are of one plan, and that there is room for it.

    Raises:
        RefusedError: If another slice follows another plan.
    """
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
    """Commits if all slices are there.

    Raises:
        OutputError: If what was written has been removed.
    """
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
