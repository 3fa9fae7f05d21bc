"""Fills a live model from any checkpoint: each rank reads what it needs, and waits for no other.

Everything that can be compared is compared before the first element is written: names, shapes,
element types, the sizes of files, and that each element is stored once. There is no communication,
so that a rank which fails or ends leaves the others alone, and cannot stop them either: each rank
has to look whether all of them succeeded, as its next collective will.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.conversion.mapped_names import convert_checkpoint
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import CkptkitError, PartlyFilledError, SourceChangedError
from ckptkit.core.index import Box, Fqn, Key, TensorEntry
from ckptkit.core.text import Closing
from ckptkit.core.tiles import walk_boxes
from ckptkit.engine.box_reads import (
    CastMemory,
    SpanRead,
    WantedBox,
    find_stored_boxes,
    plan_chunk_reads,
    read_chunks,
    read_spans,
)
from ckptkit.engine.reader import BoxMemory, ChunkRead, Origin
from ckptkit.hub_names.known_models import recognise_framework
from ckptkit.options import FACTOR_DTYPES, ConsolidateRequest, choose_dtype
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.selection import select_model
from ckptkit.training.load.live_model import LiveModel, LiveTensor
from ckptkit.training.load.tensor_sources import (
    PartSource,
    SourceSearch,
    Stored,
    TensorSources,
    best_entry,
    refuse_misfits,
)
from ckptkit.training.resume.load_pieces import list_first, memory_of
from ckptkit.training.resume.materialise import is_wide_float
from ckptkit.training.resume.restore import copied_changes
from ckptkit.training.torch_modes import check_modes, plain_torch

_MOST_PARTS = 256  # of a record that are kept, as in a resume
_PROOF_SHARE = 64  # so much of what is needed is read for proofs alone


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `load_into` did.

    Attributes:
        path: The checkpoint that was taken.
        format: Its format.
        step: Its training step, or None.
        missing_keys: Tensors of the model that the checkpoint does not have; they are unchanged.
        unexpected_keys: Tensors of the checkpoint that the model does not have.
        left_alone: Tensors of the model that such a checkpoint does not hold, as those of an
            adapter where it is a base model; they are unchanged.
        bytes_read: By this rank, from files of tensors.
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
    bytes_needed: int
    unverified: tuple[str, ...]
    unproven: tuple[str, ...]
    notes: tuple[str, ...] = field(default=(), repr=False)


def load_into(
    model: nn.Module,
    source: str | PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    map: str | PathLike[str] | None = None,  # noqa: A002  as the option of the commands
    strict: bool = True,
    select: str | None = None,
) -> LoadResult:
    """Fills a model from a checkpoint of any format, sharded alike, otherwise, or not at all.

    Each rank reads the byte ranges of its own shards, straight into their memory where the element
    types are equal. Nothing is communicated; ranks may call it at different times, or alone. Name
    a step, not a run, where another one may be saved meanwhile: each rank takes the newest that it
    sees.

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
        with ModelLoad(model, source, dtype=dtype, name_map=map, select=select) as pending:
            pending.check(strict=strict)
            return pending.fill()


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
    ) -> None:
        """Opens the checkpoint, and finds the tensors of the model in it; see `load_into`."""
        self._live, self._dtype = LiveModel(model), _parse_dtype(dtype)
        if self._dtype is not None:
            self._live.refuse_other(self._dtype)
        with ExitStack() as stack:
            opened = stack.enter_context(open_checkpoint(source, select=select))
            found = _find_sources(self._live, opened, name_map)
            self._checkpoint, self._stored, self._sources = found
            self._stack = stack.pop_all()

    @property
    def step(self) -> int | None:
        """The training step of the checkpoint, or None."""
        return self._checkpoint.index.run.step

    def check(self, *, strict: bool) -> None:
        """Refuses a checkpoint that does not fit, or is not complete; nothing is written yet."""
        live, sources, checkpoint = self._live, self._sources, self._checkpoint
        dtypes = {tensor.name: _dtype_of(tensor, self._dtype) for tensor in live.tensors}
        refuse_misfits(live, sources, self._stored, dtypes, strict=strict)
        used = [self._stored[part.name] for parts in sources.parts.values() for part in parts]
        refuse_problems(checkpoint.index, used, checkpoint.path)

    def fill(self, optimizers: Sequence[Optimizer] = ()) -> LoadResult:
        """Fills the model.

        Args:
            optimizers: Those of its parameters, which get new ones for those on the meta device.
        """
        alone = (*self._sources.missing, *self._sources.left_alone)
        self._live.materialise(self._dtype, alone, optimizers)
        return _Filling(self._live, self._checkpoint, self._stored, self._sources).run()

    def close(self) -> None:
        """Closes the files of the checkpoint."""
        self._stack.close()


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, choose_dtype(dtype, FACTOR_DTYPES))
    return found if isinstance(found, torch.dtype) else None


def _dtype_of(tensor: LiveTensor, wanted: torch.dtype | None) -> DType:
    local = tensor.pieces[0].local
    if wanted is None or not local.is_meta or not is_wide_float(local.dtype):
        return tensor.dtype
    return dtype_named(str(wanted))


def _find_sources(
    live: LiveModel, opened: OpenedCheckpoint, name_map: str | PathLike[str] | None
) -> tuple[OpenedCheckpoint, Stored, TensorSources]:
    """Returns the checkpoint with names that fit, its tensors, and where those of the model are."""
    checkpoint = opened
    if name_map is None:
        stored = _stored_tensors(opened)
        if not recognise_framework(stored):
            return opened, stored, SourceSearch(live, stored).find()
        sources = SourceSearch(live, stored).find()
        if not sources.rest:
            return opened, stored, sources
    request = ConsolidateRequest.from_options({"map": "auto" if name_map is None else name_map})
    checkpoint = convert_checkpoint(opened, request, live.config)
    stored = _stored_tensors(checkpoint)
    return checkpoint, stored, SourceSearch(live, stored).find()


def _stored_tensors(checkpoint: OpenedCheckpoint) -> Stored:
    request = ConsolidateRequest(select=checkpoint.select)
    entries = select_model(checkpoint.index, request, location=checkpoint.path)
    return {entry.name: entry for entry in entries}


class _Filling:
    """Reads what this rank needs, and says how far it came if that fails."""

    def __init__(
        self, live: LiveModel, checkpoint: OpenedCheckpoint, stored: Stored, sources: TensorSources
    ) -> None:
        self._live = live
        self._checkpoint = checkpoint
        self._stored = stored
        self._sources = sources
        self._owners: dict[int, Fqn] = {}  # by the identity of the memory of a part
        self._keys: dict[Fqn, set[Key]] = {}  # of what is read, by the live name
        self._left: Counter[Fqn] = Counter()
        self._done: deque[int] = deque()
        self._needed_bytes = 0

    def run(self) -> LoadResult:
        """Fills the model."""
        checkpoint, sources = self._checkpoint, self._sources
        chunks, spans = self._plan()
        origins = [
            Origin("source", checkpoint.source, checkpoint.index, most_pieces=_MOST_PARTS)
            for _ in range(2)
        ]
        try:
            report = read_chunks(origins[0], chunks, done=self._note)
            computed = read_spans(origins[1], spans, done=self._note)
            proof_bytes = sum(map(self._prove, origins))
            self._refuse_changes()
            filled = [tensor for tensor in self._live.tensors if tensor.name in sources.parts]
            pieces = [piece for tensor in filled for piece in tensor.pieces]
            for change in copied_changes(self._live.bound, {"": pieces}):
                change()
        except CkptkitError as error:
            raise self._partly_filled(error) from error
        except BaseException as error:
            error.add_note(self._progress())
            raise
        left_open = {number for origin in origins for number in origin.checksums.open_now()}
        unverified = {key for origin in origins for key in origin.unverified}
        return LoadResult(
            path=checkpoint.path,
            format=checkpoint.index.format,
            step=checkpoint.index.run.step,
            missing_keys=sources.missing,
            unexpected_keys=sources.unexpected,
            left_alone=sources.left_alone,
            bytes_read=report.bytes_read + computed.bytes_read + proof_bytes,
            bytes_needed=self._needed_bytes,
            unverified=self._names_of(unverified),
            unproven=self._names_in(left_open),
            notes=checkpoint.notes,
        )

    def _plan(self) -> tuple[list[ChunkRead], list[SpanRead]]:
        boxes: list[WantedBox] = []
        spans: list[SpanRead] = []
        for tensor in self._live.tensors:
            if tensor.name not in self._sources.parts:
                continue
            for wanted in self._wanted(tensor):
                for found in find_stored_boxes(self._checkpoint.index, wanted):
                    if isinstance(found, SpanRead):
                        spans.append(found)
                        entry, memory = found.entry, found.memory
                    else:
                        boxes.append(found)
                        entry, _, memory = found
                    self._owners[id(memory)] = tensor.name
                    self._keys.setdefault(tensor.name, set()).add(entry.key)
        chunks = plan_chunk_reads(boxes)
        memories = [memory for read in chunks for _, memory in read.targets]
        self._left.update(
            self._owners[id(memory)] for memory in (*memories, *(span.memory for span in spans))
        )
        return chunks, spans

    def _wanted(self, tensor: LiveTensor) -> Iterator[WantedBox]:
        """Yields the parts of a live tensor that are on this rank, as boxes of stored tensors."""
        for piece in tensor.pieces:
            for place, elements in piece.boxes() if piece.elements else ():
                memory = memory_of(elements.detach().view(place.sizes))
                for part in self._sources.parts[tensor.name]:
                    stored = self._stored[part.name]
                    entry = best_entry(self._checkpoint.index, stored, tensor.dtype)
                    cast = _cast(memory, entry, tensor)
                    for wanted in _boxes_of(entry, part, place, cast):
                        size = math.prod(wanted[1].sizes) * entry.stored_dtype.itemsize
                        self._needed_bytes += size
                        yield wanted

    def _note(self, memory: BoxMemory) -> None:
        self._done.append(id(memory))

    def _prove(self, origin: Origin) -> int:
        """Reads what little is missing of records that were read in part, and compares them.

        Returns:
            How many bytes were read for that.
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
        """Returns the live tensors of which something is in some records."""
        tensors = self._checkpoint.index.tensors
        wanted = np.array(sorted(records), np.int64)
        keys = {k for k in self._stored_keys() if np.isin(tensors[k].chunks.record, wanted).any()}
        return self._names_of(keys)

    def _names_of(self, keys: Collection[Key]) -> tuple[str, ...]:
        """Returns the live tensors that are made of some stored ones."""
        return tuple(name for name, own in self._keys.items() if not own.isdisjoint(keys))

    def _partly_filled(self, error: CkptkitError) -> PartlyFilledError:
        return PartlyFilledError(f"{error.message}; {self._progress()}", where=error.where)

    def _progress(self) -> str:
        """Says which tensors are not filled."""
        done = Counter(self._owners[number] for number in tuple(self._done))
        left = [name for name, count in self._left.items() if done[name] < count]
        if not left:
            return "the model is filled, and what was read is not proven"
        return (
            f"the model is partly filled: {len(left):,} of {len(self._left):,} tensors are not:"
            f" {list_first(left)}"
        )


def _cast(memory: BoxMemory, entry: TensorEntry, tensor: LiveTensor) -> BoxMemory:
    if entry.dtype == tensor.dtype:
        return memory
    return CastMemory(memory, entry.dtype, tensor.dtype, f"tensor {tensor.name!r}")


def _boxes_of(
    entry: TensorEntry, part: PartSource, place: Box, memory: BoxMemory
) -> Iterator[WantedBox]:
    """Yields what a stored tensor has of a box of a live one."""
    if part.tile is None:
        yield entry, place, memory
        return
    for walk in walk_boxes(part.tile, place):
        yield entry, walk.box, memory.walked(walk.start, walk.walks, walk.box.sizes)
