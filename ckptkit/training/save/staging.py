"""Copies the tensors of the state into the shared buffer: the only copy of a save."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ckptkit.core.geometry import slabs
from ckptkit.core.index import Span
from ckptkit.training.save.file_layout import CopyStep, SavePlan
from ckptkit.training.save.shared_memory import SharedBuffer
from ckptkit.training.state.pieces import Piece

logger = logging.getLogger(__name__)

_MEASURED_BYTES = 128 << 20
_MEASUREMENTS = 5
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only the current one
Pair = tuple[torch.Tensor, torch.Tensor]  # a place in the buffer, and what goes there


class Staged:
    """Copies of one wave into the buffer; those from the CPU are complete."""

    def __init__(
        self, events: Sequence[tuple[torch.device, Any]] = (), sources: Sequence[torch.Tensor] = ()
    ) -> None:
        self._events = tuple(events)
        self._sources = tuple(sources)

    def join(self) -> None:
        """Makes each device's current stream wait for the copies, without blocking the host.

        Does nothing while a graph is captured: what is captured runs when it is replayed, and this
        is called then.
        """
        if not self._events or torch.cuda.is_current_stream_capturing():
            return
        self._events = tuple(entry for entry in self._events if not entry[1].query())
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Waits until everything is in the buffer."""
        for device, event in self._events:
            # Elsewhere, a thread would use the first device, where a context takes 0.5 GB.
            with torch.cuda.device(device):
                event.synchronize()
        self._events, self._sources = (), ()


class Stager:
    """Copies pieces into a buffer according to a plan; used by one thread.

    Nothing is allocated on a device. A tensor on a CUDA device is copied asynchronously, unless its
    elements are not in row-major order.
    """

    def __init__(self, buffer: SharedBuffer, *, pin: bool = True) -> None:
        """Takes the buffer, which must not grow elsewhere while a plan is loaded."""
        self._buffer = buffer
        self._cuda = _CudaCopies(pin=pin)
        self._plan: SavePlan | None = None
        self._descriptor = -1  # of the memory that the plan is loaded into
        self._base = torch.empty(0, dtype=torch.uint8)
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._wave = -1  # whose literals are in place
        self._staged = Staged()

    def load(self, plan: SavePlan, wave: int | None = 0) -> None:
        """Prepares the buffer for a wave of a plan, and grows it if it is too small.

        The buffer must not be in use. Does nothing if the wave is loaded already.
        """
        if plan is not self._plan or self._descriptor != self._buffer.descriptor:
            self._staged.wait()
            self._plan, self._targets, self._wave = None, {}, -1
            if plan.buffer_bytes > self._buffer.size_bytes:
                self.close()
                self._buffer.reserve(plan.buffer_bytes)
            if self._buffer.size_bytes:
                self._base = torch.frombuffer(self._buffer.memory, dtype=torch.uint8)
            self._plan, self._descriptor = plan, self._buffer.descriptor
            self._cuda.prepare(plan.devices, self._base)
        if wave is None:
            return
        if self._wave != wave:
            memory = self._buffer.memory
            for start, data in plan.literals[wave]:
                memory[start : start + len(data)] = data
            self._wave = wave
        if wave not in self._targets:
            self._targets[wave] = [_target(self._base, step) for step in plan.copies[wave]]

    def stage(
        self, plan: SavePlan, pieces: Sequence[Piece], wave: int = 0, *, frozen: bool = True
    ) -> Staged:
        """Copies one wave into the buffer, which must not be in use by another one.

        Returns:
            The copies. Those from the CPU are complete; those from a device may still run.
        """
        self.load(plan, wave)
        targets, steps = self._targets[wave], plan.copies[wave]
        if not frozen:
            steps = steps[: len(steps) - len(plan.samples[wave])]
        with torch.no_grad():
            self._staged = self._copy(plan, steps, targets[: len(steps)], pieces)
        return self._staged

    def fetch(
        self, plan: SavePlan, pieces: Sequence[Piece], steps: Sequence[CopyStep]
    ) -> list[memoryview]:
        """Copies some elements to their places in the buffer, which is not in use, and waits.

        Returns:
            The bytes of each copy, valid until the next wave is staged.
        """
        self.load(plan, None)
        if len(plan.images) > 1:  # they may overwrite literals of another wave
            self._wave = -1
        with torch.no_grad():
            self._copy(plan, steps, [_target(self._base, step) for step in steps], pieces).wait()
        memory = self._buffer.memory
        return [memory[step.start : step.end] for step in steps]

    def join(self) -> None:
        """Makes each device's current stream wait for pending copies."""
        self._staged.join()

    def close(self) -> None:
        """Releases the buffer, which may be closed afterwards."""
        self._staged.wait()
        self._plan, self._targets, self._wave = None, {}, -1
        self._cuda.unpin()
        self._base = torch.empty(0, dtype=torch.uint8)

    def _copy(
        self,
        plan: SavePlan,
        steps: Sequence[CopyStep],
        targets: list[torch.Tensor],
        pieces: Sequence[Piece],
    ) -> Staged:
        sources = [_source(pieces[step.piece].local, step) for step in steps]
        if all(device.type == "cpu" for device in plan.devices):
            if sources:
                # Private, since there is no public function for many copies at once; a loop takes
                # as long for large tensors, and twice as long for small ones.
                torch._foreach_copy_(targets, sources)
            return Staged()
        prompt: list[Pair] = []
        rest: list[Pair] = []
        on_host: list[Pair] = []
        for target, source, step in zip(targets, sources, steps, strict=True):
            pairs = on_host if not source.is_cuda else prompt if step.prompt else rest
            pairs.append((target, source))
        staged = self._cuda.copy(prompt, rest)
        for target, source in on_host:
            target.copy_(source)
        return staged


class _CudaCopies:
    """Copies from CUDA devices, each on a stream of its own in parallel to the computation."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._pinned = 0  # address; 0 while nothing is
        self._streams: dict[torch.device, Any] = {}

    def prepare(self, devices: Sequence[torch.device], memory: torch.Tensor) -> None:
        """Creates the streams and pins the memory once, if tensors are on CUDA devices."""
        ours = [device for device in devices if device.type == "cuda"]
        for device in ours:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if not ours or not self._pin or self._pinned or not memory.numel():
            return
        # On the trainer's device, since the runtime would create a context on device 0 otherwise.
        with torch.cuda.device(ours[0]):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
            if int(status) == 0:
                self._pinned = memory.data_ptr()
                return
            with suppress(RuntimeError):  # clears the error, which the next kernel would report
                torch.zeros(1, device=ours[0])
        self._pin = False
        logger.warning(
            "the staging buffer of %.0f MB cannot be pinned (cudaHostRegister: error %d):"
            " copies from the device are slower and block longer; raise `ulimit -l`",
            memory.numel() / 1e6,
            int(status),
        )

    def unpin(self) -> None:
        """Unpins the memory before it is released; no copy may be under way."""
        if self._pinned:
            with torch.cuda.device(next(iter(self._streams))):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                runtime.cudaHostUnregister(self._pinned)
        self._pinned = 0

    def copy(self, prompt: Sequence[Pair], rest: Sequence[Pair]) -> Staged:
        """Starts the copies.

        The device completes the prompt ones before any later work; the rest is complete only after
        `Staged.join` or `Staged.wait`.
        """
        pairs = [*prompt, *rest]
        events = []
        for device in dict.fromkeys(source.device for _, source in pairs):
            side, current = self._streams[device], torch.cuda.current_stream(device)
            side.wait_stream(current)
            if _copy_on(side, device, prompt):
                current.wait_stream(side)
            _copy_on(side, device, rest)
            # A thread that waits for it sleeps, instead of taking a core from the training.
            with torch.cuda.device(device):
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                events.append((device, side.record_event(event)))
        for target, source in pairs:
            if not is_plain(source):
                copy_through_host(target, source)
        return Staged(events, [source for _, source in pairs])


def _copy_on(side: Any, device: torch.device, pairs: Sequence[Pair]) -> int:
    """Starts the copies from one device on a stream, and returns how many there are."""
    ours = [pair for pair in pairs if pair[1].device == device and is_plain(pair[1])]
    with torch.cuda.stream(side):
        for target, source in ours:
            target.copy_(source, non_blocking=True)
            source.record_stream(side)  # otherwise its memory could be reused
    return len(ours)


def is_plain(source: torch.Tensor) -> bool:
    """Returns whether the bytes in memory are the elements in row-major order."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def copy_through_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a tensor with any strides from a device, without allocating anything there.

    torch would make it contiguous on the device first. Instead the memory range with its elements
    is copied to the host and reordered there; this needs as much host memory temporarily, blocks,
    and runs at the rate of unpinned memory.
    """
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)
    )
    host = torch.empty(span, dtype=source.dtype)
    host.copy_(source.as_strided((span,), (1,), source.storage_offset()))
    target.copy_(host.as_strided(source.shape, source.stride()))


def measure_copy_limit(buffer: SharedBuffer) -> float:
    """Returns the bytes per second of a plain warm copy; 0 if the buffer is too small to measure.

    Overwrites the buffer, so it is called before a plan is loaded.
    """
    size = min(_MEASURED_BYTES, buffer.size_bytes // 2)
    if not size:
        return 0.0
    memory = torch.frombuffer(buffer.memory, dtype=torch.uint8)
    source, target = memory[:size], memory[size : 2 * size]
    target.copy_(source)
    seconds = []
    for _ in range(_MEASUREMENTS):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds)


def _target(base: torch.Tensor, step: CopyStep) -> torch.Tensor:
    return base[step.start : step.end].view(step.dtype).view(step.shape)


def _source(local: torch.Tensor, step: CopyStep) -> torch.Tensor:
    """Returns the part of a piece that a step copies, as a view."""
    if step.whole and local.shape == step.shape:
        return local
    local = local.detach()  # a view of it would keep torch from swapping its content
    if step.whole:
        return local.view(step.shape)
    if local.is_contiguous():
        return local.view(-1)[step.first : step.stop].view(step.shape)
    (slab,) = slabs(Span(step.first, step.stop), tuple(local.shape))
    part = local
    for axis, (offset, size) in enumerate(zip(slab.offsets, slab.sizes, strict=True)):
        part = part.narrow(axis, offset, size)
    return part
