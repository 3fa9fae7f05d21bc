"""The readers of DeepSpeed's checkpoints, and the choice of a tag.

ZeRO checkpoints are of stages 1 to 3, or without ZeRO. Experts of `deepspeed.moe` have a file each,
with the number of the layer that has experts and the number of the expert among those of all ranks,
which is also in the names of its tensors. In the files of optimizer states a rank counts its own
experts from 0; its vectors of experts are shared by the ranks that have the same ones.

`mp_rank` in a name is the model-parallel rank: a slice of every tensor (`layouts`), or the stage of
a pipeline, whose layers have a file each and whose stages have optimizer states of their own.

Universal checkpoints are made of them by `ds_to_universal.py`: every parameter has a folder below
`zero/`, with its master copy and the optimizer's states in a file each; the files of weights of the
save are copied as they were. Up to stage 2 a file holds the tensor in its shape, and values that a
change of tensor parallelism needs; in stage 3 it holds the elements only, without steps and frozen
parameters. Those are in the files of weights, and the steps in `zero/optimizer_state.pt`.

The live weights are the model. Up to stage 2 they are stored whole; in stage 3 they are rounded
from the optimizer's master copies, as DeepSpeed does after each step. The master copies are tensors
of the index too, so that casts can start from them.

Stages 1 and 2 concatenate the parameters of a group and cut the vector into equal parts, one for
each rank; each rank stores the list of its slices of parameters. Stage 3 cuts every parameter by
itself, into parts that are padded to one length, and concatenates the parts of a rank in a few
vectors. The optimizer that DeepSpeed wraps knows only the vectors: its element-wise states of a
vector belong to the parameters in it, at the same positions; a single number belongs to each.

A run has one folder per tag, and the file `latest` with the last tag; `latest_universal` names a
universal checkpoint, whose folder usually is next to its tag's, with a suffix in its name.

Source: deepspeed/runtime/engine.py (`save_checkpoint`, which writes `latest` last,
`_get_zero_ckpt_name`, `_get_ckpt_name`, `_save_moe_checkpoint`, `_get_expert_ckpt_name`),
deepspeed/runtime/pipe/module.py (`_build`, `ckpt_layer_path`), deepspeed/utils/groups.py
(`_create_expert_and_data_parallel`), deepspeed/checkpoint/ds_to_universal.py
(`main`, `merge_tp_slices`, `merge_zero3_slices`, `_save_optimizer_state`), deepspeed 0.14 to 0.19;
deepspeed/utils/zero_to_fp32.py, deepspeed/runtime/zero/stage_1_and_2.py (`_create_param_mapping`,
`state_dict`, `_get_base_optimizer_state`), deepspeed/runtime/zero/stage3.py (`_rigid_state_dict`),
deepspeed/runtime/bf16_optimizer.py, 0.19.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.geometry import flat_offset, row_major_strides
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Fqn,
    Key,
    KeyPath,
    Master,
    Problem,
    RunFacts,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import join_first, quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.parsing import (
    COPY_BACK,
    MIXED_SAVES,
    group_by_folder,
    is_count,
    refuse_missing_ranks,
    refuse_mixed_sizes,
    refuse_stale_ranks,
)
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.objects import find_unread, whole_object_error
from ckptkit.formats.pickle.torch_archives import (
    ArchiveTable,
    PickledDict,
    TorchArchive,
    find_differing_copies,
)
from ckptkit.formats.pickle.torch_values import ALLOWED, TensorRef
from ckptkit.formats.trees import Membership, Stored, describe_objects_in, join_path, make_entries
from ckptkit.formats.zero.layouts import Layout, read_layouts, read_maps
from ckptkit.storage.base import Source

_MODULE = "module"
_SLICES = "param_slice_mappings"
_FLAT_SLICES = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"
_TIED = re.compile(r"(tied_modules\.[^.]+\.)(.+)")
Kind = Literal["model", "optim", "expert", "layer"]
_NAME = re.compile(
    r"(bf16_)?(?:zero_pp_rank_(?P<rank>\d{1,7})_|layer_(?P<layer>\d{1,7})_expert_(?P<expert>\d{1,7})_)?"
    r"mp_rank_(?P<slice>\d{1,7})_(?P<kind>optim|model)_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,7})(?:-model_(?P<slice>\d{1,7}))?-model_states\.pt")
_NOT_MODELLED = {
    "experts in files of their own": re.compile(
        r"(layer_-?\d+_)?expert_\d+_.*\.pt|expp_rank_.*\.pt"
    ),
    "layers of a pipeline with an axis of its own": re.compile(r"layer_\d+-.*model_states\.pt"),
}
_AUTO_EXPERTS = "experts of AutoEP, of its first form or beside slices of tensor parallelism"
_LISTED = 4
_UNIVERSAL = re.compile(
    r"(?:(?P<folder>.*)/)?zero/"
    r"(?:(?P<parameter>[^/]+)/(?P<kind>fp32|exp_avg|exp_avg_sq|step)|optimizer_state)\.pt"
)
_MASTER = "fp32"  # the state dict of the master copies, and their kind among universal files
_STATES = "optimizer_state_dict"
_PARTITIONED_STAGE = 3
UNIVERSAL_MODELS = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class TagFile(Struct, frozen=True):
    path: str
    kind: Kind
    rank: int | None  # data-parallel; None for the only file of its kind
    slice: int  # the model-parallel rank: a slice of tensors, or a stage of a pipeline
    # the number of the layer, among those with experts, and of the expert in it
    expert: tuple[int, int] | None = None
    layer: int = 0  # of a pipeline


def parse_name(path: str) -> TagFile | None:
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        match = _LAYER.fullmatch(posixpath.basename(path))
        return match and TagFile(
            path, "layer", None, int(match["slice"] or 0), layer=int(match["layer"])
        )
    kind: Kind = "model" if match["kind"] == "model" else "optim"
    rank = None if match["rank"] is None else int(match["rank"])
    if match["expert"] is None:
        return TagFile(path, kind, rank, int(match["slice"]))
    expert = int(match["layer"]), int(match["expert"])
    return TagFile(path, "expert", None, int(match["slice"]), expert)


def find_unsupported_part(path: str) -> str | None:
    """Returns which part of a model that is not supported a file holds; None for other files."""
    name = posixpath.basename(path)
    if parse_name(path) is not None:
        return None
    return next((what for what, pattern in _NOT_MODELLED.items() if pattern.fullmatch(name)), None)


def parse_universal_path(path: str) -> tuple[str, str, str] | None:
    """Returns the folder of a universal checkpoint, the parameter and the kind of a file in it.

    The last two are empty for the states that all parameters share.
    """
    match = _UNIVERSAL.fullmatch(path)
    if match is None:
        return None
    return match["folder"] or "", match["parameter"] or "", match["kind"] or ""


def _stage(*args: object) -> int:
    match args:
        case (int(stage),):
            return stage
    raise FormatError("ZeRO's stage is not a number")


_ALLOWED = {**ALLOWED, ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage}


class ZeroFile(Struct, frozen=True):
    info: TagFile
    content: PickledDict
    archive: TorchArchive

    def states(self) -> PickledDict:
        """Returns the states of the optimizer in the file of a rank."""
        return self.content.inner(_STATES)

    def slice(
        self, tensor: TensorRef, group: int, first: int, start: int, count: int
    ) -> VectorSlice:
        info = self.info
        return VectorSlice(self.archive, info.rank, info.slice, tensor, group, first, start, count)


def open_zero_file(table: ArchiveTable, source: Source, file: TagFile) -> ZeroFile:
    archive = table.open(source, file.path, _ALLOWED)
    return ZeroFile(file, archive.dictionary(), archive)


class TagFiles(Struct, frozen=True):
    """The files of a tag; those of ranks by model-parallel rank, and by rank in it."""

    ranks: Mapping[int, Mapping[Kind, list[TagFile]]]
    experts: Sequence[TagFile]
    layers: Sequence[TagFile]

    @property
    def optimizers(self) -> list[TagFile]:
        return [file for files in self.ranks.values() for file in files["optim"]]


def sort_tag_files(paths: Sequence[str]) -> TagFiles:
    """Sorts the files of a tag into those of weights and of optimizer states, by rank."""
    parsed = [file for file in map(parse_name, paths) if file is not None]
    has_experts = any(file.kind == "expert" for file in parsed)
    for path in paths:
        part = find_unsupported_part(path)
        # Beside experts, this is what an optimizer without ZeRO wrote; states of theirs are unread.
        if part is not None and not (has_experts and path.endswith("_optim_states.pt")):
            raise unsupported_part_error(part, path)
    ranks: dict[int, dict[Kind, list[TagFile]]] = {}
    beside: dict[Kind, list[TagFile]] = {"expert": [], "layer": []}
    for file in sorted(parsed, key=lambda file: -1 if file.rank is None else file.rank):
        if file.kind in beside:
            beside[file.kind].append(file)
            continue
        files = ranks.setdefault(file.slice, {"model": [], "optim": []})[file.kind]
        if files and (files[-1].rank is None or files[-1].rank == file.rank):
            raise FormatError(
                f"{posixpath.basename(files[-1].path)!r} and {posixpath.basename(file.path)!r}"
                " are of two checkpoints",
                hint=MIXED_SAVES,
            )
        files.append(file)
    without = [number for number, files in sorted(ranks.items()) if not files["model"]]
    if without or not ranks:
        of = f" of model-parallel rank {without[0]}" if len(ranks) > 1 and without else ""
        raise MissingFileError(
            f"there are optimizer states{of}, and no file of weights ('…model_states.pt')"
            if ranks
            else "there is no file of a rank ('mp_rank_00_model_states.pt')",
            hint="give the directory that holds the files of every rank",
        )
    layers = sorted(beside["layer"], key=lambda file: (file.layer, file.slice))
    return TagFiles(dict(sorted(ranks.items())), beside["expert"], layers)


def unsupported_part_error(part: str, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"holds {part} ({posixpath.basename(path)!r}), which this version does not read",
        hint="load it where it was trained, and save the gathered state dict of the whole model"
        " with `torch.save`; read are ZeRO 1 to 3, also with AutoTP, pipelines, and the experts of"
        " `deepspeed.moe` up to ZeRO 2",
    )


def _check_experts(model: PickledDict, experts: Sequence[TagFile]) -> None:
    """Refuses files of experts that are missing, or that the model does not have."""
    counts = model.values.get("num_experts") or []
    counts = counts if isinstance(counts, list) else [counts]
    if not all(map(is_count, counts)):
        raise model.error("'num_experts' is not a list of numbers")
    there = {file.expert for file in experts}
    if not counts and there:
        raise FormatError(
            f"{posixpath.basename(experts[0].path)!r} is beside a model without experts",
            hint=MIXED_SAVES,
        )
    # A hostile file may claim any number of experts, so that no list of them is made.
    expected = ((layer, n) for layer, count in enumerate(counts) for n in range(count))
    some = islice(expected, len(there) + _LISTED)
    absent = [place for place in some if place not in there]
    if absent:
        names = (f"expert {expert} of layer {layer}" for layer, expert in absent)
        count = sum(counts)
        raise MissingFileError(
            f"{len(there):,} of the files of {count:,} experts are there; missing are"
            f" {join_first(names, count - len(there), _LISTED)}",
            hint="copy 'layer_L_expert_E_mp_rank_00_model_states.pt' of every rank's node beside"
            " them; layers with experts are counted from 0",
        )
    if len(there) > sum(counts):
        known = {(layer, n) for layer, count in enumerate(counts) for n in range(count)}
        odd = next(file for file in experts if file.expert not in known)
        raise FormatError(
            f"{posixpath.basename(odd.path)!r} is of an expert that the model does not have",
            hint=MIXED_SAVES,
        )


def _check_ranks(files: Sequence[ZeroFile], world_size: int, what: str) -> None:
    """Refuses files that are missing, and files of ranks that the run did not have."""
    ranks = {file.info.rank for file in files}
    refuse_missing_ranks(ranks, world_size, what)
    refuse_stale_ranks(((file.info.rank, file.info.path) for file in files), world_size)


def _read_groups(model: PickledDict) -> list[dict[str, Shape]]:
    """Returns the shapes of trained parameters, by name, for each vector of the ranks."""
    groups: list[dict[str, Shape]] = []
    seen: set[str] = set()
    for document in model.inner_list("param_shapes"):
        group = document.shapes()
        twice = next((name for name in group if name in seen), None)
        if twice is not None:
            raise document.error(f"has {quote(twice)} in two groups")
        seen.update(group)
        groups.append(group)
    return groups


def _infer_groups(
    model: PickledDict, ranks: Sequence[ZeroFile], layers: Sequence[ZeroFile]
) -> list[dict[str, Shape]]:
    """Returns the shapes of what is trained where no file has them: `BF16_Optimizer` without ZeRO.

    It cuts its vectors as ZeRO 1 does; tensors of the module have the shapes.
    """
    counts: list[dict[str, int]] = []
    for mappings in (file.states().inner_list(_SLICES) for file in ranks):
        counts += [{} for _ in mappings[len(counts) :]]
        for mapping, group in zip(mappings, counts, strict=False):
            for name in mapping.values:
                group[str(name)] = group.get(str(name), 0) + (
                    mapping.inner(name).count("numel") or 0
                )
    named: dict[str, set[Shape]] = defaultdict(set)
    for prefix, values in (
        ("", model.inner(_MODULE).values),
        *((f"{file.info.layer}.", file.content.values) for file in layers),
    ):
        for name, tensor in values.items():
            if isinstance(tensor, TensorRef):
                named[f"{prefix}{name}"].add(tensor.shape)
                named[f"tied.{name}"].add(tensor.shape)
    groups: list[dict[str, Shape]] = [{} for _ in counts]
    for number, group in enumerate(counts):
        for name, count in group.items():
            shapes = named[_TIED.sub(r"tied.\2", name)]
            fitting = [shape for shape in shapes if math.prod(shape) == count]
            if len(fitting) != 1:
                raise model.error(f"has no shape of {quote(name)}, which is trained")
            groups[number][name] = fitting[0]
    return groups


class _Slice(Struct, frozen=True):
    """What one model-parallel rank has: a slice of the tensors, or a stage of a pipeline."""

    models: Sequence[ZeroFile]  # of each rank in stage 3, else one
    ranks: Sequence[ZeroFile]  # of the optimizer's states
    groups: Sequence[Mapping[str, Shape]]  # the shapes of what is trained

    @property
    def content(self) -> PickledDict:
        return self.models[0].content

    @property
    def is_partitioned(self) -> bool:
        return self.models[0].info.rank is not None

    def shapes(self) -> dict[str, Shape]:
        """Returns the shapes of this slice of parameters, and of buffers."""
        module = self.content.inner(_MODULE).values
        shapes = {str(n): v.shape for n, v in module.items() if isinstance(v, TensorRef)}
        for group in self.groups:
            shapes |= {name: shape for name, shape in group.items() if name in shapes}
        return shapes | self.content.inner("frozen_param_shapes").shapes()


class _Save(Struct, frozen=True):
    """The opened files of a tag.

    Attributes:
        slices: Of each model-parallel rank.
        experts: One file for each expert.
        layers: One file for each layer of a pipeline.
        layouts: How parameters are cut into slices of tensor parallelism, by name; else None.
        stacked: How the experts of a layer, which AutoEP makes one parameter, are cut, by name.
    """

    slices: Sequence[_Slice]
    experts: Sequence[ZeroFile]
    layers: Sequence[ZeroFile]
    layouts: Mapping[str, Layout] | None
    stacked: Mapping[str, Layout]

    @classmethod
    def open(
        cls, table: ArchiveTable, source: Source, files: TagFiles, *, is_universal: bool = False
    ) -> _Save:
        """Opens the files, and checks that those of all ranks are there, of one save."""
        experts, layers = (
            [open_zero_file(table, source, file) for file in found]
            for found in (files.experts, files.layers)
        )
        slices = []
        for kinds in files.ranks.values():
            models = [open_zero_file(table, source, file) for file in kinds["model"]]
            ranks = [open_zero_file(table, source, file) for file in kinds["optim"]]
            groups = _read_groups(models[0].content)
            if ranks and not groups:
                groups = _infer_groups(models[0].content, ranks, layers)
            slices.append(_Slice(models, ranks, groups))
        for key in ("global_steps", "dp_world_size", "mp_world_size"):
            if len({model.content.count(key) for each in slices for model in each.models}) > 1:
                raise FormatError(f"the files of ranks have several {key!r}", hint=MIXED_SAVES)
        is_pipeline = _check_model_parallelism(slices, files, needs_layers=not is_universal)
        stacked = _find_stacked(slices)
        # In stage 3 ranks have parts of what AutoEP stacked; ds_to_universal.py joins it.
        if experts or not stacked or not (slices[0].is_partitioned or is_universal):
            _check_experts(slices[0].content, files.experts)
        has_experts = bool(experts or stacked)
        for each in slices:
            _check_ranks_of(each, has_experts=has_experts, has_states=not is_universal)
        layouts = None if is_pipeline or len(slices) == 1 else _find_layouts(slices)
        return cls(slices, experts, layers, layouts, stacked)

    @property
    def content(self) -> PickledDict:
        return self.slices[0].content

    @property
    def is_partitioned(self) -> bool:
        return self.slices[0].is_partitioned

    @property
    def is_pipeline(self) -> bool:
        return self.content.values.get(_MODULE) is None

    @property
    def elsewhere(self) -> Mapping[str, Layout]:
        """What AutoEP stacked and no file of weights has."""
        return {} if self.experts else self.stacked

    @property
    def is_rounded(self) -> bool:
        """Whether weights are nowhere, and have to be rounded from master copies."""
        return self.is_partitioned or (self.is_pipeline and not self.layers)

    def shared(self) -> dict[str, str]:
        """Returns the further names of tied parameters, each with the first name."""
        shared: dict[str, str] = {}
        for each in self.slices:
            pairs = each.content.inner("shared_params").values
            if not all(isinstance(name, str) for pair in pairs.items() for name in pair):
                raise each.content.error("'shared_params' names something that is not a text")
            shared |= pairs
        if self.stacked and self.is_partitioned:
            shared |= _find_routers(self.slices[0])
        return shared


def _find_routers(each: _Slice) -> Iterator[tuple[str, str]]:
    """Yields the old names of AutoEP's routers, which files do not note, each with the new one."""
    module = each.content.inner(_MODULE).values
    trained = {name for group in each.groups for name in group}
    for layer in each.content.inner_list("ds_autoep_layers"):
        prefix = layer.text("module_path") + "."
        for name in map(str, module):
            rest = name.removeprefix(prefix).partition(".")[2]
            router = f"{prefix}router.{rest}"
            if name.startswith(prefix) and name not in trained and router in trained:
                yield name, router


def _check_model_parallelism(
    slices: Sequence[_Slice], files: TagFiles, *, needs_layers: bool
) -> bool:
    """Refuses saves that lack a model-parallel rank; returns whether it is a pipeline."""
    content = slices[0].content
    degrees = content.inner("checkpoint_parallel_dimensions")
    count = content.count("mp_world_size") or 1
    pipeline, tensor = degrees.count("pp_degree"), degrees.count("tp_degree")
    path = slices[0].models[0].info.path
    if (pipeline or 1) * (tensor or 1) not in {1, count}:
        raise content.error(
            f"has {count} model-parallel ranks, which are not {pipeline} stages of {tensor} slices"
        )
    refuse_missing_ranks(files.ranks.keys(), count, "model-parallel weights")
    refuse_stale_ranks(
        ((number, kinds["model"][0].path) for number, kinds in files.ranks.items()), count
    )
    if content.values.get("autoep_layers") or (
        content.values.get("ds_autoep_layers") and count > 1
    ):
        raise unsupported_part_error(_AUTO_EXPERTS, path)
    wholes = {each.content.values.get(_MODULE) is None for each in slices}
    if len(wholes) > 1 or (files.layers and not wholes == {True}):
        raise FormatError(
            "holds a module beside layers of a pipeline", where=content.where, hint=MIXED_SAVES
        )
    if wholes == {True} and not files.layers and needs_layers:
        raise MissingFileError(
            "the layers of the pipeline ('layer_00-model_states.pt') are not there",
            where=content.where,
            hint=COPY_BACK,
        )
    has_slices = count > 1 or any(file.slice for file in files.experts)
    if files.experts and (has_slices or slices[0].is_partitioned):
        beside = "weights of ZeRO 3" if slices[0].is_partitioned else "slices or stages"
        raise unsupported_part_error(f"experts beside {beside}", files.experts[0].path)
    if files.layers and ((tensor or 1) > 1 or any(file.slice for file in files.layers)):
        raise unsupported_part_error("slices of the layers of a pipeline", files.layers[-1].path)
    return wholes == {True}


def _find_stacked(slices: Sequence[_Slice]) -> Mapping[str, Layout]:
    """Returns how ranks share the experts that AutoEP stacked, as the files of all say alike."""
    found: dict[str, Layout] | None = None
    for file in slices[0].models:
        layouts: dict[str, Layout] = {}
        for layer in file.content.inner_list("ds_autoep_layers"):
            layouts |= read_maps(layer.inner("affine_maps"), most=file.archive.most_values)
            prefix = layer.text("expert_key_prefix")
            if not any(name.startswith(f"{prefix}.") for name in layouts):
                raise unsupported_part_error(_AUTO_EXPERTS, file.info.path)
        if found is not None and found != layouts:
            raise FormatError(
                "has other experts than the first rank", where=file.content.where, hint=MIXED_SAVES
            )
        found = layouts
    return found or {}


def _find_layouts(slices: Sequence[_Slice]) -> Mapping[str, Layout]:
    """Returns how each parameter and buffer is cut, as the files of all slices say alike."""
    shapes = [each.shapes() for each in slices]
    for each, own in zip(slices, shapes, strict=True):
        if own.keys() != shapes[0].keys():
            odd = min(own.keys() ^ shapes[0].keys())
            raise FormatError(
                f"has other tensors than the first rank: {quote(odd)}",
                where=each.content.where,
                hint=MIXED_SAVES,
            )
    shared = slices[0].content.inner("shared_params").values
    buffers = {*map(str, slices[0].content.sequence("buffer_names"))}
    cut = {
        name: [own[name] for own in shapes]
        for name in shapes[0]
        if name not in shared and name not in buffers
    }
    found: Mapping[str, Layout] | None = None
    for each in slices:
        layouts = read_layouts(each.content, cut, most=each.models[0].archive.most_values)
        if found is not None and layouts != found:
            odd = next(name for name in cut if layouts[name] != found[name])
            raise FormatError(
                f"has another map of {quote(odd)} than the first rank",
                where=each.content.where,
                hint=MIXED_SAVES,
            )
        found = layouts
    # Buffers are never cut, and a rank's own are as good as any.
    wholes = {name: Layout.whole(shapes[0][name], len(slices)) for name in buffers & {*shapes[0]}}
    return {**(found or {}), **wholes}


def _check_ranks_of(each: _Slice, *, has_experts: bool, has_states: bool) -> None:
    """Checks that the files of all ranks are there, and that all are of one save."""
    counts: set[int] = set()
    for file in each.ranks:
        state = file.states()
        if state.values.get("ds_zero_partition_groups") and not has_experts:
            raise unsupported_part_error("expert groups", file.info.path)
        value = state.values.get("partition_count")  # each group may have its own
        own: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if not own or not all(type(count) is int and count > 0 for count in own):
            raise state.error("'partition_count' is not a number of ranks")
        # The ranks of an expert group share its vectors.
        counts.update([max(own)] if has_experts else own)
    recorded = each.content.count("dp_world_size")
    if each.ranks and recorded is not None:
        counts.add(recorded)
    refuse_mixed_sizes(
        counts,
        hint="files of a run of another size, or of expert groups, are among them; take away"
        " those that do not belong here",
    )
    world_size = counts.pop() if counts else recorded or 1
    if each.is_partitioned:
        _check_ranks(each.models, world_size, "weights")
    if each.ranks or (each.is_partitioned and has_states):
        _check_ranks(each.ranks, world_size, "optimizer states")
    stages = {file.states().count("zero_stage") for file in each.ranks}
    if stages and (len(stages) > 1 or (_PARTITIONED_STAGE in stages) != each.is_partitioned):
        raise FormatError(
            f"optimizer states are of stage {' and '.join(map(str, stages))}, and the weights"
            " of another",
            hint=MIXED_SAVES,
        )


class VectorSlice(Struct, frozen=True):
    """Elements of a parameter that are contiguous in a file."""

    archive: TorchArchive
    rank: int | None
    slice: int  # of tensor parallelism, from which the parameter's elements are counted
    tensor: TensorRef
    group: int  # position among the vectors of the file, 0 if it has no list of them
    first: int  # counted in the tensor
    start: int  # counted row-major in the parameter, or in its slice
    count: int


class FlatParameter(Struct, frozen=True):
    """A parameter, or its master copy, in slices of flat tensors."""

    shape: Shape
    dtype: DType
    slices: tuple[VectorSlice, ...]  # which contain each element exactly once
    layout: Layout | None = None  # how tensor parallelism cut it


def _place_slices(table: ArchiveTable, parameter: FlatParameter) -> list[Chunk]:
    chunks = []
    for part in parameter.slices:
        span = Span(part.start, part.start + part.count)
        if parameter.layout is None:
            chunks.append(table.chunk(part.archive, part.tensor, part.rank, span, part.first))
            continue
        strides = row_major_strides(parameter.layout.slices[part.slice])
        view = replace(part.tensor, strides=strides)
        for box, offsets in parameter.layout.place(part.slice, span):
            skipped = part.first + flat_offset(offsets, strides) - part.start
            chunks.append(table.chunk(part.archive, view, part.rank, box, skipped))
    return chunks


def _join_ranks(
    found: Sequence[Mapping[str, FlatParameter]], layouts: Mapping[str, Layout] | None
) -> Mapping[str, FlatParameter]:
    """Returns what model-parallel ranks have: slices of the same parameters, or their own."""
    if len(found) == 1:
        return found[0]
    joined: dict[str, FlatParameter] = {}
    if layouts is None:
        for name, parameter in (item for stage in found for item in stage.items()):
            before = joined.setdefault(name, parameter)  # tied ones are in several stages
            if before.shape != parameter.shape:
                raise FormatError(f"stages hold {quote(name)} in several shapes")
        return joined
    for name, first in found[0].items():
        if any(name not in each for each in found):
            raise FormatError(f"a rank holds no slice of the master copy of {quote(name)}")
        slices = tuple(part for each in found for part in each[name].slices)
        if len({each[name].dtype for each in found}) != 1:
            raise FormatError(f"{quote(name)} is stored by the ranks as several element types")
        joined[name] = FlatParameter(layouts[name].shape, first.dtype, slices, layouts[name])
    return joined


class _ExpertGroups(Struct, frozen=True):
    """Which experts the ranks have; files of ranks number those of their own from 0.

    A group of ranks shares the experts of a layer: neighbours, or one in so many where the run had
    `use_data_before_expert_parallelism`.
    """

    groups: Sequence[Mapping[str, Shape]]  # the shapes of what the first rank trains
    sizes: Sequence[int]  # of the groups, for each vector; 1 where it has no experts
    is_data_first: bool
    world_size: int
    own: Mapping[str, int]  # how many experts of a layer a rank has, by the layer's prefix
    stacked: Mapping[str, Layout]  # how the ranks of a group share what AutoEP stacked

    @property
    def is_ambiguous(self) -> bool:
        return bool({*self.sizes} - {1, self.world_size})

    @classmethod
    def of(cls, each: _Slice, stacked: Mapping[str, Layout]) -> _ExpertGroups:
        sizes = []
        own: dict[str, int] = {}
        world_size = len(each.ranks)
        for number, group in enumerate(each.groups):
            matches = [_EXPERT.fullmatch(name) for name in group]
            experts = [match for match in matches if match is not None]
            for match in experts:
                own[match[1]] = max(own.get(match[1], 0), int(match[2]) + 1)
            counts = each.ranks[0].states().values.get("partition_count")
            count = counts[number] if isinstance(counts, list) and number < len(counts) else None
            shared = {len(stacked[name].slices) for name in group if name in stacked}
            if not experts and (not shared or each.is_partitioned):
                sizes.append(1)
            elif shared and world_size != (count or 0) * max(shared):
                raise each.content.error("has experts in a vector of another group of ranks")
            elif shared:
                sizes.append(max(shared))
            elif len(experts) < len(group) or not count or world_size % count:
                raise each.content.error("has experts in a vector of no group of ranks")
            else:
                sizes.append(world_size // count)
        settings = each.content.values.get("ds_config")
        is_data_first = isinstance(settings, dict) and bool(
            settings.get("use_data_before_expert_parallelism")
        )
        return cls(each.groups, sizes, is_data_first, world_size, own, stacked)

    def find(self, position: int, mapping: PickledDict) -> int:
        """Returns which vector of the first rank has the parameters of a rank's vector.

        DeepSpeed goes through names of groups in the order of a set, which ranks may disagree on.
        """
        order = (position, *range(len(self.groups)))
        fitting = (n for n in order if all(name in self.groups[n] for name in mapping.values))
        return next(fitting, position)

    def name(self, name: str, number: int) -> str:
        """Returns the name of an expert in the model, by that in the files of a rank."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return name
        expert = number * self.own[match[1]] + int(match[2])
        return f"{match[1]}.{expert}.{match[3]}"

    def number(self, rank: int, size: int) -> int:
        """Returns which rank of its group a rank is, if groups have a size."""
        return rank // (self.world_size // size) if self.is_data_first else rank % size

    def part(self, name: str, rank: int) -> tuple[int, int, int]:
        """Returns whose slice of a parameter a rank has a part of, which part, and of how many."""
        size = len(self.stacked[name].slices) if name in self.stacked else 1
        count = max(1, self.world_size // size)
        return self.number(rank, size), rank % count if self.is_data_first else rank // size, count

    def join(
        self, name: str, shape: Shape, parts: Mapping[int, Sequence[VectorSlice]]
    ) -> FlatParameter:
        """Returns a parameter of the slices that each rank of a group has of it."""
        layout = self.stacked.get(name)
        if layout is None:
            return _join_slices(name, shape, parts.get(0, ()))
        slices: list[VectorSlice] = []
        dtype = BY_NAME["float32"]
        for number, own in enumerate(layout.slices):
            joined = _join_slices(name, own, parts.get(number, ()))
            slices += [replace(part, slice=number) for part in joined.slices]
            dtype = joined.dtype
        return FlatParameter(layout.shape, dtype, tuple(slices), layout)

    def whole(self, groups: Sequence[Mapping[str, Shape]]) -> list[dict[str, Shape]]:
        """Returns the shapes of what all ranks train, for each vector."""
        return [
            {
                self.name(name, number): self.stacked[name].shape if name in self.stacked else shape
                for number in range(self.sizes[position])
                for name, shape in group.items()
            }
            for position, group in enumerate(groups)
        ]


def _find_sliced(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[ZeroFile], experts: _ExpertGroups
) -> dict[str, FlatParameter]:
    """Finds the master copies of parameters in the vectors of stages 1 and 2."""
    slices: dict[str, dict[int, list[VectorSlice]]] = {n: {} for group in groups for n in group}
    for rank, file in enumerate(ranks):
        state = file.states()
        vectors = state.vectors(_FLAT_SLICES)
        if state.values.get(_SLICES) is None:
            raise UnsupportedError(
                f"has no {_SLICES!r}, the slices of parameters in its vectors",
                where=state.where,
                hint="DeepSpeed writes them since 0.8; convert the checkpoint with"
                " 'zero_to_fp32.py', which DeepSpeed puts into its folder",
            )
        mappings = state.inner_list(_SLICES)
        if not len(vectors) == len(mappings) == len(groups):
            raise state.error(
                f"has {len(vectors)} vectors and slices for {len(mappings)} groups of parameters,"
                f" where the weights have {len(groups)}"
            )
        for position, (vector, mapping) in enumerate(zip(vectors, mappings, strict=True)):
            group = experts.find(position, mapping)
            number = experts.number(rank, experts.sizes[group])
            for own_name in mapping.values:
                if not isinstance(own_name, str):
                    raise mapping.error("names a parameter by something that is not a text")
                address = mapping.inner(own_name)
                name = experts.name(own_name, number)
                first, count = address.count("start"), address.count("numel")
                if first is None or count is None or first + count > vector.shape[0]:
                    raise address.error(
                        f"is outside the {vector.shape[0]:,} elements of its vector"
                    )
                if name not in groups[group]:
                    raise mapping.error(
                        f"has a slice of {quote(name)}, and that group has no shape of it"
                    )
                held = slices[name].setdefault(number if name in experts.stacked else 0, [])
                start = held[-1].start + held[-1].count if held else 0
                held.append(file.slice(vector, position, first, start, count))
    with errors_at(ranks[0].states().where):
        return {
            name: experts.join(name, shape, slices[name])
            for group in groups
            for name, shape in group.items()
        }


def _find_partitioned(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[ZeroFile], experts: _ExpertGroups
) -> dict[str, FlatParameter]:
    """Finds the master copies of parameters in the vectors of stage 3."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    slices: dict[str, dict[int, list[VectorSlice]]] = {name: {} for name in shapes}
    for rank, file in enumerate(ranks):
        state = file.states()
        vectors = state.vectors(_FLAT)
        sizes = [vector.shape[0] for vector in vectors]
        group = first = 0  # the next element
        for name, shape in shapes.items():
            number, own, parts = experts.part(name, rank)
            elements = math.prod(shape)
            part = -(-elements // parts)
            while part and group < len(sizes) and first == sizes[group]:
                group, first = group + 1, 0
            if group == len(sizes):
                raise state.error(f"ends before its part of {quote(name)}")
            if part > sizes[group] - first:
                raise state.error(
                    f"{_FLAT!r} has {sizes[group] - first:,} elements where the part of"
                    f" {quote(name)} has {part:,}: sizes do not add up"
                )
            start = own * part
            count = max(0, min(part, elements - start))
            of_vectors = state.inner_list("ds_zero_partition_groups")[group : group + 1]
            if of_vectors and of_vectors[0].count("partition_rank") != own:
                raise of_vectors[0].error(f"says that {quote(name)} is shared by other ranks")
            if count:
                held = slices[name].setdefault(number, [])
                held.append(file.slice(vectors[group], group, first, start, count))
            first += part
        left = sum(sizes[group:]) - first
        if left:
            raise state.error(
                f"{_FLAT!r} has {left:,} elements more than its parameters: sizes do not add up"
            )
    with errors_at(ranks[0].states().where):
        return {name: experts.join(name, shape, slices[name]) for name, shape in shapes.items()}


def _find_frozen(models: Sequence[ZeroFile]) -> dict[str, FlatParameter]:
    """Finds the frozen parameters of stage 3; each rank has a part of each."""
    first = models[0].content
    frozen: dict[str, FlatParameter] = {}
    for name, shape in first.inner("frozen_param_shapes").shapes().items():
        elements = math.prod(shape)
        part = -(-elements // len(models))
        slices = []
        for rank, file in enumerate(models):
            content = file.content
            tensor = content.inner("frozen_param_fragments").tensor(name)
            held = math.prod(tensor.shape)
            if held != part or not tensor.row_major:
                raise content.error(
                    f"has {held:,} elements of the frozen {quote(name)}, where its part has"
                    f" {part:,}: sizes do not add up"
                )
            count = max(0, min(part, elements - rank * part))
            slices.append(file.slice(tensor, 0, 0, rank * part, count))
        with errors_at(first.where):
            frozen[name] = _join_slices(name, shape, slices)
    return frozen


def _join_slices(name: str, shape: Shape, slices: Sequence[VectorSlice]) -> FlatParameter:
    """Checks that consecutive slices are all elements of a parameter, of one element type."""
    elements = math.prod(shape)
    held = sum(part.count for part in slices)
    if held != elements:
        raise IncompleteCheckpointError(
            f"{quote(name)} has {elements:,} elements, and the ranks hold {held:,} of them"
        )
    dtypes = {part.tensor.dtype for part in slices} or {BY_NAME["float32"]}
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        raise FormatError(f"{quote(name)} is stored by the ranks as {names}")
    return FlatParameter(shape, dtypes.pop(), tuple(slices))


OPTIMIZER = "optimizer"
_STATE = "state"
_GROUPS = "param_groups"
_WHOLE = "base_optimizer_state"  # stages 1 and 2
_MAX_KINDS = 64  # of states of one vector; each occurs again for every parameter in it
_PLAIN = (bool, int, float, str, type(None))


class RankStates(Struct, frozen=True):
    archive: TorchArchive
    vectors: Mapping[int, PickledDict]  # the states of each vector, by its position
    groups: Sequence[PickledDict]  # the parameter groups; empty if the file has none


def _find_rank_states(archive: TorchArchive, state: PickledDict) -> RankStates:
    base = state.values.get(_WHOLE)
    if isinstance(base, (list, tuple)):  # with `elastic_checkpoint`
        states = RankStates(archive, dict(enumerate(state.inner_list(_WHOLE))), ())
    else:
        inner = state.inner(_WHOLE if _WHOLE in state.values else _STATES)
        held = inner.inner(_STATE)
        vectors = {number: held.inner(number) for number in held.values if type(number) is int}
        states = RankStates(archive, vectors, inner.inner_list(_GROUPS))
    for vector in states.vectors.values():
        if len(vector.values) > _MAX_KINDS:
            raise LimitError(
                f"keeps {len(vector.values):,} kinds of states of one vector, more than"
                f" {_MAX_KINDS}",
                where=vector.where,
            )
    return states


States = tuple[Sequence[TensorEntry], Mapping[KeyPath, Any]]
"""The state of an optimizer: tensors and other values."""


def _collect_states(
    table: ArchiveTable,
    ranks: Sequence[tuple[int, RankStates]],  # each with its stage of a pipeline
    parameters: Mapping[str, FlatParameter],
    names: Mapping[str, Fqn],
) -> tuple[list[TensorEntry], dict[KeyPath, Any], list[str]]:
    """Collects the states of every trained parameter under its name in the index, and notes."""
    seen: dict[tuple[int, int], tuple[object, str]] = {}
    for stage, rank in ranks:
        for number, vector in rank.vectors.items():
            step = _fingerprint_step(rank.archive, vector.values.get(_STEP))
            if step is None:
                continue
            before = seen.setdefault((stage, number), (step, vector.where))
            if before[0] != step:
                raise FormatError(
                    f"was stepped another number of times than {before[1]}: the files are of two"
                    " saves",
                    where=vector.where,
                    hint="a save was cut short, or went into the folder of another one; take an"
                    " earlier checkpoint",
                )
    by_path = {rank.archive.path: rank for _, rank in ranks}
    entries: list[TensorEntry] = []
    values: dict[KeyPath, Any] = {}
    left_out: dict[str, Fqn] = {}  # kinds of states, each with an example
    for own_name, parameter in parameters.items():
        name = names[own_name]
        states = [
            by_path[part.archive.path].vectors.get(part.group)
            or PickledDict({}, part.archive.where)
            for part in parameter.slices
        ]
        for state in states:
            if state.values.keys() != states[0].values.keys():
                raise state.error(
                    f"does not keep the states of {quote(name)} that other ranks keep"
                )
        for kind in states[0].values if states else ():
            path = (OPTIMIZER, _STATE, name, str(kind))
            held = [state.values[kind] for state in states]
            entry = _join_state(table, path, parameter, held)
            if entry is not None:
                entries.append(entry)
            elif isinstance(held[0], _PLAIN):
                values[path] = held[0]
            else:
                left_out.setdefault(str(kind), name)
    notes = [
        f"the optimizer keeps {kind!r} of each rank's own part of {name!r} and others, which means"
        " nothing for the whole: it is left out"
        for kind, name in left_out.items()
    ]
    return entries, values, notes


def _fingerprint_step(file: TorchArchive, value: object) -> object:
    """Returns a value that is equal for equal steps, or None if the step is unknown.

    A step may be a tensor of one number, which its checksum identifies as well as its bytes.
    """
    if isinstance(value, TensorRef):
        if value.shape != () or value.storage.elements != 1:
            return None
        crc32 = file.archive.extent(value.storage)[2]
        return None if crc32 is None else (value.dtype.name, crc32)
    return value if isinstance(value, (int, float)) else None


def _join_state(
    table: ArchiveTable, path: KeyPath, parameter: FlatParameter, held: Sequence[object]
) -> TensorEntry | None:
    """Returns the state that the slices of a parameter have; None if it is no tensor."""
    first, of_first = held[0], parameter.slices[0]
    if isinstance(first, TensorRef) and first.shape == ():
        chunk = table.chunk(of_first.archive, first, rank=of_first.rank)
        return _make_state_entry(path, first, (), [chunk])
    if not all(map(_is_elementwise, held, parameter.slices)):
        return None
    tensors = [tensor for tensor in held if isinstance(tensor, TensorRef)]
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise FormatError(
            f"{quote(str(path[-1]))} has several element types", where=of_first.archive.where
        )
    parts = zip(parameter.slices, tensors, strict=True)
    slices = tuple(replace(part, tensor=tensor) for part, tensor in parts)
    chunks = _place_slices(table, replace(parameter, slices=slices))
    return _make_state_entry(path, tensors[0], parameter.shape, chunks)


def _make_state_entry(
    path: KeyPath, like: TensorRef, shape: Shape, chunks: Sequence[Chunk]
) -> TensorEntry:
    """Returns an entry; `path` is `optimizer`, `state`, the parameter's name, the kind of state."""
    membership = Membership(OPTIMIZER, "optimizer", Fqn(join_path(path[1:])))
    return membership.entry(path, like.dtype, shape, ChunkTable.of(chunks, len(shape)))


def _is_elementwise(tensor: object, part: VectorSlice) -> bool:
    """Returns whether a state has a value for each element of a slice's vector."""
    return (
        isinstance(tensor, TensorRef)
        # The codes of a quantized state mean nothing without their scales.
        and tensor.dtype.kind == "float"
        and len(tensor.shape) == 1
        and tensor.row_major
        and tensor.shape[0] >= max(part.tensor.shape[0], part.first + part.count)
    )


def _collect_group_values(rank: RankStates, groups: Sequence[Sequence[Fqn]]) -> dict[KeyPath, Any]:
    """Returns the settings of groups, with vectors replaced by the names of their parameters."""
    values: dict[KeyPath, Any] = {}
    seen: set[int] = set()
    # Groups may share values over and over; every real setting takes bytes of its own.
    limit = rank.archive.pickle_bytes
    counts = (len(group.values) + len(group.sequence("params")) for group in rank.groups)
    if any(count > limit for count in accumulate(counts)):
        raise LimitError(
            f"groups of the optimizer unfold into more than {limit:,} values",
            where=rank.archive.where,
        )
    for number, group in enumerate(rank.groups):
        for key, value in group.values.items():
            if key == "params" or not isinstance(key, str):
                continue
            values[OPTIMIZER, _GROUPS, number, key] = value
        members: list[Fqn] = []
        for vector in group.sequence("params"):
            if type(vector) is not int or not 0 <= vector < len(groups):
                continue
            if vector in seen:
                raise group.error(f"has vector {vector}, which is in two groups")
            seen.add(vector)
            members += groups[vector]
        values[OPTIMIZER, _GROUPS, number, "params"] = members
    return values


class _Weights(Struct, frozen=True):
    """The weights of a save as entries of an index, and what else its index is made of."""

    table: ArchiveTable
    save: _Save
    entries: Mapping[Key, TensorEntry]  # the live tensors, and then the master copies
    names: Mapping[str, Fqn]  # in the index, by the names in the module
    values: Mapping[KeyPath, Any]  # of the module's state dict that are not tensors
    shared: Mapping[str, str]  # the further names of tied parameters, each with the first name
    notes: Sequence[str]
    warnings: Sequence[str]
    problems: Sequence[Problem]

    def index(
        self,
        format_name: str,
        states: States,
        notes: Sequence[str],
        *,
        stage: int | None,
        tool: str = "",
    ) -> TensorIndex:
        content = self.save.content
        tied: dict[Key, set[Key]] = defaultdict(set)
        for name, owner in self.shared.items():
            keys = Key(f"{_MODULE}.{name}"), Key(f"{_MODULE}.{owner}")
            # DeepSpeed does not distinguish empty tensors, so that they are not known to be tied.
            if all(key in self.entries and self.entries[key].elements for key in keys):
                tied[keys[1]] |= {*keys}
        version = content.text("ds_version")
        said = "" if stage is None else f"ZeRO stage {stage}"
        parallel = "pipeline" if self.save.is_pipeline else "tensor"
        count = len(self.save.slices)
        mesh = ((parallel, count),) if count > 1 else ()
        run = RunFacts(
            world_size=(content.count("dp_world_size") or 1) * len(self.save.slices),
            step=content.count("global_steps"),
            writer=", ".join(filter(None, [f"DeepSpeed {version}".strip(), said, tool])),
            version=version,
            mesh=mesh,
            notes=(*self.notes, *notes),
            warnings=(
                *describe_objects_in(self.save.slices[0].models[0].archive),
                *self.warnings,
            ),
        )
        entries, values = states
        return self.table.index(
            format_name,
            {**self.entries, **{entry.key: entry for entry in entries}},
            values={**self.values, **values},
            aliases=tuple(frozenset(keys) for keys in tied.values()),
            run=run,
            problems=tuple(self.problems),
        )


def _collect_tensors(
    save: _Save,
) -> tuple[dict[str, list[tuple[ZeroFile, TensorRef]]], dict[KeyPath, Any]]:
    """Returns the tensors of the module as each slice has them, by name, and its other values."""
    stored: dict[str, list[tuple[ZeroFile, TensorRef]]] = defaultdict(list)
    values: dict[KeyPath, Any] = {}
    modules = [(each.models[0], each.content.inner(_MODULE), "") for each in save.slices]
    if save.layers:
        prefixes = _name_layers(save)
        modules = [
            (file, file.content, prefix) for file, prefix in zip(save.layers, prefixes, strict=True)
        ]
    for file, module, prefix in modules:
        whole = file.content.values.get(_MODULE)
        if isinstance(whole, InertObject):
            raise whole_object_error(whole, module.where)
        for name, value in module.values.items():
            if isinstance(value, TensorRef) and isinstance(name, str):
                stored[prefix + name].append((file, value))
            elif (unread := find_unread(value)) is not None:
                raise unread.error(f"{module.where}, {quote(str(name))}")
            else:
                values[_MODULE, f"{prefix}{name}"] = value
    return dict(stored), values


def _name_layers(save: _Save) -> list[str]:
    """Returns the prefix that the names of each layer's tensors have in the whole pipeline.

    It is the layer's number, or the name of a module that several layers share. Files do not say
    so; what the stages train has the names of the whole pipeline.
    """
    tied: dict[str, dict[str, Shape]] = defaultdict(dict)
    numbered: set[str] = set()
    for name, shape in (
        item for each in save.slices for group in each.groups for item in group.items()
    ):
        match = _TIED.fullmatch(name)
        if match is None:
            numbered.add(name.partition(".")[0])
        else:
            tied[match[1]][match[2]] = shape
    prefixes = [f"{file.info.layer}." for file in save.layers]
    loose: dict[int, dict[object, Shape]] = {}
    for position, file in enumerate(save.layers):
        if str(file.info.layer) not in numbered:
            values = file.content.values.items()
            loose[position] = {n: v.shape for n, v in values if isinstance(v, TensorRef)}
    for prefix, shapes in tied.items():
        fitting = [n for n, held in loose.items() if shapes.items() <= held.items()]
        if not fitting:
            raise MissingFileError(
                f"no file has the layer that is called {quote(prefix[:-1])}",
                where=save.content.where,
                hint=COPY_BACK,
            )
        if len(fitting) > 1 and (
            any(p != prefix and other.items() >= shapes.items() for p, other in tied.items())
            or not _are_copies(save, fitting)
        ):
            names = (posixpath.basename(save.layers[n].info.path) for n in fitting)
            raise UnsupportedError(
                f"nothing shows which of {' and '.join(map(repr, names))} is the layer that is"
                f" called {quote(prefix[:-1])}",
                hint="load it where it was trained, and save `module.state_dict()` of every stage"
                " with `torch.save`",
            )
        for position in fitting:
            prefixes[position] = prefix
    return prefixes


def _are_copies(save: _Save, positions: Sequence[int]) -> bool:
    """Returns whether stored checksums show that layers hold the same tensors."""
    prints = set()
    for file in (save.layers[position] for position in positions):
        tensors = ((n, v) for n, v in file.content.values.items() if isinstance(v, TensorRef))
        held = []
        for name, value in tensors:
            crc32 = file.archive.archive.extent(value.storage)[2]
            if crc32 is None:
                return False
            held.append((str(name), value.shape, value.storage_offset, crc32))
        prints.add((*sorted(held),))
    return len(prints) == 1


def _find_copies(
    table: ArchiveTable,
    source: Source,
    stored: Mapping[str, Sequence[tuple[ZeroFile, TensorRef]]],
    layouts: Mapping[str, Layout] | None,
    shared: Mapping[str, str],
) -> tuple[list[Problem], list[str]]:
    """Compares what several model-parallel ranks have of the weights; also returns notes."""
    pairs, names = [], []
    for name, held in stored.items():
        owner = shared.get(name, name)
        if layouts is None:
            copies = [
                (0, (0,) * len(held[0][1].shape), n, (0,) * len(t.shape), t.shape)
                for n, (_, t) in enumerate(held)
                if n
            ]
        else:
            copies = [*layouts[owner].copies()] if owner in layouts else []
        for first, mine, other, theirs, sizes in copies:
            pair = []
            for rank, offsets in ((first, mine), (other, theirs)):
                file, tensor = held[rank]
                start = tensor.storage_offset + flat_offset(offsets, tensor.strides)
                pair.append((file.archive, replace(tensor, shape=sizes, storage_offset=start)))
            pairs.append((pair[0], pair[1]))
            names.append(name)
    differing, notes = find_differing_copies(source, table, pairs)
    problems = {
        names[position]: Problem(
            FormatError.code,
            f"{_MODULE}.{names[position]}",
            f"{pairs[position][0][0].path!r} and {pairs[position][1][0].path!r} hold different"
            f" values of {quote(names[position])}, which ranks have as copies: files of two saves"
            " are in one folder, or training let them drift apart",
        )
        for position in differing
    }
    return list(problems.values()), notes


def _place_tensors(
    table: ArchiveTable,
    name: str,
    held: Sequence[tuple[ZeroFile, TensorRef]],
    layout: Layout | None,
) -> tuple[Shape, list[Chunk]]:
    """Returns the shape of a tensor of the module, and its chunks in the files of its slices."""
    file, first = held[0]
    shapes = (*(tensor.shape for _, tensor in held),)
    expected = (first.shape,) * len(held) if layout is None else layout.slices
    if shapes != expected or any(tensor.dtype != first.dtype for _, tensor in held):
        raise FormatError(
            f"holds {quote(name)} otherwise than other model-parallel ranks",
            where=file.content.where,
            hint=MIXED_SAVES,
        )
    if layout is None:
        return first.shape, [
            table.chunk(file.archive, first, 0 if file.info.expert is None else None)
        ]
    chunks = []
    for rank, (own_file, tensor) in enumerate(held):
        for box, offsets in layout.place(rank, Span(0, math.prod(tensor.shape))):
            skipped = flat_offset(offsets, tensor.strides)
            chunks.append(table.chunk(own_file.archive, tensor, rank, box, skipped))
    return layout.shape, chunks


def _find_live_dtype(content: PickledDict) -> DType:
    """Returns the element type of the weights in training, by the run's settings."""
    known = content.values.get("ds_config")
    settings = PickledDict(known if isinstance(known, dict) else {}, content.where)
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if settings.inner(key).values.get("enabled"):
            return BY_NAME[name]
    return BY_NAME["float32"]


def _check_names(save: _Save, stored: Collection[str], masters: Collection[str]) -> None:
    """Refuses parameters that are trained and in no file, and master copies of others."""
    content, elsewhere = save.content, save.elsewhere
    trained = [name for each in save.slices for group in each.groups for name in group]
    lost = next((name for name in trained if save.layers and name not in stored), None)
    if lost is not None:
        raise MissingFileError(
            f"the file of the layer with {quote(lost)} ('layer_{lost.partition('.')[0]:0>2}-…') is"
            " not there",
            where=content.where,
            hint=COPY_BACK,
        )
    for name in masters:
        if name not in stored and name not in elsewhere and (stored or not save.is_rounded):
            raise content.error(f"holds a master copy of {quote(name)} but not the parameter")
    for name in trained:
        held = stored or masters
        if name not in held and name not in elsewhere and not _EXPERT.fullmatch(name):
            raise content.error(f"trains {quote(name)}, which is in no file")


def _add_experts(
    table: ArchiveTable, save: _Save, stored: dict[str, list[tuple[ZeroFile, TensorRef]]]
) -> Mapping[str, list[Chunk]]:
    """Adds the tensors of experts; returns the chunks of those that several files make up."""
    layers: dict[int, dict[str, Shape]] = {}
    stacks: dict[str, list[Chunk]] = defaultdict(list)
    for file in save.experts:
        if not save.stacked:
            tensors = _find_expert(file, stored, layers)
            stored |= {name: [(file, tensor)] for name, tensor in tensors.items()}
        for name, tensor, chunk in _place_expert(table, file, save.stacked) if save.stacked else ():
            stacks[name].append(chunk)
            if stored.setdefault(name, [(file, tensor)])[0][1].dtype != tensor.dtype:
                raise file.content.error(f"holds {quote(name)} in another element type")
    return stacks


def _read_weights(
    table: ArchiveTable, source: Source, save: _Save, masters: Mapping[str, FlatParameter]
) -> _Weights:
    content, shared = save.content, save.shared()
    stored, values = _collect_tensors(save)
    stacks = _add_experts(table, save, stored)
    _check_names(save, stored, masters)
    # What stage 3 partitions is stored here as an empty tensor; its ranks have the parts.
    frozen: Mapping[str, FlatParameter] = {}
    if save.is_partitioned:
        found = [_find_frozen(each.models) for each in save.slices]
        frozen = _join_ranks(found, save.layouts)
    partitioned = {**masters, **frozen}
    if not save.is_rounded:
        partitioned = {name: masters[name] for name in save.elsewhere if name in masters}
    notes: list[str] = []
    warnings: list[str] = []
    if save.layers:
        numbers = {file.info.layer for file in save.layers}
        gaps = [*islice((n for n in range(max(numbers)) if n not in numbers), _LISTED)]
        if gaps:
            warnings.append(
                f"there is no file of layer {' and '.join(map(str, gaps))} of the pipeline: it is a"
                " function, or frozen weights are lost, which nothing shows"
            )
    live_dtypes: dict[str, DType] = {name: held[0][1].dtype for name, held in stored.items()}
    for name in save.elsewhere:
        live_dtypes.setdefault(name, _find_live_dtype(content))
    if save.is_rounded and not stored:
        live_dtypes = dict.fromkeys(masters, _find_live_dtype(content))
        warnings.append(
            "ds_to_universal.py leaves out the layers of a pipeline: the weights are rounded from"
            " master copies, and what is not trained is in no file"
        )
    if save.is_partitioned:
        # Of a module with two names DeepSpeed says the shapes under one of them only, and not that
        # the other one shares them: `_get_shared_params` walks `named_children`, each once.
        second = [
            name
            for name in live_dtypes
            if shared.get(name, name) not in partitioned
            and stored[name][0][1].shape == (0,)
            and name not in content.sequence("buffer_names")
        ]
        if second:
            listed = join_first([quote(name) for name in second], len(second), _LISTED)
            warnings.append(
                f"{listed} left out, as by zero_to_fp32.py: no rank has a part of it, which is so"
                " for the second name of a module that a model has twice"
            )
            live_dtypes = {n: dtype for n, dtype in live_dtypes.items() if n not in second}
    held: dict[KeyPath, Stored] = {}
    for name, live_dtype in live_dtypes.items():
        owner, dtype = shared.get(name, name), live_dtype
        if owner in partitioned:
            parameter = partitioned[owner]
            dtype = parameter.dtype if owner in frozen else dtype
            shape, chunks = parameter.shape, _place_slices(table, parameter)
        elif name in stacks:
            shape, chunks = save.stacked[name].shape, stacks[name]
        else:
            layout = save.layouts.get(owner) if save.layouts else None
            shape, chunks = _place_tensors(table, name, stored[name], layout)
        held[_MODULE, name] = dtype, shape, chunks
    problems: list[Problem] = []
    if len(save.slices) > 1 and not save.is_partitioned:
        problems, notes = _find_copies(table, source, stored, save.layouts, shared)
    live: dict[Key, TensorEntry] = {}
    copies: dict[Key, TensorEntry] = {}
    for name, entry in zip(live_dtypes, make_entries(held).values(), strict=True):
        live[entry.key] = entry
        master = masters.get(shared.get(name, name))
        if master is not None and master.shape != entry.shape:
            raise content.error(
                f"{quote(name)} has shape {list(entry.shape)}, its master copy {list(master.shape)}"
            )
        if master is not None and master.dtype != entry.dtype:
            key = Key(f"{_MASTER}.{name}")
            chunk_table = ChunkTable.of(_place_slices(table, master), len(entry.shape))
            copies[key] = replace(
                entry,
                key=key,
                key_path=(_MASTER, name),
                tree=_MASTER,
                part="other",
                dtype=master.dtype,
                chunks=chunk_table,
            )
            live[entry.key] = replace(
                entry,
                rounded_from=master.dtype if shared.get(name, name) in partitioned else None,
                master=Master(key, master.dtype),
            )
    names = {name: entry.name for name, entry in zip(live_dtypes, live.values(), strict=True)}
    entries = {**live, **copies}
    return _Weights(table, save, entries, names, values, shared, notes, warnings, problems)


_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,7})\.(.+)")


def _place_expert(
    table: ArchiveTable, file: ZeroFile, stacked: Mapping[str, Layout]
) -> Iterator[tuple[str, TensorRef, Chunk]]:
    """Yields what a file has of experts that are one parameter: its name, and the place in it."""
    _, number = file.info.expert or (0, 0)
    for key, tensor in file.content.values.items():
        name, _, expert = str(key).rpartition(".")
        layout = stacked.get(name)
        if (
            layout is None
            or expert != str(number)
            or not isinstance(tensor, TensorRef)
            or tensor.shape != layout.shape[1:]
            or number >= layout.shape[0]
        ):
            raise file.content.error(
                f"holds {quote(str(key))}, which is no tensor of expert {number}"
            )
        place = Box((number, *(0 for _ in tensor.shape)), (1, *tensor.shape))
        view = replace(tensor, strides=(math.prod(tensor.shape), *tensor.strides))
        yield name, tensor, table.chunk(file.archive, view, None, place)


def _find_expert(
    file: ZeroFile, known: Mapping[str, object], layers: dict[int, dict[str, Shape]]
) -> dict[str, TensorRef]:
    """Returns the tensors of an expert, whose names have its number among all of its layer.

    `layers` has the shapes of an expert of each layer, by names without the number; it is filled.
    """
    layer, number = file.info.expert or (0, 0)
    tensors, shapes = {}, {}
    for name, value in file.content.values.items():
        match = _EXPERT.fullmatch(name) if isinstance(name, str) else None
        if match is None or int(match[2]) != number or not isinstance(value, TensorRef):
            unread = find_unread(value)
            if unread is not None:
                raise unread.error(f"{file.content.where}, {quote(str(name))}")
            raise file.content.error(
                f"holds {quote(str(name))}, which is no tensor of expert {number}"
            )
        if name in known:
            raise file.content.error(f"holds {quote(name)}, which another file holds too")
        tensors[name] = value
        shapes[f"{match[1]}.{match[3]}"] = value.shape
    if layers.setdefault(layer, shapes) != shapes:
        raise file.content.error(f"has other tensors than the other experts of layer {layer}")
    return tensors


class _ParameterFile(Struct, frozen=True):
    """The value in a file of a parameter, in a dictionary or by itself."""

    file: TorchArchive
    value: object  # a tensor, or a number for a step that is stored as one
    is_vocabulary: bool = False  # whether rows that padded the vocabulary were removed

    def tensor(self) -> TensorRef:
        if not isinstance(self.value, TensorRef):
            raise FormatError("holds no tensor", where=self.file.where)
        if not self.value.row_major:
            raise UnsupportedError(
                "its elements are not stored contiguously",
                where=self.file.where,
                hint="ds_to_universal.py writes none like that; make the checkpoint anew with it",
            )
        return self.value

    def parameter(self, name: str, shape: Shape) -> FlatParameter:
        """Returns the tensor as a parameter of its shape, which stage 3 does not store."""
        tensor = self.tensor()
        count = math.prod(shape)
        if tensor.shape not in {shape, (count,)}:
            raise FormatError(
                f"holds {list(tensor.shape)} where {quote(name)} has {list(shape)}: sizes do not"
                " add up",
                where=self.file.where,
            )
        slices = (VectorSlice(self.file, None, 0, tensor, 0, 0, 0, count),) if count else ()
        return FlatParameter(shape, tensor.dtype, slices)


class _UniversalFiles(Struct):
    """The files below `zero/` of a universal checkpoint."""

    save: _Save
    groups: Sequence[Mapping[str, Shape]]  # the whole shapes of what is trained
    files: Mapping[str, Mapping[str, _ParameterFile]]  # by parameter and kind
    common: TorchArchive  # the states that all parameters share
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, table: ArchiveTable, source: Source, paths: Sequence[str]) -> _UniversalFiles:
        """Opens the files, and checks that they are of one save that is supported."""
        own = [path for path in paths if parse_universal_path(path) is None]
        if len({posixpath.basename(path) for path in own} & set(UNIVERSAL_MODELS)) > 1:
            # One for each stage, as ckptkit writes them: that of stage 3 has tensors.
            own = [path for path in own if posixpath.basename(path) != UNIVERSAL_MODELS[0]]
        tag = sort_tag_files(own)
        if tag.optimizers:
            raise FormatError(
                f"{posixpath.basename(tag.optimizers[0].path)!r}, of a rank's optimizer states, is"
                " beside the files of a universal checkpoint",
                hint="one was written into the folder of the other; take away the files of one",
            )
        for file in tag.experts:
            raise unsupported_part_error("experts in files of their own", file.path)
        save = _Save.open(table, source, tag, is_universal=True)
        files: dict[str, dict[str, _ParameterFile]] = defaultdict(dict)
        common = None
        for path in paths:
            parsed = parse_universal_path(path)
            if parsed is None:
                continue
            _, parameter, kind = parsed
            archive = table.open(source, path, _ALLOWED)
            root = archive.root
            if not parameter:
                archive.dictionary()
                common = archive
            elif isinstance(root, dict):
                tensor = archive.dictionary().tensor("param")
                is_vocabulary = bool(root.get("vocab_tensor"))
                files[parameter][kind] = _ParameterFile(archive, tensor, is_vocabulary)
            elif isinstance(root, (TensorRef, int, float)):
                files[parameter][kind] = _ParameterFile(archive, root)
            else:
                raise FormatError("holds neither a tensor nor a number", where=archive.where)
        if common is None:
            raise MissingFileError(
                "'zero/optimizer_state.pt' is not there",
                hint="make the checkpoint anew with ds_to_universal.py",
            )
        # Only stage 3 leaves this key in the common states.
        if (_STATES in common.dictionary().values) != save.is_partitioned:
            raise FormatError(
                "files of weights and files of parameters are of different stages",
                hint="take away the files of one of the two checkpoints",
            )
        whole = {**(save.layouts or {}), **save.stacked}
        groups: list[dict[str, Shape]] = []
        for each in save.slices[:1] if save.layouts else save.slices:
            for number, group in enumerate(each.groups):
                groups += [{}] * (number + 1 - len(groups))
                groups[number] = groups[number] | {
                    name: whole[name].shape if name in whole else shape
                    for name, shape in group.items()
                }
        return cls(save, groups, files, common)

    def masters(self) -> Mapping[str, FlatParameter]:
        masters = {}
        for group in self.groups:
            for name, shape in group.items():
                file = self._file(name, _MASTER)
                if self._lacks_rows(file, shape):
                    self.notes.append(
                        f"the master copy of {name!r} lacks the rows that padded the vocabulary:"
                        " it is made from the weights as the model has them"
                    )
                    continue
                masters[name] = file.parameter(name, shape)
        return masters

    def states(self, table: ArchiveTable, names: Mapping[str, Fqn]) -> States:
        content = self.common.dictionary()
        if _STATES in content.values:
            common = _find_rank_states(self.common, content)
        else:
            common = RankStates(self.common, {}, content.inner_list("param_groups"))
        self._check_steps()
        entries: list[TensorEntry] = []
        values: dict[KeyPath, Any] = {}
        for name in (name for group in self.groups for name in group if name not in names):
            raise self.save.content.error(
                f"holds optimizer states of {quote(name)} but not the parameter"
            )
        for number, group in enumerate(self.groups):
            for name, shape in group.items():
                path = (OPTIMIZER, "state", names[name])
                entries += self._moments(table, path, name, shape)
                step = self.files[name].get(_STEP)
                vector = common.vectors.get(number)
                if step is None and vector is not None and vector.values.get(_STEP) is not None:
                    step = _ParameterFile(self.common, vector.values[_STEP])
                if step is not None and isinstance(step.value, TensorRef):
                    tensor = step.tensor()
                    chunks = [table.chunk(step.file, tensor)]
                    entries.append(_make_state_entry((*path, _STEP), tensor, tensor.shape, chunks))
                elif step is not None:
                    values[*path, _STEP] = step.value
        members = [[names[name] for name in group] for group in self.groups]
        return entries, values | _collect_group_values(common, members)

    def _file(self, name: str, kind: str) -> _ParameterFile:
        file = self.files.get(name, {}).get(kind)
        if file is None:
            raise MissingFileError(
                f"'zero/{name}/{kind}.pt' is not there",
                hint="copy the file back, or make the checkpoint anew with ds_to_universal.py",
            )
        return file

    def _lacks_rows(self, file: _ParameterFile, shape: Shape) -> bool:
        """Returns whether a tensor lacks padding rows of the vocabulary that the weights have."""
        stored = file.tensor().shape
        return (
            file.is_vocabulary
            and not self.save.is_partitioned
            and len(stored) == len(shape)
            and stored[1:] == shape[1:]
            and stored[0] < shape[0]
        )

    def _moments(
        self, table: ArchiveTable, path: KeyPath, name: str, shape: Shape
    ) -> Iterator[TensorEntry]:
        has_moments = any(kind in self.files[name] for kind in _MOMENTS)
        for kind in _MOMENTS if has_moments or self.save.is_partitioned else ():
            file = self._file(name, kind)
            whole = file.tensor().shape if self._lacks_rows(file, shape) else shape
            chunks = _place_slices(table, file.parameter(name, whole))
            yield _make_state_entry((*path, kind), file.tensor(), whole, chunks)

    def _check_steps(self) -> None:
        """Refuses parameters of one group with different numbers of steps, and lost steps."""
        names = [name for group in self.groups for name in group]
        if not any(_STEP in self.files[name] for name in names):
            return
        for group in self.groups:
            first: tuple[object, str] | None = None
            for name in group:
                if not any(kind in self.files[name] for kind in (*_MOMENTS, _STEP)):
                    continue  # a parameter that never had a gradient
                file = self._file(name, _STEP)
                step = _fingerprint_step(file.file, file.value)
                if first is not None and first[0] != step:
                    raise FormatError(
                        f"was stepped another number of times than {first[1]}: the files are of two"
                        " checkpoints",
                        where=file.file.where,
                        hint="make the checkpoint anew with ds_to_universal.py",
                    )
                first = first or (step, file.file.where)


class ZeroReader(FormatReader):
    """Reads what DeepSpeed's `save_checkpoint` writes into the folder of a tag."""

    name = "zero"
    order = 90
    expected = "'mp_rank_00_model_states.pt' beside '..._optim_states.pt'"
    endings = r"\.pt"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups the files by folder, together with those that are only refused."""
        files = [path for path in paths if find_unsupported_part(path) or parse_name(path)]
        candidates = []
        for folder, inside in group_by_folder(files).items():
            count = sum(find_unsupported_part(path) is None for path in inside)
            reason = f"{count} files named as DeepSpeed names those of its ranks"
            candidates.append(Candidate(self.name, folder, tuple(inside), reason))
        return candidates

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        table = ArchiveTable()
        save = _Save.open(table, source, sort_tag_files(candidate.files))
        found: list[Mapping[str, FlatParameter]] = []
        of_ranks: list[tuple[int, RankStates]] = []
        of_stages: list[tuple[RankStates, Sequence[Mapping[str, Shape]]]] = []
        unread: list[str] = []
        for stage, each in enumerate(save.slices):
            groups = each.groups
            if not each.ranks:
                continue
            experts = _ExpertGroups.of(each, save.stacked)
            has_settings = isinstance(each.content.values.get("ds_config"), dict)
            if experts.is_ambiguous and not has_settings:  # but the path of a file
                unread.append(
                    "nothing shows which ranks share experts, as the run's settings are not in its"
                    " files: optimizer states and master copies are left out"
                )
                continue
            if each.is_partitioned:
                found.append(_find_partitioned(groups, each.ranks, experts))
            else:
                groups = experts.whole(groups)
                found.append(_find_sliced(groups, each.ranks, experts))
            states = [_find_rank_states(file.archive, file.states()) for file in each.ranks]
            of_ranks += [(stage if save.layers else 0, state) for state in states]
            of_stages.append((states[0], groups))
        if found and len(found) < len(save.slices):
            raise MissingFileError(
                "only some model-parallel ranks have optimizer states", hint=COPY_BACK
            )
        masters = _join_ranks(found, save.layouts) if found else {}
        weights = _read_weights(table, source, save, masters)
        entries, values, notes = _collect_states(table, of_ranks, masters, weights.names)
        of_groups, more = _join_group_values(of_stages if save.layers else of_stages[:1], weights)
        notes = [*notes, *more, *unread]
        if not found and any(each.content.values.get("optimizer") for each in save.slices):
            notes.append(
                "without ZeRO, DeepSpeed keeps optimizer states and master copies by number:"
                " nothing proves which parameter has which, and they are left out"
            )
        elif not found and not unread:
            notes.append("there are no optimizer states, and so no master copies")
        if save.layers and not any(each.groups for each in save.slices):
            notes.append(
                "without ZeRO, nothing shows which layers of the pipeline share a module: all are"
                " named by their number"
            )
        ranks = save.slices[0].ranks
        number = ranks[0].states().count("zero_stage") if ranks else None
        return weights.index(self.name, (entries, values | of_groups), notes, stage=number)


def _join_group_values(
    stages: Sequence[tuple[RankStates, Sequence[Mapping[str, Shape]]]], weights: _Weights
) -> tuple[dict[KeyPath, Any], list[str]]:
    """Returns the settings of groups, where all stages of a pipeline have the same; and a note."""
    joined: dict[KeyPath, Any] = {}
    for number, (rank, groups) in enumerate(stages):
        names = [[weights.names[name] for name in group] for group in groups]
        values = _collect_group_values(rank, names)
        if not number:
            joined = values
            continue
        for path in joined.keys() | values.keys():
            if path[-1] == "params":
                members = joined.get(path, []), values.get(path, [])
                joined[path] = list(dict.fromkeys([*members[0], *members[1]]))
            elif path not in joined or path not in values or joined[path] != values[path]:
                note = "stages of the pipeline have other groups of parameters: they are left out"
                return {}, [note]
    return joined, []


class UniversalReader(FormatReader):
    """Reads what `ds_to_universal.py` writes into the folder of a tag."""

    name = "universal"
    order = 80  # before ZeRO, whose files of weights it contains
    expected = "'zero/<parameter>/fp32.pt'"
    endings = r"\.pt"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with files of parameters, and the files of weights in them."""
        folders: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            parsed = parse_universal_path(path)
            if parsed is not None:
                folders[parsed[0]].append(path)
        counts = {folder: len(files) for folder, files in folders.items()}
        for path in paths:
            folder = posixpath.dirname(path)
            if folder in counts and parse_name(path) is not None:
                folders[folder].append(path)
        return [
            Candidate(
                self.name,
                folder,
                tuple(sorted(files)),
                f"{counts[folder]} files named as ds_to_universal.py names those of parameters",
            )
            for folder, files in sorted(folders.items())
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        table = ArchiveTable()
        files = _UniversalFiles.open(table, source, candidate.files)
        weights = _read_weights(table, source, files.save, files.masters())
        states = files.states(table, weights.names)
        stage = files.common.dictionary().count("zero_stage")
        return weights.index(self.name, states, files.notes, stage=stage, tool="ds_to_universal.py")
