"""The reader of torch.distributed.checkpoint: `.metadata` beside `.distcp` files.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, 2.1 to 2.14.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.core.errors import FormatError, MissingFileError
from ckptkit.core.index import (
    CONTAINERS,
    ChunkTable,
    FileRef,
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp_join import LEAST_ARCHIVE_BYTES
from ckptkit.formats.dcp_metadata import DcpMetadata, DcpTensor, parse_metadata
from ckptkit.formats.trees import classify
from ckptkit.storage.base import Source

METADATA = ".metadata"
_DATA = re.compile(r"__(\d+)_(?:frozen_)?\d+\.distcp")  # the latter are ours
_TORCH_ZIP = CONTAINERS.index("torch_zip")


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A python object of the checkpoint, left where it is until somebody needs it."""

    path: str
    start: int
    stop: int


class DcpReader:
    """Reads what `torch.distributed.checkpoint.save` writes."""

    name = "dcp"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders that hold `.metadata` or `.distcp` files."""
        folders: dict[str, list[str]] = {}
        for path in paths:
            base = posixpath.basename(path)
            if base == METADATA or base.endswith(".distcp"):
                folders.setdefault(posixpath.dirname(path), []).append(path)
        return [self._candidate(folder, files) for folder, files in sorted(folders.items())]

    def _candidate(self, folder: str, files: list[str]) -> Candidate:
        data = sum(1 for path in files if path.endswith(".distcp"))
        found = "'.metadata'" if len(files) > data else "no '.metadata'"
        reason = f"{found} beside {data} '.distcp' file{'' if data == 1 else 's'}"
        return Candidate(self.name, folder, tuple(sorted(files)), reason)

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses `.metadata`; data files are only looked up.

        Returns:
            The index; files that are missing or short are left for the plan to refuse.

        Raises:
            MissingFileError: If `.metadata` is not there.
            InputError: If it is damaged, hostile or not modelled.
        """
        path = posixpath.join(candidate.folder, METADATA)
        where = posixpath.join(source.location, path)
        if path not in candidate.files:
            raise MissingFileError(
                f"{candidate.reason}: the save did not finish, or the file was not copied",
                where=where,
                hint="'.metadata' is written last, by rank 0: name its node's copy with --also, or"
                " take an earlier checkpoint",
            )
        stat = source.stat(path)
        metadata = parse_metadata(source.read(path, 0, stat.size_bytes), where=where)
        return _Assembly(source, candidate.folder, stat, metadata, where).index()


class _Assembly:
    """Turns parsed metadata into an index."""

    def __init__(
        self, source: Source, folder: str, stat: FileRef, metadata: DcpMetadata, where: str
    ) -> None:
        self.metadata = metadata
        self.where = where
        self.paths = [posixpath.join(folder, path) for path in metadata.paths]
        self.files = [*(_stat_or_missing(source, path) for path in self.paths), stat]
        self.ranks = np.array([_rank_of(path) for path in metadata.paths], np.int64)

    def index(self) -> TensorIndex:
        self._check_tied_files()
        tensors = list(self.metadata.tensors.values())
        places = classify([self._key_path(t.key) for t in tensors], where=self.where)
        entries, first = {}, 0
        for tensor, place in zip(tensors, places, strict=True):
            entries[Key(tensor.key)] = TensorEntry(
                key=Key(tensor.key),
                key_path=self._key_path(tensor.key),
                name=place.name,
                tree=place.tree,
                part=place.part,
                dtype=tensor.dtype,
                shape=tensor.shape,
                chunks=self._chunks(tensor, first),
            )
            first += len(tensor.file)
        return TensorIndex(
            format=DcpReader.name,
            files=tuple(self.files),
            records=self._records(tensors),
            tensors=entries,
            values={
                self._key_path(blob.key): BlobRef(
                    self.paths[blob.file], blob.start, blob.start + blob.length
                )
                for blob in self.metadata.blobs.values()
            },
            run=self._run(),
            problems=tuple(self._problems()),
        )

    def _check_tied_files(self) -> None:
        """Refuses a file whose last bytes belong to nothing, while others belong to two."""
        for number, end in self.metadata.tied_files.items():
            file = self.files[number]
            if file.size_bytes - end >= LEAST_ARCHIVE_BYTES:
                raise FormatError(
                    f"the last {file.size_bytes - end:,} bytes of {file.path!r} belong to nothing,"
                    " while others belong to two tensors",
                    where=self.where,
                )

    def _key_path(self, key: str) -> KeyPath:
        planned = self.metadata.planner_data
        return tuple(planned[key]) if planned else (key,)

    def _chunks(self, tensor: DcpTensor, first: int) -> ChunkTable:
        return ChunkTable(
            tensor.offsets,
            tensor.sizes,
            np.arange(first, first + len(tensor.file)),
            rank=self.ranks[tensor.file] if len(self.ranks) else -1,
        )

    def _records(self, tensors: Sequence[DcpTensor]) -> RecordTable:
        empty = np.zeros(0, np.int64)
        start = np.concatenate([empty, *(t.start for t in tensors)])
        length = np.concatenate([empty, *(t.length for t in tensors)])
        file = np.concatenate([empty, *(t.file for t in tensors)])
        return RecordTable(file, start, start + length, container=_TORCH_ZIP)

    def _problems(self) -> list[Problem]:
        return [
            Problem(
                "unsupported",
                tensor.key,
                f"stored through {', '.join(sorted(set(sum(tensor.transforms, ()))))}, which is"
                " not modelled",
            )
            for tensor in self.metadata.tensors.values()
            if tensor.transforms
        ]

    def _run(self) -> RunFacts:
        ranks = self.ranks[self.ranks >= 0]
        return RunFacts(
            world_size=int(ranks.max()) + 1 if len(ranks) else None,
            writer=f"torch.distributed.checkpoint of {self.metadata.writer}",
        )


def _stat_or_missing(source: Source, path: str) -> FileRef:
    try:
        return source.stat(path)
    except MissingFileError:
        return FileRef(path, -1, "")


def _rank_of(path: str) -> int:
    match = _DATA.fullmatch(posixpath.basename(path))
    return int(match[1]) if match else -1
