"""The files of one tag of a DeepSpeed run: their names, their contents, and checks of the set.

Experts of `deepspeed.moe` have a file each, with the number of the layer that has experts and the
number of the expert among those of all ranks, which is also in the names of its tensors.

Source: deepspeed/runtime/engine.py (`_get_zero_ckpt_name`, `_get_ckpt_name`, `_save_checkpoint`,
`_save_moe_checkpoint`, `_get_expert_ckpt_name`), deepspeed/runtime/pipe/module.py
(`ckpt_layer_path`), deepspeed 0.19.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal

from msgspec import Struct

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import (
    MIXED_SAVES,
    is_count,
    list_first,
    refuse_missing_ranks,
    refuse_stale_ranks,
)
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict, TorchArchive
from ckptkit.formats.pickle.torch_values import ALLOWED
from ckptkit.storage.base import Source

MODULE = "module"
Kind = Literal["model", "optim", "expert"]
_NAME = re.compile(
    r"(bf16_)?(?:zero_pp_rank_(?P<rank>\d{1,7})_|layer_(?P<layer>\d{1,7})_expert_(?P<expert>\d{1,7})_)?"
    r"mp_rank_(?P<slice>\d{1,7})_(?P<kind>optim|model)_states\.pt"
)
_EXPERTS = "experts in files of their own"
_AUTO_EXPERTS = "experts of AutoEP, in files of their own or in the optimizer's states"
_NOT_MODELLED = {
    _EXPERTS: re.compile(r"(layer_-?\d+_)?expert_\d+_.*\.pt|expp_rank_.*\.pt"),
    "the layers of a pipeline": re.compile(r"layer_\d+-.*model_states\.pt"),
}
# Keys of a file of weights that lacks a part of the model.
_LACKING = {"autoep_layers": _AUTO_EXPERTS, "ds_autoep_layers": _AUTO_EXPERTS}
_LISTED_EXPERTS = 4
_UNIVERSAL = re.compile(
    r"(?:(?P<folder>.*)/)?zero/"
    r"(?:(?P<parameter>[^/]+)/(?P<kind>fp32|exp_avg|exp_avg_sq|step)|optimizer_state)\.pt"
)


class TagFile(Struct, frozen=True):
    """A file of a tag, as its name describes it."""

    path: str
    kind: Kind
    rank: int | None  # data-parallel; None for the only file of its kind
    slice: int  # of tensor parallelism
    # the number of the layer, among those with experts, and of the expert in it
    expert: tuple[int, int] | None = None


def parse_name(path: str) -> TagFile | None:
    """Parses the name of a file; None if DeepSpeed does not use such names."""
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    kind: Kind = "model" if match["kind"] == "model" else "optim"
    rank = None if match["rank"] is None else int(match["rank"])
    if match["expert"] is None:
        return TagFile(path, kind, rank, int(match["slice"]))
    expert = int(match["layer"]), int(match["expert"])
    return TagFile(path, "expert", None, int(match["slice"]), expert)


def find_unsupported_part(path: str) -> str | None:
    """Returns which part of a model that is not supported a file holds; None for other files."""
    name = posixpath.basename(path)
    if _NAME.fullmatch(name):
        return None
    return next((what for what, pattern in _NOT_MODELLED.items() if pattern.fullmatch(name)), None)


class UniversalFile(Struct, frozen=True):
    """A file of a universal checkpoint, as its path describes it."""

    folder: str
    parameter: str  # empty for the states that all parameters share
    kind: str


def parse_universal_path(path: str) -> UniversalFile | None:
    """Parses the path of a file; None if universal checkpoints do not use such paths."""
    match = _UNIVERSAL.fullmatch(path)
    if match is None:
        return None
    return UniversalFile(match["folder"] or "", match["parameter"] or "", match["kind"] or "")


def _stage(*args: object) -> int:
    match args:
        case (int(stage),):
            return stage
    raise FormatError("ZeRO's stage is not a number")


_ALLOWED = {**ALLOWED, ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage}


class ZeroFile(Struct, frozen=True):
    """An opened file."""

    info: TagFile
    content: PickledDict
    archive: TorchArchive


def open_zero_file(table: ArchiveTable, source: Source, file: TagFile) -> ZeroFile:
    archive = open_zero_archive(table, source, file.path)
    return ZeroFile(file, archive.dictionary(), archive)


def open_zero_archive(table: ArchiveTable, source: Source, path: str) -> TorchArchive:
    """Opens a file of DeepSpeed that may hold something else than a dictionary."""
    return table.open(source, path, _ALLOWED)


def sort_tag_files(paths: Sequence[str], where: str) -> Mapping[Kind, list[TagFile]]:
    """Sorts the files of a tag into those of weights and of optimizer states, by rank."""
    parsed = [file for file in map(parse_name, paths) if file is not None]
    has_experts = any(file.kind == "expert" for file in parsed)
    for path in paths:
        part = find_unsupported_part(path)
        # Beside experts, this is what an optimizer without ZeRO wrote; states of theirs are unread.
        if part is not None and not (has_experts and path.endswith("_optim_states.pt")):
            raise unsupported_part_error(part, path, where)
    sliced = next((file for file in parsed if file.slice), None)
    if sliced is not None:
        raise unsupported_part_error("slices of tensor parallelism", sliced.path, where)
    files: dict[Kind, list[TagFile]] = {"model": [], "optim": [], "expert": []}
    for file in sorted(parsed, key=lambda file: -1 if file.rank is None else file.rank):
        if file.expert is not None:
            files["expert"].append(file)
            continue
        before = files[file.kind][-1:]
        if before and (before[0].rank is None or before[0].rank == file.rank):
            raise FormatError(
                f"{posixpath.basename(before[0].path)!r} and {posixpath.basename(file.path)!r}"
                " are of two checkpoints",
                where=where,
                hint=MIXED_SAVES,
            )
        files[file.kind].append(file)
    if not files["model"]:
        raise MissingFileError(
            "there are optimizer states, and no file of weights ('…model_states.pt')",
            where=where,
            hint="give the directory that holds the files of every rank",
        )
    return files


def unsupported_part_error(part: str, path: str, where: str) -> UnsupportedError:
    has_converter = not part.startswith("experts")  # DeepSpeed has none for these
    other = ", or use the converter of what trained it" if has_converter else ""
    return UnsupportedError(
        f"holds {part} ({posixpath.basename(path)!r}), which this version does not read",
        where=where,
        hint="load it where it was trained, and save the gathered state dict of the whole model"
        f" with `torch.save`{other}; read are ZeRO 1 to 3 without pipeline and tensor parallelism,"
        " and the experts of `deepspeed.moe` up to ZeRO 2",
    )


def check_experts(model: PickledDict, experts: Sequence[TagFile], where: str) -> None:
    """Refuses files of experts that are missing, or that the model does not have."""
    counts = model.values.get("num_experts") or []
    counts = counts if isinstance(counts, list) else [counts]
    if not all(map(is_count, counts)):
        raise model.error("'num_experts' is not a list of numbers")
    there = {file.expert for file in experts}
    if not counts and there:
        raise FormatError(
            f"{posixpath.basename(experts[0].path)!r} is beside a model without experts",
            where=where,
            hint=MIXED_SAVES,
        )
    # A hostile file may claim any number of experts, so that no list of them is made.
    expected = ((layer, n) for layer, count in enumerate(counts) for n in range(count))
    some = islice(expected, len(there) + _LISTED_EXPERTS)
    absent = [place for place in some if place not in there]
    if absent:
        names = (f"expert {expert} of layer {layer}" for layer, expert in absent)
        count = sum(counts)
        raise MissingFileError(
            f"{len(there):,} of the files of {count:,} experts are there; missing are"
            f" {list_first(names, count - len(there), _LISTED_EXPERTS)}",
            where=where,
            hint="copy 'layer_L_expert_E_mp_rank_00_model_states.pt' of every rank's node beside"
            " them; layers with experts are counted from 0",
        )
    if len(there) > sum(counts):
        odd = next(f for f in experts if f.expert and not _is_among(f.expert, counts))
        raise FormatError(
            f"{posixpath.basename(odd.path)!r} is of an expert that the model does not have",
            where=where,
            hint=MIXED_SAVES,
        )


def _is_among(expert: tuple[int, int], counts: Sequence[int]) -> bool:
    layer, number = expert
    return layer < len(counts) and number < counts[layer]


def check_ranks(files: Sequence[ZeroFile], world_size: int, what: str, where: str) -> None:
    """Refuses files that are missing, and files of ranks that the run did not have."""
    ranks = {file.info.rank for file in files}
    refuse_missing_ranks(ranks, world_size, what, where)
    refuse_stale_ranks(((file.info.rank, file.info.path) for file in files), world_size, where)


def refuse_parallelism(models: Sequence[ZeroFile], where: str) -> None:
    """Refuses files of weights that hold only a part of the model."""
    for model in models:
        content, path = model.content, model.info.path
        degrees = content.inner("checkpoint_parallel_dimensions")
        sizes = {content.count("mp_world_size"), *map(degrees.count, degrees.values)}
        if sizes - {None, 1}:
            raise unsupported_part_error("slices of a model-parallel run", path, where)
        for key, part in _LACKING.items():
            if content.values.get(key):
                raise unsupported_part_error(part, path, where)
        if content.values.get(MODULE) is None:
            raise unsupported_part_error("the layers of a pipeline", path, where)


def check_same_run(models: Sequence[ZeroFile], where: str) -> None:
    """Refuses files of weights of several steps, or of several runs."""
    for key in ("global_steps", "dp_world_size"):
        if len({file.content.count(key) for file in models}) > 1:
            raise FormatError(f"the files of ranks have several {key!r}", where=where)


def read_parameter_groups(model: PickledDict) -> list[dict[str, Shape]]:
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


def read_shared_parameters(model: PickledDict) -> Mapping[str, str]:
    """Returns the further names of tied parameters, each with the first name."""
    names = model.inner("shared_params").values
    if not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise model.error("'shared_params' names something that is not a text")
    return names
