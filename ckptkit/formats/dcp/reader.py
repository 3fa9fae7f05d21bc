"""The reader of torch.distributed.checkpoint: `.metadata` beside `.distcp` files.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, 2.1 to 2.14.

Data files of DCP that end with a safetensors image: `SerializationFormat.SAFETENSORS`.

Python objects come first, then one image with all tensors of the file. `.metadata` has every
tensor begin where the image does, so that torch itself cannot read one back; where a tensor lies,
the header of the image tells.

Source: torch/distributed/checkpoint/filesystem.py (`_write_files_from_queue`), torch 2.8 to 2.13.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptkit.core.errors import FormatError, IncompleteCheckpointError, MissingFileError
from ckptkit.core.index import (
    CONTAINERS,
    ChunkTable,
    FileRange,
    FileRef,
    Ints,
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.join import LEAST_ARCHIVE_BYTES
from ckptkit.formats.dcp.metadata import DcpMetadata, DcpTensor, parse_metadata
from ckptkit.formats.dcp.zstd import decoded, is_zstd
from ckptkit.formats.pickle.zip_directory import Read
from ckptkit.formats.safetensors.reader import StoredTensor, read_header, saved_offsets
from ckptkit.formats.trees import (
    LIGHTNING_META,
    Framework,
    classify,
    framework_of_keys,
    framework_of_meta,
)
from ckptkit.storage.base import Source, prefetch

_Held = Mapping[str, tuple[StoredTensor, Shape]]


@dataclass(slots=True)
class Images:
    """Looks chunks up in the images of the files that hold them.

    Attributes:
        source: Where the files lie.
        files: All data files; those that are missing have a negative size.
        problems: Chunks that are in no image, as far as was looked.
    """

    source: Source
    files: Sequence[FileRef]
    problems: list[Problem] = field(default_factory=list)
    _images: dict[int, _Held] = field(default_factory=dict)

    def records(self, tensors: Sequence[DcpTensor]) -> RecordTable:
        """Returns where the chunks of tensors lie, in their order.

        Of a file that is missing, the records are where `.metadata` has them.
        """
        self._foresee(tensors)
        rows = [self._place(tensor, row) for tensor in tensors for row in range(len(tensor.file))]
        places = np.array(rows, np.int64).reshape(len(rows), 3)
        return RecordTable(places[:, 0], places[:, 1], places[:, 2])

    def _foresee(self, tensors: Sequence[DcpTensor]) -> None:
        """Has the headers of all images read at once, where each costs a round trip."""
        starts = {
            file: start
            for tensor in tensors
            for file, start in zip(tensor.file.tolist(), tensor.start.tolist(), strict=True)
            if start < self.files[file].size_bytes
        }
        wanted = [FileRange(self.files[n].path, at, at + 1) for n, at in starts.items()]
        prefetch(self.source, wanted)

    def _place(self, tensor: DcpTensor, row: int) -> tuple[int, int, int]:
        file, start = int(tensor.file[row]), int(tensor.start[row])
        stop = start + int(tensor.length[row])
        if self.files[file].size_bytes < 0:
            return file, start, stop
        if file not in self._images:
            self._images[file] = self._opened(self.files[file], start)
        found = self._images[file].get(tensor.key)
        offsets, sizes = tuple(tensor.offsets[row].tolist()), tuple(tensor.sizes[row].tolist())
        if found is None or found[1] != offsets:
            self._note_lost(tensor, self.files[file], offsets, found)
            return file, start, start
        stored = found[0]
        if (stored.dtype, stored.shape) != (tensor.dtype, sizes):
            raise FormatError(
                f"holds {stored.dtype.name} {list(stored.shape)} against {tensor.dtype.name}"
                f" {list(sizes)} in '.metadata'",
                where=f"{self._where(self.files[file])}: tensor {tensor.key!r}",
                hint="the file belongs to another save, or was damaged",
            )
        return file, stored.start, stored.stop

    def _opened(self, file: FileRef, start: int) -> _Held:
        header = read_header(self.source, file, start)
        offsets = saved_offsets(header, where=self._where(file))
        return {stored.name: (stored, offsets[stored.name]) for stored in header.tensors}

    def _note_lost(
        self,
        tensor: DcpTensor,
        file: FileRef,
        offsets: Shape,
        found: tuple[StoredTensor, Shape] | None,
    ) -> None:
        """Takes note of a chunk that its file lacks.

        Torch keeps one piece of each name in an image: of two that a rank holds, the last.
        """
        instead = f", in its place is that from {list(found[1])} on" if found else ""
        self.problems.append(
            Problem(
                IncompleteCheckpointError.code,
                tensor.key,
                f"the piece from {list(offsets)} on is not in {file.path!r}{instead}",
            )
        )

    def _where(self, file: FileRef) -> str:
        return posixpath.join(self.source.location, file.path)


METADATA = ".metadata"
_DATA = re.compile(r"__(\d{1,7})_(?:frozen_)?\d+\.distcp")  # the latter are ours
_TORCH_ZIP = CONTAINERS.index("torch_zip")
_MOST_DECODED_BYTES = 64 << 20  # of one object that is compressed
_ZSTD = CONTAINERS.index("zstd_torch_zip")


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A python object of the checkpoint, left where it is until somebody needs it.

    Attributes:
        path: Its file.
        start: First byte of its archive.
        stop: First byte after it.
        is_compressed: Whether the archive has to be decoded as a zstd stream first.
    """

    path: str
    start: int
    stop: int
    is_compressed: bool = False


def content_of(source: Source, blob: BlobRef, *, where: str) -> tuple[Read, int]:
    """Returns how to read the archive of an object, and the archive's length."""

    def read(start: int, stop: int) -> bytes:
        return source.read(blob.path, blob.start + start, blob.start + stop)

    size = blob.stop - blob.start
    if not blob.is_compressed:
        return read, size
    content = decoded(read, size, most_bytes=_MOST_DECODED_BYTES, where=where)
    return lambda start, stop: content[start:stop], len(content)


class DcpReader:
    """Reads what `torch.distributed.checkpoint.save` writes."""

    name = "dcp"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders that hold `.metadata` or `.distcp` files."""
        folders: dict[str, list[str]] = {}
        for path in paths:
            base = posixpath.basename(path)
            if base in {METADATA, LIGHTNING_META} or base.endswith(".distcp"):
                folders.setdefault(posixpath.dirname(path), []).append(path)
        return [
            self._candidate(folder, files)
            for folder, files in sorted(folders.items())
            if any(posixpath.basename(path) != LIGHTNING_META for path in files)
        ]

    def _candidate(self, folder: str, files: list[str]) -> Candidate:
        data = sum(1 for path in files if path.endswith(".distcp"))
        there = posixpath.join(folder, METADATA) in files
        found = "'.metadata'" if there else "no '.metadata'"
        reason = f"{found} beside {data} '.distcp' file{'' if data == 1 else 's'}"
        return Candidate(self.name, folder, tuple(sorted(files)), reason)

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses `.metadata`; data files are only looked up.

        Returns:
            The index; files that are missing or short are left for the plan to refuse.
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
        index = _Assembly(source, candidate.folder, stat, metadata, where).index()
        return _with_framework(index, source, candidate)


class _Assembly:
    """Turns parsed metadata into an index."""

    def __init__(
        self, source: Source, folder: str, stat: FileRef, metadata: DcpMetadata, where: str
    ) -> None:
        self.source = source
        self.metadata = metadata
        self.where = where
        self.paths = [posixpath.join(folder, path) for path in metadata.paths]
        self.files = [*(_stat_or_missing(source, path) for path in self.paths), stat]
        self.ranks = np.array([_rank_of(path) for path in metadata.paths], np.int64)

    def index(self) -> TensorIndex:
        self._check_tied_files()
        tensors = list(self.metadata.tensors.values())
        places = classify(
            [self._key_path(t.key) for t in tensors],
            where=self.where,
            values=map(self._key_path, self.metadata.blobs),
        )
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
        images = Images(self.source, self.files)
        records = images.records(tensors) if self.metadata.has_images else self._records(tensors)
        return TensorIndex(
            format=DcpReader.name,
            files=tuple(self.files),
            records=records,
            tensors=entries,
            values={
                self._key_path(blob.key): BlobRef(
                    self.paths[blob.file],
                    blob.start,
                    blob.start + blob.length,
                    any(map(is_zstd, blob.transforms)),
                )
                for blob in self.metadata.blobs.values()
            },
            run=self._run(),
            problems=(*self._problems(), *images.problems),
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
        container: Ints | int = _TORCH_ZIP  # in no memory, where all are the same
        if any(tensor.transforms for tensor in tensors):
            kinds = [_ZSTD if tensor.transforms else _TORCH_ZIP for tensor in tensors]
            container = np.repeat(kinds, [len(tensor.file) for tensor in tensors])
        return RecordTable(file, start, start + length, container=container)

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
            and (self.metadata.has_images or not all(map(is_zstd, tensor.transforms)))
        ]

    def _run(self) -> RunFacts:
        ranks = self.ranks[self.ranks >= 0]
        clothes = ", SerializationFormat.SAFETENSORS" if self.metadata.has_images else ""
        if any(any(map(is_zstd, t.transforms)) for t in self.metadata.tensors.values()):
            clothes += ", compressed with zstd"
        return RunFacts(
            world_size=int(ranks.max()) + 1 if len(ranks) else None,
            writer=f"torch.distributed.checkpoint of {self.metadata.writer}{clothes}",
        )


def _with_framework(index: TensorIndex, source: Source, candidate: Candidate) -> TensorIndex:
    """Adds what is known of the framework that let torch save."""
    meta = posixpath.join(candidate.folder, LIGHTNING_META)
    paths = [*(entry.key_path for entry in index.tensors.values()), *index.values]
    has_meta = meta in candidate.files
    found: Framework = framework_of_meta(source, meta) if has_meta else framework_of_keys(paths)
    run = replace(
        index.run,
        step=found.step,
        writer=", ".join(filter(None, [index.run.writer, found.name])),
        version=found.version,
        notes=(*index.run.notes, *found.notes),
    )
    files = (*index.files, _stat_or_missing(source, meta)) if has_meta else index.files
    return replace(index, files=files, run=run, problems=(*index.problems, *found.problems))


def _stat_or_missing(source: Source, path: str) -> FileRef:
    try:
        return source.stat(path)
    except MissingFileError:
        return FileRef(path, -1, "")


def _rank_of(path: str) -> int:
    match = _DATA.fullmatch(posixpath.basename(path))
    return int(match[1]) if match else -1
