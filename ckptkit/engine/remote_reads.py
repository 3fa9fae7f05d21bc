"""What is asked of remote stores: each request costs a round trip, so there are few.

`reads_of` says what a part of a task reads, so that it is fetched ahead. `read_direct` fills parts
whose bytes are contiguous in the source as in the output, which needs no memory in between: a
request costs, at the store, as much as some hundred kilobytes. `estimate_reads` counts the requests
of a plan.

`with_store_copies` finds what a store copies by itself and leaves it out of the tasks of a plan,
`make_store_copies` has the store do so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.index import FileRange, Key, Span
from ckptkit.core.object_parts import MIN_PART_BYTES, CopiedRange, ObjectPart, choose_copies
from ckptkit.core.threads import run_crew
from ckptkit.engine.locate import (
    FREE_GAP_OF_ENDS_BYTES,
    ByteRun,
    ChunkLookup,
    Locator,
    RangeCache,
    SpanOverlap,
    coalesce,
    find_stored,
    ranges_of,
    requests,
    windows_of,
)
from ckptkit.engine.outcome import BytesWritten, Listener, part_span
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.plan.plan import (
    Compute,
    Copy,
    OutputFile,
    Plan,
    Segment,
    SegmentRange,
    Task,
)
from ckptkit.storage.base import CopySource, Sink

PlannedRead = tuple[str, Key, Span]
"""The origin, the tensor, and its elements."""
LEAST_BYTES = 1 << 20
"""Smaller parts are better read together with their neighbours."""
# Copies take no memory and hardly any processor time here, but time at the store.
_REQUESTS_AT_A_TIME = 8
_LOCATED_AT_ONCE = 256


def estimate_reads(plan: Plan, origins: Mapping[str, Origin]) -> tuple[int, int] | None:
    """Returns requests and bytes that a plan reads from remote sources; None if it has none."""
    remote = {name for name, origin in origins.items() if origin.source.is_remote}
    if not remote:
        return None
    count = size = 0
    for task in plan.tasks():
        wanted: dict[str, list[FileRange]] = {}
        for name, key, span in (read for part in task.parts for read in reads_of(part)):
            if name in remote:
                index = origins[name].index
                for stored, part in find_stored(index, key, span):
                    lookup = ChunkLookup(index.tensors[stored])
                    read = ranges_of(index, lookup, part, {})
                    wanted.setdefault(name, []).extend(read)
        for ranges in wanted.values():
            asked = list(requests(coalesce(ranges)))
            count += len(asked)
            size += sum(request.size_bytes for request in asked)
    return count, size


def reads_of(part: SegmentRange) -> Iterator[PlannedRead]:
    """Yields what a part of a segment reads, as far as that is known before a kernel is ready."""
    body, spec = part.segment.body, part.segment.spec
    if spec is None:
        return
    span = part_span(part, spec)
    if isinstance(body, Copy):
        yield body.origin, body.key, span
    elif isinstance(body, Compute) and body.kernel.is_ready:
        for demand in body.kernel.demands(spec, span):
            yield demand.origin, demand.key, demand.place


_DirectRead = tuple[ByteRun, int]  # and where it goes in the buffer of the task


def read_direct(
    task: Task, data: memoryview, readers: Mapping[str, TensorReader]
) -> frozenset[int]:
    """Reads all that a task copies without change, and that is in byte runs of located chunks.

    Returns the positions of the parts that are filled.
    """
    reads: dict[str, list[_DirectRead]] = {}
    filled = set()
    at = 0
    for position, part in enumerate(task.parts):
        body, spec, size_bytes = part.segment.body, part.segment.spec, part.stop - part.start
        if isinstance(body, Copy) and spec is not None and size_bytes >= LEAST_BYTES:
            reader = readers[body.origin]
            runs = (
                reader.byte_runs(body.key, part_span(part, spec)) if reader.cache.is_remote else ()
            )
            if runs:
                filled.add(position)
                reads.setdefault(body.origin, []).extend((run, at + run.target) for run in runs)
        at += size_bytes
    for origin, of_origin in reads.items():
        readers[origin].cache.read_direct(
            [(wanted, data[at : at + wanted.size_bytes]) for wanted, at in _joined(of_origin)]
        )
        for run, start in of_origin:
            readers[origin].note(run, data[start : start + run.stored.size_bytes])
    return frozenset(filled)


def _joined(reads: Sequence[_DirectRead]) -> Iterator[tuple[FileRange, int]]:
    """Yields what is read and where it goes, neighbours on both sides as one."""
    wanted, at = reads[0][0].stored, reads[0][1]
    for run, start in reads[1:]:
        stored = run.stored
        follows = stored.path == wanted.path and stored.start == wanted.stop
        if follows and start == at + wanted.size_bytes:
            wanted = FileRange(wanted.path, wanted.start, stored.stop)
        else:
            yield wanted, at
            wanted, at = stored, start
    yield wanted, at


def with_store_copies(plan: Plan, origins: Mapping[str, Origin], target: Sink) -> Plan:
    """Returns a plan that has the store copy whole chunks, with a note of why nothing is copied.

    It copies where an output tensor is a source tensor without change, and a chunk of it is
    contiguous in both, is large enough for a part, and has a stored checksum.
    """
    candidates = list(_candidates(plan, origins))
    examples: dict[int, CopySource] = {}
    for candidate in candidates:
        index, chunks = candidate.origin.index, candidate.lookup.chunks
        record = index.records[int(chunks.record[candidate.overlaps[0].row])]
        source = candidate.origin.source.copy_source(index.files[record.file].path)
        if source is not None:
            examples[id(source.store)] = source
    if not examples:
        return plan
    reasons = {store: target.why_no_copies(source) for store, source in examples.items()}
    stores = {store for store, reason in reasons.items() if not reason}
    # Also where nothing is copied: one request locates many chunks here, and readers then need
    # one or two requests less for each.
    copies = _locate_copies(candidates, stores)
    if not stores:
        notes = [f"all bytes go through this machine: {reason}" for reason in reasons.values()]
        return replace(plan, notes=(*plan.notes, *notes[:1]))
    files = tuple(_with_copies(file, copies[number]) for number, file in enumerate(plan.files))
    return replace(plan, files=files)


def make_store_copies(
    plan: Plan, origins: Mapping[str, Origin], target: Sink, listener: Listener
) -> None:
    """Makes all copies of a plan in the target's store; the files exist already."""

    def parts() -> Iterator[tuple[str, ObjectPart, CopySource]]:
        for file in plan.files:
            sources: dict[int, CopySource] = {}
            for segment in file.segments:
                if isinstance(segment.body, Copy):
                    source = origins[segment.body.origin].source
                    for copied in segment.body.copied:
                        if (found := source.copy_source(copied.path)) is not None:
                            sources[copied.start] = found
            for part in target.copied_parts(file.path) if sources else ():
                assert part.copied is not None  # noqa: S101  that is what they are
                yield file.path, part, sources[part.copied.start]

    def work(items: Iterator[tuple[str, ObjectPart, CopySource]]) -> None:
        for path, part, source in items:
            target.copy(path, part, source)
            listener(BytesWritten(part.stop - part.start, path))

    run_crew(_REQUESTS_AT_A_TIME, parts(), work)


class _Candidate(Struct, frozen=True):
    """A tensor that may have chunks to copy, as far as the index shows."""

    file: int
    position: int
    segment: Segment
    origin: Origin
    lookup: ChunkLookup
    overlaps: Sequence[SpanOverlap]

    def copies(self, locator: Locator, stores: Container[int]) -> Iterator[CopiedRange]:
        """Yields what can be copied, now that its chunks are located, from any of the stores."""
        itemsize = self.lookup.entry.stored_dtype.itemsize
        for overlap in self.overlaps:
            size = overlap.elements * itemsize
            located = locator.locate(self.lookup.entry, self.lookup.chunks, overlap.row)
            if located.compressed is not None:
                continue
            self.origin.keep_located((self.lookup.entry.key, overlap.row), located)
            source = self.origin.source.copy_source(located.path)
            if source is None or id(source.store) not in stores:
                continue
            # Whether it is all that the checksum was stored for, in the same order.
            is_all = located.strides is None and overlap.source_start == 0
            is_all &= (located.origin, located.stop) == (located.start, located.start + size)
            if located.crc32 is not None and is_all:
                start = self.segment.start + overlap.target_start * itemsize
                yield CopiedRange(start, start + size, located.path, located.start, located.crc32)

    def windows(self) -> Iterator[FileRange]:
        for overlap in self.overlaps:
            yield from windows_of(self.origin.index, self.lookup, overlap.row)


def _candidates(plan: Plan, origins: Mapping[str, Origin]) -> Iterator[_Candidate]:
    for number, file in enumerate(plan.files):
        for position, segment in enumerate(file.segments):
            large = segment.stop - segment.start >= MIN_PART_BYTES
            if not isinstance(segment.body, Copy) or not large:
                continue
            origin = origins[segment.body.origin]
            entry = origin.index.tensors[segment.body.key]
            if entry.rounded_from or entry.derivation is not None:
                continue
            lookup = ChunkLookup(entry)
            least_elements = MIN_PART_BYTES / entry.stored_dtype.itemsize
            whole = lookup.overlaps(Span(0, entry.elements))
            overlaps = [o for o in whole if o.is_contiguous and o.elements >= least_elements]
            overlaps.sort(key=lambda overlap: overlap.target_start)
            if overlaps:
                yield _Candidate(number, position, segment, origin, lookup, overlaps)


def _locate_copies(
    candidates: Sequence[_Candidate], stores: Container[int]
) -> Mapping[int, Mapping[int, list[CopiedRange]]]:
    """Locates chunks, many with one request; returns what can be copied, by file and segment."""
    by_file: dict[int, dict[int, list[CopiedRange]]] = defaultdict(dict)

    def work(batches: Iterator[Sequence[_Candidate]]) -> None:
        for batch in batches:
            origin = batch[0].origin
            cache = RangeCache(origin.source)
            if cache.is_remote:
                windows = (window for candidate in batch for window in candidate.windows())
                cache.fetch(windows, free_gap_bytes=FREE_GAP_OF_ENDS_BYTES)
            locator = Locator(cache, origin.index)
            for candidate in batch:
                copies = list(candidate.copies(locator, stores))
                by_file[candidate.file][candidate.position] = copies

    run_crew(_REQUESTS_AT_A_TIME, _batches(candidates), work)
    return by_file


def _batches(candidates: Sequence[_Candidate]) -> Iterator[Sequence[_Candidate]]:
    batch: list[_Candidate] = []
    for candidate in candidates:
        chunks = sum(len(other.overlaps) for other in batch)
        if batch and (candidate.origin is not batch[0].origin or chunks >= _LOCATED_AT_ONCE):
            yield batch
            batch = []
        batch.append(candidate)
    if batch:
        yield batch


def _with_copies(file: OutputFile, by_segment: Mapping[int, Sequence[CopiedRange]]) -> OutputFile:
    ranges = [copied for at in sorted(by_segment) for copied in by_segment[at]]
    chosen = set(choose_copies(file.size_bytes, ranges))
    segments = list(file.segments)
    for at, copies in by_segment.items():
        kept = tuple(copied for copied in copies if copied in chosen)
        segments[at] = replace(segments[at], body=replace(segments[at].body, copied=kept))
    return replace(file, segments=tuple(segments))
