"""The reader of what torch_checkpointing and torch's experimental checkpointer write.

Each rank writes a file for each item of the state (`model_0.pt`), or one for all
(`checkpoint_0.pt`); a `metadata.pkl` may tell how the tensors are spread. DTensors in torch's files
tell that themselves. Safetensors files hold local tensors, which only `metadata.pkl` places.

Local tensors in a safetensors file of each rank, placed by what `metadata.pkl` says of them.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.geometry import flat_offset, row_major_strides
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    FileRef,
    Key,
    KeyPath,
    Record,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.others.spread_metadata import (
    Spreading,
    SpreadItem,
    SpreadMetadata,
    read_spread_metadata,
)
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.ranks.contents import (
    FORMAT,
    METADATA_PICKLE,
    Family,
    Kind,
    RankContents,
    RankFile,
    RankReading,
    absent_ranks,
    check_counters,
    described,
    numbered,
)
from ckptkit.formats.ranks.dtensor import LocalPart, local_part
from ckptkit.formats.ranks.reader import RankAssembly
from ckptkit.formats.safetensors.reader import StoredTensor, read_header
from ckptkit.formats.trees import classify
from ckptkit.storage.base import Source


@dataclass(frozen=True, slots=True)
class _Local:
    """A tensor of one file, and the position of that file."""

    file: int
    stored: StoredTensor


class LocalImages:
    """Collects the tensors of such files.

    Attributes:
        where: The checkpoint, for messages.
        files: Those that were opened.
        records: One for each local tensor.
        entries: The whole tensors, by key.
    """

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self.where = where
        self.files: list[FileRef] = []
        self.records: list[Record] = []
        self.entries: dict[Key, TensorEntry] = {}

    def add(self, item: str, spread: SpreadItem, by_rank: Mapping[int, str]) -> None:
        """Adds the tensors of an item of the state."""
        held = {rank: self._opened(rank, path) for rank, path in sorted(by_rank.items())}
        names = {".".join(map(str, path)): path for path in spread.tensors}
        for rank, tensors in held.items():
            odd = next((name for name in tensors if name not in names), None)
            if odd is not None:
                raise FormatError(
                    f"{posixpath.basename(by_rank[rank])!r} holds {shown(odd)}, of which the"
                    " metadata tells nothing",
                    where=self.where,
                )
        paths: list[KeyPath] = [(item, *path) for path in names.values()]
        places = classify(paths, where=self.where)
        for (name, path), place in zip(names.items(), places, strict=True):
            spreading = spread.tensors[path]
            chunks = list(self._chunks(name, spreading, held))
            entry = TensorEntry(
                key=Key(f"{item}.{name}"),
                key_path=(item, *path),
                name=place.name,
                tree=place.tree,
                part=place.part,
                dtype=held[spreading.ranks[0]][name].stored.dtype,
                shape=spreading.shape,
                chunks=ChunkTable.of(chunks, len(spreading.shape)),
            )
            self.entries[entry.key] = entry

    def _opened(self, rank: int, path: str) -> Mapping[str, _Local]:
        try:
            file = self._source.stat(path)
        except MissingFileError:
            raise MissingFileError(
                f"{posixpath.basename(path)!r}, the file of rank {rank}, is not there",
                where=self.where,
                hint="copy the file back, name where other nodes keep theirs with --also, or take"
                " an earlier checkpoint",
            ) from None
        self.files.append(file)
        header = read_header(self._source, file)
        return {t.name: _Local(len(self.files) - 1, t) for t in header.tensors}

    def _chunks(
        self, name: str, spreading: Spreading, held: Mapping[int, Mapping[str, _Local]]
    ) -> Iterator[Chunk]:
        """Yields the blocks that ranks have of a tensor."""
        absent = next((rank for rank in spreading.ranks if name not in held.get(rank, {})), None)
        if absent is not None:
            raise FormatError(f"rank {absent} has no part of {shown(name)}", where=self.where)
        local = {rank: held[rank][name] for rank in spreading.ranks}
        if len({one.stored.dtype for one in local.values()}) > 1:
            raise FormatError(f"ranks have {shown(name)} in several types", where=self.where)
        for rank, part in self._parts(name, spreading, local).items():
            one = local[rank]
            strides = row_major_strides(part.shape)
            if 0 in part.shape:
                continue
            self.records.append(Record(one.file, one.stored.start, one.stored.stop))
            for piece in part.pieces:
                yield Chunk(
                    piece.box,
                    len(self.records) - 1,
                    byte_offset=flat_offset(piece.local, strides) * one.stored.dtype.itemsize,
                    strides=None if piece.box.sizes == part.shape else strides,
                    rank=rank,
                )

    def _parts(
        self, name: str, spreading: Spreading, local: Mapping[int, _Local]
    ) -> Mapping[int, LocalPart]:
        """Returns what each rank has; splits were made in the order that fits the sizes."""
        meshes = spreading.seen_from_ranks()
        for inner_first in (True, False):
            found = {
                rank: local_part(
                    spreading.shape, mesh, spreading.placements, inner_first=inner_first
                )
                for rank, mesh in meshes.items()
            }
            fitting = {
                rank: part
                for rank, part in found.items()
                if part is not None and _fits(local[rank].stored, part)
            }
            if len(fitting) == len(found):
                return fitting
        raise FormatError(
            f"{shown(name)} of shape {list(spreading.shape)} has parts of other shapes than its"
            " placements give: sizes do not add up",
            where=self.where,
        )


def _fits(stored: StoredTensor, part: LocalPart) -> bool:
    # Of a part without elements, releases of torch differ in which dimension they call empty.
    return stored.shape == part.shape or (0 in stored.shape and 0 in part.shape)


_WHOLE = "checkpoint"  # the item under which the experimental checkpointer writes all state
_EXPERIMENTAL = "torch.distributed.checkpoint's experimental checkpointer"


class TorchCheckpointingReader:
    """Reads a file of each rank, for each item of the state or for all of it."""

    name = FORMAT

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with a `metadata.pkl`; others are found by what files hold."""
        return described(paths)

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the pickles and headers of all ranks' files."""
        where = posixpath.join(source.location, candidate.folder)
        path = posixpath.join(candidate.folder, METADATA_PICKLE)
        is_described = path in candidate.files
        metadata = read_spread_metadata(source, path) if is_described else SpreadMetadata(0, {})
        files = _Files.of(candidate, metadata)
        index = _torch_index(source, candidate.folder, files, where)
        world_size = metadata.world_size or index.run.world_size or 1
        if metadata.world_size and index.run.world_size not in {None, world_size}:
            raise FormatError(
                f"the files are of runs with {index.run.world_size} and {world_size} ranks",
                where=where,
                hint="a save went into the folder of another one; take away the files of one",
            )
        files.check(world_size, where)
        images = LocalImages(source, where)
        for item, by_rank in files.images.items():
            if item not in metadata.items:
                raise UnsupportedError(
                    f"no {METADATA_PICKLE!r} tells how the tensors of {shown(item)} are spread, and"
                    f" {posixpath.basename(min(by_rank.values()))!r} does not either",
                    where=where,
                    hint="torch_checkpointing tells it of items that are given a resharder",
                )
            images.add(item, metadata.items[item], by_rank)
        extra = [source.stat(path)] if is_described else []
        joined = _joined(index, images)
        writer = joined.run.writer  # anybody may number the files of ranks
        if is_described:
            writer = "torch_checkpointing"
        elif _WHOLE in files.archives:
            writer = _EXPERIMENTAL
        run = replace(joined.run, world_size=world_size, writer=writer)
        return replace(joined, files=(*joined.files, *extra), run=run)


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a checkpoint, by item and rank.

    Attributes:
        archives: Those that `torch.save` wrote.
        images: Those in safetensors.
    """

    archives: Mapping[str, Mapping[int, str]]
    images: Mapping[str, Mapping[int, str]]

    @classmethod
    def of(cls, candidate: Candidate, metadata: SpreadMetadata) -> _Files:
        """Sorts files: as the metadata tells where it does, else by their names."""
        archives: dict[str, dict[int, str]] = defaultdict(dict)
        images: dict[str, dict[int, str]] = defaultdict(dict)
        told = set()
        for item, spread in metadata.items.items():
            for rank, file in spread.files.items():
                path = posixpath.join(candidate.folder, file.path)
                (images if file.is_safetensors else archives)[item][rank] = path
                told.add(path)
        for named in filter(None, map(numbered, candidate.files)):
            if named.path not in told:
                kind = images if named.is_safetensors else archives
                kind[named.item].setdefault(named.rank, named.path)
        return cls(archives, images)

    def check(self, world_size: int, where: str) -> None:
        """Refuses files of ranks that the run did not have."""
        for by_rank in (*self.archives.values(), *self.images.values()):
            stale = [path for rank, path in by_rank.items() if rank >= world_size]
            if stale:
                raise FormatError(
                    f"{posixpath.basename(stale[0])!r} is of a rank that a run with {world_size}"
                    " ranks does not have",
                    where=where,
                    hint="an earlier save of a larger run left it; take it away",
                )


_Spread = dict[str, set[int]]  # items of which ranks have parts, and which ranks


def _torch_index(source: Source, folder: str, files: _Files, where: str) -> TensorIndex:
    """Makes the index of the files that `torch.save` wrote."""
    reading = RankReading(source)
    contents, spread = _contents(reading, files)
    if not contents:
        return TensorIndex(FORMAT, (), RecordTable.of([]), {}, run=RunFacts())
    if _WHOLE in spread and len(spread) > 1:
        one, other = (min(files.archives[item].values()) for item in [*spread][:2])
        raise FormatError(
            f"{posixpath.basename(one)!r} and {posixpath.basename(other)!r} are of two checkpoints",
            where=where,
            hint="two saves went into one folder; take away the files of one",
        )
    check_counters(contents)
    first = {path: v for one in contents if one.file.rank == 0 for path, v in one.values.items()}
    contents[0] = replace(contents[0], values=first)
    owner = next(iter(spread), next(iter(files.archives)))
    owned = (RankFile(path, "model", rank) for rank, path in files.archives[owner].items())
    family = Family(folder, "", owner, tuple(owned))
    held: dict[Kind, list[RankContents]] = {"model": contents, "optimizer": [], "extra": []}
    index = replace(RankAssembly(reading, family, held, where).index(), format=FORMAT)
    _check_ranks(spread, index.run.world_size or 1, where)
    return index


def _contents(reading: RankReading, files: _Files) -> tuple[list[RankContents], _Spread]:
    """Opens all files: those of the model first, and of each item in the order of ranks."""
    contents: list[RankContents] = []
    spread: _Spread = {}
    for item in sorted(files.archives, key=lambda item: (item != "model", item)):
        under = () if item == _WHOLE else (item,)
        for rank, path in sorted(files.archives[item].items()):
            contents.append(reading.read(RankFile(path, "model", rank), under))
            if contents[-1].is_spread:
                spread.setdefault(item, set()).add(rank)
    return contents, spread


def _check_ranks(spread: _Spread, world_size: int, where: str) -> None:
    """Refuses items of which the parts of a rank are missing."""
    for item, ranks in spread.items():
        missing = absent_ranks(ranks, world_size)
        if missing:
            raise MissingFileError(
                f"the files of {shown(item)} of rank {missing} of {world_size} are not there",
                where=where,
                hint="copy the files back, name where other nodes keep theirs with --also, or take"
                " an earlier checkpoint",
            )


def _joined(index: TensorIndex, images: LocalImages) -> TensorIndex:
    """Adds what lies in safetensors files to the index of the others."""
    if not images.files:
        return index
    records = [
        *index.records,
        *(replace(record, file=record.file + len(index.files)) for record in images.records),
    ]
    shifted = {
        key: replace(entry, chunks=entry.chunks.shifted(len(index.records)))
        for key, entry in images.entries.items()
    }
    both = next((key for key in shifted if key in index.tensors), None)
    if both is not None:
        raise FormatError(
            f"{posixpath.basename(images.files[0].path)!r} and"
            f" {posixpath.basename(index.files[0].path)!r} hold {shown(both)} both",
            where=images.where,
            hint="two saves went into one folder; take away the files of one",
        )
    return replace(
        index,
        files=(*index.files, *images.files),
        records=RecordTable.of(records),
        tensors={**shifted, **index.tensors},
    )
