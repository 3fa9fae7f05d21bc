"""What an execution returns (digests, open checksums, proofs of files), and its progress events.

An `Outcome` is what the process that completes an output needs of each part: plain values that
processes exchange and join. `is_proven` compares a file of an earlier run with the digests that
run wrote. Events report progress to a listener.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct, convert, field, to_builtins

from ckptkit.core.checksums import (
    ChecksumPiece,
    join_crc32s,
    join_leaves,
    leaf_sums,
)
from ckptkit.core.index import Span
from ckptkit.core.manifest import CRC32_SCHEME, LEAF_BYTES
from ckptkit.engine.checksum_tracker import DeferredChecksums, OpenRecord, Slot
from ckptkit.plan.plan import (
    TASK_BYTES,
    Compute,
    Copy,
    Literal,
    OutputFile,
    SegmentRange,
    Task,
    TensorSpec,
    Trailer,
    cut_into_tasks,
)
from ckptkit.storage.base import SentRows

Leaves = dict[str, dict[int, bytes]]
Sealed = tuple[int, int, int]


def _no_leaves() -> Leaves:
    return defaultdict(dict)


class Digests(Struct):
    """The sums of leaves, by tensor name and by path of side file; see `leaf_sums`.

    `crc32s` are the checksums of tensors that a store copied in part. No task reads those parts.
    """

    tensors: Leaves = field(default_factory=_no_leaves)
    files: Leaves = field(default_factory=_no_leaves)
    crc32s: dict[str, int] = field(default_factory=dict)

    def of_tensor(self, name: str) -> str:
        """Returns the digest of a tensor's bytes; an empty tensor has no leaves."""
        if name in self.crc32s:
            return f"{CRC32_SCHEME}:{self.crc32s[name]:08x}"
        return join_leaves(self.tensors.get(name, {}))

    def crc32_of_tensor(self, spec: TensorSpec) -> int:
        """Returns the CRC-32 of a tensor's bytes, which are all written."""
        name = str(spec.name)
        if name in self.crc32s:
            return self.crc32s[name]
        return join_crc32s(self.tensors.get(name, {}), spec.size_bytes)

    def of_file(self, path: str) -> str:
        """Returns the digest of a side file's bytes."""
        return join_leaves(self.files.get(path, {}))

    def first_difference(self, other: Digests) -> str | None:
        """Returns the first tensor or side file that has another leaf in `other` than here."""
        for mine, theirs in ((self.tensors, other.tensors), (self.files, other.files)):
            for name, leaves in theirs.items():
                if not leaves.items() <= mine.get(name, {}).items():
                    return name
        return None

    def update(self, other: Digests) -> None:
        """Adds the leaves of another part."""
        for mine, theirs in ((self.tensors, other.tensors), (self.files, other.files)):
            for name, leaves in theirs.items():
                mine.setdefault(name, {}).update(leaves)


class Outcome(Struct):
    """The result of some of a plan's tasks."""

    digests: Digests = field(default_factory=Digests)  # of what was written
    # The checksums that trailers wait for; a slot may come several times.
    pieces: list[tuple[Slot, list[ChecksumPiece]]] = field(default_factory=list)
    # By origin, the source records whose rest other tasks read.
    open_records: dict[str, dict[int, OpenRecord]] = field(default_factory=dict)
    # By origin, the tensors with bytes that had no stored checksum.
    unverified: dict[str, set[str]] = field(default_factory=dict)
    # The trailers that are written already: file, segment, and first byte in it.
    sealed: set[Sealed] = field(default_factory=set)
    # What a store has returned for the parts that it took, by file.
    sent: SentRows = field(default_factory=dict)

    def add(self, part: Outcome) -> None:
        """Adds the outcome of a part that has no task in common with this."""
        self.digests.update(part.digests)
        self.pieces += part.pieces
        for origin, records in part.open_records.items():
            mine = self.open_records.setdefault(origin, {})
            for number, record in records.items():
                mine[number] = record.joined(mine[number]) if number in mine else record
        for origin, keys in part.unverified.items():
            self.unverified.setdefault(origin, set()).update(keys)
        self.sealed |= part.sealed
        for path, rows in part.sent.items():
            self.sent.setdefault(path, []).extend(rows)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; equal outcomes give equal text."""
        values: dict[str, Any] = to_builtins(self, str_keys=True, order="deterministic")
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """Reads what `to_json` gave."""
        return convert(values, cls, str_keys=True)


ReadInto = Callable[[int, memoryview], int]
"""Fills a buffer from a byte of the file on, and returns how many bytes there were."""


def can_be_proven(file: OutputFile) -> bool:
    """Whether all bytes of a file follow from the plan and from digests of its tensors."""
    bodies = [segment.body for segment in file.segments]
    return any(segment.spec is not None for segment in file.segments) and all(
        isinstance(body, (Literal, Copy, Compute, Trailer)) for body in bodies
    )


def task_parts(task: Task, data: memoryview) -> Iterator[tuple[SegmentRange, memoryview]]:
    """Yields the parts of a task, each with its bytes in the buffer of the task."""
    at = 0
    for part in task.parts:
        yield part, data[at : at + part.stop - part.start]
        at += part.stop - part.start


def part_span(part: SegmentRange, spec: TensorSpec) -> Span:
    """Returns the elements of a tensor that a part of its segment holds."""
    return Span(part.start // spec.dtype.itemsize, part.stop // spec.dtype.itemsize)


def is_proven(file: OutputFile, digests: Digests, read_into: ReadInto) -> bool:
    """Reads a file, and compares every byte with the plan, or with digests.

    `file`: the file as it is planned; it can be proven. `digests`: of its tensors, as they were
    written.
    """
    checksums = DeferredChecksums([file])
    block = memoryview(bytearray(min(TASK_BYTES, file.size_bytes)))

    def is_right(part: SegmentRange, view: memoryview) -> bool:
        body, spec = part.segment.body, part.segment.spec
        if isinstance(body, Literal):
            return view == body.data[part.start : part.stop]
        if isinstance(body, Trailer):
            expected = memoryview(bytearray(len(view)))
            return checksums.fill(0, part, expected) and view == expected
        checksums.note((0, part.number), part.start, view)
        written = digests.tensors.get("" if spec is None else str(spec.name), {})
        return leaf_sums(view) == written.get(part.start // LEAF_BYTES)

    for task in cut_into_tasks(0, file):
        data = block[: task.stop - task.start]
        if read_into(task.start, data) != len(data):
            return False
        if not all(is_right(part, view) for part, view in task_parts(task, data)):
            return False
    return True


class Planned(Struct, frozen=True):
    """The plan is complete; `notes` are for the user to read before it runs."""

    notes: tuple[str, ...]


class Started(Struct, frozen=True):
    """Work on that many output bytes begins; `files` has paths and sizes, where they are known."""

    total_bytes: int
    files: tuple[tuple[str, int], ...] = ()


class BytesWritten(Struct, frozen=True):
    """That many more output bytes are written, or checked; `path` is their file, where known."""

    size_bytes: int
    path: str = ""


class BlocksShared(Struct, frozen=True):
    """The file system has made that many output bytes of blocks of the sources."""

    size_bytes: int


class Waiting(Struct, frozen=True):
    """All bytes are written; the output becomes visible once `what` is done."""

    what: str


class OutputCommitted(Struct, frozen=True):
    """The output is durable and visible."""

    path: str


class OutputKept(Struct, frozen=True):
    """The requested output existed already and is complete; nothing was written."""

    path: str


class WorkKept(Struct, frozen=True):
    """The run fails; the files that it has finished stay in that folder, to be resumed."""

    path: str


Event = (
    Planned
    | Started
    | BlocksShared
    | BytesWritten
    | Waiting
    | OutputCommitted
    | OutputKept
    | WorkKept
)
Listener = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """A listener that does nothing."""
