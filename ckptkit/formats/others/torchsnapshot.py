"""The reader of snapshots that torchsnapshot took, at any number of ranks.

Source: torchsnapshot/snapshot.py, manifest_ops.py, batcher.py, 0.1.0 and nightly 2024.7.26.

What the ranks of a snapshot list, put together: each tensor once, under one path.

A tensor that is spread over ranks is put together of all that they list of it, one that is the
same on all ranks is listed once. What ranks saved for themselves (the buffers of a model that
FSDP shards, a state of random numbers) is rank 0's where all ranks have the like; else each rank
has a state of its own, as in a pipeline, and its tensors are told apart by rank.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    FileRef,
    Key,
    KeyPath,
    Problem,
    Record,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import BlobRef
from ckptkit.formats.others.torchsnapshot_manifest import (
    Piece,
    RankManifest,
    SavedObject,
    SavedTensor,
    SnapshotManifest,
    read_manifest,
)
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.trees import Membership, classify
from ckptkit.storage.base import Source

_NAMED = 3  # tensors in a note


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A tensor of the whole checkpoint.

    Attributes:
        key: Its path in the manifest, with the rank where it is that rank's alone.
        path: The same as keys.
        shape: Its full shape.
        pieces: Its blocks, each with the rank that lists it; at least one.
    """

    key: str
    path: KeyPath
    shape: Shape
    pieces: Sequence[tuple[int, Piece]]


@dataclass(slots=True)
class Gathered:
    """What all ranks list together.

    Attributes:
        tensors: Every tensor once.
        values: Everything else, by path; what a further rank alone has, below its number.
        unread: Why tensors of a state that is not whole cannot be read, by key.
        notes: What is to be told of the ranks' own tensors.
    """

    tensors: list[GatheredTensor] = field(default_factory=list)
    values: dict[KeyPath, object] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    """What ranks list of one object of the application, such as the model.

    Attributes:
        shared: Tensors that are spread over ranks or the same on all, with who lists them.
        own: By rank, what it saved for itself.
    """

    shared: dict[str, list[tuple[int, SavedTensor]]] = field(default_factory=dict)
    own: dict[int, dict[str, SavedTensor]] = field(default_factory=dict)

    def first_difference(self) -> str:
        """Names a tensor that not all ranks have alike among their own; mostly there is none."""
        first, *others = self.own.values()
        for other in others:
            for key in dict.fromkeys([*first, *other]):
                if key not in first or key not in other or not _alike(first[key], other[key]):
                    return key
        return ""

    def note(self) -> list[str]:
        """Says which tensors are one rank's, though each has them."""
        held = list(self.own[min(self.own)])
        if not held or len(self.own) == 1:
            return []
        named = ", ".join(held[:_NAMED]) + (", …" if len(held) > _NAMED else "")
        what = (
            "1 tensor that each rank saved for itself is"
            if len(held) == 1
            else (f"{len(held)} tensors that each rank saved for itself are")
        )
        return [f"{what} rank 0's: {named}"]


def gather_ranks(ranks: Sequence[RankManifest], where: str) -> Gathered:
    """Puts together what ranks list.

    Args:
        ranks: What each lists, in order.
        where: The snapshot, for messages.
    """
    found = Gathered(values=_values(ranks))
    for name, state in _states(ranks).items():
        for key, parts in state.shared.items():
            if any(key in held for held in state.own.values()):
                raise FormatError(f"ranks disagree on whether {shown(key)} is shared", where=where)
            path = ranks[parts[0][0]].key_paths[key]
            found.tensors.append(_joined(key, path, parts, where))
        difference = state.first_difference()
        if difference:
            why = f"is shared by ranks whose own tensors in {name!r} differ, such as {difference!r}"
            found.unread |= dict.fromkeys(state.shared, why)
            found.notes.append(f"each rank saved a {name!r} of its own; the rank stands before it")
        else:
            found.notes += state.note()
        found.tensors += _own_tensors(state, ranks, where, by_rank=bool(difference))
    return found


def _own_tensors(
    state: _State, ranks: Sequence[RankManifest], where: str, *, by_rank: bool
) -> Iterator[GatheredTensor]:
    """Yields what ranks saved for themselves: of each, told apart, or of the first one alone."""
    for rank in state.own if by_rank else [min(state.own)]:
        for key, tensor in state.own[rank].items():
            path = ranks[rank].key_paths[key]
            if by_rank:
                yield _joined(f"{rank}/{key}", (str(rank), *path), [(rank, tensor)], where)
            else:
                yield _joined(key, path, [(rank, tensor)], where)


def _states(ranks: Sequence[RankManifest]) -> dict[str, _State]:
    states: dict[str, _State] = {}
    for rank, listed in enumerate(ranks):
        for key in listed.key_paths:
            states.setdefault(key.partition("/")[0], _State()).own.setdefault(rank, {})
        for key, tensor in listed.tensors.items():
            state = states[key.partition("/")[0]]
            if tensor.share == "own":
                state.own[rank][key] = tensor
            else:
                state.shared.setdefault(key, []).append((rank, tensor))
    return states


def _alike(first: SavedTensor, second: SavedTensor) -> bool:
    types = {piece.dtype for piece in (*first.pieces, *second.pieces)}
    return first.shape == second.shape and len(types) <= 1


def _joined(
    key: str, path: KeyPath, parts: Sequence[tuple[int, SavedTensor]], where: str
) -> GatheredTensor:
    """Puts together what ranks list of a tensor; what is the same on all is listed once."""
    kinds = {tensor.share for _, tensor in parts}
    if len(kinds) > 1 or (kinds != {"sharded"} and any(t != parts[0][1] for _, t in parts)):
        raise FormatError(f"ranks contradict each other about {shown(key)}", where=where)
    listing = parts if kinds == {"sharded"} else parts[:1]
    pieces = [(rank, piece) for rank, tensor in listing for piece in tensor.pieces]
    if not pieces:
        raise IncompleteCheckpointError(f"no rank lists a block of {shown(key)}", where=where)
    shape = parts[0][1].shape
    if shape is None:
        places = [piece.place for _, piece in pieces]
        if len({len(place.sizes) for place in places}) > 1:
            raise FormatError(f"blocks of {shown(key)} differ in dimensions", where=where)
        ends = [map(sum, zip(p.offsets, p.sizes, strict=True)) for p in places]
        shape = tuple(max(along) for along in zip(*ends, strict=True))
    return GatheredTensor(key, path, shape, pieces)


def _values(ranks: Sequence[RankManifest]) -> dict[KeyPath, object]:
    values: dict[KeyPath, object] = {}
    for rank, listed in enumerate(ranks):
        for key, value in listed.values.items():
            path = listed.key_paths[key]
            if values.setdefault(path, value) != value:
                values[str(rank), *path] = value
    return values


SNAPSHOT_METADATA = ".snapshot_metadata"
_DATA_FOLDER = re.compile(r"replicated|sharded|batched|\d{1,7}")
_MAX_BYTES = 2**63 - 1


class TorchsnapshotReader:
    """Reads what `Snapshot.take` and `Snapshot.async_take` write."""

    name = "torchsnapshot"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with a manifest, and the files that one keeps below itself."""
        homes = [
            posixpath.dirname(path)
            for path in paths
            if posixpath.basename(path) == SNAPSHOT_METADATA
        ]
        found: dict[str, list[str]] = {home: [] for home in homes}
        for path in paths if homes else ():
            home = next((h for h in homes if _belongs(path, h)), None)
            if home is not None:
                found[home].append(path)
        reason = f"{SNAPSHOT_METADATA!r}, which torchsnapshot writes last"
        return [Candidate(self.name, h, tuple(sorted(f)), reason) for h, f in sorted(found.items())]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses the manifest; data files are only looked up."""
        path = posixpath.join(candidate.folder, SNAPSHOT_METADATA)
        manifest = read_manifest(source, path)
        where = posixpath.join(source.location, candidate.folder)
        return _Assembly(source, candidate.folder, manifest, where).index(source.stat(path))


def _belongs(path: str, home: str) -> bool:
    inside = path if not home else path[len(home) + 1 :] if path.startswith(f"{home}/") else ""
    first, slash, _ = inside.partition("/")
    return inside == SNAPSHOT_METADATA or bool(slash and _DATA_FOLDER.fullmatch(first))


class _Assembly:
    """Turns a manifest into an index."""

    def __init__(self, source: Source, folder: str, manifest: SnapshotManifest, where: str) -> None:
        self._source = source
        self._folder = folder
        self._manifest = manifest
        self._where = where
        self._files: dict[str, int] = {}
        self._refs: list[FileRef] = []
        self._places: dict[tuple[str, tuple[int, int] | None], int] = {}
        self._records: list[Record] = []

    def index(self, manifest_file: FileRef) -> TensorIndex:
        """Makes the index."""
        gathered = gather_ranks(self._manifest.ranks, self._where)
        places = classify([tensor.path for tensor in gathered.tensors], where=self._where)
        entries = {
            Key(tensor.key): self._entry(tensor, place)
            for tensor, place in zip(gathered.tensors, places, strict=True)
        }
        # Further copies, of which none is read, are there all the same.
        for path, piece in self._manifest.all_pieces():
            self._record(piece, f"{self._where}: tensor {shown(path)}")
        self._check_extents()
        values = {path: self._value(value) for path, value in gathered.values.items()}
        return TensorIndex(
            format=TorchsnapshotReader.name,
            files=(*self._refs, manifest_file),
            records=RecordTable.of(self._records),
            tensors=entries,
            values=values,
            run=RunFacts(
                world_size=len(self._manifest.ranks),
                writer="torchsnapshot",
                version=self._manifest.version,
                notes=tuple(gathered.notes),
            ),
            problems=tuple(
                Problem(UnsupportedError.code, key, why) for key, why in gathered.unread.items()
            ),
        )

    def _entry(self, tensor: GatheredTensor, place: Membership) -> TensorEntry:
        where = f"{self._where}: tensor {shown(tensor.key)}"
        shape = tensor.shape
        dtype = tensor.pieces[0][1].dtype
        if any(piece.dtype != dtype for _, piece in tensor.pieces):
            raise FormatError("is stored in several element types", where=where)
        if math.prod(size or 1 for size in shape) * dtype.itemsize > _MAX_BYTES:
            raise FormatError(f"size of shape {list(shape)} overflows", where=where)
        chunks = [
            Chunk(
                # One value is cut in chunks as if it were a list of one.
                piece.place if shape else Box((), ()),
                self._record(piece, where),
                byte_offset=None if piece.is_archive else 0,
                rank=rank,
            )
            for rank, piece in tensor.pieces
        ]
        return TensorEntry(
            key=Key(tensor.key),
            key_path=tensor.path,
            name=place.name,
            tree=place.tree,
            part=place.part,
            dtype=dtype,
            shape=shape,
            chunks=ChunkTable.of(chunks, len(shape)),
        )

    def _record(self, piece: Piece, where: str) -> int:
        """Returns the position of the record of a block, adding it when new."""
        needed = math.prod(piece.place.sizes) * piece.dtype.itemsize
        start, stop = piece.byte_range or (0, needed)
        if stop - start != needed and not piece.is_archive:
            raise FormatError(
                f"has {needed:,} bytes in {list(piece.place.sizes)}, which are said to lie in"
                f" {stop - start:,}: sizes do not add up",
                where=where,
            )
        known = self._places.get((piece.location, piece.byte_range))
        if known is None:
            file = self._file(piece.location)
            if piece.is_archive:
                record = Record(file, 0, max(self._refs[file].size_bytes, 0), "torch_zip")
            else:
                record = Record(file, start, stop)
            known = self._places[piece.location, piece.byte_range] = len(self._records)
            self._records.append(record)
        return known

    def _file(self, location: str) -> int:
        """Returns the position of a file of the snapshot; one that is not there has size -1."""
        known = self._files.get(location)
        if known is None:
            path = posixpath.join(self._folder, location)
            try:
                found = self._source.stat(path)
            except MissingFileError:
                found = FileRef(path, -1, "")
            known = self._files[location] = len(self._refs)
            self._refs.append(found)
        return known

    def _value(self, value: object) -> object:
        if not isinstance(value, SavedObject):
            return value
        file = self._refs[self._file(value.location)]
        return BlobRef(file.path, 0, max(file.size_bytes, 0))

    def _check_extents(self) -> None:
        """Proves that every byte of a file is of one tensor; a file may end too early here."""
        at, of_file = 0, -1
        rows = sorted((r.file, r.start, r.stop) for r in self._records if r.stop > r.start)
        for file, start, stop in [*rows, (-1, 0, 0)]:
            if file != of_file:
                if of_file >= 0:
                    self._check_end(self._refs[of_file], at)
                at, of_file = 0, file
            if start != at:
                first, last = sorted((start, at))
                raise FormatError(
                    f"bytes [{first:,}, {last:,}) are of {'two tensors' if start < at else 'none'}",
                    where=posixpath.join(self._source.location, self._refs[file].path),
                )
            at = stop

    def _check_end(self, file: FileRef, end: int) -> None:
        if file.size_bytes > end:
            raise FormatError(
                f"has {file.size_bytes:,} bytes, of which the manifest knows {end:,}: sizes do not"
                " add up",
                where=posixpath.join(self._source.location, file.path),
                hint="the file is of another snapshot, or was damaged; take another copy of it",
            )
