"""Reads what a rank needs into a live model, and says how far it came if that fails."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.conversion.source.open import OpenedCheckpoint, StoredDigest
from ckptkit.core.checksums import digest_as
from ckptkit.core.errors import (
    CkptkitError,
    PartlyFilledError,
    SourceChangedError,
    UnsupportedError,
)
from ckptkit.core.geometry import flat_offset
from ckptkit.core.index import Box, Fqn, Key, Shape, TensorEntry
from ckptkit.core.text import list_first
from ckptkit.core.tiles import Walk, walk_boxes
from ckptkit.engine.box_reads import (
    CastMemory,
    SpanRead,
    WantedBox,
    find_stored_boxes,
    join_walks,
    plan_chunk_reads,
    read_chunks,
    read_spans,
)
from ckptkit.engine.checksum_tracker import NumberedRecord
from ckptkit.engine.outcome import BytesWritten, Listener, Started
from ckptkit.engine.reader import BoxMemory, ChunkRead, Origin, slices_of
from ckptkit.training.load.live_model import LiveModel, LiveTensor
from ckptkit.training.load.shared_source import SharedSource
from ckptkit.training.load.tensor_sources import (
    Parts,
    PartSource,
    Stored,
    TensorSources,
    best_entry,
)
from ckptkit.training.resume.load_pieces import memory_of
from ckptkit.training.resume.restore import copied_changes
from ckptkit.training.state.memory_changes import count_changes

_MOST_PARTS = 256  # of a record that are kept, as in a resume
_PROOF_SHARE = 64  # so much of what is needed is read for proofs alone


class LoadResult(Struct, frozen=True):
    """What `load_into` did.

    Attributes:
        path: The checkpoint that was taken.
        format: Its format.
        step: Its training step, or None.
        missing_keys: Tensors of the model that the checkpoint does not have; they are unchanged.
        unexpected_keys: Tensors of the checkpoint that the model does not have.
        left_alone: Tensors of the model that such a checkpoint does not hold, as those of an
            adapter where it is a base model, and extra states of modules; they are unchanged.
        bytes_read: By this rank, from files of tensors.
        bytes_shared: Taken from other ranks of the node, which have read them from the URL.
        bytes_needed: What this rank holds of the tensors, in the element types of the files.
        unverified: Tensors with bytes for which the checkpoint has no checksum.
        unproven: Tensors with bytes whose checksum is that of more than this rank has read.
        notes: What was ignored, or converted.
    """

    path: str
    format: str
    step: int | None
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    left_alone: tuple[str, ...]
    bytes_read: int
    bytes_shared: int
    bytes_needed: int
    unverified: tuple[str, ...]
    unproven: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Filling:
    """Reads what this rank needs, and says how far it came if that fails."""

    def __init__(
        self,
        live: LiveModel,
        checkpoint: OpenedCheckpoint,
        stored: Stored,
        sources: TensorSources,
        files: SharedSource,
        listener: Listener,
    ) -> None:
        self._live = live
        self._files = files
        self._listener = listener
        self._checkpoint = checkpoint
        self._stored = stored
        self._sources = sources
        self._owners: dict[int, Fqn] = {}  # by the identity of the memory of a part
        self._keys: dict[Fqn, set[Key]] = {}  # of what is read, by the live name
        self._left: Counter[Fqn] = Counter()
        self._done: deque[int] = deque()
        self._kept: list[BoxMemory] = []
        self._needed_bytes = 0
        self._untied: set[Fqn] = set()  # stored tensors that differ from the live one of their name
        self._collided: set[Fqn] = set()  # live ones with one memory for elements that differ
        self.partial: tuple[NumberedRecord, ...] = ()  # records that were read in part

    def run(self, digests: Mapping[str, StoredDigest]) -> LoadResult:
        checkpoint, sources = self._checkpoint, self._sources
        chunks, spans = self._plan(self._wanted_of_all())
        # Digests of whole tensors, without a CRC-32, would have each rank read all of them.
        records = checkpoint.index.records
        index = replace(checkpoint.index, records=records.with_sums(records.crc32, {}))
        origins = [Origin("source", self._files, index, most_pieces=_MOST_PARTS) for _ in range(2)]
        filled = [tensor for tensor in self._live.tensors if tensor.name in sources.parts]
        pieces = [piece for tensor in filled for piece in tensor.pieces]
        try:
            self._files.announce(checkpoint.index, chunks, spans)
            read_bytes = self._read(origins, chunks, spans)
            read_bytes += self._read(origins, *self._plan(self._wanted_again()))
            self._refuse_collisions()
            read_bytes += sum(map(self._prove, origins))
            proven = set(self._compare(digests))
            self._refuse_changes()
            for change in copied_changes(self._live.bound, {"": pieces}):
                change()
        except CkptkitError as error:
            raise self._partly_filled(error) from error
        except BaseException as error:
            error.add_note(self._progress())
            raise
        finally:
            count_changes(piece.local for piece in pieces)
        self.partial = tuple(n for origin in origins for n in origin.checksums.open_now().items())
        left_open = {number for number, _ in self.partial}
        unverified = {key for origin in origins for key in origin.unverified}
        unverified_names = self._names_of(unverified)
        return LoadResult(
            path=checkpoint.path,
            format=checkpoint.index.format,
            step=checkpoint.index.run.step,
            missing_keys=sources.missing,
            unexpected_keys=sources.unexpected,
            left_alone=(*sources.left_alone, *self._live.extra),
            bytes_read=read_bytes - self._files.bytes_shared,
            bytes_shared=self._files.bytes_shared,
            bytes_needed=self._needed_bytes,
            unverified=tuple(name for name in unverified_names if name not in proven),
            unproven=self._names_in(left_open),
            notes=(*checkpoint.notes, *self.notes_on_ties()),
        )

    def _read(
        self, origins: Sequence[Origin], chunks: Sequence[ChunkRead], spans: Sequence[SpanRead]
    ) -> int:
        boxes = [(c.entry, of.target, memory) for c in chunks for of, memory in c.targets]
        boxes += [(span.entry, span.box, span.memory) for span in spans]
        sizes = {id(memory): math.prod(box.sizes) * e.dtype.itemsize for e, box, memory in boxes}

        def note(memory: BoxMemory) -> None:
            self._done.append(id(memory))
            self._listener(BytesWritten(sizes[id(memory)]))

        if sizes:
            self._listener(Started(sum(sizes.values())))
        report = read_chunks(origins[0], chunks, done=note)
        return report.bytes_read + read_spans(origins[1], spans, done=note).bytes_read

    def _plan(
        self, wanted: Iterable[tuple[Fqn, WantedBox]]
    ) -> tuple[list[ChunkRead], list[SpanRead]]:
        boxes: list[WantedBox] = []
        spans: list[SpanRead] = []
        for name, box in wanted:
            for found in find_stored_boxes(self._checkpoint.index, box):
                if isinstance(found, SpanRead):
                    spans.append(found)
                    entry, memory = found.entry, found.memory
                else:
                    boxes.append(found)
                    entry, _, memory = found
                self._owners[id(memory)] = name
                self._keys.setdefault(name, set()).add(entry.key)
        chunks = plan_chunk_reads(boxes)
        memories = [memory for read in chunks for _, memory in read.targets]
        self._left.update(
            self._owners[id(memory)] for memory in (*memories, *(span.memory for span in spans))
        )
        self._kept += memories  # so that their identities are not used again
        return chunks, spans

    def _wanted_of_all(self) -> Iterator[tuple[Fqn, WantedBox]]:
        """Yields the parts of live tensors that are on this rank, as boxes of stored tensors."""
        for tensor in self._live.tensors:
            for place, elements in _places(tensor):
                parts = self._sources.parts.get(tensor.name, ())
                memory = memory_of(elements)
                for count, wanted in self._wanted(tensor, parts, place, memory):
                    self._needed_bytes += count * wanted[0].stored_dtype.itemsize
                    yield tensor.name, wanted

    def _wanted_again(self) -> Iterator[tuple[Fqn, WantedBox]]:
        """Yields what is read to be compared with what is there.

        Tied tensors may be stored more than once. In other tensors several elements may have one
        place in memory.
        """
        for tensor in self._live.tensors:
            own = self._sources.parts.get(tensor.name, ())
            for place, elements in _places(tensor) if own else ():
                forms = [
                    (parts, _Comparison(elements, parts[0].name, self._untied))
                    for parts in self._sources.further.get(tensor.name, ())
                ]
                if _may_overlap(elements):
                    forms.append((own, _Comparison(elements, tensor.name, self._collided)))
                for parts, memory in forms:
                    for _, wanted in self._wanted(tensor, parts, place, memory):
                        yield tensor.name, wanted

    def _wanted(
        self, tensor: LiveTensor, parts: Parts, place: Box, memory: BoxMemory
    ) -> Iterator[tuple[int, WantedBox]]:
        """Yields boxes of stored tensors, with the number of elements that are wanted of each."""
        found = 0
        for part in parts:
            entry = best_entry(self._checkpoint.index, self._stored[part.name], tensor.dtype)
            for count, box, own in _boxes_of(entry, part, place, memory):
                found += count
                yield count, (entry, box, _cast(own, entry, tensor))
        if parts and found != math.prod(place.sizes):
            raise UnsupportedError(
                "is not made of whole parts of tensors on disk",
                where=tensor.name,
                hint="convert the checkpoint first: ckptkit consolidate SRC OUT",
            )

    def notes_on_ties(self) -> Iterator[str]:
        for name, forms in self._sources.further.items():
            for parts in forms:
                if parts and parts[0].name in self._untied:
                    yield (
                        f"{parts[0].name!r} differs in the checkpoint from {name!r}, and the model"
                        f" holds them as one tensor: it has the values of {name!r}"
                    )

    def _compare(self, digests: Mapping[str, StoredDigest]) -> Iterator[Fqn]:
        """Yields tensors that are whole on this rank, and have the digest of the stored ones."""
        for tensor in self._live.tensors if digests else ():
            parts = self._sources.parts.get(tensor.name, ())
            data = _whole_bytes(tensor)
            if data is None or len(parts) != 1 or parts[0].tile is not None:
                continue
            stored, known = self._stored[parts[0].name], digests.get(parts[0].name)
            if known is None or stored.derivation is not None or stored.dtype != tensor.dtype:
                continue
            known.compare(digest_as(known.record.digest, data))
            yield tensor.name

    def _prove(self, origin: Origin) -> int:
        """Reads what little is missing of records that were read in part, and compares them.

        Returns how many bytes were read for that.
        """
        missing = {
            number: record.stop - record.start - sum(length for _, length, _ in record.pieces)
            for number, record in origin.checksums.open_now().items()
        }
        left, read = self._needed_bytes // _PROOF_SHARE, 0
        for number in sorted(missing, key=missing.__getitem__):
            if missing[number] > left - read:
                break
            origin.checksums.settle(number)
            read += missing[number]
        return read

    def _refuse_collisions(self) -> None:
        if self._collided:
            raise UnsupportedError(
                "elements that differ in the checkpoint have one place in memory, as `expand` makes"
                " it",
                where=min(self._collided),
                hint="give the model a tensor with memory for each element, as `clone` makes it",
            )

    def _refuse_changes(self) -> None:
        index = self._checkpoint.index
        records = [r for key in self._stored_keys() for r in index.tensors[key].chunks.record]
        numbers = {int(index.records.file[record]) for record in records}
        changed = self._checkpoint.source.changed([index.files[n] for n in sorted(numbers)])
        if changed is not None:
            raise SourceChangedError(
                f"{changed.path!r} changed while it was read", where=self._checkpoint.path
            )

    def _stored_keys(self) -> Iterator[Key]:
        """Yields the stored tensors that something is read of."""
        index = self._checkpoint.index
        for key in {key for keys in self._keys.values() for key in keys}:
            derivation = index.tensors[key].derivation
            yield from (key,) if derivation is None else (k for _, k in derivation.reads)

    def _names_in(self, records: Collection[int]) -> tuple[str, ...]:
        """Returns the live tensors that have elements in some records."""
        tensors = self._checkpoint.index.tensors
        wanted = np.array(sorted(records), np.int64)
        keys = {k for k in self._stored_keys() if np.isin(tensors[k].chunks.record, wanted).any()}
        return self._names_of(keys)

    def _names_of(self, keys: Collection[Key]) -> tuple[str, ...]:
        return tuple(name for name, own in self._keys.items() if not own.isdisjoint(keys))

    def _partly_filled(self, error: CkptkitError) -> PartlyFilledError:
        return PartlyFilledError(f"{error.message}; {self._progress()}", where=error.where)

    def _progress(self) -> str:
        done = Counter(self._owners[number] for number in tuple(self._done))
        left = [name for name, count in self._left.items() if done[name] < count]
        if not left:
            return "the model is filled, and what was read is not proven"
        return (
            f"the model is partly filled: {len(left):,} of {len(self._left):,} tensors are not:"
            f" {list_first(left)}"
        )


class _Comparison:
    """Memory that nothing is written to: what is read is compared with what is there."""

    def __init__(self, tensor: torch.Tensor, name: Fqn, differing: set[Fqn]) -> None:
        """Takes the memory, the name of what is read, and what gets the name if it differs."""
        self._tensor = tensor
        self._name = name
        self._differing = differing

    def direct(self, _box: Box) -> memoryview | None:
        return None

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        own = self._tensor[slices_of(box)].cpu().contiguous().reshape(-1).view(torch.uint8)
        read = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        if not np.array_equal(own.numpy(), read):
            self._differing.add(self._name)

    def walked(self, start: Shape, walks: Sequence[Walk], sizes: Shape) -> _Comparison:
        strides = self._tensor.stride()
        steps = [strides[axis] * step if step else 0 for axis, step in walks]
        first = self._tensor.storage_offset() + flat_offset(start, strides)
        part = self._tensor.as_strided(sizes, steps, first)
        return _Comparison(part, self._name, self._differing)


def _whole_bytes(tensor: LiveTensor) -> memoryview | None:
    """Returns the bytes of a tensor that is on this rank as a whole, in host memory; else None."""
    places = list(_places(tensor))
    if len(places) != 1 or places[0][0].sizes != tensor.shape:
        return None
    elements = places[0][1]
    if elements.device.type != "cpu" or not elements.is_contiguous() or elements.is_conj():
        return None
    return elements.reshape(-1).view(torch.uint8).numpy().data


def _places(tensor: LiveTensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yields where the parts of a tensor are that are on this rank, with their elements."""
    for piece in tensor.pieces:
        for place, elements in piece.boxes() if piece.elements else ():
            yield place, elements.detach().view(place.sizes)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether it is not certain that each element has memory of its own."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _cast(memory: BoxMemory, entry: TensorEntry, tensor: LiveTensor) -> BoxMemory:
    if entry.dtype == tensor.dtype:
        return memory
    return CastMemory(memory, entry.dtype, tensor.dtype, f"tensor {tensor.name!r}")


def _boxes_of(
    entry: TensorEntry, part: PartSource, place: Box, memory: BoxMemory
) -> Iterator[tuple[int, Box, BoxMemory]]:
    """Yields boxes of a stored tensor for a box of a live one, and the elements in both."""
    if part.tile is None:
        yield math.prod(place.sizes), place, memory
        return
    walks = list(walk_boxes(part.tile, place))
    left = sum(math.prod(walk.box.sizes) for walk in walks)
    for box, own in join_walks(entry, walks, memory):
        count = min(left, math.prod(box.sizes))
        left -= count
        yield count, box, own
