"""The reader of snapshots that torchsnapshot took, at any number of ranks.

Source: torchsnapshot/snapshot.py, manifest_ops.py, batcher.py, 0.1.0 and nightly 2024.7.26.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence

from ckptkit.core.errors import (
    FormatError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    FileRef,
    Key,
    Problem,
    Record,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp import BlobRef
from ckptkit.formats.pickles import shown
from ckptkit.formats.torchsnapshot_manifest import (
    Piece,
    SavedObject,
    SnapshotManifest,
    read_manifest,
)
from ckptkit.formats.torchsnapshot_ranks import GatheredTensor, gather_ranks
from ckptkit.formats.trees import Membership, classify
from ckptkit.storage.base import Source

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
        """Parses the manifest; data files are only looked up.

        Raises:
            UnsupportedError: If the manifest names what is not modelled.
            IncompleteCheckpointError: If it lacks a rank, or all blocks of a tensor.
            InputError: If it is damaged, or files are longer than it says.
        """
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
