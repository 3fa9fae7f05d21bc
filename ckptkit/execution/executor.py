"""Runs a plan on this machine: threads that read, check, transform, digest and write."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.crc import crc32
from ckptkit.core.index import Span
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.execution.budget import ExecutionSettings
from ckptkit.execution.crew import run_crew
from ckptkit.execution.events import BytesWritten, Listener, Started
from ckptkit.execution.preparing import Preparations
from ckptkit.execution.tensors import Origin, TensorReader
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.checksums import RangeChecksum, join_leaves, leaf_digest
from ckptkit.planning.plan import (
    TASK_BYTES,
    Compute,
    Copy,
    Demand,
    Literal,
    Part,
    Plan,
    RawCopy,
    Segment,
    Task,
    TensorSpec,
    Trailer,
)
from ckptkit.storage.base import Source, Target
from ckptkit.storage.buffers import aligned_buffer
from ckptkit.storage.syscalls import PAGE_BYTES

# A block of fp32 is then as large as one read. Smaller ones cost more calls than they save in
# the processor's cache, and much more where a chunk has to be passed over for each block.
COMPUTE_ELEMENTS = 1 << 20


@dataclass(slots=True)
class Digests:
    """Leaves of digests, by tensor name and by path of side file."""

    tensors: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    files: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))

    def of_tensor(self, name: str) -> str:
        """Returns the digest of a tensor's bytes; an empty tensor has no leaves."""
        return join_leaves(self.tensors.get(name, {}))

    def of_file(self, path: str) -> str:
        """Returns the digest of a side file's bytes."""
        return join_leaves(self.files.get(path, {}))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a plan reads from: opened checkpoints, and places that hold side files."""

    origins: Mapping[str, Origin]
    folders: Mapping[str, Source]


class Executor:
    """Executes one plan into one target."""

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        target: Target,
        settings: ExecutionSettings,
        listener: Listener,
    ) -> None:
        self.digests = Digests()
        self._plan = plan
        self._inputs = inputs
        self._target = target
        self._settings = settings
        self._listener = listener
        self._lock = threading.Lock()
        self._preparations = Preparations()
        self._checksums = {
            (number, tensor): RangeChecksum()
            for number, file in enumerate(plan.files)
            for segment in file.segments
            if isinstance(segment.body, Trailer)
            for _, tensor in segment.body.fields
        }

    def run(self) -> Digests:
        """Fills every file of the plan; what is written is not yet durable or visible.

        Returns:
            The digests of what was written.

        Raises:
            CkptkitError: The first error of any worker; the others are stopped.
        """
        self._listener(Started(self._plan.bytes_written))
        for file in self._plan.files:
            self._target.create(file.path, file.size_bytes)
        with self._preparations:
            run_crew(self._settings.workers, self._plan.tasks(), self._worker)
        self._write_trailers()
        for origin in self._inputs.origins.values():
            origin.ledger.finish()
        return self.digests

    def _worker(self, tasks: Iterator[Task]) -> None:
        desk = _Desk(self._inputs, self._preparations)
        for task in tasks:
            data = desk.prepare(task)
            at = 0
            for part in task.parts:
                view = data[at : at + part.stop - part.start]
                desk.fill(part, view)
                self._digest(task, part, view)
                at += len(view)
            self._target.write(self._plan.files[task.file].path, task.start, data)
            self._listener(BytesWritten(len(data)))

    def _write_trailers(self) -> None:
        """Fills in what depends on the bytes written before it."""
        for number, file in enumerate(self._plan.files):
            for segment in file.segments:
                if isinstance(segment.body, Trailer):
                    data = bytearray(segment.body.template)
                    for position, tensor in segment.body.fields:
                        crc = self._checksums[number, tensor].value(_size(file.segments[tensor]))
                        data[position : position + 4] = crc.to_bytes(4, "little")
                    self._target.write(file.path, segment.start, memoryview(data))

    def _digest(self, task: Task, part: Part, view: memoryview) -> None:
        path = self._plan.files[task.file].path
        pieces = self._checksums.get((task.file, part.number))
        if pieces is not None:
            pieces.add(part.start, len(view), crc32(view))
        leaf = part.start // LEAF_BYTES
        book, name = self.digests.files, path
        if part.segment.spec is not None:
            book, name = self.digests.tensors, str(part.segment.spec.name)
        elif len(self._plan.files[task.file].segments) > 1:
            return  # headers and trailers are proven by what they say
        digest = leaf_digest(view)
        with self._lock:
            book[name][leaf] = digest


def _size(segment: Segment) -> int:
    return segment.stop - segment.start


class _Desk:
    """What one worker has at hand: readers, and buffers that it uses again and again."""

    def __init__(self, inputs: Inputs, preparations: Preparations) -> None:
        self._inputs = inputs
        self._preparations = preparations
        self._readers = {name: TensorReader(origin) for name, origin in inputs.origins.items()}
        self._block = aligned_buffer(TASK_BYTES + PAGE_BYTES)
        self._scratch: dict[int, memoryview] = {}

    def prepare(self, task: Task) -> memoryview:
        """Returns a buffer for a task, lying in memory as it will lie on disk pages."""
        low = task.start % PAGE_BYTES
        return self._block[low : low + task.stop - task.start]

    def fill(self, part: Part, view: memoryview) -> None:
        """Fills the buffer of one part of a segment."""
        body, spec = part.segment.body, part.segment.spec
        if isinstance(body, Literal):
            view[:] = body.data[part.start : part.stop]
        elif isinstance(body, Trailer):
            view[:] = body.template[part.start : part.stop]
        elif isinstance(body, RawCopy):
            folder = self._inputs.folders[body.origin]
            folder.read_into(body.path, body.start + part.start, view)
        elif isinstance(body, Copy) and spec is not None:
            self._readers[body.origin].fill(body.key, _span_of(part, spec), view)
        elif isinstance(body, Compute) and spec is not None:
            self._compute(body, spec, _span_of(part, spec), view)
        else:
            raise NotImplementedError(f"{type(body).__name__} segments need another engine")

    def _compute(self, body: Compute, spec: TensorSpec, span: Span, view: memoryview) -> None:
        target = np.frombuffer(view, numpy_dtype(spec.dtype))
        kernel = self._preparations.kernel(body.kernel, spec, self._read)
        grain = kernel.grain_elements(spec)
        step = max(grain, COMPUTE_ELEMENTS // grain * grain)
        for start in range(span.start, span.stop, step):
            block = Span(start, min(start + step, span.stop))
            inputs = [
                self._input(slot, demand) for slot, demand in enumerate(kernel.demands(spec, block))
            ]
            low, high = block.start - span.start, block.stop - span.start
            kernel.run(spec, block, inputs, target[low:high])
        self._preparations.settle(spec, span.stop - span.start)

    def _read(self, demand: Demand) -> NDArray[Any]:
        """Reads into memory of its own."""
        entry = self._inputs.origins[demand.origin].index.tensors[demand.key]
        found = np.empty(demand.place.stop - demand.place.start, numpy_dtype(entry.dtype))
        self._readers[demand.origin].fill(demand.key, demand.place, found.view(np.uint8).data)
        return found

    def _input(self, slot: int, demand: Demand) -> NDArray[Any]:
        entry = self._inputs.origins[demand.origin].index.tensors[demand.key]
        size = (demand.place.stop - demand.place.start) * entry.dtype.itemsize
        scratch = self._scratch.get(slot)
        if scratch is None or len(scratch) < size:
            scratch = self._scratch[slot] = aligned_buffer(size)
        self._readers[demand.origin].fill(demand.key, demand.place, scratch[:size])
        return np.frombuffer(scratch[:size], numpy_dtype(entry.dtype))


def _span_of(part: Part, spec: TensorSpec) -> Span:
    return Span(part.start // spec.dtype.itemsize, part.stop // spec.dtype.itemsize)
