"""The plan of an export: its files, the bytes of each, and the parts of a rank.

The plan follows from names, element types and shapes, which every rank knows of the whole model,
so that all ranks compute the same one without communication. It is what `ckptkit consolidate` plans
for a save of the same state.

The names on disk are those that the model's `save_pretrained` would write. Every rank determines
them from what all ranks know alike. A model whose names are not known is exported under the names
of training, which Transformers 5 loads too: an export is often the last thing that a job does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import operator
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from ckptkit.consumers.class_facts import find_kept_by_diffusers, kept_by_transformers
from ckptkit.consumers.folder_truth import Truth, parse_texts, tell_truth
from ckptkit.consumers.side_files import (
    choose_side_files,
    is_side_file,
    rewrite_side_file,
    sum_bytes_by_dtype,
    update_config,
)
from ckptkit.consumers.table import ADAPTER_CONFIG, CONFIG, GENERATION, find_consumer
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import RefusedError, UnsupportedError, UsageError
from ckptkit.core.geometry import intersect
from ckptkit.core.index import Box, ChunkTable, Fqn, Key, Shape, TensorEntry
from ckptkit.core.manifest import SIDE_FOLDER
from ckptkit.core.model_configs import parse_json_object, parse_model_config
from ckptkit.engine.kernels import make_products
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.hub_names.disk_tensors import (
    HubNames,
    HubTensor,
    Window,
    find_whole,
    find_windows,
)
from ckptkit.lora.dialects import AdapterNames
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.layouts.hf import layout_adapter, layout_hf_weights
from ckptkit.plan.plan import (
    SOURCE,
    Copy,
    OutputFile,
    Plan,
    Product,
    TensorSpec,
    literal_file,
)
from ckptkit.plan.selection import (
    DTypePolicy,
    KeptDtypes,
    describe_kept,
    refuse_casting_quantized,
)
from ckptkit.plan.ties import (
    choose_ties_to_drop,
    find_tie_candidates,
    find_tie_conflicts,
    untie_config,
)
from ckptkit.plan.weight_kinds import refuse_random_weights
from ckptkit.storage.locations import BESIDE_FILES
from ckptkit.training.sidecar import collect_sidecar
from ckptkit.training.state.collect import BoundState
from ckptkit.training.state.dtensors import Copies, has_data
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Piece, select_owned
from ckptkit.training.step_names import (
    TensorPlaces,
    adapter_names,
    ask_disk_names,
    innermost,
    model_class,
)

Table = Mapping[Fqn, TensorSpec]
"""The tensors of the whole model, by name, as training holds them."""
Part = tuple[Box, torch.Tensor]
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]


class ExportNames:
    """The names of live tensors on disk, and how these cut them."""

    def __init__(self, names: HubNames | None, notes: tuple[str, ...] = ()) -> None:
        """Takes what `save_pretrained` makes of a model; None where it changes nothing."""
        self.notes = notes  # what the user should know
        self._tensors = {} if names is None else names.tensors
        self._live = {} if names is None else names.live
        self._called = {
            tensor.sources[0]: name
            for name, tensor in self._tensors.items()
            if _is_same(tensor, self._live)
        }
        library = {} if names is None else {"transformers": names.library}
        # the libraries that determine the names, with their versions
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
        """Turns parts of a live tensor into those of one on disk."""
        tensor = self._tensors.get(name)
        if tensor is None or self._called.get(source) == name:
            yield from held
            return
        every = find_windows(tensor, self._live) or ()
        windows = [(place, window) for place, window in every if window.source == source]
        for box, local in held:
            for place, window in windows:
                shared = intersect(box, window.box)
                if shared is not None:
                    yield _moved(shared, place, window), _taken(local, box, shared, window)


def disk_names(modules: Sequence[nn.Module], table: Table, config: Any) -> ExportNames:
    names, why = ask_disk_names(modules[0], config, _extents(table))
    if names is not None and not all(
        _is_same(tensor, names.live) or find_windows(tensor, names.live) is not None
        for tensor in names.tensors.values()
    ):
        why, names = _why_not(names), None
    notes = (f"names are written as training holds them: {why}",) if why else ()
    return ExportNames(names, notes)


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


_OF_MODELS = frozenset({CONFIG, GENERATION})
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


class ExportRequest(Struct, frozen=True):
    out: Path
    options: ConsolidateRequest  # element type and size of files
    overwrite: bool  # whether a directory that holds something is replaced
    source: Mapping[str, Any]  # what the manifest says of the origin

    @property
    def named(self) -> Path:
        return self.out.parent if self.out.name == BESIDE_FILES else self.out


class ExportPlan(Struct, frozen=True):
    """The output, and what is known of the model without keeping it."""

    plan: Plan
    model_class: type
    table: Table  # the tensors of the whole model
    names: ExportNames  # their names on disk
    is_adapter: bool


class BoxWrite(Struct, frozen=True):
    path: str  # of the file in the output that the tensor is in
    start: int  # its first byte in that file
    spec: TensorSpec  # the tensor as it is written
    dtype: DType  # of the elements here, before they are cast
    box: Box  # which part of the tensor it is
    local: torch.Tensor  # the elements, in the shape of the box

    @property
    def size_bytes(self) -> int:
        return self.local.numel() * self.spec.dtype.itemsize


def plan_export(
    bound: BoundState, sidecar: Mapping[str, object], request: ExportRequest, agree: Agree
) -> tuple[ExportPlan, list[BoxWrite]]:
    """Plans the whole folder, the same on all ranks, and what this rank writes of it.

    `agree` lets rank 0 decide on values of all ranks, as `Peers.agree` does.
    """
    exported, side, options = view_model(bound), side_files(bound, sidecar), request.options
    modules, table, names = parts_of_model(bound), exported.table, ExportNames(None)
    if not exported.is_everywhere:  # ranks of a pipeline have to exchange what they hold
        table = unpack_table(agree(pack_table(table), _join_tables))
    if exported.is_adapter:
        plan = plan_adapter(table, side, options)
    else:
        if options.names != "live":
            names = disk_names(modules, table, parse_config(side))

        def is_tied(name: Fqn, other: Fqn) -> bool:
            same = exported.same(name, other)
            if exported.is_everywhere and same is None:
                return True
            return bool(agree(same is not False, all))

        kept, where = kept_of(modules), str(request.named)
        plan = plan_model(table, side, options, is_tied, names, kept, where=where)
    parts = [
        BoxWrite(file.path, segment.start, spec, exported.table[source].dtype, box, local)
        for file, segment, spec in plan.specs()
        for source in names.sources(spec.name)
        for box, local in names.parts(spec.name, source, exported.parts(source))
    ]
    own = model_class(modules[0])
    return ExportPlan(plan, own, table, names, exported.is_adapter), parts


def _join_tables(tables: list[str]) -> str:
    return pack_table(merge_tables([unpack_table(table) for table in tables]))


def plan_model(
    table: Table,
    side: Mapping[str, bytes],
    options: ConsolidateRequest,
    is_tied: Callable[[Fqn, Fqn], bool],
    names: ExportNames,
    kept: KeptDtypes,
    *,
    where: str,
) -> Plan:
    """Plans a model folder.

    Tensors of the plan are described and not yet bound to what they are copied from.
    """
    config, entries, extents = parse_config(side), list(_entries(table)), _extents(table)
    policy = DTypePolicy(options.dtype, kept=KeptDtypes() if options.cast_all else kept)
    if options.names != "live":
        refuse_random_weights(entries, location=where, config=config)
    refuse_casting_quantized(entries, config, policy, location=where)
    same, broken = dict[Fqn, Fqn](), dict(find_tie_conflicts(config, extents))
    for target, source in find_tie_candidates(config, extents).items():
        (same if is_tied(target, source) else broken)[target] = source
    dropped = choose_ties_to_drop(config, same, broken)
    live = {p.spec.name: p.spec for p in make_products(entries, policy, dropped)}
    products = [Product(spec, Copy(SOURCE, Key(spec.name))) for spec in names.specs(live)]
    consumer, truth = find_consumer(config), Truth()
    weights = layout_hf_weights(products, options.max_file_bytes, consumer.stem)
    if config is not None and consumer.owns_config:
        written = sum_bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        config = update_config(config, written, allow_code=options.allow_code)
        told = replace(parse_texts(side), config=untie_config(config) if broken else config)
        truth = tell_truth(told, None, [str(product.spec.name) for product in products])
    notes = (
        *(
            f"the configuration ties {target!r} to {source!r}, but they differ: both are written"
            for target, source in broken.items()
        ),
        *describe_kept(policy, entries),
        *truth.notes,
    )
    ties = {names.name_of(target): names.name_of(source) for target, source in dropped.items()}
    return Plan((*weights, *_side_files({**side, **truth.changed})), ties, notes)


def plan_adapter(table: Table, side: Mapping[str, bytes], options: ConsolidateRequest) -> Plan:
    """Plans a folder that `PeftModel.from_pretrained` loads."""
    kind = parse_json_object(side[ADAPTER_CONFIG], where=ADAPTER_CONFIG).get("peft_type")
    if not table or kind in _COMPUTED:
        raise RefusedError(
            f"an adapter of type {kind} was found, whose files PEFT computes from its tensors",
            where=ADAPTER_CONFIG,
            hint="write it with save_pretrained of the PEFT model",
        )
    policy = DTypePolicy(options.dtype)
    products = make_products(list(_entries(table)), policy, {})
    beside = {name: data for name, data in side.items() if name not in _OF_MODELS}
    own = literal_file(ADAPTER_CONFIG, beside[ADAPTER_CONFIG])
    return Plan((layout_adapter(products), own, *_side_files(beside)), {})


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


def _entries(table: Table) -> Iterator[TensorEntry]:
    for name, spec in table.items():
        chunks = ChunkTable.of((), len(spec.shape))
        yield TensorEntry(Key(name), (name,), name, "", "model", spec.dtype, spec.shape, chunks)


def _extents(table: Table) -> dict[Fqn, tuple[DType, Shape]]:
    return {name: (spec.dtype, spec.shape) for name, spec in table.items()}


def kept_of(modules: Sequence[nn.Module]) -> KeptDtypes:
    """Returns what the class of a live model keeps in float32, as its library says it.

    Source: transformers 5.23, `PreTrainedModel._get_dtype_plan`; diffusers 0.42, `ModelMixin`.
    """
    model = innermost(modules[0])
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    if isinstance(getattr(model, "config", None), Mapping):  # as models of diffusers have it
        return find_kept_by_diffusers({"_class_name": type(model).__name__.removeprefix("FSDP")})
    return kept_by_transformers(sorted(always), sorted(kept))


def parse_config(side: Mapping[str, bytes]) -> dict[str, Any] | None:
    data = side.get(CONFIG)
    return None if data is None else parse_model_config(data, where=CONFIG)


def _side_files(side: Mapping[str, bytes]) -> Iterator[OutputFile]:
    listed = {name: len(data) for name, data in side.items() if is_side_file(name)}
    files, _ = choose_side_files([("", listed)], allow_code=False)
    for file in files:
        data = side[file.name]
        changed = rewrite_side_file(file.name, len(data), partial(side.__getitem__, file.name))
        yield literal_file(file.name, data if changed is None else changed)


class ExportView(Struct, frozen=True):
    """What this rank holds of the exported model."""

    table: Table  # the tensors that are on this rank, whole or in part
    pieces: Mapping[Fqn, tuple[Piece, ...]]  # this rank's parts of them, by each of their names
    owned: frozenset[int]  # the identities of the pieces that this rank writes
    is_everywhere: bool  # whether all ranks hold the same tensors
    is_adapter: bool  # whether it is the adapter of a PEFT model, and not a model

    def parts(self, name: Fqn) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields what this rank writes of a tensor: boxes, and their elements in that shape."""
        for piece in self.pieces.get(name, ()):
            if id(piece) in self.owned:
                yield from piece.boxes()

    def same(self, name: Fqn, other: Fqn) -> bool | None:
        """Whether two tensors are equal as far as this rank sees; None if they are one."""
        first, second = self.pieces.get(name, ()), self.pieces.get(other, ())
        if first and len(first) == len(second) and all(map(operator.is_, first, second)):
            return None
        if [piece.places for piece in first] != [piece.places for piece in second]:
            return False  # then both are written, which loads as well
        for piece, another in zip(first, second, strict=True):
            left, right = piece.local, another.local
            if not piece.places:
                continue
            if left.dtype != right.dtype or left.shape != right.shape:
                return False
            bits = (side.contiguous().view(-1).view(torch.uint8) for side in (left, right))
            if not torch.equal(*bits):
                return False
        return True


def parts_of_model(bound: BoundState) -> list[nn.Module]:
    """Returns the one model of a state; several modules where they are stages of a pipeline."""
    if len({model.saved_as for model in bound.models}) != 1:
        raise UsageError(
            f"{len(bound.models)} models were found where one was expected",
            where="state",
            hint='give the one to export: export(out, state={"model": model})',
        )
    return [model.module for model in bound.models]


def is_adapter(bound: BoundState) -> bool:
    """Whether the model is a PEFT model and only its adapter is exported."""
    return adapter_names(parts_of_model(bound)[0]) is not None


def adapter_options(bound: BoundState) -> tuple[str, ...]:
    """Returns the options of a command that name the adapter to be exported, among several."""
    model: Any = innermost(parts_of_model(bound)[0])
    names = adapter_names(model)
    if names is None or len(model.peft_config) == 1:
        return ()
    return "--adapter", names.adapter


def view_model(bound: BoundState) -> ExportView:
    """Returns what of the model is on this rank, without any communication."""
    modules, world = parts_of_model(bound), Copies(bound.world_size, bound.rank)
    walks = [ModelWalk(module, TensorPlaces("", ()), world=world) for module in modules]
    views = [walk.look(keep=True) for walk in walks]  # all that a save holds
    adapter = adapter_names(modules[0])
    named = list(_named([piece for view in views for piece in view.pieces], adapter))
    pieces: dict[Fqn, tuple[Piece, ...]] = {}
    for name, piece in named:
        pieces[name] = (*pieces.get(name, ()), piece)
    taken = list({id(piece): piece for _, piece in named}.values())
    mine = zip(taken, select_owned(taken), strict=True)
    return ExportView(
        table={name: _spec(name, parts[0]) for name, parts in pieces.items()},
        pieces=pieces,
        owned=frozenset(id(piece) for piece, is_mine in mine if is_mine),
        is_everywhere=all(view.values.count >= bound.world_size for view in views),
        is_adapter=adapter is not None,
    )


def side_files(bound: BoundState, sidecar: Mapping[str, object]) -> dict[str, bytes]:
    """Returns the files besides the weights, by name: all of them on rank 0.

    The other ranks need only those that the plan depends on: configurations, not tokenizers.
    """
    modules = parts_of_model(bound)
    if bound.rank:
        sidecar = {
            key: value
            for key, value in sidecar.items()
            if isinstance(value, (str, bytes, os.PathLike)) or hasattr(value, "to_json_string")
        }
    files = collect_sidecar(modules, sidecar)
    contents = {file.path.removeprefix(f"{SIDE_FOLDER}/"): file.data for file in files}
    adapter = adapter_names(modules[0])
    own = contents.get(f"adapters/{adapter.adapter}/{ADAPTER_CONFIG}") if adapter else None
    return contents if own is None else {**contents, ADAPTER_CONFIG: own}


def pack_table(table: Table) -> str:
    rows = [[spec.name, spec.dtype.name, spec.shape] for spec in table.values()]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpack_table(text: str) -> dict[Fqn, TensorSpec]:
    """Returns the table that was packed."""
    rows: list[Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    specs = (TensorSpec(Fqn(name), dtype_named(dtype), tuple(s)) for name, dtype, s in rows)
    return {spec.name: spec for spec in specs}


def _named(pieces: Sequence[Piece], adapter: AdapterNames | None) -> Iterator[tuple[Fqn, Piece]]:
    """Yields each piece under the names that it has in the output."""
    for piece in pieces:
        for path in (piece.key_path, *piece.aliases):
            name = Fqn(".".join(map(str, path)))
            in_file = name if adapter is None else adapter.file_name(name)
            if in_file is not None and EXTRA_STATE not in name.split("."):
                yield Fqn(in_file), piece


def _spec(name: Fqn, piece: Piece) -> TensorSpec:
    local = piece.local
    if local.layout is not torch.strided or local.is_quantized or not has_data(local):
        raise UnsupportedError(
            "a tensor that is sparse, quantized or without data was found where a dense one was"
            " expected",
            where=name,
            hint="hold it in the model as a dense tensor",
        )
    return TensorSpec(name, dtype_named(str(local.dtype), where=name), piece.shape)
