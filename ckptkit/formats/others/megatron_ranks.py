"""The reader of `--ckpt-format torch` of Megatron-LM: a file for each rank of the model.

A rank of tensor parallelism T, pipeline stage P and expert parallelism E writes
`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`; the numbers of sizes that are 1 are left out. Of the
ranks that share a name, one writes. Tensors get the names that they have in `torch_dist`, with a
number for each layer and each expert. Optimizer states are numbered on each rank, or are in the
files of the distributed optimizer, and are left alone.

Layers are numbered from 0 on each stage. Of virtual stages, each rank has the parts `model0`,
`model1` and so on; the layers of all stages' `model0` precede those of `model1`. So offsets are the
counts of the layers before, however stages divide them. Of experts, every group has equally many.

Files of ranks store no global shapes. A column-parallel layer is cut along axis 0, and so are its
biases; a row-parallel one along axis 1, its bias is whole. Each rank has its own part of the gate
and of the up projection in `linear_fc1`, one after the other.

Source: megatron/training/checkpointing.py (`get_checkpoint_name`, `generate_state_dict`,
`save_checkpoint`), megatron/core/parallel_state.py (`RankGenerator`),
megatron/core/tensor_parallel/layers.py, megatron/core/transformer/{attention,mlp,
multi_latent_attention,multi_token_prediction,dot_product_attention}.py,
megatron/core/transformer/transformer_layer.py (`get_transformer_layer_offset`),
megatron/core/transformer/moe/{moe_layer,router,experts,shared_experts}.py, Megatron-LM and
Megatron-Core 0.7 to 0.19.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from msgspec import Struct

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import Box, Chunk, KeyPath, Problem, RunFacts, Shape, TensorIndex
from ckptkit.core.text import join_first, quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.dcp.megatron import compare_iterations, find_arguments, is_size, read_common
from ckptkit.formats.parsing import COPY_BACK, MIXED_SAVES, TWO_SAVES, is_count
from ckptkit.formats.pickle.machine import InertObject, class_of
from ckptkit.formats.pickle.objects import find_unread
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive, find_differing_copies
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import (
    EXTRA_STATE,
    TRAINING_VALUES,
    Stored,
    describe_objects_in,
    make_entries,
)
from ckptkit.storage.base import Source

_FILE = "model_optim_rng.pt"
_LONG = r"\d{3}|[1-9]\d{3,6}"
_PATH = re.compile(
    r"(?:(?P<step>.*?)/)??"
    rf"(?:mp_rank_(?P<a>\d{{2}}|[1-9]\d{{2,6}})(?:_(?P<b>{_LONG}))?(?:_(?P<c>{_LONG}))?/)?"
    rf"{re.escape(_FILE)}"
)
_NUMBERS = ("a", "b", "c")  # of tensor parallelism, and of a stage or experts, or both
_MODEL = re.compile(r"model(\d{1,4})?")
_ITERATION, _VERSION = "iteration", "checkpoint_version"
_LEAST_VERSION = 2.0  # rows of queries, keys and values had other orders before
_BEFORE_CORE = "language_model"
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
}
_LISTED_FILES, _LISTED_NAMES = 4, 3


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
        for stage in range(self.pipeline):
            for rank in range(self.period):
                expert = rank // self.expert_tensor % self.expert
                yield Position(rank % self.tensor, stage, expert)


class ModelFile(Struct, frozen=True):
    position: Position
    archive: TorchArchive
    root: Mapping[Any, Any]
    # tensors of each part of the model; more than one with virtual stages
    models: Sequence[Mapping[Any, Any]]


def _open_files(
    table: ArchiveTable, source: Source, numbers: Mapping[str, Sequence[int]]
) -> tuple[list[ModelFile], Parallelism]:
    """Opens all files of a step; `numbers` has those in the names of their folders."""
    archives = [table.open(source, path, TRAINING_VALUES) for path in numbers]
    roots = [archive.dictionary().values for archive in archives]
    _check_same_save(archives, roots)
    sizes = _find_parallelism(find_arguments(roots[0]), list(numbers.values()))
    files = []
    for own, archive, root in zip(numbers.values(), archives, roots, strict=True):
        with errors_at(archive.where):
            files.append(ModelFile(_position(own, sizes), archive, root, _find_models(root)))
    _check_positions(files, sizes)
    if len({len(file.models) for file in files}) > 1:
        raise FormatError("files have different numbers of parts of the model", hint=MIXED_SAVES)
    return files, sizes


def _check_same_save(archives: Sequence[TorchArchive], roots: Sequence[Mapping[Any, Any]]) -> None:
    """Refuses files of two iterations, or of runs whose sizes differ."""
    first, expected = archives[0], roots[0]
    others = find_arguments(expected)
    above = repr(posixpath.basename(posixpath.dirname(first.path)))
    for archive, root in zip(archives, roots, strict=True):
        mine = find_arguments(root)
        for what in (_ITERATION, _VERSION):
            if root.get(what) != expected.get(what):
                raise FormatError(
                    f"is of {what} {_shown(root.get(what))}, and {above} of"
                    f" {_shown(expected.get(what))}",
                    where=archive.where,
                    hint=TWO_SAVES,
                )
        for name in (*_SIZES.values(), "expert_tensor_parallel_size", "num_layers"):
            if mine.get(name) != others.get(name):
                raise FormatError(
                    f"is of a run with {name} {_shown(mine.get(name))}, and {above} of one with"
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
    return quote(value) if isinstance(value, str) else str(value)[:32]


def _find_models(root: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """Returns the state dicts `model`, or `model0`, `model1`, … of virtual stages."""
    found = {}
    for key, value in root.items():
        match = _MODEL.fullmatch(key) if isinstance(key, str) else None
        if match is None or not isinstance(value, dict):
            continue
        if _BEFORE_CORE in value:
            raise UnsupportedError(
                f"model has {_BEFORE_CORE!r}, as in Megatron-LM before Megatron-Core, which is not"
                " modelled",
                hint="convert it with tools/checkpoint/convert.py of Megatron-LM to a model of"
                " Megatron-Core",
            )
        found[key] = value
    is_numbered = set(found) == {f"model{n}" for n in range(len(found))}
    if not found or (set(found) != {"model"} and not is_numbered):
        names = ", ".join(map(repr, sorted(found))) or "none"
        raise FormatError(
            f"has the state dicts {names}, where 'model' or 'model0', 'model1', … was expected",
            hint="a file without weights is of an interrupted save; take an earlier checkpoint",
        )
    return [found[key] for key in sorted(found, key=lambda key: (len(key), key))]


def _find_parallelism(
    arguments: Mapping[str, Any], numbers: Sequence[Sequence[int]]
) -> Parallelism:
    """Returns the sizes in the arguments; without arguments, those that names show."""
    lengths = {len(own) for own in numbers}
    if len(lengths) > 1:
        raise FormatError("folders 'mp_rank_…' have different counts of numbers", hint=MIXED_SAVES)
    given = {kind: arguments.get(name) for kind, name in _SIZES.items()}
    sizes = {kind: size if is_size(size) else 1 for kind, size in given.items()}
    if not is_size(given["tensor"]):
        if max(lengths) > 1:
            raise UnsupportedError(
                "files without the arguments of the training do not show what the second number of"
                " their folders counts",
                hint="give the files as Megatron-LM wrote them, with 'args'",
            )
        sizes["tensor"] = 1 + max((own[0] for own in numbers if own), default=0)
    expert_tensor = arguments.get("expert_tensor_parallel_size")
    layers, untied = (
        arguments.get("num_layers"),
        arguments.get("untie_embeddings_and_output_weights"),
    )
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
            hint="save the run in the format 'torch_dist'",
        )
    return found


def _position(numbers: Sequence[int], sizes: Parallelism) -> Position:
    if not numbers and sizes.pipeline * sizes.period == 1:
        return Position(0, 0, 0)
    if not numbers:
        raise MissingFileError(
            f"is the file of one rank of {sizes.pipeline * sizes.period:,}",
            hint="give the folder 'iter_…' with the folders 'mp_rank_…' of all ranks",
        )
    kinds = ["tensor", *(["stage"] * (sizes.pipeline > 1)), *(["expert"] * (sizes.expert > 1))]
    if len(kinds) != len(numbers):
        raise FormatError(
            f"folder has {len(numbers)} numbers; a run with {sizes.pipeline} pipeline stages and"
            f" {sizes.expert} groups of experts has {len(kinds)}",
            hint=MIXED_SAVES,
        )
    return Position(**{"stage": 0, "expert": 0, **dict(zip(kinds, numbers, strict=True))})


def _name(position: Position, sizes: Parallelism) -> str:
    stage = f"_{position.stage:03d}" if sizes.pipeline > 1 else ""
    expert = f"_{position.expert:03d}" if sizes.expert > 1 else ""
    return f"mp_rank_{position.tensor:02d}{stage}{expert}"


def _check_positions(files: Sequence[ModelFile], sizes: Parallelism) -> None:
    """Refuses a step that lacks files, or has files of ranks that its run did not have.

    So it does with a file that another rank wrote than the one that its folder names. Ranks are
    counted along tensors first and along stages last, unless the run says otherwise.
    """
    there = {file.position for file in files}
    count = sizes.pipeline * sizes.period
    # A hostile file may claim any number of ranks, so that no list of them is made.
    expected = islice(sizes.positions(), len(files) + _LISTED_FILES)
    missing = [_name(position, sizes) for position in expected if position not in there]
    if missing:
        names = join_first(missing, count - len(files), _LISTED_FILES)
        raise MissingFileError(
            f"{len(files):,} of the files of {count:,} ranks are there; missing are {names}",
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
    for file in files:
        arguments = find_arguments(file.root)
        rank, world_size = arguments.get("rank"), arguments.get("world_size")
        if not is_count(rank) or not is_size(world_size) or world_size % sizes.pipeline:
            continue
        position = Position(rank % sizes.tensor, file.position.stage, file.position.expert)
        if not arguments.get("use_tp_pp_dp_mapping"):
            stage = rank // (world_size // sizes.pipeline)
            position = Position(position.tensor, stage, rank // sizes.expert_tensor % sizes.expert)
        if position != file.position:
            raise FormatError(
                f"was written by rank {rank:,} of {world_size:,}, whose folder is"
                f" {_name(position, sizes)!r}",
                where=file.archive.where,
                hint="files were exchanged, or are of another run; copy them again",
            )


_WRAPPER = re.compile(r"(?:module\.)+")
_LAYER = re.compile(r"((?:.*\.)?(?:encoder|decoder)\.layers\.)(\d{1,7})(\..+)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d{1,7})(\..+)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d{1,7})")
_FUSED = re.compile(r".*\.experts\.weight[12]")  # Megatron-Core's own grouped experts
_HEAD = re.compile(r"((?:.*\.)?)output_layer\.weight")
_DECODER, _ENCODER = "decoder.layers.", "encoder.layers."
_Counts = Mapping[tuple[str, int, int], int]  # of layers, by prefix, virtual stage and stage


class LocalTensor(Struct, frozen=True):
    file: ModelFile
    name: str
    tensor: TensorRef
    part: int  # of tensor parallelism, if the tensor is cut
    parts: int
    neighbours: Mapping[str, TensorRef]  # of the same part of the model, by their names in the file


def _collect_tensors(
    files: Sequence[ModelFile], sizes: Parallelism
) -> tuple[dict[str, list[LocalTensor]], int]:
    """Returns what all ranks have of each tensor, by its name in the whole model."""
    held: dict[tuple[int, int], dict[str, TensorRef]] = {}  # by file and virtual stage
    ignored = 0
    for number, file in enumerate(files):
        for virtual, model in enumerate(file.models):
            tensors = _find_tensors(model, file)
            ignored += sum(1 for name in model if isinstance(name, str) and EXTRA_STATE in name)
            held[number, virtual] = tensors
    counts = _count_layers(files, held, sizes.layers)
    collected: dict[str, list[LocalTensor]] = defaultdict(list)
    for (number, virtual), tensors in held.items():
        file = files[number]
        experts = _count_experts(tensors, file)
        offsets: dict[str, int] = defaultdict(int)  # the layers before, by prefix
        for (prefix, *place), count in counts.items():
            offsets[prefix] += count if place < [virtual, file.position.stage] else 0
        for name, tensor in tensors.items():
            is_expert = _EXPERT.fullmatch(name) is not None
            parts = sizes.expert_tensor if is_expert else sizes.tensor
            part = file.position.tensor % parts
            local = LocalTensor(file, name, tensor, part, parts, tensors)
            whole_name = _rename(name, file, experts, offsets, is_tied=sizes.is_tied)
            collected[whole_name].append(local)
    return dict(collected), ignored


def _find_tensors(model: Mapping[Any, Any], file: ModelFile) -> dict[str, TensorRef]:
    """Returns the tensors of a state dict, experts named as if each were stored apart."""
    found: dict[str, TensorRef] = {}
    for key, value in model.items():
        if not isinstance(key, str) or EXTRA_STATE in key:
            continue
        unread = find_unread(value)
        if unread is not None:
            raise unread.error(f"{file.archive.where}: {quote(key)}")
        if isinstance(value, InertObject) or _FUSED.fullmatch(key):
            is_object = isinstance(value, InertObject)
            kind = quote(str(class_of(value))) if is_object else "one matrix of experts"
            raise UnsupportedError(
                f"{quote(key)} is held as {kind}, which is not modelled",
                where=file.archive.where,
                hint="save the run in the format 'torch_dist', with plain tensors",
            )
        if not isinstance(value, TensorRef):
            continue
        name = _WRAPPER.sub("", key, count=1) if key.startswith("module.") else key
        grouped = _GROUPED.fullmatch(name)
        if grouped is not None:
            name = f"{grouped[1]}local_experts.{grouped[3]}.{grouped[2]}"
        if name in found:
            raise FormatError(f"two tensors are {quote(name)}", where=file.archive.where)
        found[name] = value
    return found


def _count_layers(
    files: Sequence[ModelFile],
    held: Mapping[tuple[int, int], Collection[str]],
    expected: int | None,
) -> _Counts:
    """Counts the layers of each stage, whose ranks have to have tensors of the same names."""
    first: dict[tuple[int, int], tuple[ModelFile, set[str]]] = {}
    numbers: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for (number, virtual), names in held.items():
        file, stage = files[number], files[number].position.stage
        other, of_stage = first.setdefault((stage, virtual), (file, set(names)))
        differing = of_stage ^ set(names)
        if differing:
            shown = join_first(map(quote, sorted(differing)), len(differing), _LISTED_NAMES)
            raise FormatError(
                f"has other tensors than {other.archive.path!r} of the same stage: {shown}",
                where=file.archive.where,
                hint=TWO_SAVES,
            )
        for match in filter(None, map(_LAYER.fullmatch, names)):
            numbers[match[1], virtual, stage].add(int(match[2]))
    for (prefix, _, stage), own in numbers.items():
        _check_numbers(own, f"layers {prefix!r} of stage {stage}")
    counts = {key: len(own) for key, own in numbers.items()}
    totals: dict[str, int] = defaultdict(int)
    for (prefix, _, _), count in counts.items():
        totals[prefix] += count
    # With an encoder, the argument counts its layers.
    is_alone = _DECODER in totals and _ENCODER not in totals
    if expected is not None and is_alone and totals[_DECODER] != expected:
        raise FormatError(
            f"the stages have {totals[_DECODER]} layers, the arguments of the training say"
            f" {expected}",
            hint=TWO_SAVES,
        )
    return counts


def _count_experts(names: Collection[str], file: ModelFile) -> Mapping[str, int]:
    numbers: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        numbers[match[1]].add(int(match[2]))
    for prefix, own in numbers.items():
        with errors_at(file.archive.where):
            _check_numbers(own, f"experts {prefix!r}")
    return {prefix: len(own) for prefix, own in numbers.items()}


def _check_numbers(own: Collection[int], what: str) -> None:
    """Refuses numbers that are not those from 0 on."""
    missing = next((number for number in range(len(own)) if number not in own), None)
    if missing is not None:
        raise FormatError(
            f"of the {what}, number {missing} is missing, {max(own)} is there",
            hint="give the file as Megatron-LM wrote it",
        )


def _rename(
    name: str,
    file: ModelFile,
    experts: Mapping[str, int],
    offsets: Mapping[str, int],
    *,
    is_tied: bool | None,
) -> str:
    """Returns the name in the whole model of a tensor of one rank."""
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        number = int(expert[2]) + file.position.expert * experts[expert[1]]
        name = f"{expert[1]}experts.{number}{expert[3]}"
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        return f"{layer[1]}{int(layer[2]) + offsets[layer[1]]}{layer[3]}"
    head = _HEAD.fullmatch(name)
    return f"{head[1]}embedding.word_embeddings.weight" if head is not None and is_tied else name


_Cut = Literal["rows", "halves of rows", "columns", "whole", "rows or whole"]
_RULES: Mapping[_Cut, re.Pattern[str]] = {
    "rows": re.compile(
        r"(?:.*\.)?(?:embedding\.word_embeddings\.weight|output_layer\.(?:weight|bias)"
        r"|self_attention\.linear_(?:qkv|q|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)"
        r"|core_attention\.softmax_offset|eh_proj\.weight)"
    ),
    "halves of rows": re.compile(r".*\.linear_fc1\.(?:weight|bias)"),
    "columns": re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight"),
    "whole": re.compile(
        r"(?:.*\.)?(?:embedding\.(?:position|tokentype)_embeddings\.weight"
        r"|\w*norm\.(?:weight|bias)|\w+\.layer_norm_(?:weight|bias)"
        r"|(?:linear_proj|linear_fc2)\.bias"
        r"|router\.(?:weight|bias|expert_bias)|shared_experts\.gate_weight)"
    ),
    # Of Transformer Engine every rank has the whole, else its rows.
    "rows or whole": re.compile(r".*\.self_attention\.linear_(?:q|kv)_down_proj\.weight"),
}
_ROTARY = "qk_pos_emb_head_dim"
_FC1, _FC2 = ".linear_fc1.", ".linear_fc2.weight"
_MATRIX = 2
_LEAST_DIMENSIONS = {"columns": 2, "rows": 1, "halves of rows": 1, "whole": 0, "rows or whole": 2}


def _find_cut(local: LocalTensor, arguments: Mapping[str, Any]) -> _Cut:
    """Returns how a tensor is cut, of two ways the one that its shape shows."""
    if local.parts == 1:
        return "whole"
    dimensions = len(local.tensor.shape)
    cut = next((cut for cut, pattern in _RULES.items() if pattern.fullmatch(local.name)), None)
    if cut == "rows or whole":
        rotary = arguments.get(_ROTARY)
        rotary = rotary if type(rotary) is int else None
        cut = "whole" if _has_whole_rows(local, rotary) else "rows"
    if cut == "halves of rows" and not _is_gated(local):
        cut = "rows"
    if cut is None or dimensions < _LEAST_DIMENSIONS[cut]:
        raise UnsupportedError(
            f"nothing shows how {quote(local.name)} with {dimensions} dimensions is cut over"
            f" {local.parts} ranks of tensor parallelism",
            hint="save the run in the format 'torch_dist', which stores it",
        )
    return cut


def _is_gated(local: LocalTensor) -> bool:
    """Returns whether the rows of a `linear_fc1` are those of a gate and of an up projection."""
    base = local.name[: local.name.rindex(_FC1)]
    shape, outer = local.tensor.shape, _shape_beside(local, base + _FC2)
    if shape and len(outer) == _MATRIX and shape[0] in {outer[1], 2 * outer[1]}:
        return shape[0] != outer[1]
    raise FormatError(
        f"{quote(local.name)} of shape {list(shape)} does not fit {quote(base + _FC2)} of shape"
        f" {list(outer)}: expected as many rows as that has columns, or twice as many"
    )


def _has_whole_rows(local: LocalTensor, rotary: int | None) -> bool:
    """Returns whether every rank has all rows of a down projection.

    They are the columns of the up projection, and for keys and values those of the rotary
    embedding besides.
    """
    name = local.name
    up = name.replace("_down_proj", "_up_proj")
    shape, outer = local.tensor.shape, _shape_beside(local, up)
    if len(outer) == len(shape) == _MATRIX:
        added = 0 if "linear_q_" in name else rotary
        if added is None:
            return shape[0] > outer[1]
        if shape[0] in {outer[1] + added, (outer[1] + added) / local.parts}:
            return shape[0] == outer[1] + added
    raise FormatError(
        f"{quote(name)} of shape {list(shape)} does not fit {quote(up)} of shape {list(outer)}:"
        f" expected as many rows as that has columns{', and the rotary ones' * ('kv' in name)}, or"
        f" a part of {local.parts}"
    )


def _shape_beside(local: LocalTensor, name: str) -> Shape:
    tensor = local.neighbours.get(name)
    return () if tensor is None else tensor.shape


class MegatronReader(FormatReader):
    """Reads `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`."""

    name = "megatron"
    order = 30
    expected = "'mp_rank_00/model_optim_rng.pt'"
    endings = r"model_optim_rng\.pt"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups the files by the folder of their step; one that is alone is recognised too."""
        steps: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            match = _PATH.fullmatch(path) if path.endswith(_FILE) else None
            if match is not None:
                steps[match["step"] or ""].append(path)
        return [
            Candidate(self.name, step, tuple(sorted(files)), f"{len(files)} files {_FILE!r}")
            for step, files in sorted(steps.items())
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        table = ArchiveTable()
        matches = {path: _PATH.fullmatch(path) for path in candidate.files}
        numbers = {
            path: [int(match[kind]) for kind in _NUMBERS if match[kind] is not None]
            for path, match in matches.items()
            if match is not None
        }
        files, sizes = _open_files(table, source, numbers)
        tensors, ignored = _collect_tensors(files, sizes)
        root = files[0].root
        pieces: dict[KeyPath, Stored] = {}
        replicas: list[tuple[str, LocalTensor, LocalTensor]] = []
        for name, held in sorted(tensors.items()):
            first = held[0]
            for local in held:
                mine, theirs = (
                    f"{x.tensor.dtype.name} {list(x.tensor.shape)}" for x in (local, first)
                )
                if mine != theirs:
                    raise FormatError(
                        f"{quote(local.name)} is {mine} here, and {theirs} in"
                        f" {first.file.archive.path!r}",
                        where=local.file.archive.where,
                        hint=TWO_SAVES,
                    )
            with errors_at(first.file.archive.where):
                cut = _find_cut(first, find_arguments(root))
            by_part: dict[int, LocalTensor] = {}
            for local in held:
                kept = by_part.setdefault(0 if cut == "whole" else local.part, local)
                if kept is not local:
                    replicas.append((name, kept, local))
            shape = first.tensor.shape
            if cut != "whole":
                axis = 1 if cut == "columns" else 0
                shape = (*shape[:axis], shape[axis] * first.parts, *shape[axis + 1 :])
            chunks = [c for local in by_part.values() for c in _place(table, local, cut, shape)]
            pieces[name,] = first.tensor.dtype, shape, chunks
        problems, unread = _compare(source, table, replicas)
        notes = ["optimizer states and random states were left alone"]
        if ignored:
            notes.append(f"objects '_extra_state' were ignored, they hold no weights: {ignored:,}")
        common = read_common(root)
        known = {"tensor": sizes.tensor, "pipeline": sizes.pipeline, "expert": sizes.expert}
        run = RunFacts(
            world_size=common.world_size,
            step=common.step,
            writer=", ".join(filter(None, [common.framework, "Megatron-LM, one file a rank"])),
            mesh=tuple({**known, **(common.sizes or {})}.items()),
            notes=(*notes, *unread),
            warnings=describe_objects_in(files[0].archive),
            settings=common.settings,
        )
        problems += compare_iterations(run.step, where, _FILE)
        entries = make_entries(pieces)
        return table.index(self.name, entries, run=run, problems=tuple(problems))


def _place(table: ArchiveTable, local: LocalTensor, cut: _Cut, shape: Shape) -> Iterator[Chunk]:
    """Yields the parts of one rank's tensor in the whole."""
    tensor, archive, own = local.tensor, local.file.archive, local.tensor.shape
    offsets = [0] * len(own)
    if cut == "halves of rows":
        rows = own[0] // 2
        for half in range(2):
            offsets[0] = half * shape[0] // 2 + local.part * rows
            place = Box((*offsets,), (rows, *own[1:]))
            yield table.chunk(
                archive, tensor, archive.number, place, half * rows * tensor.strides[0]
            )
        return
    if cut != "whole":
        axis = 1 if cut == "columns" else 0
        offsets[axis] = local.part * own[axis]
    yield table.chunk(archive, tensor, archive.number, Box((*offsets,), own))


def _compare(
    source: Source, table: ArchiveTable, replicas: Sequence[tuple[str, LocalTensor, LocalTensor]]
) -> tuple[list[Problem], list[str]]:
    """Compares copies of tensors that several ranks have; also returns notes."""
    pairs = [
        ((kept.file.archive, kept.tensor), (other.file.archive, other.tensor))
        for _, kept, other in replicas
    ]
    differing, notes = find_differing_copies(source, table, pairs)
    problems: dict[str, Problem] = {}
    for name, kept, other in (replicas[position] for position in differing):
        both = "" if kept.name == other.name else f" and {quote(other.name)}"
        said = (
            f"{kept.file.archive.path!r} and {other.file.archive.path!r} hold different values of"
            f" {quote(kept.name)}{both}, which ranks have as copies: files of two saves are in one"
            " folder, or training let them drift apart"
        )
        problems.setdefault(name, Problem(FormatError.code, name, said))
    return list(problems.values()), notes
