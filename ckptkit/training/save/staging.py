"""The memory that a trainer shares with its writer, and copies into it: the only copy of a save."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from ckptkit.core.errors import NoSpaceError
from ckptkit.core.geometry import slabs
from ckptkit.core.index import Span
from ckptkit.storage.local.control_groups import available_bytes
from ckptkit.storage.local.disk import is_out_of_space, is_refused
from ckptkit.training.save.file_layout import CopyStep, SavePlan
from ckptkit.training.state.pieces import Piece

logger = logging.getLogger(__name__)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name
_HINT = "set staging_limit, so that the state is staged in waves through a smaller buffer"
_PLACE_HINT = f"{_HINT}, or set TMPDIR to a folder with room"
_NO_MEMORY = frozenset({errno.ENOMEM, errno.EFBIG})


class MemoryPlaces(Struct, frozen=True):
    """Sources of shared memory, in this order."""

    # Whether to request memory without a name, which no size of a mount limits
    anonymous: bool = hasattr(os, "memfd_create")
    # A folder in memory, or None
    memory_folder: Path | None = Path("/dev/shm")  # noqa: S108  where Linux has it
    disk_folder: Path | None = None  # a folder on a disk; None for the system's temporary folder


class SharedBuffer:
    """Writable memory with a descriptor that can be passed to another process.

    All pages are allocated at once: later writes neither wait for the kernel nor fail for lack of
    memory. A forked child does not get the memory.

    Attributes:
        memory: The bytes.
        descriptor: -1 without memory; new memory has a number that was never used before.
        kind: "memfd", "shm" or "file"; empty before the first `reserve`.
        note: What the user should know of it; may be empty.
    """

    def __init__(self, places: MemoryPlaces | None = None) -> None:
        """Allocates no memory yet."""
        self._places = places or MemoryPlaces()
        self._map: mmap.mmap | None = None
        self._highest = -1
        self.memory = memoryview(b"")
        self.descriptor = -1
        self.kind = ""
        self.note = ""

    @property
    def size_bytes(self) -> int:
        return len(self.memory)

    def reserve(self, size_bytes: int) -> bool:
        """Makes the buffer at least this large; the content is lost if it grows.

        Old memory must not be in use any more: it is released even if views of it exist.

        Returns:
            Whether the memory is new.
        """
        import fcntl  # not there on Windows

        if size_bytes <= self.size_bytes:
            return False
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.close()  # first, so that old and new memory never exist at once
        descriptor, kind, note = self._obtain(size_bytes)
        # To a number that this buffer never had, so that it looks changed.
        self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, self._highest + 1)
        os.close(descriptor)
        self._highest = self.descriptor
        try:
            memory = mmap.mmap(self.descriptor, size_bytes)
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                with suppress(OSError):  # only ever a matter of speed
                    memory.madvise(getattr(mmap, advice, mmap.MADV_NORMAL))
            try:
                memory.madvise(_POPULATE_WRITE)
            except OSError:  # an older kernel
                np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
        except OSError as error:
            self.close()
            raise _no_space(size_bytes, "memory", str(error)) from error
        self._map, self.memory = memory, memoryview(memory)
        self.kind, self.note = kind, note
        return True

    def close(self) -> None:
        """Releases the memory; a second call does nothing.

        It is truncated as well, so that another process that has it mapped does not keep it.
        """
        with suppress(BufferError):  # a view exists; the memory is released with the last one
            self.memory.release()
            if self._map is not None:
                self._map.close()
        self.memory, self._map = memoryview(b""), None
        if self.descriptor != -1:
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
        self.descriptor = -1

    def close_descriptor(self) -> None:
        """Closes the descriptor and leaves the content alone, as in a forked child."""
        if self.descriptor != -1:
            os.close(self.descriptor)
        self.descriptor = -1

    def _obtain(self, size_bytes: int) -> tuple[int, str, str]:
        """Returns the descriptor of new memory, its kind, and a note for the user."""
        places = self._places
        short = ""
        available = available_bytes()
        if available is not None and available < size_bytes:
            # A control group with a limit would be killed without an error.
            raise NoSpaceError(
                f"{_megabytes(size_bytes)} of memory are needed for staging,"
                f" and {_megabytes(available)} are available",
                hint=_HINT,
            )
        if places.anonymous:
            with suppress(OSError):  # refused by the kernel, or by a container's filter
                descriptor = os.memfd_create("ckptkit", os.MFD_CLOEXEC)
                return _filled(descriptor, size_bytes, "memory"), "memfd", ""
        if places.memory_folder is not None:
            try:
                return _file_in(places.memory_folder, size_bytes), "shm", ""
            except NoSpaceError as error:
                short = error.message
        folder = places.disk_folder or Path(tempfile.gettempdir())
        descriptor = _file_in(folder, size_bytes)
        reason = short or "shared memory is disabled"
        return descriptor, "file", f"{reason}: staging in a file under {str(folder)!r}, slower"


def _file_in(folder: Path, size_bytes: int) -> int:
    """Returns the descriptor of a new file without a name."""
    place = repr(str(folder))
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        if free >= size_bytes or not status.f_blocks:  # some file systems report no sizes
            descriptor, name = tempfile.mkstemp(prefix=".ckptkit-staging-", dir=folder)
            Path(name).unlink()
            return _filled(descriptor, size_bytes, place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NoSpaceError(f"{place} cannot be used ({reason})", hint=_PLACE_HINT) from error
    raise NoSpaceError(
        f"{place} has {_megabytes(free)} free, where {_megabytes(size_bytes)} are needed",
        hint=_PLACE_HINT,
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def _filled(descriptor: int, size_bytes: int, place: str) -> int:
    """Allocates all memory now, so that a lack of it is an error here, and no signal later."""
    try:
        try:
            allocate = getattr(os, "posix_fallocate", None)  # not there on macOS
            if allocate is not None:
                allocate(descriptor, 0, size_bytes)
        except OSError as error:
            if not is_refused(error):
                raise
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        os.close(descriptor)
        if is_out_of_space(error) or error.errno in _NO_MEMORY:
            raise _no_space(size_bytes, place, str(error)) from error
        raise
    return descriptor


def _no_space(size_bytes: int, place: str, reason: str) -> NoSpaceError:
    return NoSpaceError(
        f"{place} refused {_megabytes(size_bytes)} for staging: {reason}",
        hint=_HINT,
    )


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
        self._may_pin = pin
        self._pinned = 0  # address; 0 while nothing is
        self._streams: dict[torch.device, Any] = {}  # one for each CUDA device
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
            self._pin([device for device in plan.devices if device.type == "cuda"])
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
        if self._pinned:
            with torch.cuda.device(next(iter(self._streams))):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                runtime.cudaHostUnregister(self._pinned)
        self._pinned = 0
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
        staged = self._copy_from_devices(prompt, rest)
        for target, source in on_host:
            target.copy_(source)
        return staged

    def _pin(self, devices: Sequence[torch.device]) -> None:
        """Creates a stream for each CUDA device, and pins the buffer once."""
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if not devices or not self._may_pin or self._pinned or not self._base.numel():
            return
        # On the trainer's device, since the runtime would create a context on device 0 otherwise.
        with torch.cuda.device(devices[0]):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            size_bytes = self._base.numel()
            status = runtime.cudaHostRegister(self._base.data_ptr(), size_bytes, _PORTABLE)
            if int(status) == 0:
                self._pinned = self._base.data_ptr()
                return
            with suppress(RuntimeError):  # clears the error, which the next kernel would report
                torch.zeros(1, device=devices[0])
        self._may_pin = False
        logger.warning(
            "the staging buffer of %.0f MB cannot be pinned (cudaHostRegister: error %d):"
            " copies from the device are slower and block longer; raise `ulimit -l`",
            size_bytes / 1e6,
            int(status),
        )

    def _copy_from_devices(self, prompt: Sequence[Pair], rest: Sequence[Pair]) -> Staged:
        """Starts the copies from CUDA devices, in parallel to the computation.

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
