"""The reader of files that `torch.save` writes, single or in numbered sets with an index."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.core.errors import FormatError, LimitError
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Key,
    KeyPath,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.frameworks import Framework, framework_of_values
from ckptkit.formats.torch_archives import ArchiveTable
from ckptkit.formats.torch_values import TensorRef
from ckptkit.formats.training_values import TRAINING_VALUES
from ckptkit.formats.trees import Membership, classify
from ckptkit.formats.weight_map import (
    INDEX_ENDING,
    check_weight_map,
    file_sets,
    members,
)
from ckptkit.storage.base import Source

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
MAX_DEPTH = 32
MAX_KEY_CHARACTERS = 64  # per byte of the pickle, for all keys of a file together
_SCALARS = frozenset({str, bytes, bool, int, float, type(None)})
# Files that accelerate, the Trainer and DeepSpeed write beside a model and that hold none.
_NOT_A_MODEL = re.compile(
    r"optim.*|scheduler.*|lr_scheduler.*|scaler.*|sampler.*|rng_state.*|random_states.*|dl_state_dict.*"
    r"|training_args\.bin|extra_state.*|(bf16_)?zero_pp_rank_.*"
)
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
        contents = TorchContents()
        for path in paths:
            contents.add_file(source, path)
        if weight_map is not None:
            check_weight_map(weight_map, contents.homes(), where=where)
        indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
        index = contents.index(where)
        return replace(index, files=(*index.files, *map(source.stat, indices)))


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
class TorchContents:
    """Collects what the files of one candidate hold."""

    _table: ArchiveTable = field(default_factory=ArchiveTable)
    _tensors: list[_Found] = field(default_factory=list)
    _values: dict[KeyPath, Any] = field(default_factory=dict)
    _framework: Framework = field(default_factory=Framework)
    _notes: list[str] = field(default_factory=list)

    def add_file(self, source: Source, path: str, under: KeyPath = ()) -> None:
        """Adds the tensors and values of one file.

        Args:
            source: Where it lies.
            path: The file.
            under: Keys that all its values are put under.

        Raises:
            UnsafePickleError: If the pickle names something outside the allow-list.
            UnsupportedError: If the file is of a kind that is not modelled.
            FormatError: If it is damaged.
            LimitError: If it was made to exhaust memory.
        """
        file = self._table.open(source, path, TRAINING_VALUES)
        if not self._framework.name:
            self._framework = framework_of_values(file.root)
        if file.is_legacy:
            self._notes.append(
                f"{posixpath.basename(path)} has the layout of torch before 1.6, without checksums"
            )
        characters = MAX_KEY_CHARACTERS * file.pickle_bytes
        # No honest pickle reaches more than one value per byte.
        for steps, value in walk(file.root, limit=file.pickle_bytes, where=file.where):
            if not isinstance(value, TensorRef):
                self._values[(*under, *steps)] = value
                continue
            place = (*under, *(steps or _ONLY_TENSOR))
            found = _Found(place, value, self._table.record(file, value))
            self._tensors.append(found)
            characters -= len(found.key)
            if characters < 0:
                raise LimitError(
                    "names of tensors are far longer than the pickle", where=file.where
                )

    def homes(self) -> dict[str, str]:
        """Maps every tensor to the file that holds it."""
        files, records = self._table.files, self._table.records
        return {t.key: files[records[t.record].file].path for t in self._tensors}

    def index(self, where: str) -> TensorIndex:
        """Returns the index of everything that was added.

        Raises:
            FormatError: If two tensors have the same name.
        """
        writer = self._framework.name or "torch.save"
        return TensorIndex(
            format=TorchFileReader.name,
            files=tuple(self._table.files),
            records=RecordTable.of(self._table.records),
            tensors=_entries(self._tensors, self._values, where),
            values=self._values,
            aliases=_aliases(self._tensors),
            run=RunFacts(
                step=self._framework.step,
                writer=writer,
                version=self._framework.version,
                notes=tuple(self._notes),
            ),
        )


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


def _entries(
    tensors: list[_Found], values: Iterable[KeyPath], where: str
) -> dict[Key, TensorEntry]:
    places = classify([found.path for found in tensors], where=where, values=values)
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
