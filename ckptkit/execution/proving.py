"""Whether a file that an earlier run finished is what was written then: read, and compared."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.execution.outcome import Digests
from ckptkit.execution.seals import Seals
from ckptkit.kernels.checksums import leaf_digest
from ckptkit.planning.plan import (
    TASK_BYTES,
    Compute,
    Copy,
    Literal,
    OutputFile,
    Part,
    Segment,
    Task,
    Trailer,
    tasks_of_file,
)

ReadInto = Callable[[int, memoryview], int]
"""Fills a buffer from a byte of the file on, and returns how many bytes there were."""


def can_be_proven(file: OutputFile) -> bool:
    """Tells whether all bytes of a file follow from the plan and from digests of its tensors."""
    bodies = [segment.body for segment in file.segments]
    return any(segment.spec is not None for segment in file.segments) and all(
        isinstance(body, (Literal, Copy, Compute, Trailer)) for body in bodies
    )


def is_proven(file: OutputFile, digests: Digests, read_into: ReadInto) -> bool:
    """Reads a file, and compares every byte with the plan, or with digests.

    Args:
        file: The file as it is planned; it can be proven.
        digests: Of its tensors, as they were written.
        read_into: Reads it.
    """
    proof = _Proof(file, digests)
    block = memoryview(bytearray(min(TASK_BYTES, file.size_bytes)))
    for task in tasks_of_file(0, file):
        view = block[: task.stop - task.start]
        if read_into(task.start, view) != len(view) or not proof.holds(task, view):
            return False
    return True


class _Proof:
    def __init__(self, file: OutputFile, digests: Digests) -> None:
        self._digests = digests
        self._seals = Seals([file])

    def holds(self, task: Task, data: memoryview) -> bool:
        at = 0
        for part in task.parts:
            view = data[at : at + part.stop - part.start]
            at += len(view)
            if not self._is_right(part, part.segment, view):
                return False
        return True

    def _is_right(self, part: Part, segment: Segment, view: memoryview) -> bool:
        if isinstance(segment.body, Literal):
            return view == segment.body.data[part.start : part.stop]
        if isinstance(segment.body, Trailer):
            expected = memoryview(bytearray(len(view)))
            return self._seals.fill(0, part, expected) and view == expected
        self._seals.note((0, part.number), part.start, view)
        name = "" if segment.spec is None else str(segment.spec.name)
        written = self._digests.tensors.get(name, {}).get(part.start // LEAF_BYTES)
        return leaf_digest(view) == written
