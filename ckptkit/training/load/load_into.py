"""Fills a live model from any checkpoint: each rank reads what it needs, and depends on no other.

Everything that can be compared is compared before the first element is written: names, shapes,
element types, the sizes of files, and that each element is stored once. There is no communication,
so that a rank which fails or ends leaves the others alone, and cannot stop them either: each rank
has to look whether all of them succeeded, as its next collective will.
"""

from __future__ import annotations

import json
import logging
import math
import posixpath
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from ckptkit.conversion.mapped_names import convert_checkpoint
from ckptkit.conversion.source.open import (
    OpenedCheckpoint,
    open_checkpoint,
    read_stored_digests,
)
from ckptkit.core.arguments import check_arguments
from ckptkit.core.checksums import digest_as
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import (
    CkptkitError,
    LoadError,
    PartlyFilledError,
    SourceChangedError,
    UnsupportedError,
)
from ckptkit.core.frameworks import recognise_by_tensors
from ckptkit.core.geometry import Walk, slices_of, walk_boxes
from ckptkit.core.index import Box, Fqn, Key, Shape, TensorEntry
from ckptkit.core.text import Closing, counted, list_first
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
from ckptkit.engine.locate import list_stored
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.engine.progress import report_to
from ckptkit.engine.reader import BoxMemory, ChunkRead, Origin
from ckptkit.options import FACTOR_DTYPES, ConsolidateRequest, choose_dtype
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.selection import select_model
from ckptkit.storage.local.control_groups import available_bytes
from ckptkit.storage.places import is_url, place_of
from ckptkit.training.environment import ranks_of_this_machine
from ckptkit.training.load.group_reads import GroupReads, agreeing
from ckptkit.training.load.load_pieces import (
    MOST_PARTS,
    DeviceMemory,
    copied_changes,
    memory_of,
    strided_part,
)
from ckptkit.training.load.materialise import is_wide_float
from ckptkit.training.load.node_sharing import HEAP_BYTES, NodeMemory, SharedSource, join_node
from ckptkit.training.load.tensor_sources import (
    LiveModel,
    LiveTensor,
    Parts,
    PartSource,
    SourceSearch,
    Stored,
    TensorSources,
    best_entry,
    refuse_misfits,
)
from ckptkit.training.state.memory_changes import announce_changes, count_changes
from ckptkit.training.state.models import check_modes, plain_torch
from ckptkit.training.state.pieces import Piece
from ckptkit.training.state.quant_states import (
    StoredScale,
    is_made_anew,
    packed_weights,
    plan_scales,
    scale_names,
)
from ckptkit.training.step_names import parallel_prefixes

logger = logging.getLogger(__name__)
_PROOF_SHARE = 64  # so much of what is needed is read for proofs alone
_MEMORY_SHARE = 8  # at most one of so many available bytes is shared on the node


@check_arguments
def load_into(
    model: nn.Module,
    source: str | PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    map: str | PathLike[str] | None = None,  # noqa: A002  as the option of the commands
    strict: bool = True,
    select: str | None = None,
    group: dist.ProcessGroup | None = None,
    listener: Listener | None = None,
    progress: bool = False,
) -> LoadResult:
    """Fills a model from a checkpoint of any format, sharded alike, otherwise, or not at all.

    Each rank reads the byte ranges of its own shards, straight into their memory where the element
    types are equal. No collective is issued; ranks may call it at different times, or alone. Those
    of one node that load from the same URL at a time share what they download. Name a step, not a
    run, where another one may be saved meanwhile: each rank takes the newest that it sees.

    Args:
        model: Plain, or wrapped already by DDP, FSDP, FSDP2 or tensor parallelism. Tensors on the
            meta device get memory, on the device of the mesh, and with FSDP2's offloading on the
            CPU. Those that the checkpoint does not have stay there.
        source: Any path in or above a checkpoint, or its URL.
        dtype: What floats become that are on the meta device; None for what the model has. All
            others are cast to what the model has.
        map: The map of names of another framework, as `ckptkit consolidate --map` takes it; None
            for the one that fits, if names need one.
        strict: Whether to refuse tensors that only the model has, or only the checkpoint.
        select: Which of several checkpoints or models to take, as `--select`.
        group: Ranks that load at the same time, such as those of the replicate dimension of HSDP:
            what several of them hold alike, one reads and sends to the others. All of them have to
            call it. None issues no collective.
        listener: Receives progress events of this rank, from several threads.
        progress: Whether rank 0 shows its progress, see `ckptkit.api.Options`.

    Returns:
        What was loaded, and what was not.

    Raises:
        LoadError: If the checkpoint does not fit the model, which is then unchanged.
        PartlyFilledError: If reading failed after the first element was written.
        InputError: If the checkpoint cannot be opened, is damaged or incomplete; the model is
            unchanged.
    """
    with plain_torch() as unsuited:
        check_modes(unsuited, "load_into")
        with ExitStack() as stack:
            with agreeing(group):
                load = ModelLoad(model, source, dtype=dtype, name_map=map, select=select)
                pending = stack.enter_context(load)
                pending.check(strict=strict)
            shows = progress and pending.is_first_rank
            with report_to("load_into", {"listener": listener, "progress": shows}) as listen:
                result = pending.fill(listener=listen, group=group)
    if result.unproven and pending.is_first_rank:
        logger.warning(
            "%s: checksums of %s were not compared, since each rank reads a part of their records;"
            " `ckptkit verify` compares them",
            *(result.path, counted(len(result.unproven), "tensor")),
        )
    return result


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
        bytes_shared: Taken from other ranks, of the node for a URL, or of the group.
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


class ModelLoad(Closing):
    """One load in two parts, between which ranks can agree. Use it as a context manager."""

    def __init__(
        self,
        model: nn.Module,
        source: PathLike[str] | str,
        *,
        dtype: str | torch.dtype | None = None,
        name_map: str | PathLike[str] | None = None,
        select: str | None = None,
        kept: Collection[Fqn] = (),
    ) -> None:
        self._live = LiveModel(model)
        self._dtype: torch.dtype | None = None
        if dtype is not None:
            self._dtype = getattr(torch, choose_dtype(dtype, FACTOR_DTYPES))
            self._live.refuse_other(self._dtype)
        with ExitStack() as stack:
            self._node = _join_node(stack, source)  # before, so that other ranks know of this one
            opened = stack.enter_context(open_checkpoint(source, select=select))
            found = _find_sources(self._live, opened, name_map)
            self._checkpoint, self._stored, self._sources = found
            self._find_scales()
            if kept:
                tensors = self._live.tensors
                gone = {t.name for t in tensors if any(name in kept for name in t.names)}
                self._sources = self._sources.without(gone)
            self._scale_changes: list[Callable[[], object]] = []
            # the records that this rank has read in part, for `prove_together`
            self.partial: tuple[NumberedRecord, ...] = ()
            self._digests = read_stored_digests(self._checkpoint, without_crc32=True)
            # What `fill` plans, and how far it has come.
            self._listener: Listener = ignore
            self._owners: dict[int, Fqn] = {}  # by the identity of the memory of a part
            self._keys: dict[Fqn, set[Key]] = {}  # of what is read, by the live name
            self._left: Counter[Fqn] = Counter()
            self._done: deque[int] = deque()
            self._kept: list[BoxMemory] = []
            self._needed_bytes = 0
            # Stored tensors that differ from the live one of their name.
            self._untied: set[Fqn] = set()
            # Live ones with one memory for elements that differ.
            self._collided: set[Fqn] = set()
            self._stack = stack.pop_all()

    @property
    def step(self) -> int | None:
        return self._checkpoint.index.run.step

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes what all ranks would."""
        return self._live.rank == 0

    def name_record(self, number: int) -> str:
        checkpoint = self._checkpoint
        return posixpath.join(checkpoint.source.location, checkpoint.index.path_of(number))

    @property
    def files(self) -> tuple[str, ...]:
        index = self._checkpoint.index
        records = {record for entry in self._stored.values() for record in entry.chunks.record}
        numbers = sorted({int(index.records.file[record]) for record in records})
        return tuple(
            posixpath.join(self._checkpoint.source.location, index.files[n].path) for n in numbers
        )

    @property
    def unfilled(self) -> tuple[Fqn, ...]:
        """Tensors of the model that the checkpoint does not have, but for those that are kept."""
        return self._sources.missing + self._sources.left_alone

    def _find_scales(self) -> None:
        """Finds scales of packed weights that are not filled like other tensors."""
        parts, index = self._sources.parts, self._checkpoint.index
        packed = packed_weights(self._live.module, parallel_prefixes(self._live.module))
        self._packed = {name: state for name, state in packed.items() if name in parts}
        self._stored_scales: dict[str, StoredScale] = {}
        for weight, key in scale_names(self._packed):
            name, scale = f"{weight}.{key}", Fqn(f"{parts[Fqn(weight)][0].name}.{key}")
            if scale in self._stored and (is_made_anew(key) or name not in parts):
                self._stored_scales[name] = index, self._checkpoint.source, self._stored[scale]
        stored = {entry.name for _, _, entry in self._stored_scales.values()}
        self._sources = self._sources.without(self._stored_scales, stored)

    def check(self, *, strict: bool) -> None:
        """Refuses a checkpoint that does not fit, or is not complete; nothing is written yet."""
        live, sources, checkpoint = self._live, self._sources, self._checkpoint
        dtypes = {tensor.name: tensor.dtype for tensor in live.tensors}
        for tensor in live.tensors if self._dtype is not None else ():
            local = tensor.pieces[0].local
            if local.is_meta and is_wide_float(local.dtype):
                dtypes[tensor.name] = dtype_named(str(self._dtype))
        refuse_misfits(live, sources, self._stored, dtypes, strict=strict)
        used = [self._stored[part.name] for _, part in sources.all_parts()]
        refuse_problems(checkpoint.index, used, checkpoint.path)
        problems, self._scale_changes = plan_scales(self._packed, self._stored_scales)
        if problems:
            raise LoadError(
                f"packed weights of the checkpoint are not those of {live.where}: {problems[0]}",
                hint="quantize the model as the checkpoint was, or build it with the"
                " quantization_config of the checkpoint",
            )

    def fill(
        self,
        optimizers: Sequence[Optimizer] = (),
        listener: Listener = ignore,
        group: dist.ProcessGroup | None = None,
    ) -> LoadResult:
        """Reads what this rank needs, and says how far it came if that fails."""
        checkpoint, sources = self._checkpoint, self._sources
        announce_changes(self._live.module)
        with agreeing(group):
            self._live.materialise(self._dtype, self.unfilled, optimizers)
        files, self._listener = SharedSource(checkpoint.source, self._node), listener
        filled = [tensor for tensor in self._live.tensors if tensor.name in sources.parts]
        pieces = [piece for tensor in filled for piece in tensor.pieces]
        texts = [(self._describe(t), p) for t in filled for p in t.pieces]
        shared = GroupReads([(f"{text} {p.places}", p.local) for text, p in texts], group)
        own = {id(p) for p, is_own in zip(pieces, shared.is_own, strict=True) if is_own}
        chunks, spans = self._plan(self._wanted_of_all(own))
        # Digests of whole tensors, without a CRC-32, would have each rank read all of them.
        records = checkpoint.index.records
        index = replace(checkpoint.index, records=records.with_sums(records.crc32, {}))
        origins = [Origin("source", files, index, most_pieces=MOST_PARTS) for _ in range(2)]
        try:
            with agreeing(group):
                files.announce(checkpoint.index, chunks, spans)
                read_bytes = self._read(origins, chunks, spans)
            sent_bytes = shared.exchange()
            read_bytes += self._read(origins, *self._plan(self._wanted_again()))
            self._refuse_collisions()
            read_bytes += sum(map(self._prove, origins))
            proven = set(self._compare())
            self._refuse_changes()
            for change in copied_changes(self._live.bound, {"": pieces}):
                change()
        except CkptkitError as error:
            message = f"{error.message}; {self._progress()}"
            raise PartlyFilledError(message, where=error.where) from error
        except BaseException as error:
            error.add_note(self._progress())
            raise
        finally:
            count_changes(piece.local for piece in pieces)
        for change in self._scale_changes:
            change()
        self.partial = tuple(n for origin in origins for n in origin.checksums.open_now().items())
        unverified = self._names_of({key for origin in origins for key in origin.unverified})
        notes = tuple(self._notes_on_ties())
        for note in notes if self.is_first_rank else ():
            logger.warning("%s: %s", checkpoint.path, note)
        return LoadResult(
            path=checkpoint.path,
            format=checkpoint.index.format,
            step=checkpoint.index.run.step,
            missing_keys=sources.missing,
            unexpected_keys=sources.unexpected,
            left_alone=(*sources.left_alone, *self._live.extra),
            bytes_read=read_bytes - files.bytes_shared,
            bytes_shared=files.bytes_shared + sent_bytes,
            bytes_needed=self._needed_bytes,
            unverified=tuple(name for name in unverified if name not in proven),
            unproven=self._names_in({number for number, _ in self.partial}),
            notes=(*checkpoint.notes, *notes),
        )

    def close(self) -> None:
        self._stack.close()

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
        bytes_read, _ = read_chunks(origins[0], chunks, done=note)
        return bytes_read + read_spans(origins[1], spans, done=note)

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

    def _describe(self, tensor: LiveTensor) -> str:
        """Returns what a tensor is filled from: of equal texts, its elements are equal."""
        index = self._checkpoint.index
        parts = []
        for part in self._sources.parts[tensor.name]:
            entry = best_entry(index, self._stored[part.name], tensor.dtype)
            stored = (index.tensors[key].chunks.record for key in list_stored(index, entry.key))
            files = {index.files[int(index.records.file[n])] for records in stored for n in records}
            parts.append((part, entry.key, sorted((file.path, file.identity) for file in files)))
        return repr((tensor.dtype.name, parts))

    def _wanted_of_all(self, own: Collection[int]) -> Iterator[tuple[Fqn, WantedBox]]:
        """Yields the parts of live tensors that are on this rank, as boxes of stored tensors.

        `own`: the identities of the pieces that it reads itself.
        """
        for tensor in self._live.tensors:
            parts = self._sources.parts.get(tensor.name, ())
            for piece in tensor.pieces:
                for place, elements in _places_of(piece):
                    memory = memory_of(elements)
                    for count, wanted in self._wanted(tensor, parts, place, memory):
                        self._needed_bytes += count * wanted[0].stored_dtype.itemsize
                        if id(piece) in own:
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

    def _notes_on_ties(self) -> Iterator[str]:
        for name, forms in self._sources.further.items():
            for parts in forms:
                if parts and parts[0].name in self._untied:
                    yield (
                        f"{parts[0].name!r} differs in the checkpoint from {name!r}, and the model"
                        f" holds them as one tensor: it has the values of {name!r}"
                    )

    def _compare(self) -> Iterator[Fqn]:
        """Yields tensors that are whole on this rank, and have the digest of the stored ones."""
        for tensor in self._live.tensors if self._digests else ():
            parts = self._sources.parts.get(tensor.name, ())
            data = _whole_bytes(tensor)
            if data is None or len(parts) != 1 or parts[0].tile is not None:
                continue
            stored, known = self._stored[parts[0].name], self._digests.get(parts[0].name)
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

    def _progress(self) -> str:
        done = Counter(self._owners[number] for number in tuple(self._done))
        left = [name for name, count in self._left.items() if done[name] < count]
        if not left:
            return "the model is filled, and what was read is not proven"
        return (
            f"the model is partly filled: {len(left):,} of {len(self._left):,} tensors are not:"
            f" {list_first(left)}"
        )


def _join_node(stack: ExitStack, source: PathLike[str] | str) -> NodeMemory | None:
    """Returns what ranks of this node share of a distant source; None if that is nothing."""
    place = place_of(source)
    if not is_url(place) or ranks_of_this_machine() == 1:
        return None
    available = available_bytes()
    if available is not None and available < _MEMORY_SHARE * HEAP_BYTES:
        return None
    options = json.dumps(place.options, sort_keys=True, default=repr)
    node = join_node(f"{place.location} {options}")
    return None if node is None else stack.enter_context(node)


def _find_sources(
    live: LiveModel, opened: OpenedCheckpoint, name_map: str | PathLike[str] | None
) -> tuple[OpenedCheckpoint, Stored, TensorSources]:
    """Returns the checkpoint with names that fit, its tensors, and where those of the model are."""
    if name_map is None:
        stored = _stored_tensors(opened)
        sources = SourceSearch(live, stored).find()
        if not sources.rest or not recognise_by_tensors(stored):
            return opened, stored, sources
    request = ConsolidateRequest.from_options({"map": "auto" if name_map is None else name_map})
    checkpoint = convert_checkpoint(opened, request, live.config)
    stored = _stored_tensors(checkpoint)
    return checkpoint, stored, SourceSearch(live, stored).find()


def _stored_tensors(checkpoint: OpenedCheckpoint) -> Stored:
    request = ConsolidateRequest(select=checkpoint.select)
    entries = select_model(checkpoint.index, request, location=checkpoint.path)
    return {entry.name: entry for entry in entries}


class _Comparison(DeviceMemory):
    """Memory that nothing is written to: what is read is compared with what is there."""

    def __init__(self, tensor: torch.Tensor, name: Fqn, differing: set[Fqn]) -> None:
        """Takes the memory, the name of what is read, and what gets the name if it differs."""
        super().__init__(tensor)
        self._name = name
        self._differing = differing

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        own = self._tensor[slices_of(box)].cpu().contiguous().reshape(-1).view(torch.uint8)
        read = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        if not np.array_equal(own.numpy(), read):
            self._differing.add(self._name)

    def walked(self, start: Shape, walks: Sequence[Walk], sizes: Shape) -> _Comparison:
        part = strided_part(self._tensor, start, walks, sizes)
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
        yield from _places_of(piece)


def _places_of(piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
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
