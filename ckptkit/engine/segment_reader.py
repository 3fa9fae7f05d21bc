"""Makes the bytes of planned files: what an execution writes, and what can be read unwritten.

`SegmentReader.fill` fills a range of one segment for the executor. `SegmentReader.fill_range` fills
any bytes of a planned file, so that a plan is a folder that can be read without being written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import aligned_buffer, numpy_dtype
from ckptkit.core.geometry import cut_span
from ckptkit.core.index import Span
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.engine.kernels import Preparations
from ckptkit.engine.locate import READ_AHEAD_BYTES
from ckptkit.engine.outcome import part_span
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.engine.remote_reads import PlannedRead, reads_of
from ckptkit.plan.plan import (
    Compute,
    Copy,
    Demand,
    Kernel,
    Literal,
    OutputFile,
    RawCopy,
    SegmentRange,
    Task,
    TensorSpec,
)
from ckptkit.storage.base import Source

# A block of fp32 is then as large as one read. Smaller ones cost more calls than they save in
# the processor's cache, and much more where a chunk has to be passed over for each block.
COMPUTE_ELEMENTS = 1 << 20


class Inputs(Struct, frozen=True):
    """What a plan reads from: opened checkpoints, and the folders of side files."""

    origins: Mapping[str, Origin]
    folders: Mapping[str, Source]

    def with_own_checksums(self) -> Inputs:
        """Returns the same files, with checksums that only one reader of them adds to."""
        origins = {name: Origin(name, o.source, o.index) for name, o in self.origins.items()}
        return Inputs(origins, self.folders)


class SegmentReader:
    """Makes the bytes of segments from the sources; one per thread, with buffers that it reuses.

    `readers`: of the sources, by name.
    """

    def __init__(self, inputs: Inputs, preparations: Preparations) -> None:
        """Opens a reader for each source.

        `preparations`: of the plan's kernels, shared by the readers of all threads.
        """
        self._inputs = inputs
        self._preparations = preparations
        self.readers = {name: TensorReader(origin) for name, origin in inputs.origins.items()}
        self._is_remote = any(reader.cache.is_remote for reader in self.readers.values())
        self._prefetched: tuple[Task | None, int] = None, 0  # so many parts of a task
        self._scratch: dict[int, memoryview] = {}
        self._raw_bytes = 0
        self._leaf: SegmentRange | None = None
        self._leaf_block = memoryview(bytearray())

    def take_bytes_read(self) -> int:
        """Returns how much was read from the sources since the last call."""
        total, self._raw_bytes = self._raw_bytes, 0
        for reader in self.readers.values():
            total += reader.cache.bytes_read
            reader.cache.bytes_read = 0
        return total

    def clear(self) -> None:
        """Frees the memory of what was prefetched."""
        for reader in self.readers.values():
            reader.clear()

    def prefetch_parts(self, task: Task, at: int, filled: Container[int] = ()) -> None:
        """Fetches what a part of a task reads, with as many of the following ones as fit in.

        `filled` are the parts that need no read.
        """
        if not self._is_remote or (self._prefetched[0] is task and at < self._prefetched[1]):
            return
        wanted: list[PlannedRead] = []
        for number, following in enumerate(task.parts[at:], at):
            more = [] if number in filled else self._remote(reads_of(following))
            if self._bytes_of([*wanted, *more]) > READ_AHEAD_BYTES:
                break
            wanted += more
            self._prefetched = task, number + 1
        self._prefetch(wanted)

    def _prefetch_blocks(self, kernel: Kernel, spec: TensorSpec, block: Span, stop: int) -> None:
        """Fetches what a block is computed from, and the blocks after it up to `stop`."""
        if not self._is_remote:
            return
        wanted: list[PlannedRead] = []
        size, low = block.stop - block.start, block.start
        while low < stop:
            demands = kernel.demands(spec, Span(low, min(low + size, stop)))
            more = self._remote((d.origin, d.key, d.place) for d in demands)
            if wanted and self._bytes_of([*wanted, *more]) > READ_AHEAD_BYTES:
                break
            wanted, low = [*wanted, *more], low + size
        if self._bytes_of(wanted) <= READ_AHEAD_BYTES:
            self._prefetch(wanted)

    def _remote(self, reads: Iterable[PlannedRead]) -> list[PlannedRead]:
        return [read for read in reads if self.readers[read[0]].cache.is_remote]

    def _bytes_of(self, wanted: Iterable[PlannedRead]) -> int:
        origins = self._inputs.origins
        return sum(
            (span.stop - span.start) * origins[name].index.tensors[key].stored_dtype.itemsize
            for name, key, span in wanted
        )

    def _prefetch(self, wanted: Sequence[PlannedRead]) -> None:
        for name in dict.fromkeys(name for name, _, _ in wanted):
            self.readers[name].prefetch([(k, span) for other, k, span in wanted if other == name])

    def fill_range(self, file: OutputFile, start: int, stop: int, target: memoryview) -> None:
        """Fills a buffer with the bytes `[start, stop)` of a planned file.

        What kernels compute is computed in the same blocks as when the file is written, since
        products of matrices are rounded as their blocks are cut. The leaf of a tensor that was
        computed last is kept for the next call.

        `file`: without a `Trailer`: its bytes follow from what is written before it. `stop`: first
        byte after them. `target`: as many bytes.
        """
        task = Task(0, start, stop, tuple(_parts_between(file, start, stop)))
        at = 0
        for number, part in enumerate(task.parts):
            low = max(start - part.segment.start, part.start)
            high = min(stop - part.segment.start, part.stop)
            self.prefetch_parts(task, number)
            view = target[at : at + high - low]
            if low == part.start and high == part.stop:
                self.fill(part, view)
            else:
                begin = low - part.start
                view[:] = self._computed(part)[begin : begin + len(view)]
            at += len(view)
        self.clear()

    def fill(self, part: SegmentRange, view: memoryview) -> None:
        """Fills the buffer of one part of a segment; `part` is cut at the leaves of digests."""
        body, spec = part.segment.body, part.segment.spec
        if isinstance(body, Literal):
            view[:] = body.data[part.start : part.stop]
        elif isinstance(body, RawCopy):
            folder = self._inputs.folders[body.origin]
            folder.read_into(body.path, body.start + part.start, view)
            self._raw_bytes += len(view)
        elif isinstance(body, Copy) and spec is not None:
            self.readers[body.origin].fill(body.key, part_span(part, spec), view)
        elif isinstance(body, Compute) and spec is not None:
            self._compute(body, spec, part_span(part, spec), view)
        else:
            raise NotImplementedError(f"{type(body).__name__} segments need another engine")

    def _computed(self, part: SegmentRange) -> memoryview:
        """Returns the bytes of a part, from the last call if they were wanted there."""
        size, last = part.stop - part.start, self._leaf
        is_last = last is not None and last.segment is part.segment
        if last is None or not is_last or (last.start, last.stop) != (part.start, part.stop):
            self._leaf = None
            if len(self._leaf_block) < size:
                self._leaf_block = aligned_buffer(size)
            self.fill(part, self._leaf_block[:size])
            self._leaf = part
        return self._leaf_block[:size]

    def _compute(self, body: Compute, spec: TensorSpec, span: Span, view: memoryview) -> None:
        target = np.frombuffer(view, numpy_dtype(spec.dtype))
        kernel = self._preparations.kernel(body.kernel, spec, self._read)
        grain = kernel.grain_elements(spec)
        step = max(grain, (body.most_elements or COMPUTE_ELEMENTS) // grain * grain)
        for block in cut_span(span, step):
            self._prefetch_blocks(kernel, spec, block, span.stop)
            inputs = [
                self._input(slot, demand) for slot, demand in enumerate(kernel.demands(spec, block))
            ]
            low, high = block.start - span.start, block.stop - span.start
            kernel.run(spec, block, inputs, target[low:high])
        self._preparations.settle(spec, span.stop - span.start)

    def _read(self, demand: Demand) -> NDArray[Any]:
        """Reads into memory of its own."""
        entry = self._inputs.origins[demand.origin].index.tensors[demand.key]
        elements = np.empty(demand.place.stop - demand.place.start, numpy_dtype(entry.dtype))
        self.readers[demand.origin].fill(demand.key, demand.place, elements.view(np.uint8).data)
        return elements

    def _input(self, slot: int, demand: Demand) -> NDArray[Any]:
        entry = self._inputs.origins[demand.origin].index.tensors[demand.key]
        size = (demand.place.stop - demand.place.start) * entry.dtype.itemsize
        scratch = self._scratch.get(slot)
        if scratch is None or len(scratch) < size:
            scratch = self._scratch[slot] = aligned_buffer(size)
        self.readers[demand.origin].fill(demand.key, demand.place, scratch[:size])
        return np.frombuffer(scratch[:size], numpy_dtype(entry.dtype))


def _parts_between(file: OutputFile, start: int, stop: int) -> Iterator[SegmentRange]:
    """Yields the parts of segments that have some of the bytes `[start, stop)` of a file.

    What is computed comes in leaves, all else in the elements or bytes that are wanted.
    """
    first = max(bisect_right(file.segments, start, key=attrgetter("start")) - 1, 0)
    for number, segment in enumerate(islice(file.segments, first, None), first):
        if segment.start >= stop:
            return
        low, high = max(start, segment.start) - segment.start, min(stop, segment.stop)
        high -= segment.start
        if low >= high:
            continue
        size = segment.stop - segment.start
        grain = LEAF_BYTES if isinstance(segment.body, Compute) else 1
        if grain == 1 and segment.spec is not None:
            grain = segment.spec.dtype.itemsize
        low, high = low // grain * grain, min(size, -(-high // grain) * grain)
        for at in range(low // LEAF_BYTES * LEAF_BYTES, high, LEAF_BYTES):
            whole = SegmentRange(number, segment, at, min(at + LEAF_BYTES, size))
            yield replace(whole, start=max(at, low), stop=min(whole.stop, high))
