"""The plan: which bytes of which file come from where. Pure values, printable, picklable.

Which tensor goes to which output file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Fqn, Key, Shape, Span
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.core.object_parts import CopiedRange

TASK_BYTES = LEAF_BYTES
Kept = TypeVar("Kept")
SOURCE = "source"  # the origin that a conversion reads; others are named by whoever adds them


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as it will be written, dense and row-major."""

    name: Fqn
    dtype: DType
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Demand:
    """A part of a source tensor that a kernel reads for one block."""

    origin: str
    key: Key
    place: Span


class Kernel(Protocol):
    """Computes blocks of an output tensor from parts of source tensors."""

    def grain_elements(self, out: TensorSpec) -> int:
        """Returns how many elements a block must be a multiple of, tail excepted."""
        ...

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Returns what the block is computed from."""
        ...

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Fills `target`, the block's elements in row-major order."""
        ...


class Reading(Protocol):
    """How a kernel reads parts of source tensors while it prepares itself."""

    def own(self, demand: Demand) -> NDArray[Any]:
        """Returns the elements, one-dimensional, in an array that is the kernel's own."""
        ...

    def shared(self, demand: Demand) -> NDArray[Any]:
        """Returns the elements read-only, from memory where another tensor asked for them."""
        ...

    def kept(self, key: Hashable, opened: Callable[[], AbstractContextManager[Kept]]) -> Kept:
        """Returns what is opened once, for all tensors, and closed when all are written.

        Args:
            key: The same for all that share it.
            opened: Opens it.
        """
        ...


@runtime_checkable
class Preparable(Protocol):
    """What becomes a kernel by reading what all blocks of a tensor need, once for all."""

    def prepared(self, out: TensorSpec, reading: Reading) -> Kernel:
        """Returns the kernel; several threads may use it at a time."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedWithin:
    """A kernel around one that has to prepare itself first.

    Attributes:
        inner: The inner one.
        made: What the inner one makes.
        around: Makes the kernel around a prepared one.
    """

    inner: Preparable
    made: TensorSpec
    around: Callable[[Kernel], Kernel]

    def prepared(self, _out: TensorSpec, reading: Reading) -> Kernel:
        return self.around(self.inner.prepared(self.made, reading))


def kernel_around(
    kernel: Kernel | Preparable, made: TensorSpec, around: Callable[[Kernel], Kernel]
) -> Kernel | Preparable:
    """Puts a kernel around another, which makes `made` and may have to prepare itself."""
    if isinstance(kernel, Preparable):
        return PreparedWithin(kernel, made, around)
    return around(kernel)


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known when planning: headers, indexes, configurations."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A source tensor, assembled from its chunks without change."""

    origin: str
    key: Key


@dataclass(frozen=True, slots=True)
class ServerCopy:
    """The same, of which the store of the output copies ranges by itself, unseen by us.

    Attributes:
        origin: As in `Copy`.
        key: As in `Copy`.
        copied: Ranges of the output file within the segment, by their starts.
    """

    origin: str
    key: Key
    copied: tuple[CopiedRange, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """A tensor that a kernel makes; `reads` are the source tensors it looks at."""

    kernel: Kernel | Preparable
    reads: tuple[tuple[str, Key], ...]


@dataclass(frozen=True, slots=True)
class RawCopy:
    """A byte range of a side file, from `start` on, taken as it is."""

    origin: str
    path: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Trailer:
    """Bytes that depend on checksums of the segments before it, such as a zip's directory."""

    template: bytes
    fields: tuple[tuple[int, int], ...]
    """Where the little-endian CRC-32 of which segment goes: `(position, segment)`."""


Body = Literal | Copy | ServerCopy | Compute | RawCopy | Trailer


@dataclass(frozen=True, slots=True)
class Product:
    """An output tensor and how it comes to be."""

    spec: TensorSpec
    body: Copy | Compute


@dataclass(frozen=True, slots=True)
class Segment:
    """A byte range `[start, stop)` of an output file; `spec` is set for tensors."""

    start: int
    stop: int
    body: Body
    spec: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: contiguous segments from byte 0 to `size_bytes`."""

    path: str
    size_bytes: int
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class Part:
    """The piece `[start, stop)` of a segment, in bytes from the segment's first.

    `number` is the segment's position in its file.
    """

    number: int
    segment: Segment
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Task:
    """A byte range of one output file that is filled, digested and written as one.

    No leaf of a tensor's digest is split between two tasks, so tasks are independent.
    """

    file: int
    start: int
    stop: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that an execution does.

    Attributes:
        files: The output files; all are written in full.
        dropped: Tied names that are not written, with the name that stands for each.
        notes: What the user should know before it runs.
    """

    files: tuple[OutputFile, ...]
    dropped: Mapping[Fqn, Fqn]
    notes: tuple[str, ...] = ()

    @property
    def bytes_written(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def specs(self) -> Iterator[tuple[OutputFile, Segment, TensorSpec]]:
        """Yields every tensor to be written, with its place."""
        for file in self.files:
            for segment in file.segments:
                if segment.spec is not None:
                    yield file, segment, segment.spec

    def tasks(self, most_bytes: int | None = None) -> Iterator[Task]:
        """Cuts the files into byte ranges, lazily and in order.

        Args:
            most_bytes: Of each, `TASK_BYTES` or a multiple of it; the first if left out.

        Yields:
            The tasks.
        """
        for number, file in enumerate(self.files):
            yield from tasks_of_file(number, file, most_bytes)


def tasks_of_file(number: int, file: OutputFile, most_bytes: int | None = None) -> Iterator[Task]:
    """Cuts one file, the plan's `number`th, as `Plan.tasks` cuts all of them."""
    most = most_bytes or TASK_BYTES
    parts: list[Part] = []
    start = size = 0
    for part in _parts_of(file):
        length = part.stop - part.start
        is_apart = part.segment.start + part.start != start + size
        if parts and (is_apart or size + length > most or _fills_a_task(part, most)):
            yield Task(number, start, start + size, tuple(parts))
            parts = []
        if not parts:
            start, size = part.segment.start + part.start, 0
        parts.append(part)
        size += length
    if parts:
        yield Task(number, start, start + size, tuple(parts))


def _fills_a_task(part: Part, most_bytes: int) -> bool:
    """Tells whether a task of its own begins with a part: the chunks of a source lie in step."""
    left = part.segment.stop - part.segment.start - part.start
    return part.start % most_bytes == 0 and left >= most_bytes


def _parts_of(file: OutputFile) -> Iterator[Part]:
    for position, segment in enumerate(file.segments):
        for first, last in _written_ranges(segment):
            for low in range(first, last, LEAF_BYTES):
                yield Part(position, segment, low, min(low + LEAF_BYTES, last))


def _written_ranges(segment: Segment) -> Iterator[tuple[int, int]]:
    """Yields what of a segment has to be written, which the store does not copy."""
    at = 0
    if isinstance(segment.body, ServerCopy):
        for copied in segment.body.copied:
            yield at, copied.start - segment.start
            at = copied.stop - segment.start
    yield at, segment.stop - segment.start


def contiguous(path: str, bodies: Sequence[tuple[int, Body, TensorSpec | None]]) -> OutputFile:
    """Lays out `(size_bytes, body, spec)` one after the other into a file."""
    segments, at = [], 0
    for size_bytes, body, spec in bodies:
        segments.append(Segment(at, at + size_bytes, body, spec))
        at += size_bytes
    return OutputFile(path, at, tuple(segments))


def name_order(name: str) -> list[tuple[int, str]]:
    """Returns what tensors are sorted by: their names, numbers in them by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def split_by_size(products: Sequence[Product], max_file_bytes: int) -> list[list[Product]]:
    """Fills files in the order of the tensors, each up to `max_file_bytes` of tensor data.

    A tensor larger than that gets a file of its own; no tensor is ever split over files.
    There is always at least one file.

    Args:
        products: The tensors, in model order.
        max_file_bytes: The limit, in bytes, without headers.

    Returns:
        The tensors of each file, in order.
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


def numbered(stem: str, extension: str, count: int) -> list[str]:
    """Names the files of a set as Hugging Face does.

    Returns:
        One name per file.

    >>> numbered("model", "safetensors", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [f"{stem}.{extension}"]
    return [f"{stem}-{i:05d}-of-{count:05d}.{extension}" for i in range(1, count + 1)]
