"""The bytes of an export that are this rank's: cast, summed and written where they stay.

Block by block through a few reused buffers, by threads that each do both, so that one casts
while another one writes. Nothing is read back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from ckptkit.execution.crew import run_crew
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.kernels.shares import Share, share_of
from ckptkit.planning.plan import Literal, Plan
from ckptkit.storage.buffers import aligned_buffer
from ckptkit.storage.shared_target import SharedTarget
from ckptkit.storage.syscalls import PAGE_BYTES
from ckptkit.training.export_casts import caster_of
from ckptkit.training.export_plan import BLOCK_BYTES, Block, Place, blocks_of
from ckptkit.training.staging import is_plain

WRITERS = 2
"""Threads of a rank; each holds one buffer of a block, and as much again to gather into."""


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


def write_parts(target: SharedTarget, plan: Plan, parts: Sequence[Part]) -> dict[Fqn, Share]:
    """Writes parts of tensors, and returns the share that each tensor has got from them.

    Raises:
        NoSpaceError: If the disk is full.
        OutputError: If something cannot be written.
        OverflowRefusedError: If a number does not fit the element type.
    """
    size = sum(part.size_bytes for part in parts)
    free = target.free_bytes()
    if size > free:
        raise NoSpaceError(
            f"this rank needs {size:,} bytes and {free:,} are free",
            hint="export to another disk, or with a smaller dtype",
        )
    sizes = {file.path: file.size_bytes for file in plan.files}
    for path in dict.fromkeys(part.place.path for part in parts):
        target.create(path, sizes[path])
    desks: list[_Desk] = []

    def work(jobs: Iterator[tuple[Part, Block]]) -> None:
        desk = _Desk(target)
        desks.append(desk)
        for part, block in jobs:
            desk.write(part, block)

    run_crew(WRITERS, _jobs(parts), work)
    shares: dict[Fqn, Share] = {}
    for desk in desks:
        for name, share in desk.shares.items():
            shares[name] = shares.get(name, Share()).joined(share)
    return shares


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
    # In the order of the files: the device then writes long stretches.
    for part in sorted(parts, key=lambda part: (part.place.path, part.place.start)):
        for block in blocks_of(part.box, part.place):
            yield part, block


class _Desk:
    """What one thread works with."""

    def __init__(self, target: SharedTarget) -> None:
        self.shares: defaultdict[Fqn, Share] = defaultdict(Share)
        self._target = target
        self._buffer = aligned_buffer(BLOCK_BYTES + 2 * PAGE_BYTES)
        self._casters: dict[tuple[DType, DType], Caster] = {}

    def write(self, part: Part, block: Block) -> None:
        """Casts a block, and writes its runs."""
        place, itemsize = part.place, part.place.spec.dtype.itemsize
        size = (block.stop - block.first) * itemsize
        # A single run lies in memory as it will lie on disk pages.
        low = (place.start + int(block.at[0])) % PAGE_BYTES if len(block.at) == 1 else 0
        data = self._buffer[low : low + size]
        self._fill(part, block, np.frombuffer(data, np.uint8))
        length, name = block.run_bytes, place.spec.name
        runs = (crc32(data[start : start + length]) for start in range(0, size, length))
        sums = np.fromiter(runs, np.uint32, len(block.at))
        share = share_of(block.at, length, sums, place.spec.size_bytes)
        self.shares[name] = self.shares[name].joined(share)
        self._target.write_runs(place.path, (block.at + place.start).tolist(), data)

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
