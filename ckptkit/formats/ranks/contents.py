"""What the files of all ranks hold, proven to be all there and of one save.

The names of files that each rank wrote for itself, and what belongs together.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py; accelerate/utils/fsdp_utils.py
(`save_fsdp_model`, `save_fsdp_optimizer`), 1.15. Others put the rank at the end of any name.

Files that are numbered by rank: those of torch_checkpointing and of torch's experimental writer.

`model_0.pt` may as well be the model of epoch 0, so that names do not tell. What tells is the
`metadata.pkl` that torch_checkpointing writes beside them, or else what is in the files: a pickle
that names torch's distributed tensors was written by a rank.

Source: torch_checkpointing/checkpoint_layout.py (`default_torch_layout_info`), 0.1.1;
torch/distributed/checkpoint/_experimental/checkpoint_writer.py, torch 2.13.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptkit.core.errors import FormatError, InputError, LimitError, MissingFileError
from ckptkit.core.index import KeyPath
from ckptkit.formats.base import Candidate
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.ranks.flat import FLAT
from ckptkit.formats.ranks.sharded_values import SHARDED_ALLOWED, DTensorRef, ShardedTensorRef
from ckptkit.formats.torch_files.reader import MAX_KEY_CHARACTERS, walk
from ckptkit.storage.base import Source

Kind = Literal["model", "optimizer", "extra", "metadata"]
_VERL = re.compile(
    r"(?P<kind>model|optim|extra_state)_world_size_(?P<size>\d{1,7})_rank_(?P<rank>\d{1,7})\.pt"
)
_ACCELERATE = re.compile(
    r"(?P<kind>pytorch_model_fsdp|optimizer)(?:_(?P<number>\d{1,7}))?_rank(?P<rank>\d{1,7})\.bin"
)
# fairseq and metaseq; the parts of a model-parallel run are not those of one model.
_FAIRSEQ = re.compile(r"(?P<stem>(?!.*model_part-[1-9]).*)-shard(?P<rank>\d{1,7})\.pt")
_OTHER = re.compile(r"(?P<stem>.*?)[-_.]?rank[-_.]?(?P<rank>\d{1,7})\.(?:pt|pth|bin|ckpt)")
_OPTIMIZER = re.compile(r".*optim.*", re.IGNORECASE)
_METADATA = re.compile(r".*meta.*", re.IGNORECASE)  # which users of FairScale save beside
# What others save for each rank and what is no state of a model.
_NEITHER = re.compile(
    r".*(rng|random|extra|sched|scaler|sampler|loader|dl_state|train_state|args|grad|log).*",
    re.IGNORECASE,
)
# `lora_rank8.pt` tells the rank of matrices; processes are counted from 0.
_LOW_RANK = re.compile(r".*(lora|dora|adapter).*", re.IGNORECASE)
_KINDS: Mapping[str, Kind] = {"model": "model", "optim": "optimizer", "extra_state": "extra"}
VERL, ACCELERATE, FAIRSEQ = "verl", "accelerate", "fairseq"


@dataclass(frozen=True, slots=True)
class RankFile:
    """What the name of a file tells.

    Attributes:
        path: The file.
        kind: What it holds.
        rank: The rank that wrote it.
        world_size: The number of ranks, where the name tells it.
    """

    path: str
    kind: Kind
    rank: int
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Files that were written together.

    Attributes:
        folder: Where they lie.
        writer: Whose names they have; empty for those of others.
        stem: What their names have in common: a model's number, or the text before the rank.
        files: By kind and rank.
    """

    folder: str
    writer: str
    stem: str
    files: tuple[RankFile, ...]

    def of(self, kind: Kind) -> list[RankFile]:
        return [file for file in self.files if file.kind == kind]


_Place = tuple[str, str, str]  # folder, writer and stem


def families(paths: Sequence[str]) -> list[Family]:
    """Groups files by what they are part of.

    Args:
        paths: All files that may be among them.

    Returns:
        Families that have a model's files; the optimizer's go to the only model beside them.
    """
    found: dict[_Place, list[RankFile]] = defaultdict(list)
    for path in paths:
        parsed = _parsed(path)
        if parsed is not None:
            place, file = parsed
            found[place].append(file)
    models = {place for place, files in found.items() if _is_of_a_model(place[2], files)}
    groups = {place: list(found[place]) for place in sorted(models)}
    for place, files in sorted(found.items()):
        homes = [model for model in models if model[:2] == place[:2]]
        if place not in models and len(homes) == 1 and not place[1]:
            groups[homes[0]] += files
    return [Family(*place, tuple(sorted(files, key=_order))) for place, files in groups.items()]


def _is_of_a_model(stem: str, files: Sequence[RankFile]) -> bool:
    ranks = {file.rank for file in files if file.kind == "model"}
    return bool(ranks) and (0 in ranks or not _LOW_RANK.fullmatch(stem))


def _order(file: RankFile) -> tuple[str, int, int, str]:
    return file.kind, file.world_size or 0, file.rank, file.path


def _parsed(path: str) -> tuple[_Place, RankFile] | None:
    folder, name = posixpath.split(path)
    if match := _VERL.fullmatch(name):
        file = RankFile(path, _KINDS[match["kind"]], int(match["rank"]), int(match["size"]))
        return (folder, VERL, ""), file
    if match := _ACCELERATE.fullmatch(name):
        kind: Kind = "optimizer" if match["kind"] == "optimizer" else "model"
        file = RankFile(path, kind, int(match["rank"]))
        return (folder, ACCELERATE, match["number"] or "0"), file
    if match := _FAIRSEQ.fullmatch(name):
        return (folder, FAIRSEQ, match["stem"]), RankFile(path, "model", int(match["rank"]))
    match = _OTHER.fullmatch(name)
    if match is None or _NEITHER.fullmatch(match["stem"]):
        return None
    file = RankFile(path, _kind_of(match["stem"]), int(match["rank"]))
    return (folder, "", match["stem"]), file


def _kind_of(stem: str) -> Kind:
    if _OPTIMIZER.fullmatch(stem):
        return "optimizer"
    return "metadata" if _METADATA.fullmatch(stem) else "model"


_NAMED = 7  # missing files
_WORDS: Mapping[Kind, str] = {
    "model": "weights",
    "optimizer": "optimizer states",
    "extra": "extra states",
    "metadata": "metadata",
}
# What counts how far a run is, and is the same on all ranks of one save.
_COUNTERS = frozenset({"last_epoch", "_step_count", "step", "global_step", "iteration", "epoch"})
Tensor = TensorRef | DTensorRef | ShardedTensorRef


@dataclass(frozen=True, slots=True)
class RankContents:
    """What one file holds.

    Attributes:
        file: What its name tells.
        archive: The file itself.
        tensors: By path.
        values: What is no tensor, by path.
    """

    file: RankFile
    archive: TorchArchive
    tensors: Mapping[KeyPath, Tensor]
    values: Mapping[KeyPath, Any]

    @property
    def is_spread(self) -> bool:
        return any(not isinstance(tensor, TensorRef) for tensor in self.tensors.values())


@dataclass(slots=True)
class RankReading:
    """Opens the files of a family, one after another.

    Attributes:
        source: Where they lie.
        table: The files that were opened, and the records in them.
    """

    source: Source
    table: ArchiveTable = field(default_factory=ArchiveTable)

    def read(self, file: RankFile, under: KeyPath) -> RankContents:
        """Opens a file and takes apart what its pickle holds.

        Args:
            file: The file.
            under: Keys that all its values are put under.
        """
        archive = self.table.open(self.source, file.path, SHARDED_ALLOWED)
        tensors: dict[KeyPath, Tensor] = {}
        values: dict[KeyPath, Any] = {}
        characters = MAX_KEY_CHARACTERS * archive.pickle_bytes
        for steps, value in walk(archive.root, limit=archive.pickle_bytes, where=archive.where):
            path = (*under, *steps) or ("tensor",)
            if isinstance(value, Tensor):
                tensors[path] = value
            else:
                values[path] = value
            characters -= sum(len(str(step)) for step in path)
            if characters < 0:
                raise LimitError("names are far longer than the pickle", where=archive.where)
        return RankContents(file, archive, tensors, values)


def without_slices(
    contents: Sequence[RankContents],
) -> tuple[list[RankContents], dict[KeyPath, tuple[int, int]]]:
    """Takes out the slices of flat parameters that FSDP1 puts beside them under original names.

    With `use_orig_params=True` a LOCAL_STATE_DICT holds of each parameter what of it lies on the
    rank, as a view on the flat parameter's memory, empty on most ranks.

    Args:
        contents: What the ranks hold.

    Returns:
        The same without slices, and for each slice the range of elements in its flat parameter.
    """
    ranges: dict[KeyPath, tuple[int, int]] = {}
    for one in contents:
        for path, low, high in _slices(one):
            known = ranges.get(path, (low, high))
            ranges[path] = min(low, known[0]), max(high, known[1])
    rest = [
        replace(one, tensors={p: tensor for p, tensor in one.tensors.items() if p not in ranges})
        for one in contents
    ]
    return (rest if ranges else list(contents)), ranges


def _slices(one: RankContents) -> Iterator[tuple[KeyPath, int, int]]:
    """Yields the views on memory of flat parameters, and where they lie in those."""
    flat: dict[str, int] = {}
    for path, tensor in one.tensors.items():
        if isinstance(tensor, ShardedTensorRef) and str(path[-1]).rpartition(".")[2] == FLAT:
            for shard in tensor.shards:
                skipped = shard.tensor.storage_offset
                flat[shard.tensor.storage.key] = sum(shard.offsets) - skipped
    for path, tensor in one.tensors.items():
        if isinstance(tensor, TensorRef) and len(tensor.shape) == 1:
            first = flat.get(tensor.storage.key)
            if first is not None and tensor.shape[0]:
                start = first + tensor.storage_offset
                yield path, start, start + tensor.shape[0]


def check_names(family: Family, where: str) -> None:
    """Refuses files of runs of different sizes, and two files of one rank."""
    sizes = sorted({file.world_size for file in family.files if file.world_size is not None})
    if len(sizes) > 1:
        named = " and ".join(map(str, sizes))
        raise FormatError(
            f"the files are of runs with {named} ranks",
            where=where,
            hint="a save went into the folder of another one; take away the files of one",
        )
    seen: dict[tuple[Kind, int], str] = {}
    for file in family.files:
        other = seen.setdefault((file.kind, file.rank), file.path)
        if other != file.path:
            raise FormatError(
                f"{posixpath.basename(other)!r} and {posixpath.basename(file.path)!r} are both of"
                f" rank {file.rank}",
                where=where,
                hint="take away the one that does not belong here",
            )


def check_ranks(family: Family, world_size: int, where: str) -> None:
    """Refuses files that are missing, and files of ranks that the run did not have."""
    for kind, what in _WORDS.items():
        ranks = {file.rank for file in family.of(kind)}
        missing = absent_ranks(ranks, world_size)
        if ranks and missing:
            raise MissingFileError(
                f"the {what} of rank {missing} of {world_size} are not there",
                where=where,
                hint="copy the files back, name where other nodes keep theirs with --also, or take"
                " an earlier checkpoint",
            )
        extra = [file for file in family.of(kind) if file.rank >= world_size]
        if extra:
            raise FormatError(
                f"{posixpath.basename(extra[0].path)!r} is of a rank that a run with {world_size}"
                " ranks does not have",
                where=where,
                hint="an earlier save of a larger run left it; take it away",
            )


def absent_ranks(ranks: set[int], world_size: int) -> str:
    """Names the ranks of a run that are not among those found; an empty text where all are.

    A file may tell of any number of ranks, so that no list of them is made.
    """
    absent = world_size - sum(rank < world_size for rank in ranks)
    first = itertools.islice((rank for rank in range(world_size) if rank not in ranks), _NAMED)
    more = f" and {absent - _NAMED} more" if absent > _NAMED else ""
    return ", ".join(map(str, first)) + more


def told_sizes(contents: Sequence[RankContents]) -> dict[int, RankContents]:
    """Returns the world sizes that ShardedTensors tell, each with a file that tells it."""
    found: dict[int, RankContents] = {}
    for one in contents:
        for tensor in one.tensors.values():
            if isinstance(tensor, ShardedTensorRef):
                if tensor.rank != one.file.rank:
                    raise FormatError(
                        f"file is named after rank {one.file.rank}, and was written by rank"
                        f" {tensor.rank}",
                        where=one.archive.where,
                        hint="give the files of all ranks the names that they were saved under",
                    )
                found.setdefault(tensor.world_size, one)
    return found


def check_counters(contents: Sequence[RankContents]) -> None:
    """Refuses ranks of different steps, where their files tell how far the run was."""
    first: dict[KeyPath, tuple[RankContents, Any]] = {}
    for one, path, value in _counters(contents):
        other, known = first.setdefault(path, (one, value))
        if known != value:
            raise FormatError(
                f"{posixpath.basename(one.file.path)!r} is of another step than"
                f" {posixpath.basename(other.file.path)!r}: {shown(str(path[-1]))} is {value}"
                f" against {known}",
                where=one.archive.where,
                hint="files of two saves lie together; take an earlier checkpoint",
            )


def _counters(contents: Sequence[RankContents]) -> Iterator[tuple[RankContents, KeyPath, Any]]:
    for one in contents:
        for path, value in one.values.items():
            if path and path[-1] in _COUNTERS and type(value) in {int, float}:
                yield one, path, value


def by_path(contents: Sequence[RankContents]) -> dict[KeyPath, list[tuple[RankContents, Tensor]]]:
    """Returns for each path what the ranks have there, in the order of ranks."""
    found: dict[KeyPath, list[tuple[RankContents, Tensor]]] = defaultdict(list)
    for one in contents:
        for path, tensor in one.tensors.items():
            found[path].append((one, tensor))
    return found


FORMAT = "torch-checkpointing"
METADATA_PICKLE = "metadata.pkl"
_NAME = re.compile(r"(?P<item>[A-Za-z0-9_-]+?)[_-]?(?P<rank>\d{1,7})\.(?P<kind>pt|safetensors)")
_FINAL = {"dcp", "zero"}
_MARKS = (b"torch.distributed", b"ShardedTensor")
_LOOSE = {"torch", "torch optimizer", "safetensors"}  # what single files are taken for
_MOST_LOOKS = 32  # at items of the state, to tell what they are
_FILES_OF_AN_ITEM = 3  # one of them may be damaged


@dataclass(frozen=True, slots=True)
class NumberedFile:
    """What the name of a file tells.

    Attributes:
        path: The file.
        item: Whose state it holds.
        rank: The rank that wrote it.
        is_safetensors: Whether it is a safetensors file, and not torch's.
    """

    path: str
    item: str
    rank: int
    is_safetensors: bool


def numbered(path: str) -> NumberedFile | None:
    """Returns what the name of a file tells, or None for any other name."""
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    return NumberedFile(path, match["item"], int(match["rank"]), match["kind"] == "safetensors")


def described(paths: Sequence[str]) -> list[Candidate]:
    """Recognises folders in which a `metadata.pkl` lies beside numbered files; reads nothing."""
    homes = {posixpath.dirname(p) for p in paths if posixpath.basename(p) == METADATA_PICKLE}
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths if homes else ():
        folder = posixpath.dirname(path)
        if folder in homes and (numbered(path) or posixpath.basename(path) == METADATA_PICKLE):
            found[folder].append(path)
    reason = f"{METADATA_PICKLE!r} beside files numbered by rank"
    return [
        Candidate(FORMAT, folder, tuple(sorted(files)), reason)
        for folder, files in sorted(found.items())
        if len(files) > 1
    ]


def with_numbered_ranks(
    source: Source, candidates: Sequence[Candidate], paths: Sequence[str]
) -> list[Candidate]:
    """Puts files together that ranks wrote, though only what is in them tells so.

    Args:
        source: Where they lie.
        candidates: What was recognised by names.
        paths: All files.

    Returns:
        The candidates; single files that are of ranks are in one of their own.
    """
    taken = {p for c in candidates if c.format not in _LOOSE or len(c.files) > 1 for p in c.files}
    # Beside a model of these they are what its run saved besides, and are left alone.
    others = {c.folder for c in candidates if c.format in _FINAL}
    folders: dict[str, list[NumberedFile]] = defaultdict(list)
    for path in paths:
        file, folder = numbered(path), posixpath.dirname(path)
        if file is not None and path not in taken and folder not in others:
            folders[folder].append(file)
    found = list(_of_ranks(source, folders))
    theirs = {path for candidate in found for path in candidate.files}
    return [c for c in candidates if theirs.isdisjoint(c.files)] + found


def _of_ranks(source: Source, folders: dict[str, list[NumberedFile]]) -> Iterator[Candidate]:
    looks = 0
    for folder, files in sorted(folders.items()):
        items: dict[str, list[NumberedFile]] = defaultdict(list)
        for file in sorted(files, key=lambda file: file.rank):
            items[file.item].append(file)
        looks += len(items)
        if looks > _MOST_LOOKS:
            return
        spread = sorted(
            item
            for item, held in items.items()
            if any(_is_of_a_rank(source, file) for file in held[:_FILES_OF_AN_ITEM])
        )
        if spread:
            named = " and ".join(map(repr, spread))
            reason = f"files numbered by rank, of which {named} hold distributed tensors"
            yield Candidate(FORMAT, folder, tuple(sorted(f.path for f in files)), reason)


def _is_of_a_rank(source: Source, file: NumberedFile) -> bool:
    """Tells whether the pickle of a file names torch's distributed tensors."""
    path = file.path

    def read(start: int, stop: int) -> bytes:
        return source.read(path, start, stop)

    if file.is_safetensors:
        return False  # such files do not tell
    try:
        size = source.stat(path).size_bytes
        pickle = open_archive(read, size, where=path).pickle()
    except InputError:
        return False  # what is wrong with it, its reader tells
    return any(mark in pickle for mark in _MARKS)
