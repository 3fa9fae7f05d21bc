"""The reader of files that `torch.save` writes, single or in numbered sets with an index."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import FormatError, LimitError, UnsupportedError
from ckptkit.core.index import (
    Box,
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
from ckptkit.formats.torch_values import TensorRef, parse_values
from ckptkit.formats.torch_zip import Archive, open_archive
from ckptkit.formats.trees import Membership, classify
from ckptkit.formats.weight_map import (
    INDEX_ENDING,
    check_weight_map,
    file_sets,
    members,
)
from ckptkit.storage.base import Source

ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
MAX_DEPTH = 32
MAX_KEY_CHARACTERS = 64  # per byte of the pickle, for all keys of a file together
_SCALARS = frozenset({str, bytes, bool, int, float, type(None)})
# Files that accelerate, the Trainer and DeepSpeed write beside a model and that hold none.
_NOT_A_MODEL = re.compile(
    r"optim.*|scheduler.*|lr_scheduler.*|scaler.*|sampler.*|rng_state.*|random_states.*"
    r"|training_args\.bin|extra_state.*|(bf16_)?zero_pp_rank_.*"
)
# Before 1.6, files began with a pickle of this number: 0x1950a86a20f9469cfc6c.
_OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_ONLY_TENSOR: KeyPath = ("tensor",)  # the path of a tensor that is in no container


class TorchFileReader:
    """Reads models that `torch.save` wrote."""

    name = "torch"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises single files, and sets that are numbered or have an index."""
        own = [path for path in paths if not _NOT_A_MODEL.fullmatch(posixpath.basename(path))]
        return [found.candidate(self.name) for found in file_sets(own, ENDINGS)]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the directories and pickles of all files of a candidate.

        Raises:
            MissingFileError: If a file of the set is not there.
            UnsupportedError: If a file is of a kind that is not modelled.
            UnsafePickleError: If a pickle names something outside the allow-list.
            InputError: If a file or the index is damaged, or they contradict each other.
        """
        where = posixpath.join(source.location, candidate.folder)
        paths, weight_map = members(source, candidate)
        contents = _Contents()
        for path in paths:
            contents.add_file(source, source.stat(path))
        if weight_map is not None:
            check_weight_map(weight_map, contents.homes(), where=where)
        indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
        return TensorIndex(
            format=self.name,
            files=(*contents.files, *map(source.stat, indices)),
            records=RecordTable.of(contents.records),
            tensors=_entries(contents.tensors, where),
            values=contents.values,
            aliases=_aliases(contents.tensors),
            run=RunFacts(writer="torch.save"),
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor at the end of a path, and the position of its storage's record."""

    path: KeyPath
    tensor: TensorRef
    record: int

    @property
    def key(self) -> Key:
        """The path, dotted."""
        return Key(".".join(map(str, self.path)))


@dataclass(slots=True)
class _Contents:
    """Collects what the files of one candidate hold."""

    files: list[FileRef] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    tensors: list[_Found] = field(default_factory=list)
    values: dict[KeyPath, Any] = field(default_factory=dict)

    def add_file(self, source: Source, file: FileRef) -> None:
        """Adds the tensors and values of one file."""
        where = posixpath.join(source.location, file.path)
        archive = _open(source, file, where)
        pickle = archive.pickle()
        root = parse_values(pickle, where=where)
        number = len(self.files)
        self.files.append(file)
        places: dict[str, int] = {}
        characters = MAX_KEY_CHARACTERS * len(pickle)
        # No honest pickle reaches more than one value per byte.
        for path, value in walk(root, limit=len(pickle), where=where):
            if not isinstance(value, TensorRef):
                self.values[path] = value
                continue
            record = self._record(archive, number, value, places)
            found = _Found(path or _ONLY_TENSOR, value, record)
            self.tensors.append(found)
            characters -= len(found.key)
            if characters < 0:
                raise LimitError("names of tensors are far longer than the pickle", where=where)

    def homes(self) -> dict[str, str]:
        """Maps every tensor to the file that holds it."""
        return {t.key: self.files[self.records[t.record].file].path for t in self.tensors}

    def _record(
        self, archive: Archive, number: int, tensor: TensorRef, places: dict[str, int]
    ) -> int:
        """Returns the position of the record of a tensor's storage, adding it when new."""
        storage = tensor.storage
        known = places.get(storage.key)
        if known is None:
            start, stop, crc32 = archive.extent(storage)
            places[storage.key] = known = len(self.records)
            self.records.append(Record(number, start, stop, crc32=crc32))
        record = self.records[known]
        if record.stop - record.start != storage.size_bytes:
            raise FormatError(
                f"storage {storage.key!r} has two different lengths",
                where=archive.where,
            )
        return known


def walk(root: object, *, limit: int, where: str) -> Iterator[tuple[KeyPath, object]]:
    """Yields what the containers of an inert value hold, with the path of keys that leads to it.

    Args:
        root: Dictionaries, lists and tuples, nested; they may be shared.
        limit: How many values may be met at most.
        where: The file, for messages.

    Raises:
        LimitError: If there are more values than `limit`, as sharing can bring about.
        FormatError: If containers hold themselves, or are nested more than `MAX_DEPTH` deep.
    """
    met = 0
    waiting: list[tuple[KeyPath, object]] = [((), root)]
    while waiting:
        path, value = waiting.pop()
        met += 1
        if met > limit:
            raise LimitError(f"pickle unfolds into more than {limit:,} values", where=where)
        inside = _inside(value)
        if not inside:
            yield path, value
            continue
        if len(path) == MAX_DEPTH:
            raise FormatError(f"containers are nested more than {MAX_DEPTH} deep", where=where)
        if met + len(waiting) + len(inside) > limit:
            raise LimitError(f"pickle unfolds into more than {limit:,} values", where=where)
        waiting += [((*path, key), item) for key, item in reversed(inside)]


def _inside(value: object) -> list[tuple[str | int, object]]:
    """Returns what a container holds by key; nothing for whatever is no container."""
    if isinstance(value, dict):
        return [(_step(key), item) for key, item in value.items()]
    # Sequences of plain numbers can be long (the order of a data set), and are kept whole.
    if isinstance(value, (list, tuple)) and not all(type(item) in _SCALARS for item in value):
        return list(enumerate(value))
    return []


def _step(key: object) -> str | int:
    """Makes a dictionary key part of a path; a rare one is only named by its kind."""
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    if key is None or isinstance(key, (bool, float)):
        return repr(key)
    return f"<{type(key).__name__}>"


def _open(source: Source, file: FileRef, where: str) -> Archive:
    def read(start: int, stop: int) -> bytes:
        return source.read(file.path, start, stop)

    if file.size_bytes >= len(_OLD_MAGIC) and read(0, len(_OLD_MAGIC)) == _OLD_MAGIC:
        raise UnsupportedError(
            "file has the layout that torch wrote before 1.6, which is not modelled",
            where=where,
            hint="save it again: `torch.save(torch.load(path, weights_only=True), path)`",
        )
    return open_archive(read, file.size_bytes, where=where)


def _entries(tensors: list[_Found], where: str) -> dict[Key, TensorEntry]:
    places = classify([found.path for found in tensors], where=where)
    entries: dict[Key, TensorEntry] = {}
    for found, place in zip(tensors, places, strict=True):
        entry = _entry(found, place)
        if entry.key in entries:
            raise FormatError(f"two tensors are called {entry.key!r}", where=where)
        entries[entry.key] = entry
    return entries


def _entry(found: _Found, place: Membership) -> TensorEntry:
    tensor = found.tensor
    chunk = Chunk(
        Box((0,) * len(tensor.shape), tensor.shape),
        found.record,
        byte_offset=tensor.storage_offset * tensor.dtype.itemsize,
        strides=None if tensor.row_major else tensor.strides,
    )
    return TensorEntry(
        key=found.key,
        key_path=found.path,
        name=place.name,
        tree=place.tree,
        part=place.part,
        dtype=tensor.dtype,
        shape=tensor.shape,
        chunks=ChunkTable.of([chunk], len(tensor.shape)),
    )


def _aliases(tensors: list[_Found]) -> tuple[frozenset[Key], ...]:
    """Groups the names under which the very same view of a storage is found."""
    groups: dict[tuple[int, TensorRef], set[Key]] = defaultdict(set)
    for found in tensors:
        if 0 not in found.tensor.shape:
            groups[found.record, found.tensor].add(found.key)
    return tuple(frozenset(keys) for keys in groups.values() if len(keys) > 1)
