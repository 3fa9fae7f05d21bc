"""Fills a live model from any checkpoint: each rank reads what it needs, and depends on no other.

Everything that can be compared is compared before the first element is written: names, shapes,
element types, the sizes of files, and that each element is stored once. There is no communication,
so that a rank which fails or ends leaves the others alone, and cannot stop them either: each rank
has to look whether all of them succeeded, as its next collective will.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from os import PathLike

import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.conversion.mapped_names import convert_checkpoint
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint, read_stored_digests
from ckptkit.core.arguments import check_arguments
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import LoadError
from ckptkit.core.index import Fqn
from ckptkit.core.text import Closing, counted
from ckptkit.engine.checksum_tracker import NumberedRecord
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.progress import report_to
from ckptkit.hub_names.known_models import recognise_framework
from ckptkit.options import FACTOR_DTYPES, ConsolidateRequest, choose_dtype
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.selection import select_model
from ckptkit.storage.local.control_groups import available_bytes
from ckptkit.storage.places import is_url, place_of
from ckptkit.training.environment import ranks_of_this_machine
from ckptkit.training.load.filling import Filling, LoadResult
from ckptkit.training.load.live_model import LiveModel, LiveTensor
from ckptkit.training.load.node_memory import HEAP_BYTES, NodeMemory, join_node
from ckptkit.training.load.shared_source import SharedSource
from ckptkit.training.load.tensor_sources import (
    SourceSearch,
    Stored,
    TensorSources,
    refuse_misfits,
)
from ckptkit.training.resume.materialise import is_wide_float
from ckptkit.training.state.memory_changes import announce_changes
from ckptkit.training.state.models import check_modes, plain_torch
from ckptkit.training.state.quant_states import (
    ScalePlan,
    StoredScale,
    is_made_anew,
    plan_scales,
    scale_names,
)
from ckptkit.training.state.rank_bound import packed_weights
from ckptkit.training.step_names import parallel_prefixes

logger = logging.getLogger(__name__)
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
        with ModelLoad(model, source, dtype=dtype, name_map=map, select=select) as pending:
            pending.check(strict=strict)
            shows = progress and pending.is_first_rank
            with report_to("load_into", {"listener": listener, "progress": shows}) as listen:
                result = pending.fill(listener=listen)
    if result.unproven and pending.is_first_rank:
        logger.warning(
            "%s: checksums of %s were not compared, since each rank reads a part of their records;"
            " `ckptkit verify` compares them",
            *(result.path, counted(len(result.unproven), "tensor")),
        )
    return result


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
        self._live, self._dtype = LiveModel(model), _parse_dtype(dtype)
        if self._dtype is not None:
            self._live.refuse_other(self._dtype)
        with ExitStack() as stack:
            self._node = _join_node(stack, source)  # before, so that other ranks know of this one
            opened = stack.enter_context(open_checkpoint(source, select=select))
            found = _find_sources(self._live, opened, name_map)
            self._checkpoint, self._stored, self._sources = found
            self._find_scales()
            if kept:
                self._sources = self._sources.without(self._live.tensors, kept)
            self._scales = ScalePlan()
            # the records that this rank has read in part, for `cross_check`
            self.partial: tuple[NumberedRecord, ...] = ()
            self._digests = read_stored_digests(self._checkpoint, without_crc32=True)
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
        names = {name: entry.name for name, (_, _, entry) in self._stored_scales.items()}
        self._sources = self._sources.read_apart(names)

    def check(self, *, strict: bool) -> None:
        """Refuses a checkpoint that does not fit, or is not complete; nothing is written yet."""
        live, sources, checkpoint = self._live, self._sources, self._checkpoint
        dtypes = {tensor.name: _dtype_of(tensor, self._dtype) for tensor in live.tensors}
        refuse_misfits(live, sources, self._stored, dtypes, strict=strict)
        used = [self._stored[part.name] for _, part in sources.all_parts()]
        refuse_problems(checkpoint.index, used, checkpoint.path)
        self._scales = plan_scales(self._packed, self._stored_scales)
        if self._scales.problems:
            raise LoadError(
                f"packed weights of the checkpoint are not those of {live.where}:"
                f" {self._scales.problems[0]}",
                hint="quantize the model as the checkpoint was, or build it with the"
                " quantization_config of the checkpoint",
            )

    def fill(self, optimizers: Sequence[Optimizer] = (), listener: Listener = ignore) -> LoadResult:
        announce_changes(self._live.module)
        alone = (*self._sources.missing, *self._sources.left_alone)
        self._live.materialise(self._dtype, alone, optimizers)
        files = SharedSource(self._checkpoint.source, self._node)
        stored, sources = self._stored, self._sources
        filling = Filling(self._live, self._checkpoint, stored, sources, files, listener)
        result = filling.run(self._digests)
        for change in self._scales.changes:
            change()
        self.partial = filling.partial
        for note in filling.notes_on_ties() if self.is_first_rank else ():
            logger.warning("%s: %s", result.path, note)
        return result

    def close(self) -> None:
        self._stack.close()


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
