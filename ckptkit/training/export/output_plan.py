"""Which bytes of which file an export writes: the plan of the whole, and the parts of a rank.

The plan follows from names, element types and shapes, which every rank knows of the whole model,
so that all ranks compute the same one without communication. It is what `ckptkit consolidate` plans
for a save of the same state.

The names on disk are those that the model's `save_pretrained` would write. Every rank determines
them from what all ranks know alike. A model whose names are not known is exported under the names
of training, which Transformers 5 loads too: an export is often the last thing that a job does.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.core.geometry import intersect, row_major_strides
from ckptkit.core.index import Box, ChunkTable, Fqn, Ints, Key, Shape, TensorEntry
from ckptkit.core.model_configs import parse_json_object, parse_model_config
from ckptkit.engine.kernels import CastKernel
from ckptkit.hub_names.disk_tensors import (
    HubNames,
    HubTensor,
    NamingRequest,
    Window,
    find_whole,
    find_windows,
)
from ckptkit.hub_names.known_models import determine_need, explain_doubt
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.layouts.hf import layout_adapter, layout_hf_weights
from ckptkit.plan.packed_weights import refuse_random_weights
from ckptkit.plan.plan import (
    SOURCE,
    Copy,
    Literal,
    OutputFile,
    Plan,
    Product,
    TensorSpec,
    lay_out_file,
)
from ckptkit.plan.selection import make_products, refuse_casting_quantized
from ckptkit.plan.side_files import (
    CONFIG,
    choose_side_files,
    is_side_file,
    rewrite_side_file,
    sum_bytes_by_dtype,
    update_config,
)
from ckptkit.plan.ties import (
    choose_ties_to_drop,
    find_tie_candidates,
    find_tie_conflicts,
    untie_config,
)
from ckptkit.storage.local.disk import PAGE_BYTES
from ckptkit.training.step_names import innermost

Table = Mapping[Fqn, TensorSpec]
Part = tuple[Box, torch.Tensor]


class ExportNames:
    """The names of live tensors on disk, and how these cut them.

    Attributes:
        notes: What the user should know.
        versions: The libraries that determine the names, with their versions.
    """

    def __init__(self, names: HubNames | None, notes: tuple[str, ...] = ()) -> None:
        """Takes what `save_pretrained` makes of a model; None where it changes nothing."""
        self.notes = notes
        self._tensors = {} if names is None else names.tensors
        self._live = {} if names is None else names.live
        self._called = {
            tensor.sources[0]: name
            for name, tensor in self._tensors.items()
            if _is_same(tensor, self._live)
        }
        library = {} if names is None else {"transformers": names.library}
        self.versions: Mapping[str, str] = library

    def name_of(self, live: Fqn) -> Fqn:
        return self._called.get(live, live)

    def specs(self, written: Table) -> Iterator[TensorSpec]:
        """Yields the tensors on disk, from the live ones as they are to be written."""
        if not self._tensors:
            yield from written.values()
        for name, tensor in self._tensors.items():
            sources = [written[source] for source in tensor.sources if source in written]
            if sources:
                yield TensorSpec(name, sources[0].dtype, tensor.shape)

    def sources(self, name: Fqn) -> tuple[Fqn, ...]:
        tensor = self._tensors.get(name)
        return (name,) if tensor is None else tensor.sources

    def parts(self, name: Fqn, source: Fqn, held: Iterator[Part]) -> Iterator[Part]:
        """Turns parts of a live tensor into those of one on disk.

        Args:
            name: The tensor on disk.
            source: One of its live tensors.
            held: Boxes of that, with their elements in the shape of the box.

        Yields:
            Boxes of the tensor on disk, with theirs.
        """
        tensor = self._tensors.get(name)
        if tensor is None or self._called.get(source) == name:
            yield from held
            return
        windows = [pair for pair in self._windows(tensor) if pair[1].source == source]
        for box, local in held:
            for place, window in windows:
                shared = intersect(box, window.box)
                if shared is not None:
                    yield _moved(shared, place, window), _taken(local, box, shared, window)

    def _windows(self, tensor: HubTensor) -> Sequence[tuple[Box, Window]]:
        return find_windows(tensor, self._live) or ()


def disk_names(modules: Sequence[nn.Module], table: Table, config: Any) -> ExportNames:
    """Determines the names of a model's tensors on disk.

    Args:
        modules: The model; several modules where they are stages of a pipeline.
        table: The tensors of the whole model.
        config: Its parsed `config.json`, or None.
    """
    model: Any = innermost(modules[0])
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    is_native = own.__module__.startswith("transformers.")
    need = determine_need(config, has_base=True)
    if need.kind != "ask" or not is_native:
        return ExportNames(None)
    why = explain_doubt(config, (spec.dtype for spec in table.values()))
    names: HubNames | None = None
    if not why:
        try:
            names = _asked(model, {**config, "architectures": [own.__name__]}, table)
        except Exception as error:  # noqa: BLE001  an export is written without them
            why = f"{type(error).__name__}: {error}"
    if names is not None and not _can_be_cut(names):
        why, names = _why_not(names), None
    notes = (f"names are written as training holds them: {why}",) if why else ()
    return ExportNames(names, notes)


def _asked(model: Any, config: Mapping[str, Any], table: Table) -> HubNames:
    from ckptkit.hub_names.transformers.answers import answer_names

    tensors = {name: (spec.dtype, spec.shape) for name, spec in table.items()}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    return answer_names(NamingRequest(plain, tensors), getattr(model, "_weight_conversions", None))


def _can_be_cut(names: HubNames) -> bool:
    return all(
        _is_same(tensor, names.live) or find_windows(tensor, names.live) is not None
        for tensor in names.tensors.values()
    )


def _why_not(names: HubNames) -> str:
    """Returns why ranks cannot write these names from what each of them holds."""
    for tensor in names.tensors.values():
        if tensor.computed is not None:
            return (
                f"transformers {names.library} computes tensor {tensor.name!r}, for which it needs"
                f" {tensor.sources[0]!r} as a whole; `ckptkit consolidate` makes what"
                " save_pretrained would write of this folder"
            )
    return "its conversion reorders elements within a dimension"


def _is_same(tensor: HubTensor, live: Mapping[Fqn, Shape]) -> bool:
    source = find_whole(tensor, live)
    return source is not None and live[source] == tensor.shape


def _moved(shared: Box, place: Box, window: Window) -> Box:
    """Returns where on disk a part of a live tensor is."""
    return Box(
        tuple(
            offset + shared.offsets[axis] - window.box.offsets[axis]
            for offset, axis in zip(place.offsets, window.axes, strict=True)
        ),
        tuple(shared.sizes[axis] for axis in window.axes),
    )


def _taken(local: torch.Tensor, box: Box, shared: Box, window: Window) -> torch.Tensor:
    """Returns the elements of a part, in the shape that it has on disk."""
    for axis, size in enumerate(shared.sizes):
        local = local.narrow(axis, shared.offsets[axis] - box.offsets[axis], size)
    rest = [axis for axis in range(local.dim()) if axis not in window.axes]
    ordered = local.permute(*rest, *window.axes)
    return ordered[(0,) * len(rest)]


BLOCK_BYTES = 8 << 20
"""The size of the blocks that are cast, checksummed and written."""

_LONG_BYTES = 1 << 20  # runs from here on are written past the page cache, each on its own
_OF_MODELS = frozenset({CONFIG, "generation_config.json"})
ADAPTER_CONFIG = "adapter_config.json"
# SHiRA's files have indices that its state dict lacks, those of prompts what a module computes.
_COMPUTED = frozenset(
    {
        "CARTRIDGE",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "P_TUNING",
        "SHIRA",
    }
)
"""The tensors of the whole model, by name, as training holds them."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The request of an export.

    Attributes:
        out: The directory to write.
        options: Element type and size of files.
        overwrite: Whether a directory that holds something is replaced.
        source: What the manifest says of the origin.
        versions: The libraries besides ours that the output follows from, with their versions.
    """

    out: Path
    options: ConsolidateRequest
    overwrite: bool
    source: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where a tensor is in the output: its file, first byte in it, and description."""

    path: str
    start: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of a box that are cast at once.

    Attributes:
        first: The first one, in the row-major order of the box.
        stop: The first one after them.
        at: int64; where each run of them begins, in bytes from the tensor's first.
        run_bytes: How long each run is.
    """

    first: int
    stop: int
    at: Ints
    run_bytes: int


def declared_ties(table: Table, side: Mapping[str, bytes]) -> Mapping[Fqn, Fqn]:
    return find_tie_candidates(parse_config(side), _extents(table))


def plan_model(
    table: Table,
    side: Mapping[str, bytes],
    options: ConsolidateRequest,
    is_tied: Callable[[Fqn, Fqn], bool],
    names: ExportNames,
    *,
    where: str,
) -> Plan:
    """Plans a model folder.

    Args:
        table: The tensors of the whole model.
        side: The other files, by name: configurations, tokenizer.
        options: How to write it.
        is_tied: Returns whether two tensors that are declared tied hold the same bytes.
        names: The names of its tensors on disk.
        where: The output, for messages.

    Returns:
        The plan; its tensors are described and not yet bound to what they are copied from.
    """
    config, entries = parse_config(side), [_entry(spec) for spec in table.values()]
    refuse_random_weights(entries, location=where, config=config)
    refuse_casting_quantized(entries, options, config, location=where)
    same, broken = dict[Fqn, Fqn](), dict(find_tie_conflicts(config, _extents(table)))
    for target, source in declared_ties(table, side).items():
        (same if is_tied(target, source) else broken)[target] = source
    dropped = choose_ties_to_drop(config, same, broken)
    live = {p.spec.name: p.spec for p in make_products(entries, options, dropped, CastKernel)}
    products = [Product(spec, Copy(SOURCE, Key(spec.name))) for spec in names.specs(live)]
    weights = layout_hf_weights(products, options.max_file_bytes)
    if config is not None:
        written = sum_bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        config = update_config(config, written, allow_code=options.allow_code)
        config = untie_config(config) if broken else config
    notes = tuple(
        f"the configuration ties {target!r} to {source!r}, but they differ: both are written"
        for target, source in broken.items()
    )
    ties = {names.name_of(target): names.name_of(source) for target, source in dropped.items()}
    return Plan((*weights, *_side_files(side, config)), ties, notes)


def plan_adapter(table: Table, side: Mapping[str, bytes], options: ConsolidateRequest) -> Plan:
    """Plans a folder that `PeftModel.from_pretrained` loads.

    Args:
        table: The tensors of the adapter, by the names that PEFT's files give them.
        side: The other files, with `adapter_config.json`.
        options: How to write it.
    """
    kind = parse_json_object(side[ADAPTER_CONFIG], where=ADAPTER_CONFIG).get("peft_type")
    if not table or kind in _COMPUTED:
        raise RefusedError(
            f"an adapter of type {kind} was found, whose files PEFT computes from its tensors",
            where=ADAPTER_CONFIG,
            hint="write it with save_pretrained of the PEFT model",
        )
    products = make_products([_entry(spec) for spec in table.values()], options, {}, CastKernel)
    beside = {name: data for name, data in side.items() if name not in _OF_MODELS}
    own = _literal(ADAPTER_CONFIG, beside[ADAPTER_CONFIG])
    return Plan((layout_adapter(products), own, *_side_files(beside, None)), {})


def places_of(plan: Plan) -> dict[Fqn, OutputPlace]:
    return {spec.name: OutputPlace(file.path, seg.start, spec) for file, seg, spec in plan.specs()}


def digest_of_plan(plan: Plan) -> str:
    """Returns a digest that is equal on ranks that plan the same tensor bytes."""
    rows = [
        [file.path, segment.start, spec.name, spec.dtype.name, list(spec.shape)]
        for file, segment, spec in plan.specs()
    ]
    return hashlib.sha256(json.dumps([rows, sorted(plan.dropped.items())]).encode()).hexdigest()


def merge_tables(tables: Sequence[Table]) -> dict[Fqn, TensorSpec]:
    """Joins the tables of ranks that hold different tensors, such as stages of a pipeline."""
    merged: dict[Fqn, TensorSpec] = {}
    for rank, table in enumerate(tables):
        for name, spec in table.items():
            first = merged.setdefault(name, spec)
            if first != spec:
                raise UsageError(
                    f"{spec.dtype.name} of shape {list(spec.shape)} was found on rank {rank} where"
                    f" another one has {first.dtype.name} of shape {list(first.shape)}",
                    where=name,
                    hint="all ranks have to export the same model",
                )
    return merged


def blocks_of(box: Box, place: OutputPlace) -> Iterator[Block]:
    """Yields the parts of a box that are each cast and written at once.

    Long runs are cut at pages of the file, so that all but their edges fill whole pages; short
    ones are taken many at a time.
    """
    itemsize = place.spec.dtype.itemsize
    length, starts = runs_of(box, place.spec.shape)
    size = length * itemsize
    if size < _LONG_BYTES:
        count = max(1, BLOCK_BYTES // max(size, 1))
        for first in range(0, len(starts), count):
            at = starts[first : first + count] * itemsize
            yield Block(first * length, (first + len(at)) * length, at, size)
        return
    for number, start in enumerate(starts.tolist()):
        low, stop = start * itemsize, (start + length) * itemsize
        for high in _cuts(low, stop, place.start):
            first = number * length + low // itemsize - start
            at = np.array([low], np.int64)
            yield Block(first, first + (high - low) // itemsize, at, high - low)
            low = high


def _cuts(low: int, stop: int, start: int) -> Iterator[int]:
    """Yields where the blocks of a run end: about alike in size, and at whole pages of the file.

    They are less than a page longer than `BLOCK_BYTES`.
    """
    count, page = -(-(stop - low) // BLOCK_BYTES), min(PAGE_BYTES, BLOCK_BYTES)
    for number in range(1, count):
        at = start + low + (stop - low) * number // count
        yield max(at - at % page - start, low)
    yield stop


def runs_of(box: Box, shape: Shape) -> tuple[int, Ints]:
    """Returns the runs of row-major elements that a box consists of.

    Returns:
        The length of each run, and int64 of where each begins, in elements and ascending.
    """
    axis = len(shape)
    while axis > 0 and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)  # which may be cut, while all after it are whole
    strides = row_major_strides(shape)
    starts = np.array([0], np.int64)
    for outer in range(len(shape)):
        count = box.sizes[outer] if outer < axis else 1
        steps = (np.arange(count, dtype=np.int64) + box.offsets[outer]) * strides[outer]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return math.prod(box.sizes[axis:]), starts


def _entry(spec: TensorSpec) -> TensorEntry:
    chunks = ChunkTable.of((), len(spec.shape))
    name = spec.name
    return TensorEntry(Key(name), (name,), name, "", "model", spec.dtype, spec.shape, chunks)


def _extents(table: Table) -> dict[Fqn, tuple[DType, Shape]]:
    return {name: (spec.dtype, spec.shape) for name, spec in table.items()}


def parse_config(side: Mapping[str, bytes]) -> dict[str, Any] | None:
    data = side.get(CONFIG)
    return None if data is None else parse_model_config(data, where=CONFIG)


def _side_files(
    side: Mapping[str, bytes], config: Mapping[str, Any] | None
) -> Iterator[OutputFile]:
    listed = {name: len(data) for name, data in side.items() if is_side_file(name)}
    files, _ = choose_side_files([("", listed)], allow_code=False)
    for file in files:
        data = side[file.name]
        read = partial(side.__getitem__, file.name)
        changed = rewrite_side_file(file.name, len(data), read, config, allow_code=False)
        yield _literal(file.name, data if changed is None else changed)


def _literal(path: str, data: bytes) -> OutputFile:
    return lay_out_file(path, [(len(data), Literal(data), None)])
