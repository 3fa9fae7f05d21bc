"""The files of one step, one for each rank of the model: their names, and which there have to be.

A rank of tensor parallelism T, pipeline stage P and expert parallelism E writes
`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`; the numbers of sizes that are 1 are left out. Of the
ranks that share a name, one writes.

Source: megatron/training/checkpointing.py (`get_checkpoint_name`, `generate_state_dict`,
`save_checkpoint`), megatron/core/parallel_state.py (`RankGenerator`), Megatron-LM, Megatron-Core
0.7 to 0.19.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.text import quote
from ckptkit.formats.dcp.megatron import find_arguments, is_size
from ckptkit.formats.parsing import COPY_BACK, MIXED_SAVES, TWO_SAVES, is_count
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.trees import TRAINING_VALUES
from ckptkit.storage.base import Source

_MODEL = re.compile(r"model(\d{1,4})?")
_ITERATION, _VERSION = "iteration", "checkpoint_version"
_LEAST_VERSION = 2.0  # rows of queries, keys and values had other orders before
_MAX_ITERATION = 10**15
_BEFORE_CORE = "language_model"
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
}
_LISTED = 4
_SHOWN = 32  # characters of a value


class Position(Struct, frozen=True):
    """The place of a file among those of its step, by its name."""

    tensor: int
    stage: int
    expert: int


class Parallelism(Struct, frozen=True):
    """In how many parts a model was cut, and how."""

    tensor: int
    pipeline: int
    expert: int  # groups of experts
    expert_tensor: int  # parts of a tensor of an expert
    layers: int | None = None  # None if unknown
    # whether the last stage has a copy of the embeddings; None if unknown
    is_tied: bool | None = None

    @property
    def period(self) -> int:
        """After so many ranks of a stage, the same names come again."""
        return math.lcm(self.tensor, self.expert_tensor * self.expert)

    def positions(self) -> Iterator[Position]:
        """Yields the positions of all files, each once."""
        for stage in range(self.pipeline):
            for rank in range(self.period):
                expert = rank // self.expert_tensor % self.expert
                yield Position(rank % self.tensor, stage, expert)


class ModelFile(Struct, frozen=True):
    """An opened file."""

    position: Position
    archive: TorchArchive
    root: Mapping[Any, Any]
    # tensors of each part of the model; more than one with virtual stages
    models: Sequence[Mapping[Any, Any]]

    @property
    def iteration(self) -> int | None:
        value = self.root.get(_ITERATION)
        return value if is_count(value, _MAX_ITERATION) else None


class ModelFiles(Struct, frozen=True):
    """All files of one step, with what they say of the run."""

    files: Sequence[ModelFile]
    parallelism: Parallelism
    arguments: Mapping[str, Any]


def open_files(
    table: ArchiveTable, source: Source, numbers: Mapping[str, Sequence[int]], where: str
) -> ModelFiles:
    """Opens all files of a step."""
    opened = [(path, table.open(source, path, TRAINING_VALUES)) for path in numbers]
    roots = [(archive, archive.dictionary().values) for _, archive in opened]
    arguments = find_arguments(roots[0][1])
    _check_same_save(roots)
    parallelism = _find_parallelism(arguments, list(numbers.values()), where)
    files = [
        ModelFile(
            _position(numbers[path], parallelism, archive.where),
            archive,
            archive.dictionary().values,
            _find_models(archive),
        )
        for path, archive in opened
    ]
    _check_positions(files, parallelism, where)
    for file in files:
        _check_rank(file, parallelism)
    if len({len(file.models) for file in files}) > 1:
        raise FormatError(
            "files have different numbers of parts of the model", where=where, hint=MIXED_SAVES
        )
    return ModelFiles(files, parallelism, arguments)


def _check_same_save(roots: Sequence[tuple[TorchArchive, Mapping[Any, Any]]]) -> None:
    """Refuses files of two iterations, or of runs whose sizes differ."""
    first, expected = roots[0]
    for archive, root in roots:
        for what in (_ITERATION, _VERSION):
            if root.get(what) != expected.get(what):
                raise FormatError(
                    f"is of {what} {_shown(root.get(what))}, and"
                    f" {posixpath.basename(posixpath.dirname(first.path))!r} of"
                    f" {_shown(expected.get(what))}",
                    where=archive.where,
                    hint=TWO_SAVES,
                )
        mine, others = find_arguments(root), find_arguments(expected)
        for name in (*_SIZES.values(), "expert_tensor_parallel_size", "num_layers"):
            if mine.get(name) != others.get(name):
                raise FormatError(
                    f"is of a run with {name} {_shown(mine.get(name))}, and"
                    f" {posixpath.basename(posixpath.dirname(first.path))!r} of one with"
                    f" {_shown(others.get(name))}",
                    where=archive.where,
                    hint=MIXED_SAVES,
                )
    version = expected.get(_VERSION)
    if isinstance(version, (int, float)) and version < _LEAST_VERSION:
        raise UnsupportedError(
            f"{_VERSION} {version} is not modelled, at least {_LEAST_VERSION} is",
            where=first.where,
            hint="load it with Megatron-LM and save it again",
        )


def _shown(value: object) -> str:
    return quote(str(value)) if isinstance(value, str) else str(value)[: _LISTED * 8]


def _find_models(archive: TorchArchive) -> list[Mapping[Any, Any]]:
    """Returns the state dicts `model`, or `model0`, `model1`, … of virtual stages."""
    root = archive.dictionary().values
    found = {}
    for key, value in root.items():
        match = _MODEL.fullmatch(key) if isinstance(key, str) else None
        if match is None or not isinstance(value, dict):
            continue
        if _BEFORE_CORE in value:
            raise UnsupportedError(
                f"model has {_BEFORE_CORE!r}, as in Megatron-LM before Megatron-Core, which is not"
                " modelled",
                where=archive.where,
                hint="convert it with tools/checkpoint/convert.py of Megatron-LM to a model of"
                " Megatron-Core",
            )
        found[key] = value
    is_numbered = set(found) == {f"model{n}" for n in range(len(found))}
    if not found or (set(found) != {"model"} and not is_numbered):
        names = ", ".join(map(repr, sorted(found))) or "none"
        raise FormatError(
            f"has the state dicts {names}, where 'model' or 'model0', 'model1', … was expected",
            where=archive.where,
            hint="a file without weights is of an interrupted save; take an earlier checkpoint",
        )
    return [found[key] for key in sorted(found, key=lambda key: (len(key), key))]


def _find_parallelism(
    arguments: Mapping[str, Any], numbers: Sequence[Sequence[int]], where: str
) -> Parallelism:
    """Returns the sizes in the arguments; without arguments, those that names show."""
    lengths = {len(own) for own in numbers}
    if len(lengths) > 1:
        raise FormatError(
            "folders 'mp_rank_…' have different counts of numbers", where=where, hint=MIXED_SAVES
        )
    given = {kind: arguments.get(name) for kind, name in _SIZES.items()}
    sizes = {kind: size if is_size(size) else 1 for kind, size in given.items()}
    if not is_size(given["tensor"]):
        if max(lengths) > 1:
            raise UnsupportedError(
                "files without the arguments of the training do not show what the second number of"
                " their folders counts",
                where=where,
                hint="give the files as Megatron-LM wrote them, with 'args'",
            )
        sizes["tensor"] = 1 + max((own[0] for own in numbers if own), default=0)
    expert_tensor = arguments.get("expert_tensor_parallel_size")
    layers, untied = arguments.get("num_layers"), arguments.get(_UNTIED)
    found = Parallelism(
        sizes["tensor"],
        sizes["pipeline"],
        sizes["expert"],
        expert_tensor if is_size(expert_tensor) else sizes["tensor"],
        layers if is_size(layers) else None,
        None if not isinstance(untied, bool) else not untied,
    )
    if found.tensor % found.expert_tensor:
        raise UnsupportedError(
            f"experts are cut into {found.expert_tensor} parts and other tensors into"
            f" {found.tensor}: ranks with different parts write to files of the same name",
            where=where,
            hint="save the run in the format 'torch_dist'",
        )
    return found


_UNTIED = "untie_embeddings_and_output_weights"


def _position(numbers: Sequence[int], sizes: Parallelism, where: str) -> Position:
    if not numbers and sizes.pipeline * sizes.period == 1:
        return Position(0, 0, 0)
    if not numbers:
        raise MissingFileError(
            f"is the file of one rank of {sizes.pipeline * sizes.period:,}",
            where=where,
            hint="give the folder 'iter_…' with the folders 'mp_rank_…' of all ranks",
        )
    kinds = ["tensor", *(["stage"] * (sizes.pipeline > 1)), *(["expert"] * (sizes.expert > 1))]
    if len(kinds) != len(numbers):
        raise FormatError(
            f"folder has {len(numbers)} numbers; a run with {sizes.pipeline} pipeline stages and"
            f" {sizes.expert} groups of experts has {len(kinds)}",
            where=where,
            hint=MIXED_SAVES,
        )
    return Position(**{"stage": 0, "expert": 0, **dict(zip(kinds, numbers, strict=True))})


def _name(position: Position, sizes: Parallelism) -> str:
    stage = f"_{position.stage:03d}" if sizes.pipeline > 1 else ""
    expert = f"_{position.expert:03d}" if sizes.expert > 1 else ""
    return f"mp_rank_{position.tensor:02d}{stage}{expert}"


def _check_rank(file: ModelFile, sizes: Parallelism) -> None:
    """Refuses a file that another rank wrote than the one that its folder names.

    Ranks are counted along tensors first and along stages last, unless the run says otherwise.
    """
    arguments = find_arguments(file.root)
    rank, world_size = arguments.get("rank"), arguments.get("world_size")
    is_usual = not arguments.get("use_tp_pp_dp_mapping")
    if not is_count(rank) or not is_size(world_size) or world_size % sizes.pipeline:
        return
    position = Position(
        rank % sizes.tensor,
        rank // (world_size // sizes.pipeline) if is_usual else file.position.stage,
        rank // sizes.expert_tensor % sizes.expert if is_usual else file.position.expert,
    )
    if position != file.position:
        raise FormatError(
            f"was written by rank {rank:,} of {world_size:,}, whose folder is"
            f" {_name(position, sizes)!r}",
            where=file.archive.where,
            hint="files were exchanged, or are of another run; copy them again",
        )


def _check_positions(files: Sequence[ModelFile], sizes: Parallelism, where: str) -> None:
    """Refuses a step that lacks files, or has files of ranks that its run did not have."""
    there = {file.position for file in files}
    count = sizes.pipeline * sizes.period
    # A hostile file may claim any number of ranks, so that no list of them is made.
    expected = islice(sizes.positions(), len(files) + _LISTED)
    missing = [_name(position, sizes) for position in expected if position not in there]
    if missing:
        absent = count - len(files)
        names = ", ".join(missing[:_LISTED])
        more = f" and {absent - _LISTED:,} more" if absent > _LISTED else ""
        raise MissingFileError(
            f"{len(files):,} of the files of {count:,} ranks are there; missing are {names}{more}",
            where=where,
            hint=COPY_BACK,
        )
    if len(files) > count:
        known = set(sizes.positions())
        stale = next(file for file in files if file.position not in known)
        raise FormatError(
            f"is of a rank that a run with {count} such files does not have",
            where=stale.archive.where,
            hint="an earlier save of a larger run left it; take it away",
        )
