"""Shares of a plan's tasks, which are the same in every process that makes the same plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import UsageError
from ckptkit.core.object_parts import ObjectPart, choose_part_bytes
from ckptkit.plan.plan import TASK_BYTES, OutputFile, Plan, Task, cut_into_tasks

# Large enough to make the cost of starting a share negligible, small enough to repeat one elsewhere
# and to show progress.
SHARE_BYTES = 32 * TASK_BYTES
_SHARES_EACH = 8  # at least, so that other workers can take some from a slow one
_SLICE = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` parts of a plan that have about as many bytes each.

    Attributes:
        number: From 0 to `count` - 1.
        count: The number of shares.
        in_parts: Whether no part of an object is split between shares, as uploads need.
    """

    number: int
    count: int
    in_parts: bool = False

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_slice(text: str) -> Share:
    """Parses `I/N` as a share.

    >>> str(parse_slice("0/4"))
    '0/4'
    """
    match = _SLICE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(
            f"{text!r} is not I/N with I from 0 to N - 1",
            where="--slice",
            hint="under srun pass --slice $SLURM_PROCID/$SLURM_NTASKS",
        )
    return Share(int(match[1]), int(match[2]))


def tasks_of(plan: Plan, share: Share) -> Iterator[Task]:
    """Yields the tasks of a share, lazily and in the plan's order.

    With all files laid end to end, a task, or the group of tasks that makes a part of an object, is
    in the share in which it begins: a share reads neighbouring bytes, and cuts only its own files.
    """
    total = plan.bytes_written
    low = -(-share.number * total // share.count)
    high = -(-(share.number + 1) * total // share.count)
    at = 0
    for number, file in enumerate(plan.files):
        if at < high and low < at + file.size_bytes:
            least_bytes = choose_part_bytes(file.size_bytes) if share.in_parts else 1
            for group in _groups(cut_into_tasks(number, file), least_bytes):
                if low <= at + group[0].start < high:
                    yield from group
        at += file.size_bytes


def cut_object_parts(file: OutputFile) -> tuple[ObjectPart, ...]:
    """Cuts a file into the parts of an object, none of which has the bytes of two shares."""
    groups = _groups(cut_into_tasks(0, file), choose_part_bytes(file.size_bytes))
    return tuple(
        ObjectPart(number, group[0].start, group[-1].stop) for number, group in enumerate(groups, 1)
    )


def tasks_of_parts(plan: Plan, wanted: Mapping[str, Sequence[ObjectPart]]) -> Iterator[Task]:
    """Yields the tasks of some parts of objects; `wanted` has the parts by file and in order."""
    for number, file in enumerate(plan.files):
        parts = iter(wanted.get(file.path, ()))
        part = next(parts, None)
        for task in cut_into_tasks(number, file):
            while part is not None and part.stop <= task.start:
                part = next(parts, None)
            if part is None:
                break
            if part.start <= task.start:
                yield task


def split_plan(plan: Plan, workers: int, *, in_parts: bool = False) -> list[Share]:
    """Splits a plan into shares for workers that take one share after the other."""
    size_bytes = plan.bytes_written
    most = max(1, -(-size_bytes // TASK_BYTES))
    count = max(-(-size_bytes // SHARE_BYTES), min(most, _SHARES_EACH * workers))
    return [Share(number, count, in_parts) for number in range(max(1, count))]


def _groups(tasks: Iterator[Task], least_bytes: int) -> Iterator[list[Task]]:
    """Joins tasks until they have so many bytes together; the last may have fewer."""
    group: list[Task] = []
    for task in tasks:
        group.append(task)
        if task.stop - group[0].start >= least_bytes:
            yield group
            group = []
    if group:
        yield group
