"""Copies that a store makes by itself: found in a plan, left out of its tasks, and requested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.index import FileRange, Span
from ckptkit.core.object_parts import MIN_PART_BYTES, CopiedRange, ObjectPart, choose_copies
from ckptkit.core.threads import run_crew
from ckptkit.engine.locate import ChunkLookup, Locator, SpanOverlap
from ckptkit.engine.outcome import BytesWritten, Listener
from ckptkit.engine.prefetch import FREE_GAP_OF_ENDS_BYTES, RangeCache, windows_of
from ckptkit.engine.reader import Origin
from ckptkit.plan.plan import Copy, OutputFile, Plan, Segment, ServerCopy
from ckptkit.storage.base import CopyingTarget, CopySource, ObjectSource

# Copies take no memory and hardly any processor time here, but time at the store.
_REQUESTS_AT_A_TIME = 8
_LOCATED_AT_ONCE = 256


def with_store_copies(plan: Plan, origins: Mapping[str, Origin], target: CopyingTarget) -> Plan:
    """Returns a plan that has the store copy whole chunks wherever that is possible.

    That is where an output tensor is a source tensor without change, and a chunk of it is
    contiguous in both, is large enough for a part, and has a stored checksum.

    Args:
        plan: The plan.
        origins: What it reads, by name.
        target: Where its output goes.

    Returns:
        The plan, with a note of why nothing is copied where that is so.
    """
    candidates = list(_candidates(plan, origins))
    examples: dict[int, CopySource] = {}
    for candidate in candidates:
        index, chunks = candidate.origin.index, candidate.lookup.chunks
        record = index.records[int(chunks.record[candidate.overlaps[0].row])]
        source = _object_of(candidate.origin, index.files[record.file].path)
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
    plan: Plan, origins: Mapping[str, Origin], target: CopyingTarget, listener: Listener
) -> None:
    """Makes all copies of a plan in the target's store; the files exist already."""

    def parts() -> Iterator[tuple[str, ObjectPart, CopySource]]:
        for file in plan.files:
            sources = {copied.start: source for copied, source in _sources(file, origins)}
            if sources:
                for part in target.copied_parts(file.path):
                    assert part.copied is not None  # noqa: S101  that is what they are
                    yield file.path, part, sources[part.copied.start]

    def work(items: Iterator[tuple[str, ObjectPart, CopySource]]) -> None:
        for path, part, source in items:
            target.copy(path, part, source)
            listener(BytesWritten(part.stop - part.start))

    run_crew(_REQUESTS_AT_A_TIME, parts(), work)


def copies_of(file: OutputFile) -> list[CopiedRange]:
    bodies = (segment.body for segment in file.segments)
    return [copied for body in bodies if isinstance(body, ServerCopy) for copied in body.copied]


def _sources(
    file: OutputFile, origins: Mapping[str, Origin]
) -> Iterator[tuple[CopiedRange, CopySource]]:
    objects: dict[tuple[str, str], CopySource | None] = {}
    for segment in file.segments:
        if isinstance(segment.body, ServerCopy):
            origin = origins[segment.body.origin]
            for copied in segment.body.copied:
                key = origin.name, copied.path
                if key not in objects:
                    objects[key] = _object_of(origin, copied.path)
                source = objects[key]
                if source is not None:
                    yield copied, source


def _object_of(origin: Origin, path: str) -> CopySource | None:
    return origin.source.copy_source(path) if isinstance(origin.source, ObjectSource) else None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tensor of which some chunks may be copied, as far as the index shows.

    Attributes:
        file: The number of its file in the plan.
        position: That of its segment in the file.
        segment: Its segment.
        origin: Where it comes from.
        lookup: Its chunks.
        overlaps: What its large chunks hold of it, in the order of the bytes.
    """

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
            self.origin.located.put((self.lookup.entry.key, overlap.row), located)
            source = _object_of(self.origin, located.path)
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
            if entry.rounded_from:
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
            if cache.is_distant:
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
        body = segments[at].body
        kept = tuple(copied for copied in copies if copied in chosen)
        if kept and isinstance(body, Copy):
            segments[at] = replace(segments[at], body=ServerCopy(body.origin, body.key, kept))
    return replace(file, segments=tuple(segments))
