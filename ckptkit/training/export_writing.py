"""The bytes of an export that are this rank's: cast, summed and written where they stay.

Block by block through a few reused buffers: the calling thread casts while others write. Nothing
is read back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import NoSpaceError
from ckptkit.core.geometry import slabs
from ckptkit.core.index import Box, Fqn, Span
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.kernels.shares import Share, share_of
from ckptkit.planning.plan import Literal, Plan
from ckptkit.storage.buffers import aligned_buffer
from ckptkit.storage.part_files import PartFile
from ckptkit.storage.shared_target import SharedTarget
from ckptkit.storage.staged_files import MIN_DIRECT_BYTES
from ckptkit.storage.syscalls import PAGE_BYTES
from ckptkit.training.export_casts import caster_of
from ckptkit.training.export_plan import BLOCK_BYTES, Block, Place, blocks_of
from ckptkit.training.staging import is_plain

WRITERS = 2
"""Threads of a rank that do nothing but write: one that casts as well would come to its processor
too late, and leave the device idle."""
_BUFFERS = WRITERS + 1


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that this rank writes.

    Attributes:
        place: Where the tensor lies in the output.
        dtype: Of the elements here, before they are cast.
        box: Which part of the tensor it is.
        local: The elements, in the shape of the box.
    """

    place: Place
    dtype: DType
    box: Box
    local: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes in the output."""
        return self.local.numel() * self.place.spec.dtype.itemsize


def write_parts(
    target: SharedTarget | PartFile, plan: Plan, parts: Sequence[Part]
) -> dict[Fqn, Share]:
    """Writes parts of tensors, and returns the share that each tensor has got from them.

    Raises:
        NoSpaceError: If the disk is full.
        OutputError: If something cannot be written.
        OverflowRefusedError: If a number does not fit the element type.
    """
    _check_room(target, plan, parts)
    sizes = {file.path: file.size_bytes for file in plan.files}
    for path in dict.fromkeys(part.place.path for part in parts):
        target.create(path, sizes[path])
    _settle(part.local.device for part in parts)
    desk = _Desk()
    under_way: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(WRITERS, "ckptkit-export") as writers:
        for part, block in _jobs(parts):
            full = len(under_way) == _BUFFERS
            buffer = under_way.popleft().result() if full else _buffer()
            starts, data = desk.cast(part, block, buffer)
            under_way.append(writers.submit(_write, target, part.place.path, starts, data, buffer))
        for written in under_way:
            written.result()
    return dict(desk.shares)


def _check_room(target: SharedTarget | PartFile, plan: Plan, parts: Sequence[Part]) -> None:
    """Refuses an output that does not fit, before this rank writes its part.

    Raises:
        NoSpaceError: If it does not.
    """
    if isinstance(target, PartFile):
        size, room = sum(part.size_bytes for part in parts), target.free_bytes()
        what = "this rank's part"
    else:
        size = sum(file.size_bytes for file in plan.files)
        room = target.room_bytes(file.path for file in plan.files)
        what = "the output"
    if size > room:
        raise NoSpaceError(
            f"{what} needs {size:,} bytes and {room:,} are free",
            hint="export to another disk, or with a smaller dtype",
        )


def _buffer() -> memoryview:
    return aligned_buffer(BLOCK_BYTES + 2 * PAGE_BYTES)


def _write(
    target: SharedTarget | PartFile,
    path: str,
    starts: Sequence[int],
    data: memoryview,
    buffer: memoryview,
) -> memoryview:
    """Writes runs, and returns the buffer that they lie in."""
    target.write_runs(path, starts, data)
    return buffer


def _settle(devices: Iterable[torch.device]) -> None:
    """Waits for what is queued on devices: the threads that copy from there have other streams."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def write_literals(target: SharedTarget, plan: Plan) -> None:
    """Makes all files of a plan and writes what is known of them beforehand; for one rank.

    Raises:
        NoSpaceError: If the disk is full.
        OutputError: If something cannot be written.
    """
    for file in plan.files:
        target.create(file.path, file.size_bytes)
        for segment in file.segments:
            if isinstance(segment.body, Literal):
                target.write(file.path, segment.start, memoryview(segment.body.data))


def _jobs(parts: Sequence[Part]) -> Iterator[tuple[Part, Block]]:
    # In the order of the files: the device then writes long stretches. What goes through the page
    # cache has to wait until nothing else is written to the file, so it comes last.
    def order(part: Part) -> tuple[bool, str, int]:
        return part.size_bytes < MIN_DIRECT_BYTES, part.place.path, part.place.start

    for part in sorted(parts, key=order):
        for block in blocks_of(part.box, part.place):
            yield part, block


class _Desk:
    """Where blocks are cast and summed."""

    def __init__(self) -> None:
        self.shares: defaultdict[Fqn, Share] = defaultdict(Share)
        self._casters: dict[tuple[DType, DType], Caster] = {}

    def cast(
        self, part: Part, block: Block, buffer: memoryview
    ) -> tuple[Sequence[int], memoryview]:
        """Returns where the runs of a block begin in its file, and their bytes in the buffer."""
        place, itemsize = part.place, part.place.spec.dtype.itemsize
        size = (block.stop - block.first) * itemsize
        # A single run lies in memory as it will lie on disk pages.
        low = (place.start + int(block.at[0])) % PAGE_BYTES if len(block.at) == 1 else 0
        data = buffer[low : low + size]
        self._fill(part, block, np.frombuffer(data, np.uint8))
        length, name = block.run_bytes, place.spec.name
        runs = (crc32(data[start : start + length]) for start in range(0, size, length))
        sums = np.fromiter(runs, np.uint32, len(block.at))
        share = share_of(block.at, length, sums, place.spec.size_bytes)
        self.shares[name] = self.shares[name].joined(share)
        return (block.at + place.start).tolist(), data

    def _fill(self, part: Part, block: Block, data: NDArray[np.uint8]) -> None:
        source, wanted = _elements(part.local, block), part.place.spec.dtype
        if part.dtype == wanted:
            data[:] = source
            return
        caster = self._casters.get((part.dtype, wanted))
        if caster is None:
            caster = self._casters[part.dtype, wanted] = caster_of(part.dtype, wanted)
        overflow = caster.cast(source, data)
        if overflow is not None:
            where = f"tensor {part.place.spec.name!r}"
            first = _position(block, overflow.first, wanted.itemsize) - overflow.first
            raise overflow_error(overflow, wanted, where=where, block_start=first)


def _position(block: Block, element: int, itemsize: int) -> int:
    """Returns where an element of a block lies in its tensor."""
    run, rest = divmod(element * itemsize, block.run_bytes)
    return int(block.at[run] + rest) // itemsize


def _elements(local: torch.Tensor, block: Block) -> NDArray[Any]:
    """Returns the bytes of the elements of a block, gathered first where they lie scattered."""
    if not (local.device.type == "cpu" and is_plain(local)):
        gathered = torch.empty(block.stop - block.first, dtype=local.dtype)
        at = 0
        for slab in slabs(Span(block.first, block.stop), tuple(local.shape)):
            part = local
            for axis, (offset, size) in enumerate(zip(slab.offsets, slab.sizes, strict=True)):
                part = part.narrow(axis, offset, size)
            gathered[at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()
        return _bytes_of(gathered)
    return _bytes_of(local.reshape(-1)[block.first : block.stop])


def _bytes_of(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.view(torch.uint8).numpy()
