"""What the files of all ranks hold, proven to be all there and of one save."""

from __future__ import annotations

import itertools
import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.core.errors import FormatError, LimitError, MissingFileError
from ckptkit.core.index import KeyPath
from ckptkit.formats.flat_parameters import FLAT
from ckptkit.formats.pickles import shown
from ckptkit.formats.rank_names import Family, Kind, RankFile
from ckptkit.formats.sharded_values import SHARDED_ALLOWED, DTensorRef, ShardedTensorRef
from ckptkit.formats.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.torch_file import MAX_KEY_CHARACTERS, walk
from ckptkit.formats.torch_values import TensorRef
from ckptkit.storage.base import Source

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
        """Whether some of its tensors are parts of others, which all ranks together have."""
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

        Raises:
            UnsafePickleError: If the pickle names something outside the allow-list.
            UnsupportedError: If it holds a kind of tensor that is not modelled.
            FormatError: If the file is damaged.
            LimitError: If it was made to exhaust memory.
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
    """Refuses files of runs of different sizes, and two files of one rank.

    Raises:
        FormatError: If there are some.
    """
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
    """Refuses files that are missing, and files of ranks that the run did not have.

    Raises:
        MissingFileError: If the file of a rank is not there.
        FormatError: If there is one too many.
    """
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
    """Returns the world sizes that ShardedTensors tell, each with a file that tells it.

    Raises:
        FormatError: If one tells that another rank wrote the file.
    """
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
    """Refuses ranks of different steps, where their files tell how far the run was.

    Raises:
        FormatError: If two ranks count differently.
    """
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
