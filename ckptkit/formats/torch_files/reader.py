"""The reader of files that `torch.save` writes, single or in numbered sets with an index.

Models in several files: which belong together, and the `weight_map` that says what is where.

Source: huggingface_hub, serialization/_base.py (`split_state_dict_into_shards_factory`): files
`<stem>-00001-of-00002.<ending>` beside `<stem>.<ending>.index.json`.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    MissingFileError,
    UnsafePathError,
)
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
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import (
    TRAINING_VALUES,
    Framework,
    Membership,
    classify,
    framework_of_values,
)
from ckptkit.storage.base import Source

INDEX_ENDING = ".index.json"
MAX_JSON_BYTES = 100_000_000
_NAMED = 3  # how many missing names a message spells out
_PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class FileSet:
    """Files of one folder that make up one model; `index` is among `files`, or None."""

    folder: str
    files: tuple[str, ...]
    index: str | None

    def candidate(self, format_name: str) -> Candidate:
        """Returns the set as something to choose from."""
        shown = self.index or self.files[0]
        reason = repr(posixpath.basename(shown))
        others = len(self.files) - 1
        if others:
            reason += f" beside {others} other file{'' if others == 1 else 's'} of the same model"
        return Candidate(format_name, self.folder, self.files, reason)


def file_sets(paths: Iterable[str], endings: Sequence[str]) -> list[FileSet]:
    """Returns the files with the given endings, and their indices, sorted into models.

    An index takes the numbered files of its stem, or all that nothing else explains when there
    are none; numbered files without an index are one set per stem; any other file is its own.
    """
    folders: dict[str, list[str]] = {}
    for path in paths:
        if path.endswith((*endings, *(ending + INDEX_ENDING for ending in endings))):
            folders.setdefault(posixpath.dirname(path), []).append(path)
    return [found for folder, held in sorted(folders.items()) for found in _sets_of(folder, held)]


def _sets_of(folder: str, paths: list[str]) -> list[FileSet]:
    groups: dict[tuple[str, str], list[str]] = {}
    single = []
    for path in sorted(paths):
        piece = _PIECE.fullmatch(posixpath.splitext(path)[0])
        if path.endswith(INDEX_ENDING):
            continue
        if piece:
            ending = posixpath.splitext(path)[1]
            groups.setdefault((piece["stem"] + ending, piece["count"]), []).append(path)
        else:
            single.append(path)
    found = []
    for index in sorted(path for path in paths if path.endswith(INDEX_ENDING)):
        own = [k for k in groups if k[0] == index.removesuffix(INDEX_ENDING)]
        files = [path for k in own for path in groups.pop(k)]
        if not own and not groups:
            files, single = single, []
        found.append(FileSet(folder, tuple(sorted([*files, index])), index))
    found += [FileSet(folder, tuple(files), None) for files in groups.values()]
    return found + [FileSet(folder, (path,), None) for path in single]


def read_weight_map(source: Source, path: str) -> dict[str, str]:
    """Returns what an index says: file path, relative to the source, by tensor name."""
    where = posixpath.join(source.location, path)
    size_bytes = source.stat(path).size_bytes
    if size_bytes > MAX_JSON_BYTES:
        raise LimitError(
            f"index has {size_bytes:,} bytes, at most {MAX_JSON_BYTES:,} are read",
            where=where,
        )
    content = loads_strictly(source.read(path, 0, size_bytes), where=where)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise FormatError("index has no 'weight_map' from names to files", where=where)
    for file in set(names.values()):
        if not _stays_inside(file):
            raise UnsafePathError(f"file name {file!r} leads out of the folder", where=where)
    folder = posixpath.dirname(path)
    return {name: posixpath.join(folder, file) for name, file in names.items()}


def _stays_inside(file: str) -> bool:
    parts = file.split("/")
    return not ({"", ".", ".."} & set(parts) or "\\" in file or "\0" in file or ":" in file)


def members(source: Source, candidate: Candidate) -> tuple[list[str], dict[str, str] | None]:
    """Returns the data files of a candidate, and its weight map where it has an index."""
    where = posixpath.join(source.location, candidate.folder)
    indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
    if not indices:
        _check_numbering(candidate.files, where)
        return list(candidate.files), None
    weight_map = read_weight_map(source, indices[0])
    if not weight_map:
        raise IncompleteCheckpointError("index lists no tensor", where=where)
    wanted = sorted(set(weight_map.values()))
    there = set(candidate.files) | {path for path in wanted if _exists(source, path)}
    _refuse_missing([path for path in wanted if path not in there], len(wanted), where)
    return wanted, weight_map


def _exists(source: Source, path: str) -> bool:
    try:
        source.stat(path)
    except MissingFileError:
        return False
    return True


def _check_numbering(files: Sequence[str], where: str) -> None:
    """Refuses a numbered set with gaps; a single file that has no number is whole."""
    pieces = [_PIECE.fullmatch(posixpath.splitext(path)[0]) for path in files]
    first = pieces[0]
    if first is None:
        return
    count, width = int(first["count"]), len(first["number"])
    there = {int(piece["number"]) for piece in pieces if piece}
    if count > len(files):
        missing = next(n for n in range(1, count + 1) if n not in there)
        name = f"{posixpath.basename(first['stem'])}-{missing:0{width}d}-of-{first['count']}"
        raise MissingFileError(
            f"{len(files):,} of {count:,} files are there; {name!r} is missing",
            where=where,
            hint="copy the missing files as well",
        )


def _refuse_missing(missing: list[str], count: int, where: str) -> None:
    if missing:
        shown = ", ".join(repr(posixpath.basename(path)) for path in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise MissingFileError(
            f"index names {count:,} files; missing are {shown}{more}",
            where=where,
            hint="copy the missing files as well",
        )


def check_weight_map(
    weight_map: Mapping[str, str], found: Mapping[str, str], *, where: str
) -> None:
    """Proves that an index and the headers of its files tell the same.

    Args:
        weight_map: What the index says: file by tensor name.
        found: What the headers say.
        where: The checkpoint, for messages.
    """
    for name in [*weight_map, *found]:
        said, real = weight_map.get(name), found.get(name)
        if said != real:
            raise FormatError(
                f"index has tensor {name!r} in {_file(said)}, it is in {_file(real)}",
                where=where,
            )


def _file(path: str | None) -> str:
    return "no file" if path is None else repr(posixpath.basename(path))


def loads_strictly(data: bytes, *, where: str) -> object:
    """Returns parsed JSON, in which no name stands twice in one object."""
    try:
        content: object = json.loads(
            data.decode(),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
        )
        if b"\\u" in data:  # half a surrogate pair is no text, and nothing could print it
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FormatError("JSON is nested too deeply", where=where) from error
    except FormatError as error:
        raise error.located(where) from error
    except ValueError as error:
        raise FormatError(f"not JSON: {error}", where=where) from error
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise FormatError(f"name {twice!r} stands twice in one object")
    return result


def _no_constant(name: str) -> object:
    raise FormatError(f"{name} is not JSON")


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
        own = [path for path in paths if not _NOT_A_MODEL.fullmatch(posixpath.basename(path))]
        return [found.candidate(self.name) for found in file_sets(own, ENDINGS)]

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Returns the index of the directories and pickles of all files of a candidate."""
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
        files, records = self._table.files, self._table.records
        return {t.key: files[records[t.record].file].path for t in self._tensors}

    def index(self, where: str) -> TensorIndex:
        """Returns the index of everything that was added."""
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
