"""What a file system can make of the blocks of the sources, instead of writing it.

Such a part of an output is one run of bytes in a file of a source, at an offset that is congruent
modulo a block. `with_shared_blocks` finds them and puts them into the plan; the target makes them
when it creates the file, and its `write` leaves them out. They are read, compared and digested as
all others are, unless the word of the source is taken: then the plan has them as ranges that a
store copies, with their stored checksums, and `copy_edges` copies what is no whole block of them.

A save of ckptkit places weights so, see `ckptkit.training.save.file_layout`. To what lies in files
of safetensors, the output's own header is fitted with `align_headers`.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.checksums import leaf_ranges
from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, RefusedError
from ckptkit.core.index import FileRange, Key, Span, TensorIndex
from ckptkit.core.object_parts import CopiedRange, SharedRange
from ckptkit.engine.kernels import StoredOperand
from ckptkit.engine.locate import ChunkLookup, Locator, RangeCache
from ckptkit.engine.reader import Origin
from ckptkit.options import Sharing
from ckptkit.plan.layouts.hf import pad_header
from ckptkit.plan.plan import Copy, OutputFile, Plan, copied_ranges
from ckptkit.storage.base import Sink, Source
from ckptkit.storage.local.disk import BLOCK_BYTES

_LEAST_BYTES = 64 << 10  # each is a record of the file system
_HEADER_ALIGNMENT = 8  # of tensors in safetensors
WhyNoSharing = Callable[[Source, str], str]
"""Returns why blocks of a file of a source cannot be shared; empty where they can be."""


class _Run(Struct, frozen=True):
    """Bytes that are one run in a file of a source and in a file to write."""

    place: SharedRange  # of any bytes, not only whole blocks
    segment: int  # its position in the file
    crc32: int | None  # the stored checksum, where it is one of exactly these bytes


def align_headers(files: Iterable[OutputFile], origins: Mapping[str, Origin]) -> list[OutputFile]:
    """Pads headers of safetensors so that most copied bytes keep their offset modulo a block."""
    aligned = []
    for file in files:
        votes: Counter[int] = Counter()
        for segment in file.segments if file.path.endswith(".safetensors") else ():
            body, spec = segment.body, segment.spec
            if isinstance(body, Copy) and spec is not None and spec.size_bytes >= _LEAST_BYTES:
                start = _find_raw_start(origins[body.origin].index, body.key)
                if start is not None:
                    votes[(start - segment.start) % BLOCK_BYTES] += spec.size_bytes
        padding = max(votes, key=votes.__getitem__, default=0)
        is_fit = votes[padding] > votes[0] and padding % _HEADER_ALIGNMENT == 0
        aligned.append(pad_header(file, padding) if is_fit else file)
    return aligned


def _find_raw_start(index: TensorIndex, key: Key) -> int | None:
    """Returns where all of a tensor lies in its file, None if it is in parts or in an archive."""
    entry = index.tensors[key]
    if entry.derivation is not None or entry.rounded_from is not None or len(entry.chunks) != 1:
        return None
    record = index.records[int(entry.chunks.record[0])]
    if record.container != "raw" or entry.chunks.strides:
        return None
    return record.start + int(entry.chunks.byte_offset[0])


def with_shared_blocks(
    plan: Plan,
    origins: Mapping[str, Origin],
    why_not: WhyNoSharing,
    sharing: Sharing,
    trusted: Collection[str] = (),
) -> Plan:
    """Returns a plan whose files have the blocks that can be shared.

    `why_not`: is asked once for each source. `trusted`: sources whose shared bytes are not read,
    since their stored checksums are taken.

    Raises:
        RefusedError: If something has to be shared, and nothing can be.
    """
    if sharing == "never":
        return plan
    locators = {name: Locator(RangeCache(o.source), o.index) for name, o in origins.items()}
    files, reasons = [], dict[str, str]()
    for file in plan.files:
        runs = list(_runs(file, origins, locators, why_not, reasons))
        shared = [part for run in _joined(run.place for run in runs) for part in _whole_blocks(run)]
        unread = [run for run in runs if run.place.origin in trusted]
        files.append(replace(_taking_the_word(file, unread), shared=tuple(shared)))
    if sharing == "always" and not any(file.shared for file in files):
        raise RefusedError(
            "no blocks can be shared with the source: "
            + next(
                filter(None, reasons.values()),
                "no tensor is stored at an offset that fits its place in the output",
            ),
            where="--share always",
            hint="leave it out to have the bytes copied; saves of ckptkit 0.3 fit, on XFS or btrfs",
        )
    return replace(plan, files=tuple(files))


def copy_edges(file: OutputFile, origins: Mapping[str, Origin], target: Sink) -> None:
    """Copies those bytes of a created file that are not read otherwise, and that are not shared.

    Where the file system has refused to share, all of the range is read and compared.
    """
    for segment in file.segments:
        for copied in copied_ranges(segment):
            assert isinstance(segment.body, Copy)  # noqa: S101  nothing else is copied
            source, crc = origins[segment.body.origin].source, 0
            parts = list(target.unshared(file.path, copied.start, copied.stop))
            is_refused = any(high - low > BLOCK_BYTES for low, high in parts)
            for low, high in [(copied.start, copied.stop)] if is_refused else parts:
                for start, stop in leaf_ranges(high - low):
                    at = copied.source_start + low - copied.start
                    data = memoryview(source.read(copied.path, at + start, at + stop))
                    crc = crc32(data, crc)
                    target.write(file.path, low + start, data)
            if is_refused and crc != copied.crc32:
                raise ChecksumError(
                    f"has CRC-32 {crc:08x} against {copied.crc32:08x}, which was stored with it",
                    where=posixpath.join(source.location, copied.path),
                    hint="the file was damaged: take another copy of the step, or another step",
                )


def _taking_the_word(file: OutputFile, runs: Iterable[_Run]) -> OutputFile:
    """Returns the file with those runs left out of its tasks that have a stored checksum."""
    segments = list(file.segments)
    for run in runs:
        if run.crc32 is None or next(_whole_blocks(run.place), None) is None:
            continue
        segment, place = segments[run.segment], run.place
        assert isinstance(segment.body, Copy)  # noqa: S101  only these have runs
        copied = CopiedRange(
            place.start, place.stop, place.stored.path, place.stored.start, run.crc32
        )
        body = replace(segment.body, copied=(*segment.body.copied, copied))
        segments[run.segment] = replace(segment, body=body)
    return replace(file, segments=tuple(segments))


def _runs(
    file: OutputFile,
    origins: Mapping[str, Origin],
    locators: Mapping[str, Locator],
    why_not: WhyNoSharing,
    reasons: dict[str, str],
) -> Iterator[_Run]:
    """Yields what of a file is one run of bytes in a file of a source that shares, in order.

    `reasons`: what `why_not` has answered, by source; with a reason, no more is located there.
    """
    for position, segment in enumerate(file.segments):
        body, spec = segment.body, segment.spec
        if not isinstance(body, Copy) or spec is None or spec.size_bytes < _LEAST_BYTES:
            continue
        origin, key, span = origins[body.origin], body.key, Span(0, spec.elements)
        if origin.source.is_remote or reasons.get(body.origin):
            continue
        while isinstance(made := origin.index.tensors[key].derivation, StoredOperand):
            ((key, span),) = [(demand.key, demand.place) for demand in made.demands(span)]
        entry = origin.index.tensors[key]
        if made is not None or entry.rounded_from is not None:
            continue
        lookup, itemsize = ChunkLookup(entry), entry.stored_dtype.itemsize
        for overlap in sorted(lookup.overlaps(span), key=lambda overlap: overlap.target_start):
            size = overlap.elements * itemsize
            if not overlap.is_contiguous or size < _LEAST_BYTES:
                continue
            located = locators[body.origin].locate(entry, lookup.chunks, overlap.row)
            if body.origin not in reasons:
                reasons[body.origin] = why_not(origin.source, located.path)
            if reasons[body.origin]:
                break
            if located.strides is None and located.compressed is None:
                origin.keep_located((key, overlap.row), located)
                start = located.origin + overlap.source_start * itemsize
                stored = FileRange(located.path, start, start + size)
                at = segment.start + overlap.target_start * itemsize
                is_all = (start, start + size) == (located.start, located.stop)
                crc = located.crc32 if is_all else None
                yield _Run(SharedRange(body.origin, stored, at), position, crc)


def _joined(runs: Iterator[SharedRange]) -> Iterator[SharedRange]:
    """Yields runs that follow each other in both files as one."""
    last = next(runs, None)
    for run in runs:
        assert last is not None  # noqa: S101  there was one before
        follows = (last.origin, last.stored.path, last.stored.stop, last.stop) == (
            run.origin,
            run.stored.path,
            run.stored.start,
            run.start,
        )
        if follows:
            stored = replace(last.stored, stop=run.stored.stop)
            last = replace(last, stored=stored)
        else:
            yield last
            last = run
    if last is not None:
        yield last


def _whole_blocks(run: SharedRange) -> Iterator[SharedRange]:
    """Yields the whole blocks of a run, where its two offsets are congruent."""
    head = -run.start % BLOCK_BYTES
    size = (run.stored.size_bytes - head) // BLOCK_BYTES * BLOCK_BYTES
    if (run.stored.start - run.start) % BLOCK_BYTES == 0 and size >= _LEAST_BYTES - 2 * BLOCK_BYTES:
        start = run.stored.start + head
        stored = FileRange(run.stored.path, start, start + size)
        yield SharedRange(run.origin, stored, run.start + head)
