"""Files that each rank wrote for itself: their names, and checks that all are of one save.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py; accelerate/utils/fsdp_utils.py
(`save_fsdp_model`, `save_fsdp_optimizer`), 1.15; fairseq and metaseq: `checkpoint_utils.py`;
nvidia_resiliency_ext/checkpointing/local/ckpt_managers/local_manager.py, 0.4. Other programs put
the rank at the end of any name.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import FormatError, LimitError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import quote
from ckptkit.formats.parsing import (
    TWO_SAVES,
    refuse_missing_ranks,
    refuse_mixed_sizes,
    refuse_stale_ranks,
)
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.objects import find_unread, unwrap, whole_object_error
from ckptkit.formats.pickle.pickles import MAX_KEY_CHARACTERS, walk_values
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.dtensor import SHARDED_ALLOWED, DTensorRef, ShardedTensorRef
from ckptkit.formats.ranks.flat import FLAT
from ckptkit.storage.base import Source

Kind = Literal["model", "optimizer", "extra", "metadata"]
_VERL = re.compile(
    r"(?P<kind>model|optim|extra_state)_world_size_(?P<size>\d{1,7})_rank_(?P<rank>\d{1,7})\.pt"
)
_ACCELERATE = re.compile(
    r"(?P<kind>pytorch_model_fsdp|optimizer)(?:_(?P<number>\d{1,7}))?_rank(?P<rank>\d{1,7})\.bin"
)
# In a folder for each rank, which may hold copies of other ranks' files.
_LOCAL = re.compile(r"iter_(?P<step>\d{7,15})_(?P<rank>\d{1,7})_local\.pt")
RANK_IN_NAME = re.compile(
    r"(?P<of>[-_.]?rank[-_.]?"  # model_rank_3.pt, weights.rank3.of4.pt
    r"|[-_.]?shard[-_.]?(?=\d{1,7}[-_.]?of[-_.]?\d)"  # shard_0_of_2.pt; `shard_0.pt` is of anything
    r"|_(?=\d{1,7}_local\.pt\Z)"  # iter_0000010_3_local.pt, of nvidia-resiliency-ext
    r"|-shard(?=\d{1,7}\.pt\Z))"  # checkpoint1-shard0.pt, of fairseq and metaseq
    r"(?P<rank>\d{1,7})(?:[-_.]?of[-_.]?(?P<size>\d{1,7}))?(?:_local)?"
    r"(?=\.(?:pt|pth|bin|ckpt|pth\.tar)\Z)"
)
"""The end of a name that tells the files of ranks apart, but for those of verl and accelerate."""
# Of a model-parallel run of metaseq, whose parts are not those of one model.
_MODEL_PART = re.compile(r"model_part-[1-9]")
_OPTIMIZER = re.compile(r".*optim.*", re.IGNORECASE)
_METADATA = re.compile(r".*meta.*", re.IGNORECASE)  # a file that users of FairScale save
# Files of ranks that hold no state of a model.
_NEITHER = re.compile(
    r".*(rng|random|extra|sched|scaler|sampler|loader|dl_state|train_state|args|grad|log).*",
    re.IGNORECASE,
)
# `lora_rank8.pt` names the rank of matrices; those of processes begin with 0.
_LOW_RANK = re.compile(r".*(lora|dora|adapter).*", re.IGNORECASE)
_VERL_KINDS: Mapping[str, Kind] = {"model": "model", "optim": "optimizer", "extra_state": "extra"}
VERL, ACCELERATE, FAIRSEQ, LOCAL = "verl", "accelerate", "fairseq", "nvidia-resiliency-ext"


class RankFile(Struct, frozen=True):
    """A file of a rank, as its name describes it."""

    path: str
    kind: Kind
    rank: int
    world_size: int | None = None  # the number of ranks, where the name contains it


class RankFileSet(Struct, frozen=True):
    folder: str
    writer: str  # the program that uses such names; empty for any other program
    stem: str  # the common part of their names: a model's number, or the text before the rank
    files: tuple[RankFile, ...]

    def of(self, kind: Kind) -> list[RankFile]:
        return [file for file in self.files if file.kind == kind]


_SetName = tuple[str, str, str]  # folder, writer and stem


def group_rank_files(paths: Sequence[str]) -> list[RankFileSet]:
    """Groups files of ranks that were written together; other files join the only model beside."""
    sets: dict[_SetName, list[RankFile]] = defaultdict(list)
    for path in paths:
        parsed = _parse_name(path)
        if parsed is not None:
            sets[parsed[0]].append(parsed[1])
    models = set()
    for name, files in sets.items():
        ranks = {file.rank for file in files if file.kind == "model"}
        if ranks and (0 in ranks or not _LOW_RANK.fullmatch(name[2])):
            models.add(name)
    groups = {name: list(sets[name]) for name in sorted(models)}
    for name, files in sorted(sets.items()):
        homes = [model for model in models if model[:2] == name[:2]]
        if name not in models and len(homes) == 1 and not name[1]:
            groups[homes[0]] += files
    for files in groups.values():
        files.sort(key=lambda file: (file.kind, file.world_size or 0, file.rank, file.path))
    return [RankFileSet(*name, tuple(files)) for name, files in groups.items()]


def without_copies(files: RankFileSet) -> RankFileSet:
    """Leaves out what folders of ranks have of other ranks whose own files are there."""
    if files.writer != LOCAL:
        return files
    held: dict[int, RankFile] = {}
    for file in files.files:
        is_own = posixpath.basename(posixpath.dirname(file.path)) == str(file.rank)
        if is_own or file.rank not in held:
            held[file.rank] = file
    return replace(files, files=tuple(held.values()))


def _parse_name(path: str) -> tuple[_SetName, RankFile] | None:
    folder, name = posixpath.split(path)
    kind: Kind
    if match := _VERL.fullmatch(name):
        kind = _VERL_KINDS[match["kind"]]
        return (folder, VERL, ""), RankFile(path, kind, int(match["rank"]), int(match["size"]))
    if match := _ACCELERATE.fullmatch(name):
        kind = "optimizer" if match["kind"] == "optimizer" else "model"
        file = RankFile(path, kind, int(match["rank"]))
        return (folder, ACCELERATE, match["number"] or "0"), file
    if match := _LOCAL.fullmatch(name):
        above = posixpath.dirname(folder)
        return (above, LOCAL, match["step"]), RankFile(path, "model", int(match["rank"]))
    match = RANK_IN_NAME.search(name)
    if match is None:
        return None
    stem, rank = name[: match.start()], int(match["rank"])
    size = int(match["size"]) if match["size"] else None
    if match["of"] == "-shard" and size is None:
        is_part = _MODEL_PART.search(stem) is not None
        return None if is_part else ((folder, FAIRSEQ, stem), RankFile(path, "model", rank))
    # A name with nothing but the rank is described by its folder, as `extra_state/rank_0.pt`.
    if _NEITHER.fullmatch(stem or posixpath.basename(folder)):
        return None
    kind = "metadata" if _METADATA.fullmatch(stem) else "model"
    if _OPTIMIZER.fullmatch(stem):
        kind = "optimizer"
    return (folder, "", stem), RankFile(path, kind, rank, size)


_CONTENTS: Mapping[Kind, str] = {
    "model": "weights",
    "optimizer": "optimizer states",
    "extra": "extra states",
    "metadata": "metadata",
}
# Counters of a run's progress, which are equal on all ranks of one save.
_COUNTERS = frozenset({"last_epoch", "_step_count", "step", "global_step", "iteration", "epoch"})
RankTensor = TensorRef | DTensorRef | ShardedTensorRef


class RankContents(Struct, frozen=True):
    file: RankFile
    archive: TorchArchive
    tensors: Mapping[KeyPath, RankTensor]
    values: Mapping[KeyPath, Any]  # all other values, by path

    @property
    def is_distributed(self) -> bool:
        return any(not isinstance(tensor, TensorRef) for tensor in self.tensors.values())


RankParts = Sequence[tuple[RankContents, RankTensor]]
"""The parts of one tensor that ranks have, in the order of ranks."""


def load_rank_file(
    source: Source, table: ArchiveTable, file: RankFile, under: KeyPath
) -> RankContents:
    """Opens a file and flattens the value of its pickle, with `under` in front of all paths."""
    archive = table.open(source, file.path, SHARDED_ALLOWED)
    archive = replace(archive, root=unwrap(archive.root))
    if isinstance(archive.root, InertObject):
        raise whole_object_error(archive.root, archive.where)
    tensors: dict[KeyPath, RankTensor] = {}
    values: dict[KeyPath, Any] = {}
    limit = archive.most_values
    characters = MAX_KEY_CHARACTERS * limit
    for steps, value in walk_values(archive.root, limit=limit, where=archive.where):
        path = (*under, *steps) or ("tensor",)
        if isinstance(value, RankTensor):
            tensors[path] = value
        elif file.kind == "model" and (unread := find_unread(value)) is not None:
            raise unread.error(f"{archive.where}, {quote('.'.join(map(str, path)))}")
        else:
            values[path] = value
        characters -= sum(len(str(step)) for step in path)
        if characters < 0:
            raise LimitError("names are far longer than the pickle", where=archive.where)
    return RankContents(file, archive, tensors, values)


def split_off_slices(
    contents: Sequence[RankContents],
) -> tuple[list[RankContents], dict[KeyPath, tuple[int, int]]]:
    """Removes the slices of flat parameters that FSDP1 stores under original names.

    With `use_orig_params=True` a LOCAL_STATE_DICT has for each parameter the rank's part of it, as
    a view on the flat parameter's memory, empty on most ranks. Returned are the contents without
    slices, and for each slice the range of elements in its flat parameter.
    """
    ranges: dict[KeyPath, tuple[int, int]] = {}
    for held in contents:
        begins: dict[str, int] = {}  # by storage, its first element in the flat parameter
        for path, tensor in held.tensors.items():
            if isinstance(tensor, ShardedTensorRef) and str(path[-1]).rpartition(".")[2] == FLAT:
                for shard in tensor.shards:
                    skipped = shard.tensor.storage_offset
                    begins[shard.tensor.storage.key] = sum(shard.offsets) - skipped
        for path, tensor in held.tensors.items():
            if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1:
                continue
            if tensor.storage.key in begins and tensor.shape[0]:
                low = begins[tensor.storage.key] + tensor.storage_offset
                high = low + tensor.shape[0]
                first, last = ranges.get(path, (low, high))
                ranges[path] = min(low, first), max(high, last)
    if not ranges:
        return list(contents), ranges
    rest = [
        replace(held, tensors={p: tensor for p, tensor in held.tensors.items() if p not in ranges})
        for held in contents
    ]
    return rest, ranges


def check_names(files: RankFileSet) -> None:
    """Refuses files of runs of different sizes, and two files of one rank."""
    sizes = {file.world_size for file in files.files if file.world_size is not None}
    refuse_mixed_sizes(sizes)
    seen: dict[tuple[Kind, int], str] = {}
    for file in files.files:
        other = seen.setdefault((file.kind, file.rank), file.path)
        if other != file.path:
            raise FormatError(
                f"{posixpath.basename(other)!r} and {posixpath.basename(file.path)!r} are both of"
                f" rank {file.rank}",
                hint="take away the one that does not belong here",
            )


def check_ranks(files: RankFileSet, world_size: int) -> None:
    """Refuses a set that lacks files of a rank, or has files of ranks that the run did not have."""
    for kind, what in _CONTENTS.items():
        ranks = {file.rank for file in files.of(kind)}
        if ranks:
            refuse_missing_ranks(ranks, world_size, what)
        refuse_stale_ranks(((file.rank, file.path) for file in files.of(kind)), world_size)


def check_counters(contents: Sequence[RankContents]) -> None:
    first: dict[KeyPath, tuple[RankContents, Any]] = {}
    for held in contents:
        for path, value in held.values.items():
            if not path or path[-1] not in _COUNTERS or type(value) not in {int, float}:
                continue
            other, expected = first.setdefault(path, (held, value))
            if value != expected:
                raise FormatError(
                    f"{posixpath.basename(held.file.path)!r} is of another step than"
                    f" {posixpath.basename(other.file.path)!r}: {quote(str(path[-1]))} is {value}"
                    f" against {expected}",
                    where=held.archive.where,
                    hint=TWO_SAVES,
                )
