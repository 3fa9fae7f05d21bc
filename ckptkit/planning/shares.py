"""A plan's tasks dealt out: shares that are the same wherever the same plan is made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit.core.errors import UsageError
from ckptkit.planning.plan import TASK_BYTES, Plan, Task, tasks_of_file

# Long enough that starting on one costs nothing beside it, short enough to be done again
# elsewhere, and to show progress.
SHARE_BYTES = 32 * TASK_BYTES
_SHARES_EACH = 8  # at least, so that a slow worker leaves some of its own to the others
_SLICE = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` parts of a plan that have about as many bytes each; the first is 0."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_slice(text: str) -> Share:
    """Turns `I/N` into a share.

    Returns:
        The share.

    Raises:
        UsageError: If it is none.

    >>> parse_slice("0/4")
    Share(number=0, count=4)
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

    A task is in the share in which it begins, with all files laid end to end: a share reads
    neighbouring bytes, and only the files that it touches are looked at.
    """
    total = plan.bytes_written
    low = -(-share.number * total // share.count)
    high = -(-(share.number + 1) * total // share.count)
    at = 0
    for number, file in enumerate(plan.files):
        if at < high and low < at + file.size_bytes:
            for task in tasks_of_file(number, file):
                if low <= at + task.start < high:
                    yield task
        at += file.size_bytes


def shares_for(plan: Plan, workers: int) -> list[Share]:
    """Deals a plan out to workers that take one share after the other."""
    size_bytes = plan.bytes_written
    most = max(1, -(-size_bytes // TASK_BYTES))
    count = max(-(-size_bytes // SHARE_BYTES), min(most, _SHARES_EACH * workers))
    return [Share(number, count) for number in range(max(1, count))]
