"""A plan's tasks dealt out: shares that are the same wherever the same plan is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import UsageError
from ckptkit.core.object_parts import ObjectPart, part_bytes
from ckptkit.plan.plan import TASK_BYTES, OutputFile, Plan, Task, tasks_of_file

# Long enough that starting on one costs nothing beside it, short enough to be done again
# elsewhere, and to show progress.
SHARE_BYTES = 32 * TASK_BYTES
_SHARES_EACH = 8  # at least, so that a slow worker leaves some of its own to the others
_SLICE = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` parts of a plan that have about as many bytes each; the first is 0.

    Attributes:
        number: Which.
        count: Of how many.
        in_parts: Whether it has the parts of objects whole, for a store that takes no less.
    """

    number: int
    count: int
    in_parts: bool = False

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_slice(text: str) -> Share:
    """Turns `I/N` into a share.

    Returns:
        The share.

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

    A task, or the group of them that makes a part of an object, is in the share in which it
    begins, with all files laid end to end: a share reads neighbouring bytes, and only the files
    that it touches are looked at.
    """
    total = plan.bytes_written
    low = -(-share.number * total // share.count)
    high = -(-(share.number + 1) * total // share.count)
    at = 0
    for number, file in enumerate(plan.files):
        if at < high and low < at + file.size_bytes:
            least_bytes = part_bytes(file.size_bytes) if share.in_parts else 1
            for group in _groups(tasks_of_file(number, file), least_bytes):
                if low <= at + group[0].start < high:
                    yield from group
        at += file.size_bytes


def object_parts(file: OutputFile) -> tuple[ObjectPart, ...]:
    """Cuts a file into the parts of an object, none of which has the bytes of two shares."""
    groups = _groups(tasks_of_file(0, file), part_bytes(file.size_bytes))
    return tuple(
        ObjectPart(number, group[0].start, group[-1].stop) for number, group in enumerate(groups, 1)
    )


def tasks_within(plan: Plan, wanted: Mapping[str, Sequence[ObjectPart]]) -> Iterator[Task]:
    """Yields the tasks of some parts of objects.

    Args:
        plan: The plan.
        wanted: The parts, as `object_parts` cuts them, by file and in order.
    """
    for number, file in enumerate(plan.files):
        parts = iter(wanted.get(file.path, ()))
        part = next(parts, None)
        for task in tasks_of_file(number, file):
            while part is not None and part.stop <= task.start:
                part = next(parts, None)
            if part is None:
                break
            if part.start <= task.start:
                yield task


def shares_for(plan: Plan, workers: int, *, in_parts: bool = False) -> list[Share]:
    """Deals a plan out to workers that take one share after the other."""
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
