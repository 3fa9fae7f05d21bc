"""How far a worker looks ahead: which parts of its task are fetched together from afar.

Reading from afar straight to where the bytes are wanted, in requests as large as the work.

What is known to lie in one run, in the source as in the output, needs no memory in between. Each
request costs a round trip and, at the store, as much as some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.index import FileRange, Key, Span
from ckptkit.engine.locate import LocatedChunks
from ckptkit.engine.prefetch import (
    READ_AHEAD_BYTES,
    ChunkLookup,
    Run,
    coalesce,
    ranges_of,
    requests,
)
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.plan.plan import (
    Compute,
    Copy,
    Kernel,
    Part,
    Plan,
    Preparable,
    ServerCopy,
    Task,
    TensorSpec,
)
from ckptkit.storage.base import distant

_Wanted = tuple[str, Key, Span]


class Horizon:
    """What a worker reads next, as far as one window of memory reaches; one thread's own."""

    def __init__(self, origins: Mapping[str, Origin], readers: Mapping[str, TensorReader]) -> None:
        self._origins = origins
        self._readers = {name: reader for name, reader in readers.items() if reader.is_distant}
        self._task: Task | None = None
        self._reached = 0

    def reach(self, task: Task, at: int, filled: Container[int] = ()) -> None:
        """Fetches what a part of a task reads, with as many of the following ones as fit in.

        Args:
            task: What is done next.
            at: The part of it that comes now.
            filled: The parts that need nothing any more.
        """
        if not self._readers:
            return
        if task is not self._task:
            self._task, self._reached = task, 0
        if at < self._reached:
            return
        wanted: list[_Wanted] = []
        for number, following in enumerate(task.parts[at:], at):
            more = [] if number in filled else list(self._far(_reads_of(following)))
            if self._bytes([*wanted, *more]) > READ_AHEAD_BYTES:
                break
            wanted += more
            self._reached = at = at + 1
        self._foresee(wanted)

    def reach_blocks(self, kernel: Kernel, spec: TensorSpec, block: Span, stop: int) -> None:
        """Fetches what a block of a tensor is computed from, and the blocks after it.

        Args:
            kernel: What computes it.
            spec: The tensor.
            block: The elements that are computed next.
            stop: Where the part of the tensor ends of which the block is one.
        """
        if not self._readers:
            return
        wanted: list[_Wanted] = []
        size, low = block.stop - block.start, block.start
        while low < stop:
            demands = kernel.demands(spec, Span(low, min(low + size, stop)))
            more = list(self._far((d.origin, d.key, d.place) for d in demands))
            if wanted and self._bytes([*wanted, *more]) > READ_AHEAD_BYTES:
                break
            wanted, low = [*wanted, *more], low + size
        if self._bytes(wanted) <= READ_AHEAD_BYTES:
            self._foresee(wanted)

    def _far(self, reads: Iterator[_Wanted]) -> Iterator[_Wanted]:
        return (one for one in reads if one[0] in self._readers)

    def _bytes(self, wanted: list[_Wanted]) -> int:
        return sum(
            (span.stop - span.start) * self._origins[name].index.tensors[key].stored_dtype.itemsize
            for name, key, span in wanted
        )

    def _foresee(self, wanted: list[_Wanted]) -> None:
        for name in dict.fromkeys(name for name, _, _ in wanted):
            self._readers[name].foresee([(k, span) for other, k, span in wanted if other == name])


@dataclass(frozen=True, slots=True)
class PlannedReads:
    """What is asked of distant sources while a plan is executed.

    Attributes:
        requests: How often, about: what a task reads may not fit into memory at once.
        size_bytes: For how much, with what is read in vain.
    """

    requests: int
    size_bytes: int


def planned_reads(plan: Plan, origins: Mapping[str, Origin]) -> PlannedReads | None:
    """Returns what a plan reads from afar; None where all its sources are near."""
    far = {name: one for name, one in origins.items() if distant(one.source) is not None}
    if not far:
        return None
    nothing_located = LocatedChunks()
    count = size = 0
    for task in plan.tasks():
        wanted: dict[str, list[FileRange]] = {}
        for name, key, span in (one for part in task.parts for one in _reads_of(part)):
            if name in far:
                index = far[name].index
                lookup = ChunkLookup(index.tensors[key])
                wanted.setdefault(name, []).extend(ranges_of(index, lookup, span, nothing_located))
        for ranges in wanted.values():
            asked = list(requests(coalesce(ranges)))
            count += len(asked)
            size += sum(one.size_bytes for one in asked)
    return PlannedReads(count, size)


def _reads_of(part: Part) -> Iterator[_Wanted]:
    """Yields what a part of a segment reads, as far as that is known before a kernel is ready."""
    body, spec = part.segment.body, part.segment.spec
    if spec is None:
        return
    size = spec.dtype.itemsize
    span = Span(part.start // size, part.stop // size)
    if isinstance(body, (Copy, ServerCopy)):
        yield body.origin, body.key, span
    elif isinstance(body, Compute) and not isinstance(body.kernel, Preparable):
        for demand in body.kernel.demands(spec, span):
            yield demand.origin, demand.key, demand.place


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
