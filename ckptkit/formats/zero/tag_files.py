"""The files of one tag of a DeepSpeed run: their names, their contents, and checks of the set.

Source: deepspeed/runtime/engine.py (`_get_zero_ckpt_name`, `_get_ckpt_name`, `_save_checkpoint`),
deepspeed/runtime/pipe/module.py (`ckpt_layer_path`), deepspeed 0.19.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MIXED_SAVES, refuse_missing_ranks, refuse_stale_ranks
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict, TorchArchive
from ckptkit.formats.pickle.torch_values import ALLOWED
from ckptkit.storage.base import Source

MODULE = "module"
Kind = Literal["model", "optim"]
_NAME = re.compile(
    r"(bf16_)?(?:zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<slice>\d{1,7})_"
    r"(?P<kind>optim|model)_states\.pt"
)
_EXPERTS = "experts in files of their own"
_NOT_MODELLED = {
    _EXPERTS: re.compile(r"layer_\d+_expert_\d+_.*\.pt|expp_rank_.*\.pt"),
    "the layers of a pipeline": re.compile(r"layer_\d+-.*model_states\.pt"),
}
# Keys of a file of weights that lacks a part of the model.
_LACKING = {"num_experts": _EXPERTS, "autoep_layers": _EXPERTS, "ds_autoep_layers": _EXPERTS}
_UNIVERSAL = re.compile(
    r"(?:(?P<folder>.*)/)?zero/"
    r"(?:(?P<parameter>[^/]+)/(?P<kind>fp32|exp_avg|exp_avg_sq|step)|optimizer_state)\.pt"
)


@dataclass(frozen=True, slots=True)
class TagFile:
    """A file of a tag, as its name describes it.

    Attributes:
        path: The file.
        kind: Whether it holds weights or optimizer states.
        rank: The data-parallel rank that wrote it; None for the only file of its kind.
        slice: The slice of tensor parallelism.
    """

    path: str
    kind: Kind
    rank: int | None
    slice: int


def parse_name(path: str) -> TagFile | None:
    """Parses the name of a file; None if DeepSpeed does not use such names."""
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    kind: Kind = "model" if match["kind"] == "model" else "optim"
    rank = None if match["rank"] is None else int(match["rank"])
    return TagFile(path, kind, rank, int(match["slice"]))


def find_unsupported_part(path: str) -> str | None:
    """Returns which part of a model that is not supported a file holds; None for other files."""
    name = posixpath.basename(path)
    return next((what for what, pattern in _NOT_MODELLED.items() if pattern.fullmatch(name)), None)


@dataclass(frozen=True, slots=True)
class UniversalFile:
    """A file of a universal checkpoint, as its path describes it.

    Attributes:
        folder: The folder of the checkpoint.
        parameter: The parameter; empty for the states that all parameters share.
        kind: Which of the parameter's values it holds.
    """

    folder: str
    parameter: str
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


@dataclass(frozen=True, slots=True)
class ZeroFile:
    """An opened file.

    Attributes:
        info: The file's name, parsed.
        content: The dictionary in its pickle.
        archive: The opened archive.
    """

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
    """Sorts the files of a tag into those of weights and of optimizer states, by rank.

    Args:
        paths: The files of one tag.
        where: Its folder, for messages.
    """
    for path in paths:
        part = find_unsupported_part(path)
        if part is not None:
            raise unsupported_part_error(part, path, where)
    parsed = [file for file in map(parse_name, paths) if file is not None]
    sliced = next((file for file in parsed if file.slice), None)
    if sliced is not None:
        raise unsupported_part_error("slices of tensor parallelism", sliced.path, where)
    files: dict[Kind, list[TagFile]] = {"model": [], "optim": []}
    for file in sorted(parsed, key=lambda file: -1 if file.rank is None else file.rank):
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
    return UnsupportedError(
        f"holds {part} ({posixpath.basename(path)!r}), which this version does not read",
        where=where,
        hint="load it where it was trained, and save the gathered state dict of the whole model"
        " with `torch.save`, or use the converter of what trained it; read are ZeRO 1 to 3 without"
        " pipeline, tensor and expert parallelism",
    )


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
