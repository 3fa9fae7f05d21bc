"""Reading from afar straight to where the bytes are wanted, in requests as large as the work.

What is known to lie in one run, in the source as in the output, needs no memory in between. Each
request costs a round trip and, at the store, as much as some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.index import Span
from ckptkit.core.ranges import FileRange
from ckptkit.execution.pieces import Run
from ckptkit.execution.tensors import TensorReader
from ckptkit.planning.plan import Copy, Part, ServerCopy, Task

LEAST_BYTES = 1 << 20
"""What is smaller is better read together with what lies near it."""


@dataclass(frozen=True, slots=True)
class _Placed:
    run: Run
    at: int  # in the buffer of the task


def fill_straight(
    task: Task, data: memoryview, readers: Mapping[str, TensorReader]
) -> frozenset[int]:
    """Reads all that a task takes over unchanged, and that lies in runs whose place is known.

    Args:
        task: What is to be filled.
        data: Its buffer.
        readers: Of the sources, by name.

    Returns:
        The positions of the parts that are filled.

    Raises:
        InputError: If something cannot be read, or has another checksum.
    """
    placed: dict[str, list[_Placed]] = {}
    filled = set()
    for position, (part, at) in enumerate(_with_places(task)):
        origin, runs = _runs_of(part, readers)
        if runs:
            filled.add(position)
            placed.setdefault(origin, []).extend(_Placed(run, at + run.target) for run in runs)
    for origin, found in placed.items():
        readers[origin].fetch(
            [(wanted, data[at : at + wanted.size_bytes]) for wanted, at in _joined(found)]
        )
        for one in found:
            readers[origin].book(one.run, data[one.at : one.at + one.run.place.size_bytes])
    return frozenset(filled)


def _with_places(task: Task) -> Iterator[tuple[Part, int]]:
    at = 0
    for part in task.parts:
        yield part, at
        at += part.stop - part.start


def _runs_of(part: Part, readers: Mapping[str, TensorReader]) -> tuple[str, Sequence[Run]]:
    body, spec = part.segment.body, part.segment.spec
    if spec is None or part.stop - part.start < LEAST_BYTES:
        return "", ()
    if not isinstance(body, (Copy, ServerCopy)) or not readers[body.origin].is_distant:
        return "", ()
    size = spec.dtype.itemsize
    span = Span(part.start // size, part.stop // size)
    return body.origin, readers[body.origin].runs(body.key, span)


def _joined(placed: Sequence[_Placed]) -> Iterator[tuple[FileRange, int]]:
    """Yields what is read and where it goes, neighbours on both sides as one."""
    wanted, at = placed[0].run.place, placed[0].at
    for one in placed[1:]:
        place = one.run.place
        follows = place.path == wanted.path and place.start == wanted.stop
        if follows and one.at == at + wanted.size_bytes:
            wanted = FileRange(wanted.path, wanted.start, place.stop)
        else:
            yield wanted, at
            wanted, at = place, one.at
    yield wanted, at
