"""The reader of safetensors shards that torch.distributed.checkpoint writes, one set for each rank.

`shard-RRRRR-model-IIIII-of-NNNNN.safetensors` holds the pieces that rank R has of the tensors of
model file I. The files say neither how many ranks there were nor how large a tensor is as a whole:
shapes are what the pieces reach to. So numbers have to be complete, and where a `config.json` or
an index lies beside, shapes and names are compared with it.

Source: torch/distributed/checkpoint/{hf_storage,_hf_utils}.py (`HuggingFaceStorageWriter`), torch
2.8 to 2.13; transformers 5.23, distributed/checkpoint.py.

Whether the last shards are missing, told from the shapes that the others make.

Sharding cuts the rows of all matrices alike and leaves their columns. In a model the rows of one
matrix are the columns of another: where that holds for no matrix, but would for several if there
were more shards, the last ones are missing.

Source: torch.chunk, by which DTensors are split: all pieces have `ceil(rows / shards)` rows but the
last ones, which have fewer or none.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.core.errors import FormatError, IncompleteCheckpointError, MissingFileError
from ckptkit.core.index import (
    ChunkTable,
    FileRef,
    Key,
    Problem,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.safetensors.config_extents import ConfigExtents, config_beside
from ckptkit.formats.safetensors.reader import StoredTensor, read_header, saved_offsets
from ckptkit.formats.torch_files.reader import INDEX_ENDING, read_weight_map
from ckptkit.formats.trees import classify
from ckptkit.storage.base import Source

_MATRIX = 2
_LEAST_EVIDENCE = 2  # different numbers of columns that more shards would explain
_MOST_SHARDS = 1024


def shards_by_shapes(matrices: Iterable[tuple[Shape, int]]) -> int | None:
    """Returns how many shards there must have been, if that is more than there are.

    Args:
        matrices: For each tensor its shape, as far as its pieces reach, and how many pieces
            follow one another along its rows.

    >>> whole = [((8, 6), 2), ((6, 8), 2), ((20, 6), 2)]
    >>> half = [((4, 6), 1), ((3, 8), 1), ((10, 6), 1)]
    >>> shards_by_shapes(whole), shards_by_shapes(half)
    (None, 2)
    """
    known = [(shape, pieces) for shape, pieces in matrices if len(shape) == _MATRIX]
    if not known:
        return None
    ((there, _),) = Counter(pieces for _, pieces in known).most_common(1)
    alike = [shape for shape, pieces in known if pieces == there]
    rows = {shape[0] for shape in alike}
    columns = {shape[1] for shape in alike}
    if rows & columns:
        return None
    for shards in range(there + 1, min(8 * there + 8, _MOST_SHARDS)):
        explained = [n for n in columns if there * -(-n // shards) in rows]
        if len(explained) >= _LEAST_EVIDENCE:
            return shards
    return None


SHARDED_FOLDER = "sharded"
"""Where torch leaves the shards of a model that it has consolidated."""

_SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
_INDEX = f"model.safetensors{INDEX_ENDING}"
_ENDING = ".safetensors"
_INCOMPLETE = IncompleteCheckpointError.code
_MAX_BYTES = 2**63 - 1
_NAMED = 3
_MOST_RANKS = 10_000_000
UNPROVEN = (
    "the shards tell neither their number nor full shapes: shapes are what they reach to, and a"
    " shard missing at the end would not show; put the model's config.json beside them, or name"
    " it with --base, to have them compared"
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a tensor: what the header of file number `file` says, and where it begins."""

    file: int
    rank: int
    model_file: int
    stored: StoredTensor
    offsets: Shape

    @property
    def reach(self) -> Shape:
        return tuple(o + n for o, n in zip(self.offsets, self.stored.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        return 0 in self.stored.shape


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What the name of a shard says; counted from 1."""

    rank: int
    model_file: int
    model_files: int

    @classmethod
    def of(cls, path: str) -> _Numbers:
        match = _SHARD.fullmatch(posixpath.basename(path))
        assert match is not None  # noqa: S101  narrows the type: `find` took no other
        return cls(*(int(number) for number in match.groups()))


def is_shard(path: str) -> bool:
    return _SHARD.fullmatch(posixpath.basename(path)) is not None


class HfShardsReader:
    """Reads what torch's `HuggingFaceStorageWriter(save_distributed=True)` writes."""

    name = "dcp-hf"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Groups shards by folder; an index of files that are not there belongs to them."""
        folders: dict[str, list[str]] = {}
        for path in filter(is_shard, paths):
            folders.setdefault(posixpath.dirname(path), []).append(path)
        others = {posixpath.dirname(p) for p in paths if p.endswith(_ENDING) and not is_shard(p)}
        indexes = {posixpath.dirname(p): p for p in paths if posixpath.basename(p) == _INDEX}
        return [
            self._candidate(folder, files, None if folder in others else indexes.get(folder))
            for folder, files in sorted(folders.items())
        ]

    def _candidate(self, folder: str, shards: Sequence[str], index: str | None) -> Candidate:
        ranks = len({_Numbers.of(path).rank for path in shards})
        reason = f"{len(shards)} 'shard-…-model-….safetensors' of {ranks} rank"
        files = [*sorted(shards), *filter(None, [index])]
        return Candidate(self.name, folder, tuple(files), f"{reason}{'' if ranks == 1 else 's'}")

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        return _Assembly(source, candidate).index()


class _Assembly:
    """Puts the pieces of all shards together."""

    def __init__(self, source: Source, candidate: Candidate) -> None:
        self.source = source
        self.folder = candidate.folder
        self.where = posixpath.join(source.location, candidate.folder)
        self.shards = [path for path in candidate.files if is_shard(path)]
        self.numbers = [_Numbers.of(path) for path in self.shards]
        self.others = [path for path in candidate.files if not is_shard(path)]
        self.mapped = [n for path in self.others for n in read_weight_map(source, path)]

    def index(self) -> TensorIndex:
        _check_model_files(self.numbers, self.where)
        files = [self.source.stat(path) for path in self.shards]
        pieces = self._pieces(files)
        absent = [name for name in self.mapped if name not in pieces]
        self._check_ranks(absent)
        shapes = {name: _shape(held, self.where) for name, held in pieces.items()}
        extents = config_beside(self.source, self._config_folders())
        self._check_layers(extents, pieces)
        entries = self._entries(pieces, shapes)
        problems = [
            *self._stored_twice(pieces),
            *(_short(entry, extents) for entry in entries.values()),
            *([] if extents.proves(shapes) else self._cut_off(pieces, shapes)),
        ]
        rows = [piece for held in pieces.values() for piece in held if not piece.is_empty]
        return TensorIndex(
            format=HfShardsReader.name,
            files=(*files, *map(self.source.stat, self.others)),
            records=RecordTable(
                np.array([piece.file for piece in rows], np.int64),
                np.array([piece.stored.start for piece in rows], np.int64),
                np.array([piece.stored.stop for piece in rows], np.int64),
            ),
            tensors=entries,
            run=RunFacts(
                world_size=max(number.rank for number in self.numbers),
                writer="HuggingFaceStorageWriter of torch.distributed.checkpoint",
                notes=tuple(self._notes(absent, proven=extents.proves(shapes))),
            ),
            problems=tuple(filter(None, problems)),
        )

    def _config_folders(self) -> list[str]:
        folders = [self.folder]
        if posixpath.basename(self.folder) == SHARDED_FOLDER:
            folders.append(posixpath.dirname(self.folder))
        return folders

    def _pieces(self, files: Sequence[FileRef]) -> dict[str, list[_Piece]]:
        found: dict[str, list[_Piece]] = {}
        for number, (file, numbers) in enumerate(zip(files, self.numbers, strict=True)):
            header = read_header(self.source, file)
            where = posixpath.join(self.source.location, file.path)
            offsets = saved_offsets(header, where=where)
            for stored in header.tensors:
                at = offsets[stored.name]
                piece = _Piece(number, numbers.rank, numbers.model_file, stored, at)
                found.setdefault(stored.name, []).append(piece)
        for name, pieces in found.items():
            self._check_alike(name, pieces)
        return found

    def _check_alike(self, name: str, pieces: Sequence[_Piece]) -> None:
        """Refuses pieces that cannot be of one tensor, as those of two saves."""
        first = pieces[0]
        for other in pieces[1:]:
            for what, one, two in (
                ("dtype", first.stored.dtype.name, other.stored.dtype.name),
                ("dimensions", len(first.offsets), len(other.offsets)),
                ("model file", first.model_file, other.model_file),
            ):
                if one != two:
                    raise FormatError(
                        f"tensor {name!r} has {what} {one} in {self.shards[first.file]!r} against"
                        f" {two} in {self.shards[other.file]!r}",
                        where=self.where,
                        hint="the shards are of different saves: take the older ones away",
                    )

    def _check_ranks(self, absent: Sequence[str]) -> None:
        """Refuses a set with gaps, unless an index beside it tells that no tensor is lacking.

        A rank that holds nothing of a model file writes none, as in a pipeline. That nothing is
        lacking inside of a tensor, its coverage proves later.
        """
        there = {(number.rank, number.model_file) for number in self.numbers}
        last = max(number.rank for number in self.numbers)
        count = self.numbers[0].model_files
        if len(there) == last * count or (self.mapped and not absent):
            return
        missing = next(
            (rank, file)
            for rank in range(1, last + 1)
            for file in range(1, count + 1)
            if (rank, file) not in there
        )
        raise MissingFileError(
            f"{len(there):,} of {last * count:,} shards are there; {_name(*missing, count)!r} is"
            " missing",
            where=self.where,
            hint="copy the missing files as well; if the rank held no part of that file and so"
            f" wrote none, put the model's {_INDEX!r} beside the shards, which names all tensors",
        )

    def _check_layers(self, extents: ConfigExtents, names: Collection[str]) -> None:
        lacking = extents.layers_lacking(names)
        if lacking:
            raise IncompleteCheckpointError(
                f"the last {lacking:,} of {extents.layers:,} layers by {extents.path!r} are in no"
                " shard",
                where=self.where,
                hint="give the directory that holds the shards of every rank",
            )

    def _stored_twice(self, pieces: Mapping[str, Sequence[_Piece]]) -> Iterator[Problem]:
        """Yields tensors of which a part is there twice, which would be taken for a replica."""
        for name, held in pieces.items():
            seen: dict[tuple[Shape, Shape], _Piece] = {}
            for piece in held:
                place = (piece.offsets, piece.stored.shape)
                other = seen.setdefault(place, piece)
                if other is not piece and not piece.is_empty:
                    both = f"{self.shards[other.file]!r} and {self.shards[piece.file]!r}"
                    message = f"{list(piece.stored.shape)} elements from {list(piece.offsets)} on"
                    yield Problem(_INCOMPLETE, name, f"{message} are stored in both {both}")
                    break

    def _cut_off(
        self, pieces: Mapping[str, Sequence[_Piece]], shapes: Mapping[str, Shape]
    ) -> Iterator[Problem]:
        """Yields all matrices where shapes tell that the last shards are missing."""
        matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        counts = {name: len({p.offsets[:1] for p in pieces[name]}) for name in matrices}
        shards = shards_by_shapes((shape, counts[name]) for name, shape in matrices.items())
        if shards is not None:
            ranks = max(number.rank for number in self.numbers)
            for name, shape in matrices.items():
                yield Problem(
                    _INCOMPLETE,
                    name,
                    f"the shards of {ranks} ranks reach to {list(shape)}, but no matrix has as"
                    f" many rows as another has columns, as they would with {shards} shards of"
                    " each: those after the last one are missing",
                )

    def _entries(
        self, pieces: Mapping[str, Sequence[_Piece]], shapes: Mapping[str, Shape]
    ) -> dict[Key, TensorEntry]:
        places = classify([(name,) for name in pieces], where=self.where)
        entries, first = {}, 0
        for (name, held), place in zip(pieces.items(), places, strict=True):
            kept = [piece for piece in held if not piece.is_empty]
            entries[Key(name)] = TensorEntry(
                key=Key(name),
                key_path=(name,),
                name=place.name,
                tree=place.tree,
                part=place.part,
                dtype=held[0].stored.dtype,
                shape=shapes[name],
                chunks=_chunks(kept, len(shapes[name]), first),
            )
            first += len(kept)
        return entries

    def _notes(self, absent: Sequence[str], *, proven: bool) -> Iterator[str]:
        if absent:
            more = f" and {len(absent) - _NAMED:,} more" if len(absent) > _NAMED else ""
            listed = ", ".join(map(repr, absent[:_NAMED]))
            yield f"{_INDEX!r} names tensors that no shard has: {listed}{more}"
        if not proven:
            yield UNPROVEN


def _name(rank: int, model_file: int, model_files: int) -> str:
    return f"shard-{rank:05d}-model-{model_file:05d}-of-{model_files:05d}{_ENDING}"


def _check_model_files(numbers: Sequence[_Numbers], where: str) -> None:
    counts = sorted({number.model_files for number in numbers})
    if len(counts) > 1:
        raise FormatError(
            f"shards are numbered '-of-{counts[0]:05d}' and '-of-{counts[1]:05d}'",
            where=where,
            hint="they are of different saves: take the older ones away",
        )
    last = max(number.rank for number in numbers)
    if last > _MOST_RANKS:
        raise FormatError(f"a shard is named as that of rank {last:.3g}", where=where)
    there = {number.model_file for number in numbers}
    missing = next((n for n in range(1, counts[0] + 1) if n not in there), None)
    if missing is not None or max(there) > counts[0] or min(n.rank for n in numbers) < 1:
        raise MissingFileError(
            f"no shard is of model file {missing or 1} of {counts[0]}",
            where=where,
            hint="copy the missing files as well",
        )


def _shape(pieces: Sequence[_Piece], where: str) -> Shape:
    shape = tuple(max(sizes) for sizes in zip(*(piece.reach for piece in pieces), strict=True))
    stored = pieces[0].stored
    if math.prod(max(size, 1) for size in shape) * stored.dtype.itemsize > _MAX_BYTES:
        raise FormatError(
            f"size of tensor {stored.name!r} of shape {list(shape)} overflows", where=where
        )
    return shape


def _chunks(pieces: Sequence[_Piece], dimensions: int, first: int) -> ChunkTable:
    rows = len(pieces)
    return ChunkTable(
        np.array([piece.offsets for piece in pieces], np.int64).reshape(rows, dimensions),
        np.array([piece.stored.shape for piece in pieces], np.int64).reshape(rows, dimensions),
        np.arange(first, first + rows),
        byte_offset=0,
        rank=np.array([piece.rank - 1 for piece in pieces], np.int64),
    )


def _short(entry: TensorEntry, extents: ConfigExtents) -> Problem | None:
    """Says where a configuration has a tensor larger than all shards together."""
    least = extents.least(entry.name)
    if least is None or len(least) != len(entry.shape):
        return None
    if all(size >= needed for size, needed in zip(entry.shape, least, strict=True)):
        return None
    return Problem(
        _INCOMPLETE,
        entry.key,
        f"the shards reach to {list(entry.shape)} against {list(least)} by {extents.path!r}: a"
        " shard after the last one is missing",
    )
