"""The reader of snapshots that torchsnapshot took, at any number of ranks.

The entries of all ranks are merged, so that each tensor has one entry. A sharded tensor consists of
the blocks of all ranks, and a replicated one of those of the first. Tensors that ranks saved as
their own (the buffers of a model that FSDP shards, the state of a random number generator) are
taken from rank 0 if all ranks have the same ones; otherwise, as in a pipeline, each rank has a
state of its own, and the names of its tensors begin with the rank.

Source: torchsnapshot/snapshot.py, manifest_ops.py, batcher.py, 0.1.0 and nightly 2024.7.26.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
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
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.dcp.reader import BlobRef
from ckptkit.formats.others.torchsnapshot_manifest import (
    RankManifest,
    SavedBlock,
    SavedObject,
    SavedTensor,
    SnapshotManifest,
    read_manifest,
)
from ckptkit.formats.parsing import overflows, stat_or_missing
from ckptkit.formats.trees import Membership, classify
from ckptkit.storage.base import Source

_LISTED_NAMES = 3  # tensors in a note


class MergedTensor(Struct, frozen=True):
    """A tensor of the whole checkpoint.

    Attributes:
        key: Its path in the manifest, with the rank if only that rank has it.
        path: The same as keys.
        shape: Its full shape.
        blocks: Its blocks, each with the rank that lists it; at least one.
    """

    key: str
    path: KeyPath
    shape: Shape
    blocks: Sequence[tuple[int, SavedBlock]]


class MergedManifest(Struct):
    """The entries of all ranks.

    Attributes:
        tensors: Every tensor once.
        values: All other values, by path; those in which a rank differs, below its number.
        unread: Why tensors of an incomplete state cannot be read, by key.
        notes: Notes on the ranks' own tensors.
    """

    tensors: list[MergedTensor] = field(default_factory=list)
    values: dict[KeyPath, object] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _State(Struct):
    """The tensors of one object of the application, such as the model.

    Attributes:
        shared: Sharded and replicated tensors, with the ranks that list them.
        own: By rank, its own tensors.
    """

    shared: dict[str, list[tuple[int, SavedTensor]]] = field(default_factory=dict)
    own: dict[int, dict[str, SavedTensor]] = field(default_factory=dict)

    def first_difference(self) -> str:
        """Returns a tensor in which the ranks' own tensors differ; usually empty."""
        first, *others = self.own.values()
        for other in others:
            for key in dict.fromkeys([*first, *other]):
                if key not in first or key not in other:
                    return key
                blocks = (*first[key].blocks, *other[key].blocks)
                dtypes = {block.dtype for block in blocks}
                if first[key].shape != other[key].shape or len(dtypes) > 1:
                    return key
        return ""

    def note(self) -> list[str]:
        """Returns a note with the tensors that are taken from one rank, though each has them."""
        keys = list(self.own[min(self.own)])
        if not keys or len(self.own) == 1:
            return []
        names = ", ".join(keys[:_LISTED_NAMES]) + (", …" if len(keys) > _LISTED_NAMES else "")
        count, verb = ("1 tensor", "is") if len(keys) == 1 else (f"{len(keys)} tensors", "are")
        return [f"{count} that each rank saved for itself {verb} rank 0's: {names}"]


def merge_ranks(ranks: Sequence[RankManifest], where: str) -> MergedManifest:
    """Merges the entries of ranks.

    Args:
        ranks: The entries of each rank, in order.
        where: The snapshot, for messages.
    """
    merged = MergedManifest()
    for rank, manifest in enumerate(ranks):
        for key, value in manifest.values.items():
            path = manifest.key_paths[key]
            if merged.values.setdefault(path, value) != value:
                merged.values[str(rank), *path] = value
    for name, state in _states(ranks).items():
        for key, parts in state.shared.items():
            if any(key in held for held in state.own.values()):
                raise FormatError(f"ranks disagree on whether {quote(key)} is shared", where=where)
            path = ranks[parts[0][0]].key_paths[key]
            merged.tensors.append(_merge_tensor(key, path, parts, where))
        difference = state.first_difference()
        if difference:
            why = f"is shared by ranks whose own tensors in {name!r} differ, such as {difference!r}"
            merged.unread |= dict.fromkeys(state.shared, why)
            merged.notes.append(f"each rank saved a {name!r} of its own; names begin with the rank")
        else:
            merged.notes += state.note()
        merged.tensors += _own_tensors(state, ranks, where, by_rank=bool(difference))
    return merged


def _own_tensors(
    state: _State, ranks: Sequence[RankManifest], where: str, *, by_rank: bool
) -> Iterator[MergedTensor]:
    """Yields the ranks' own tensors: of each rank, under its number, or of the first only."""
    for rank in state.own if by_rank else [min(state.own)]:
        for key, tensor in state.own[rank].items():
            path = ranks[rank].key_paths[key]
            if by_rank:
                yield _merge_tensor(f"{rank}/{key}", (str(rank), *path), [(rank, tensor)], where)
            else:
                yield _merge_tensor(key, path, [(rank, tensor)], where)


def _states(ranks: Sequence[RankManifest]) -> dict[str, _State]:
    states: dict[str, _State] = {}
    for rank, manifest in enumerate(ranks):
        for key in manifest.key_paths:
            states.setdefault(key.partition("/")[0], _State()).own.setdefault(rank, {})
        for key, tensor in manifest.tensors.items():
            state = states[key.partition("/")[0]]
            if tensor.share == "own":
                state.own[rank][key] = tensor
            else:
                state.shared.setdefault(key, []).append((rank, tensor))
    return states


def _merge_tensor(
    key: str, path: KeyPath, parts: Sequence[tuple[int, SavedTensor]], where: str
) -> MergedTensor:
    """Merges the blocks of a tensor; a replicated one has those of the first rank."""
    kinds = {tensor.share for _, tensor in parts}
    if len(kinds) > 1 or (kinds != {"sharded"} and any(t != parts[0][1] for _, t in parts)):
        raise FormatError(f"ranks contradict each other about {quote(key)}", where=where)
    listing = parts if kinds == {"sharded"} else parts[:1]
    blocks = [(rank, block) for rank, tensor in listing for block in tensor.blocks]
    if not blocks:
        raise IncompleteCheckpointError(f"no rank lists a block of {quote(key)}", where=where)
    shape = parts[0][1].shape
    if shape is None:
        boxes = [block.box for _, block in blocks]
        if len({len(box.sizes) for box in boxes}) > 1:
            raise FormatError(f"blocks of {quote(key)} differ in dimensions", where=where)
        ends = [map(sum, zip(box.offsets, box.sizes, strict=True)) for box in boxes]
        shape = tuple(max(along) for along in zip(*ends, strict=True))
    return MergedTensor(key, path, shape, blocks)


SNAPSHOT_METADATA = ".snapshot_metadata"
_DATA_FOLDER = re.compile(r"replicated|sharded|batched|\d{1,7}")


class TorchsnapshotReader(FormatReader):
    """Reads what `Snapshot.take` and `Snapshot.async_take` write."""

    name = "torchsnapshot"
    order = 0  # first: its files may have any name
    expected = "'.snapshot_metadata'"
    index_memory = (SNAPSHOT_METADATA, 12)

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with a manifest, and the files of the snapshot below them."""
        homes = [
            posixpath.dirname(path)
            for path in paths
            if posixpath.basename(path) == SNAPSHOT_METADATA
        ]
        files: dict[str, list[str]] = {home: [] for home in homes}
        for path in paths if homes else ():
            for home in homes:
                is_inside = not home or path.startswith(f"{home}/")
                inside = path[len(home) :].lstrip("/") if is_inside else ""
                first, slash, _ = inside.partition("/")
                if inside == SNAPSHOT_METADATA or (slash and _DATA_FOLDER.fullmatch(first)):
                    files[home].append(path)
                    break
        reason = f"{SNAPSHOT_METADATA!r}, which torchsnapshot writes last"
        return [Candidate(self.name, h, tuple(sorted(f)), reason) for h, f in sorted(files.items())]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses the manifest; data files are only looked up."""
        path = posixpath.join(candidate.folder, SNAPSHOT_METADATA)
        manifest = read_manifest(source, path)
        where = posixpath.join(source.location, candidate.folder)
        return _Assembly(source, candidate.folder, manifest, where).index(source.stat(path))


class _Assembly:
    """Makes the index of a manifest."""

    def __init__(self, source: Source, folder: str, manifest: SnapshotManifest, where: str) -> None:
        self._source = source
        self._folder = folder
        self._manifest = manifest
        self._where = where
        self._files: dict[str, int] = {}
        self._refs: list[FileRef] = []
        self._record_numbers: dict[tuple[str, tuple[int, int] | None], int] = {}
        self._records: list[Record] = []

    def index(self, manifest_file: FileRef) -> TensorIndex:
        merged = merge_ranks(self._manifest.ranks, self._where)
        memberships = classify([tensor.path for tensor in merged.tensors], where=self._where)
        entries = {
            Key(tensor.key): self._entry(tensor, membership)
            for tensor, membership in zip(merged.tensors, memberships, strict=True)
        }
        # Further copies, which are not read, use bytes of the files too.
        for rank in self._manifest.ranks:
            for path, tensor in rank.tensors.items():
                for block in tensor.blocks:
                    self._record(block, f"{self._where}: tensor {quote(path)}")
        self._check_extents()
        values = merged.values
        for key, value in values.items():
            if isinstance(value, SavedObject):
                file = self._refs[self._file(value.location)]
                values[key] = BlobRef(file.path, 0, max(file.size_bytes, 0))
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
                notes=tuple(merged.notes),
            ),
            problems=tuple(
                Problem(UnsupportedError.code, key, why) for key, why in merged.unread.items()
            ),
        )

    def _entry(self, tensor: MergedTensor, membership: Membership) -> TensorEntry:
        where = f"{self._where}: tensor {quote(tensor.key)}"
        shape = tensor.shape
        dtype = tensor.blocks[0][1].dtype
        if any(block.dtype != dtype for _, block in tensor.blocks):
            raise FormatError("is stored in several element types", where=where)
        if overflows(shape, dtype):
            raise FormatError(f"size of shape {list(shape)} overflows", where=where)
        chunks = [
            Chunk(
                # The chunks of a scalar have one dimension.
                block.box if shape else Box((), ()),
                self._record(block, where),
                byte_offset=None if block.is_archive else 0,
                rank=rank,
            )
            for rank, block in tensor.blocks
        ]
        table = ChunkTable.of(chunks, len(shape))
        return membership.entry(tensor.path, dtype, shape, table, key=tensor.key)

    def _record(self, block: SavedBlock, where: str) -> int:
        """Returns the position of the record of a block, which is added if new."""
        needed = math.prod(block.box.sizes) * block.dtype.itemsize
        start, stop = block.byte_range or (0, needed)
        if stop - start != needed and not block.is_archive:
            raise FormatError(
                f"has {needed:,} bytes in {list(block.box.sizes)}, and a range of"
                f" {stop - start:,} in its file: sizes do not add up",
                where=where,
            )
        number = self._record_numbers.get((block.location, block.byte_range))
        if number is None:
            file = self._file(block.location)
            if block.is_archive:
                record = Record(file, 0, max(self._refs[file].size_bytes, 0), "torch_zip")
            else:
                record = Record(file, start, stop)
            number = self._record_numbers[block.location, block.byte_range] = len(self._records)
            self._records.append(record)
        return number

    def _file(self, location: str) -> int:
        """Returns the position of a file of the snapshot; a missing one has size -1."""
        number = self._files.get(location)
        if number is None:
            number = self._files[location] = len(self._refs)
            path = posixpath.join(self._folder, location)
            self._refs.append(stat_or_missing(self._source, path))
        return number

    def _check_extents(self) -> None:
        """Checks that every byte of a file is of one tensor; the plan refuses short files."""
        at, of_file = 0, -1
        rows = sorted((r.file, r.start, r.stop) for r in self._records if r.stop > r.start)
        for file, start, stop in [*rows, (-1, 0, 0)]:
            if file != of_file:
                held = self._refs[of_file] if of_file >= 0 else None
                if held is not None and held.size_bytes > at:
                    raise FormatError(
                        f"has {held.size_bytes:,} bytes, and the manifest lists {at:,}: sizes"
                        " do not add up",
                        where=posixpath.join(self._source.location, held.path),
                        hint="the file is of another snapshot, or was damaged; take another copy"
                        " of it",
                    )
                at, of_file = 0, file
            if start != at:
                first, last = sorted((start, at))
                raise FormatError(
                    f"bytes [{first:,}, {last:,}) are of {'two tensors' if start < at else 'none'}",
                    where=posixpath.join(self._source.location, self._refs[file].path),
                )
            at = stop
