"""The plan: where the bytes of every output file come from, its tasks, and shares of them.

Pure values, printable, picklable; tasks and shares are the same in every process that makes the
same plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UsageError
from ckptkit.core.index import Fqn, Key, Shape, Span
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.core.object_parts import CopiedRange, ObjectPart, SharedRange, choose_part_bytes

TASK_BYTES = LEAF_BYTES
SOURCE = "source"  # the origin that a conversion reads
FILLING = "filling"  # the origin of tensors that the source lacks


class TensorSpec(Struct, frozen=True):
    """A tensor as it will be written, dense and row-major."""

    name: Fqn
    dtype: DType
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Demand(Struct, frozen=True):
    """A part of a source tensor that a kernel reads for one block."""

    origin: str
    key: Key
    place: Span


class Reading(Struct, frozen=True):
    """Reads parts of source tensors for a kernel that is being prepared."""

    # Returns the elements, one-dimensional, in an array that only the caller uses.
    read: Callable[[Demand], NDArray[Any]]
    # Returns them read-only, from memory if another tensor needed them before.
    read_shared: Callable[[Demand], NDArray[Any]]
    # Opens a resource on the first call with a key; it is closed when all is written.
    open_once: Callable[[Hashable, Callable[[], AbstractContextManager[Any]]], Any]
    # Returns the array of a key that another tensor made, if it is still in memory, or makes one.
    share: Callable[[Hashable, Callable[[], NDArray[Any]]], NDArray[Any]]


class Kernel:
    """Computes blocks of an output tensor from parts of source tensors; threads share it.

    One that has to read first what all blocks need is not `is_ready`: `prepare` returns the kernel
    that computes.
    """

    __slots__ = ()

    @property
    def is_ready(self) -> bool:
        return True

    def prepare(self, _out: TensorSpec, _reading: Reading) -> Kernel:
        return self

    def grain_elements(self, _out: TensorSpec) -> int:
        """Returns how many elements a block must be a multiple of, tail excepted."""
        return 1

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Returns what the block is computed from."""
        raise NotImplementedError

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Fills `target`, the block's elements in row-major order."""
        raise NotImplementedError


class Literal(Struct, frozen=True):
    """Bytes known when planning: headers, indexes, configurations."""

    data: bytes


class Copy(Struct, frozen=True):
    """A source tensor, assembled from its chunks without change."""

    origin: str
    key: Key
    # The ranges of the output file within the segment that its store copies itself, by their
    # starts.
    copied: tuple[CopiedRange, ...] = ()


class Compute(Struct, frozen=True):
    """A tensor that a kernel computes from the source tensors `reads`."""

    kernel: Kernel
    reads: tuple[tuple[str, Key], ...]  # the origin and the key of each source tensor
    # How many it computes at a time, for a kernel that reads much for each; None for as many as the
    # engine chooses.
    most_elements: int | None = None


class RawCopy(Struct, frozen=True):
    """A byte range of a side file, from `start` on, unchanged."""

    origin: str
    path: str
    start: int = 0


class Trailer(Struct, frozen=True):
    """Bytes that depend on checksums of the segments before it, such as a zip's directory."""

    template: bytes
    fields: tuple[tuple[int, int], ...]
    """Where the little-endian CRC-32 of a segment goes: `(position, segment)`."""


Body = Literal | Copy | Compute | RawCopy | Trailer


class Product(Struct, frozen=True):
    """An output tensor and how it is produced."""

    spec: TensorSpec
    body: Copy | Compute
    # The tensor that it is best written after, as both are made of the same elements.
    after: Fqn | None = None


class StackedPart(Struct, frozen=True):
    """Where a product is in a larger tensor, whose first axes count layers or experts."""

    name: Fqn
    index: Shape  # the index of the product along each of these axes; it has one index along them
    counts: Shape  # the sizes of these axes

    @property
    def part_name(self) -> Fqn:
        """The name of the product, such as `decoder.layers.mlp.linear_fc2.weight[3]`."""
        if not self.index:
            return self.name
        return Fqn(f"{self.name}[{','.join(map(str, self.index))}]")


class Segment(Struct, frozen=True):
    """A byte range `[start, stop)` of an output file; `spec` is set for tensors."""

    start: int
    stop: int
    body: Body
    spec: TensorSpec | None = None


class OutputFile(Struct, frozen=True):
    """A file to write: contiguous segments from byte 0 to `size_bytes`."""

    path: str
    size_bytes: int
    segments: Sequence[Segment]
    # Blocks that its file system may take from files of the sources, in order.
    shared: tuple[SharedRange, ...] = ()


def copied_ranges(segment: Segment) -> tuple[CopiedRange, ...]:
    """Returns the ranges of a segment that the store of the output copies itself."""
    return segment.body.copied if isinstance(segment.body, Copy) else ()


class SegmentRange(Struct, frozen=True):
    """The bytes `[start, stop)` of a segment, counted from its first byte.

    `number` is the segment's position in its file.
    """

    number: int
    segment: Segment
    start: int
    stop: int


class Task(Struct, frozen=True):
    """A byte range of one output file that is filled, digested and written in one step.

    No leaf of a tensor's digest is split between two tasks, so tasks are independent.
    """

    file: int
    start: int
    stop: int
    parts: tuple[SegmentRange, ...]


class Plan(Struct, frozen=True):
    """Everything that an execution does."""

    files: tuple[OutputFile, ...]  # the output files; all are written in full
    dropped: Mapping[Fqn, Fqn]  # tied names that are not written, with the name that replaces each
    notes: tuple[str, ...] = ()  # messages for the user, before it runs

    @property
    def bytes_written(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def shared_bytes(self) -> int:
        """What its file system may take from the sources."""
        return sum(part.stored.size_bytes for file in self.files for part in file.shared)

    def specs(self) -> Iterator[tuple[OutputFile, Segment, TensorSpec]]:
        """Yields every tensor to be written, with its file and segment."""
        for file in self.files:
            for segment in file.segments:
                if segment.spec is not None:
                    yield file, segment, segment.spec

    def tasks(self) -> Iterator[Task]:
        """Cuts the files into tasks, lazily and in order."""
        for number, file in enumerate(self.files):
            yield from cut_into_tasks(number, file)


def cut_into_tasks(number: int, file: OutputFile, most_bytes: int | None = None) -> Iterator[Task]:
    """Cuts one file, number `number` of the plan, into byte ranges of at most `most_bytes`.

    They come in order. `most_bytes` is a multiple of `TASK_BYTES`, which is the default.
    """
    most = most_bytes or TASK_BYTES
    parts: list[SegmentRange] = []
    start = size = 0
    for part in _parts_of(file):
        length = part.stop - part.start
        is_apart = part.segment.start + part.start != start + size
        left = part.segment.stop - part.segment.start - part.start
        # Tasks begin where the chunks of a source do, which are as large or a fraction of it.
        begins_task = part.start % most == 0 and left >= most
        if parts and (is_apart or size + length > most or begins_task):
            yield Task(number, start, start + size, tuple(parts))
            parts = []
        if not parts:
            start, size = part.segment.start + part.start, 0
        parts.append(part)
        size += length
    if parts:
        yield Task(number, start, start + size, tuple(parts))


def _parts_of(file: OutputFile) -> Iterator[SegmentRange]:
    """Yields the ranges of segments that the store does not copy, cut at the leaves of digests."""
    for position, segment in enumerate(file.segments):
        copied = copied_ranges(segment)
        firsts = [segment.start, *(part.stop for part in copied)]
        lasts = [*(part.start for part in copied), segment.stop]
        for first, last in zip(firsts, lasts, strict=True):
            for low in range(first - segment.start, last - segment.start, LEAF_BYTES):
                high = min(low + LEAF_BYTES, last - segment.start)
                yield SegmentRange(position, segment, low, high)


def lay_out_file(path: str, bodies: Sequence[tuple[int, Body, TensorSpec | None]]) -> OutputFile:
    """Lays out segments `(size_bytes, body, spec)` one after the other in a file."""
    segments, at = [], 0
    for size_bytes, body, spec in bodies:
        segments.append(Segment(at, at + size_bytes, body, spec))
        at += size_bytes
    return OutputFile(path, at, tuple(segments))


def literal_file(path: str, content: bytes) -> OutputFile:
    """Lays out a file whose content is known."""
    return lay_out_file(path, [(len(content), Literal(content), None)])


def name_order(name: str) -> list[tuple[int, str]]:
    """Returns the sort key of a tensor's name, in which numbers are sorted by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def split_by_size(products: Sequence[Product], max_file_bytes: int) -> list[list[Product]]:
    """Fills files in the order of the tensors, each up to `max_file_bytes` of tensor data.

    A tensor larger than that gets a file of its own; no tensor is ever split over files.
    There is always at least one file. Headers do not count.
    """
    files: list[list[Product]] = [[]]
    room = max_file_bytes
    for product in products:
        size = product.spec.size_bytes
        if files[-1] and size > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(product)
        room -= size
    return files


def name_shards(stem: str, extension: str, count: int) -> list[str]:
    """Names the files of a set as Hugging Face does.

    >>> name_shards("model", "safetensors", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [f"{stem}.{extension}"]
    return [f"{stem}-{i:05d}-of-{count:05d}.{extension}" for i in range(1, count + 1)]


# Large enough to make the cost of starting a share negligible, small enough to repeat one elsewhere
# and to show progress.
SHARE_BYTES = 32 * TASK_BYTES
_SHARES_EACH = 8  # at least, so that other workers can take some from a slow one
_SLICE = re.compile(r"(\d{1,6})/(\d{1,6})")


class Share(Struct, frozen=True):
    """One of `count` parts of a plan that have about as many bytes each."""

    number: int  # from 0 to `count` - 1
    count: int  # the number of shares
    in_parts: bool = False  # whether no part of an object is split between shares, as uploads need

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_slice(text: str) -> Share:
    """Parses `I/N` as a share.

    >>> str(parse_slice("0/4"))
    '0/4'
    """
    match = _SLICE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(
            f"{text!r} is not I/N with I from 0 to N - 1",
            where="--slice",
            hint="under srun pass --slice $SLURM_PROCID/$SLURM_NTASKS",
        )
    return Share(int(match[1]), int(match[2]))


def tasks_of(plan: Plan, share: Share) -> Iterator[Task]:
    """Yields the tasks of a share, lazily and in the plan's order.

    With all files laid end to end, a task, or the group of tasks that makes a part of an object, is
    in the share in which it begins: a share reads neighbouring bytes, and cuts only its own files.
    """
    total = plan.bytes_written
    low = -(-share.number * total // share.count)
    high = -(-(share.number + 1) * total // share.count)
    at = 0
    for number, file in enumerate(plan.files):
        if at < high and low < at + file.size_bytes:
            least_bytes = choose_part_bytes(file.size_bytes) if share.in_parts else 1
            for group in _groups(cut_into_tasks(number, file), least_bytes):
                if low <= at + group[0].start < high:
                    yield from group
        at += file.size_bytes


def cut_object_parts(file: OutputFile) -> tuple[ObjectPart, ...]:
    """Cuts a file into the parts of an object; no part has the bytes of two shares."""
    groups = _groups(cut_into_tasks(0, file), choose_part_bytes(file.size_bytes))
    return tuple(
        ObjectPart(number, group[0].start, group[-1].stop) for number, group in enumerate(groups, 1)
    )


def tasks_of_parts(plan: Plan, wanted: Mapping[str, Sequence[ObjectPart]]) -> Iterator[Task]:
    """Yields the tasks of some parts of objects; `wanted` has the parts by file and in order."""
    for number, file in enumerate(plan.files):
        parts = iter(wanted.get(file.path, ()))
        part = next(parts, None)
        for task in cut_into_tasks(number, file):
            while part is not None and part.stop <= task.start:
                part = next(parts, None)
            if part is None:
                break
            if part.start <= task.start:
                yield task


def split_plan(plan: Plan, workers: int, *, in_parts: bool = False) -> list[Share]:
    """Splits a plan into shares for workers that take one share after the other."""
    size_bytes = plan.bytes_written
    most = max(1, -(-size_bytes // TASK_BYTES))
    count = max(-(-size_bytes // SHARE_BYTES), min(most, _SHARES_EACH * workers))
    return [Share(number, count, in_parts) for number in range(max(1, count))]


def _groups(tasks: Iterator[Task], least_bytes: int) -> Iterator[list[Task]]:
    """Joins tasks until they have so many bytes together; the last may have fewer."""
    group: list[Task] = []
    for task in tasks:
        group.append(task)
        if task.stop - group[0].start >= least_bytes:
            yield group
            group = []
    if group:
        yield group
