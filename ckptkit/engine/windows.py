"""What a worker reads from distant sources: prefetch windows, and direct reads of whole tasks.

`PrefetchWindow` fetches what the next parts of a task read, as far as one window of memory
reaches. `read_direct` fills parts whose bytes are contiguous in the source as in the output, which
needs no memory in between and few requests: each costs a round trip and, at the store, as much as
some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.index import FileRange, Key, Span
from ckptkit.engine.locate import ChunkLookup, LocatedChunks
from ckptkit.engine.prefetch import READ_AHEAD_BYTES, ByteRun, coalesce, ranges_of, requests
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.plan.plan import (
    Compute,
    Copy,
    Kernel,
    Plan,
    Preparable,
    SegmentRange,
    ServerCopy,
    Task,
    TensorSpec,
)
from ckptkit.storage.base import distant

_Read = tuple[str, Key, Span]


class PrefetchWindow:
    """Prefetches what a worker reads next, as far as one window of memory reaches.

    It is for one thread at a time.
    """

    def __init__(self, origins: Mapping[str, Origin], readers: Mapping[str, TensorReader]) -> None:
        self._origins = origins
        self._readers = {
            name: reader for name, reader in readers.items() if reader.cache.is_distant
        }
        self._task: Task | None = None
        self._reached = 0

    def fetch_parts(self, task: Task, at: int, filled: Container[int]) -> None:
        """Fetches what a part of a task reads, with as many of the following ones as fit in.

        Args:
            task: The task that the worker runs.
            at: The part of it that comes next.
            filled: The parts that are filled already.
        """
        if not self._readers:
            return
        if task is not self._task:
            self._task, self._reached = task, 0
        if at < self._reached:
            return
        wanted: list[_Read] = []
        for number, following in enumerate(task.parts[at:], at):
            more = [] if number in filled else list(self._distant(_reads_of(following)))
            if self._bytes([*wanted, *more]) > READ_AHEAD_BYTES:
                break
            wanted += more
            self._reached = at = at + 1
        self._prefetch(wanted)

    def fetch_blocks(self, kernel: Kernel, spec: TensorSpec, block: Span, stop: int) -> None:
        """Fetches what a block of a tensor is computed from, and the blocks after it.

        Args:
            kernel: What computes it.
            spec: The tensor.
            block: The elements that are computed next.
            stop: Where the part of the tensor ends of which the block is one.
        """
        if not self._readers:
            return
        wanted: list[_Read] = []
        size, low = block.stop - block.start, block.start
        while low < stop:
            demands = kernel.demands(spec, Span(low, min(low + size, stop)))
            more = list(self._distant((d.origin, d.key, d.place) for d in demands))
            if wanted and self._bytes([*wanted, *more]) > READ_AHEAD_BYTES:
                break
            wanted, low = [*wanted, *more], low + size
        if self._bytes(wanted) <= READ_AHEAD_BYTES:
            self._prefetch(wanted)

    def _distant(self, reads: Iterator[_Read]) -> Iterator[_Read]:
        return (read for read in reads if read[0] in self._readers)

    def _bytes(self, wanted: list[_Read]) -> int:
        return sum(
            (span.stop - span.start) * self._origins[name].index.tensors[key].stored_dtype.itemsize
            for name, key, span in wanted
        )

    def _prefetch(self, wanted: list[_Read]) -> None:
        for name in dict.fromkeys(name for name, _, _ in wanted):
            self._readers[name].prefetch([(k, span) for other, k, span in wanted if other == name])


@dataclass(frozen=True, slots=True)
class ReadEstimate:
    """What the execution of a plan reads from distant sources.

    Attributes:
        requests: About how many: what a task reads may not fit into memory at once.
        size_bytes: How much they return, with what is read in vain.
    """

    requests: int
    size_bytes: int


def estimate_reads(plan: Plan, origins: Mapping[str, Origin]) -> ReadEstimate | None:
    """Returns what a plan reads from distant sources; None where it has none."""
    far = {name for name, origin in origins.items() if distant(origin.source) is not None}
    if not far:
        return None
    nothing_located = LocatedChunks()
    count = size = 0
    for task in plan.tasks():
        wanted: dict[str, list[FileRange]] = {}
        for name, key, span in (read for part in task.parts for read in _reads_of(part)):
            if name in far:
                index = origins[name].index
                lookup = ChunkLookup(index.tensors[key])
                wanted.setdefault(name, []).extend(ranges_of(index, lookup, span, nothing_located))
        for ranges in wanted.values():
            asked = list(requests(coalesce(ranges)))
            count += len(asked)
            size += sum(request.size_bytes for request in asked)
    return ReadEstimate(count, size)


def _reads_of(part: SegmentRange) -> Iterator[_Read]:
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
"""Smaller parts are better read together with their neighbours."""


@dataclass(frozen=True, slots=True)
class _DirectRead:
    run: ByteRun
    at: int  # in the buffer of the task


def read_direct(
    task: Task, data: memoryview, readers: Mapping[str, TensorReader]
) -> frozenset[int]:
    """Reads all that a task copies without change, and that is in byte runs of located chunks.

    Args:
        task: The task.
        data: Its buffer, to be filled.
        readers: Of the sources, by name.

    Returns:
        The positions of the parts that are filled.
    """
    reads: dict[str, list[_DirectRead]] = {}
    filled = set()
    at = 0
    for position, part in enumerate(task.parts):
        origin, runs = _runs_of(part, readers)
        if runs:
            filled.add(position)
            reads.setdefault(origin, []).extend(_DirectRead(run, at + run.target) for run in runs)
        at += part.stop - part.start
    for origin, of_origin in reads.items():
        readers[origin].cache.read_direct(
            [(wanted, data[at : at + wanted.size_bytes]) for wanted, at in _joined(of_origin)]
        )
        for read in of_origin:
            readers[origin].note(read.run, data[read.at : read.at + read.run.stored.size_bytes])
    return frozenset(filled)


def _runs_of(
    part: SegmentRange, readers: Mapping[str, TensorReader]
) -> tuple[str, Sequence[ByteRun]]:
    body, spec = part.segment.body, part.segment.spec
    if spec is None or part.stop - part.start < LEAST_BYTES:
        return "", ()
    if not isinstance(body, (Copy, ServerCopy)) or not readers[body.origin].cache.is_distant:
        return "", ()
    size = spec.dtype.itemsize
    span = Span(part.start // size, part.stop // size)
    return body.origin, readers[body.origin].byte_runs(body.key, span)


def _joined(reads: Sequence[_DirectRead]) -> Iterator[tuple[FileRange, int]]:
    """Yields what is read and where it goes, neighbours on both sides as one."""
    wanted, at = reads[0].run.stored, reads[0].at
    for read in reads[1:]:
        stored = read.run.stored
        follows = stored.path == wanted.path and stored.start == wanted.stop
        if follows and read.at == at + wanted.size_bytes:
            wanted = FileRange(wanted.path, wanted.start, stored.stop)
        else:
            yield wanted, at
            wanted, at = stored, read.at
    yield wanted, at
