"""The index of a checkpoint: its tensors, their chunks, and the byte ranges that hold them.

A `TensorIndex` is made from headers alone. Everything that there can be millions of (chunks
and records) is held in numpy columns and handed out as small frozen values on demand.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Literal, NewType, Protocol, overload

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType

Shape = tuple[int, ...]
Ints = NDArray[np.int64]
Key = NewType("Key", str)  # unique within one index; the flat key of the format
Fqn = NewType("Fqn", str)  # the model's own fully qualified name
KeyPath = tuple[str | int, ...]
Part = Literal["model", "average", "optimizer", "other"]
Container = Literal["raw", "torch_zip", "safetensors", "zstd_torch_zip", "zstd"]
CONTAINERS: tuple[Container, ...] = ("raw", "torch_zip", "safetensors", "zstd_torch_zip", "zstd")
COMPRESSED: frozenset[Container] = frozenset({"zstd_torch_zip", "zstd"})
UNKNOWN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class FileRef:
    """A source file.

    Attributes:
        path: Relative to the checkpoint's root, with `/` between segments.
        size_bytes: Its size when the index was made; -1 when it is named but not there.
        identity: Changes when the file is replaced or rewritten (inode and mtime, or ETag).
        modified: When it was written, in seconds since 1970; 0 where unknown.
    """

    path: str
    size_bytes: int
    identity: str
    modified: float = dataclasses.field(default=0.0, compare=False)


class Record(Struct, frozen=True):
    """A byte range of a file that holds the data of one or more chunks.

    Attributes:
        file: Position in `TensorIndex.files`.
        start: First byte, from the start of the file.
        stop: First byte after it.
        container: `raw` when the range is the data itself; otherwise what the range has to be
            parsed as to find the data inside; `zstd…` can be read from front to back only.
        crc32: Checksum of a raw record's bytes, or None where none was stored or where it has
            to be read from the container first.
    """

    file: int
    start: int
    stop: int
    container: Container = "raw"
    crc32: int | None = None


class RecordTable(Sequence[Record]):
    """Records in columns, 29 bytes each."""

    __slots__ = ("container", "crc32", "digests", "file", "start", "stop")

    def __init__(
        self, file: Ints, start: Ints, stop: Ints, container: Ints | int = 0, crc32: Ints | int = -1
    ) -> None:
        count = len(file)
        self.file = np.asarray(file, np.int32)
        self.start = np.asarray(start, np.int64)
        self.stop = np.asarray(stop, np.int64)
        self.container = _column(container, "int8", count)
        self.crc32 = _column(crc32, "int64", count)
        # Of raw records without a CRC-32, by number: the digests that ckptkit 0.1 wrote of tensors.
        self.digests: Mapping[int, str] = {}

    @classmethod
    def of(cls, records: Sequence[Record]) -> RecordTable:
        """Builds the columns from single records."""
        return cls(
            np.array([r.file for r in records], np.int64),
            np.array([r.start for r in records], np.int64),
            np.array([r.stop for r in records], np.int64),
            np.array([CONTAINERS.index(r.container) for r in records], np.int64),
            np.array([UNKNOWN if r.crc32 is None else r.crc32 for r in records], np.int64),
        )

    def with_sums(self, crc32s: Ints, digests: Mapping[int, str]) -> RecordTable:
        """Returns the records with other checksums, `UNKNOWN` where there is none, and digests."""
        changed = copy(self)
        changed.crc32, changed.digests = crc32s, digests
        return changed

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        crc32 = int(self.crc32[index])
        return Record(
            file=int(self.file[index]),
            start=int(self.start[index]),
            stop=int(self.stop[index]),
            container=CONTAINERS[int(self.container[index])],
            crc32=None if crc32 == UNKNOWN else crc32,
        )


class Box(Struct, frozen=True):
    """A block of a tensor: the elements from `offsets`, `sizes` of them in each dimension."""

    offsets: Shape
    sizes: Shape


class Span(Struct, frozen=True):
    """A half-open range of a tensor's elements in row-major order."""

    start: int
    stop: int


class Chunk(Struct, frozen=True):
    """A stored piece of a tensor.

    Attributes:
        place: Where in the full tensor it belongs, in elements.
        record: Position in `TensorIndex.records`.
        byte_offset: First byte of the chunk inside the record's data, or None where that is
            known only once the record's container is read.
        strides: In elements; None for row-major, and where only the container knows.
        rank: The rank that wrote it, or None.
    """

    place: Box | Span
    record: int
    byte_offset: int | None = None
    strides: Shape | None = None
    rank: int | None = None


class ChunkTable(Sequence[Chunk]):
    """The chunks of one tensor in columns, about 20 + 16 bytes per dimension each.

    Attributes:
        flat: True when the places are spans; then the columns `offsets` and `sizes` have one
            dimension, and hold the start and the length in elements.
        offsets: int64 of shape [chunks, dimensions].
        sizes: int64 of the same shape.
        record: Position of each chunk's record.
        byte_offset: Bytes into the record's data, or -1.
        rank: The writing rank, or -1.
        strides: The few chunks that are known not to be row-major.
    """

    __slots__ = ("byte_offset", "flat", "offsets", "rank", "record", "sizes", "strides")

    def __init__(
        self,
        offsets: Ints,
        sizes: Ints,
        record: Ints,
        *,
        flat: bool = False,
        byte_offset: Ints | int = UNKNOWN,
        rank: NDArray[Any] | int = UNKNOWN,
        strides: Mapping[int, Shape] | None = None,
    ) -> None:
        count = len(record)
        self.flat = flat
        self.offsets = np.asarray(offsets, np.int64)
        self.sizes = np.asarray(sizes, np.int64)
        self.record = np.asarray(record, np.int64)
        self.byte_offset = _column(byte_offset, "int64", count)
        self.rank = _column(rank, "int32", count)
        self.strides: Mapping[int, Shape] = strides or {}

    @classmethod
    def of(cls, chunks: Sequence[Chunk], dimensions: int) -> ChunkTable:
        """Builds the columns from single chunks, whose places are all boxes or all spans."""
        flat = bool(chunks) and isinstance(chunks[0].place, Span)
        rows = [
            ((place.start,), (place.stop - place.start,))
            if isinstance(place, Span)
            else (place.offsets, place.sizes)
            for place in (chunk.place for chunk in chunks)
        ]
        width = 1 if flat else dimensions
        return cls(
            np.array([row[0] for row in rows], np.int64).reshape(len(rows), width),
            np.array([row[1] for row in rows], np.int64).reshape(len(rows), width),
            np.array([c.record for c in chunks], np.int64),
            flat=flat,
            byte_offset=np.array([_or_unknown(c.byte_offset) for c in chunks], np.int64),
            rank=np.array([_or_unknown(c.rank) for c in chunks], np.int64),
            strides={i: c.strides for i, c in enumerate(chunks) if c.strides is not None},
        )

    def take(self, rows: Ints) -> ChunkTable:
        """Returns the table of the given rows, in the given order."""
        new = {int(row): i for i, row in enumerate(rows)} if self.strides else {}
        return ChunkTable(
            self.offsets[rows],
            self.sizes[rows],
            self.record[rows],
            flat=self.flat,
            byte_offset=self.byte_offset[rows],
            rank=self.rank[rows],
            strides={new[i]: s for i, s in self.strides.items() if i in new},
        )

    def shifted(self, records: int) -> ChunkTable:
        """Returns the same chunks after `records` more records were put before theirs."""
        changed = copy(self)
        changed.record = self.record + records
        return changed

    def elements(self) -> Ints:
        """Returns how many elements each chunk holds."""
        counts: Ints = np.prod(self.sizes, axis=1, dtype=np.int64)
        return counts

    def __len__(self) -> int:
        return len(self.record)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        offsets, sizes = self.offsets[index].tolist(), self.sizes[index].tolist()
        byte_offset, rank = int(self.byte_offset[index]), int(self.rank[index])
        return Chunk(
            place=Span(offsets[0], offsets[0] + sizes[0])
            if self.flat
            else Box(tuple(offsets), tuple(sizes)),
            record=int(self.record[index]),
            byte_offset=None if byte_offset == UNKNOWN else byte_offset,
            strides=self.strides.get(index),
            rank=None if rank == UNKNOWN else rank,
        )


def _column(values: NDArray[Any] | int, dtype: str, count: int) -> NDArray[Any]:
    """Returns a column; a single repeated number takes no memory."""
    if isinstance(values, np.ndarray) and values.shape == (count,):
        return values.astype(dtype, copy=False)
    return _repeated(int(values), dtype, count)


@lru_cache(256)
def _repeated(value: int, dtype: str, count: int) -> NDArray[Any]:
    return np.broadcast_to(np.array(value, dtype), count)


def _or_unknown(value: int | None) -> int:
    return UNKNOWN if value is None else value


class Master(Struct, frozen=True):
    """The values that an optimizer works on, where the model's own are rounded from them.

    Attributes:
        key: The tensor of the same index that has them.
        dtype: Its element type.
    """

    key: Key
    dtype: DType


class Derivation(Protocol):
    """How the elements of a tensor are made from those of others in the same index."""

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The origin and the key of every tensor that it is made from."""
        ...

    def demands(self, span: Span) -> tuple[Any, ...]:
        """Returns what a range of elements is made from, as `ckptkit.plan.plan.Demand`."""
        ...

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills `target` with the elements of the range, in row-major order.

        Args:
            span: The range.
            inputs: One array for each of `demands(span)`.
            target: One-dimensional, in the element type of the tensor.
        """
        ...


class TensorEntry(Struct, frozen=True):
    """One tensor of a checkpoint.

    Attributes:
        key: Unique in the index; the flat key of the format.
        key_path: The path of dictionary keys and list positions that led to it.
        name: Its own name: `key_path` without the container, without wrapper segments.
        tree: Which state dict it belongs to, as `--select` names it; empty for the only one.
        part: Whether that state dict is a model's, an average of one, an optimizer's, or neither.
        dtype: Element type, as stored but for `rounded_from`.
        shape: The full, unsharded shape.
        chunks: Where its elements are.
        rounded_from: Element type in the chunks where reading rounds them to `dtype`, because
            the live tensor was so rounded and is stored nowhere; None where they have `dtype`.
        master: Where the same values are unrounded, or None.
        derivation: How it is made from other tensors of the index; it then has no chunks. None
            where it is stored.
        stored_names: The names in the checkpoint of what it is made from, where a map gave it
            another name; options know it by these too.
    """

    key: Key
    key_path: KeyPath
    name: Fqn
    tree: str
    part: Part
    dtype: DType
    shape: Shape
    chunks: ChunkTable
    rounded_from: DType | None = None
    master: Master | None = None
    derivation: Derivation | None = None
    stored_names: tuple[Fqn, ...] = ()

    @property
    def stored_dtype(self) -> DType:
        """Element type in the chunks."""
        return self.rounded_from or self.dtype

    @property
    def elements(self) -> int:
        """How many elements the full tensor has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """How many bytes the full tensor takes in its dtype."""
        return self.elements * self.dtype.itemsize


class Problem(Struct, frozen=True):
    """Something wrong with a checkpoint that does not keep it from being listed.

    `hint` says what to do next, if the usual hint of such errors does not.
    """

    code: str
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}; {self.hint}" if self.hint else text


class RunFacts(Struct, frozen=True):
    """What is known of the run that wrote a checkpoint.

    Attributes:
        world_size: Number of ranks, or None.
        step: Training step, or None.
        writer: Who wrote it, in words.
        version: The version of the writer, where the checkpoint has it; else empty.
        mesh: The dimensions of the device mesh, each with its name (empty where it has none) and
            its size; empty where the checkpoint does not have it.
        settings: What the checkpoint itself says of its model and what decides how the elements of
            its tensors are laid out, by the keys of Transformers' configurations; of an adapter,
            rank and alpha by those of PEFT's.
        notes: Further facts for `inspect`, such as what was ignored.
        warnings: What users of the step should know: what the save itself found, and which objects
            of other code are left out.
        selected: What was selected of a source with several; its state dicts are in it.
    """

    world_size: int | None = None
    step: int | None = None
    writer: str = ""
    version: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    settings: tuple[tuple[str, int], ...] = ()
    warnings: tuple[str, ...] = ()
    selected: str = ""


class TensorIndex(Struct, frozen=True):
    """Everything that the headers of a checkpoint say.

    Attributes:
        format: Short name of the on-disk format, such as `dcp`.
        files: The files that hold tensor data, and those that were read to find it.
        records: The byte ranges in them.
        tensors: Every tensor, by key.
        values: What is not a tensor, inert, by path.
        aliases: Groups of keys that share one storage.
        run: What is known of the run.
        problems: What is wrong; empty when nothing was found wrong.
    """

    format: str
    files: Sequence[FileRef]
    records: RecordTable
    tensors: Mapping[Key, TensorEntry]
    values: Mapping[KeyPath, Any] = field(default_factory=dict)
    aliases: Sequence[frozenset[Key]] = ()
    run: RunFacts = RunFacts()
    problems: tuple[Problem, ...] = ()

    def of_part(self, part: Part) -> Iterator[TensorEntry]:
        """Yields the tensors of one part, in the order of the index."""
        return (entry for entry in self.tensors.values() if entry.part == part)

    def path_of(self, record: int) -> str:
        """Returns the path of the file that holds a record, given by its number."""
        return self.files[int(self.records.file[record])].path


class FileRange(Struct, frozen=True, order=True):
    """The bytes `[start, stop)` of a file; the path is relative to its source."""

    path: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.stop - self.start


COPY = re.compile(
    r"(?:^|[._])(teacher|ema|averaged?|avg|swa|target|shadow|online|student)(?:[._]|$)",
    re.IGNORECASE,
)
"""What names of copies of a model have in them."""
MOST_WRAPPERS = 3
"""How many parts of names wrappers put before those of a model."""


def is_named_as_copy(name: str) -> bool:
    """Returns whether the first part of a tensor's name is that of a copy of a model."""
    return COPY.search(name.partition(".")[0]) is not None
