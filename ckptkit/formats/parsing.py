"""What readers share to parse headers that may be damaged or hostile, and to group files.

Checkpoints of several files are numbered sets with a `weight_map`, or one file for each rank.

Source: huggingface_hub, serialization/_base.py (`split_state_dict_into_shards_factory`): files
`<stem>-00001-of-00002.<ending>` and `<stem>.<ending>.index.json`.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    MissingFileError,
    NotACheckpointError,
    UnsafePathError,
)
from ckptkit.core.index import FileRef, Key, Record, RecordTable, Shape, TensorEntry, TensorIndex
from ckptkit.core.text import counted, join_first
from ckptkit.formats.base import Candidate
from ckptkit.storage.base import Source

Read = Callable[[int, int], bytes]
"""Returns the bytes `[start, stop)` of a file, or of an archive inside a file."""
MAX_DIMENSIONS = 64  # torch's limit
MAX_BYTES = 2**63 - 1


def read_from(source: Source, path: str, first: int = 0) -> Read:
    """Returns a function that reads a file; its positions are counted from byte `first`."""

    def read(start: int, stop: int) -> bytes:
        return source.read(path, first + start, first + stop)

    return read


def read_limited(source: Source, path: str, max_bytes: int, what: str) -> bytes:
    size = source.stat(path).size_bytes
    if size > max_bytes:
        raise LimitError(
            f"{what} has {size:,} bytes, at most {max_bytes:,} are read",
            where=posixpath.join(source.location, path),
        )
    return source.read(path, 0, size)


def stat_or_missing(source: Source, path: str) -> FileRef:
    """Returns the size and identity of a file; the size is -1 where it does not exist."""
    try:
        return source.stat(path)
    except MissingFileError:
        return FileRef(path, -1, "")


class FileTable:
    """The files of an index, and the byte ranges in them that its tensors use."""

    def __init__(self) -> None:
        self.files: list[FileRef] = []
        self.records: list[Record] = []
        self._numbers: dict[object, int] = {}

    def add_file(self, file: FileRef) -> int:
        """Adds a file; returns its position."""
        self.files.append(file)
        return len(self.files) - 1

    def add_record(self, record: Record, name: object = None) -> int:
        """Returns the position of a record, which is added if it, or its name, is new."""
        number = self._numbers.setdefault(name or record, len(self.records))
        if number == len(self.records):
            self.records.append(record)
        return number

    def index(
        self, format_name: str, tensors: Mapping[Key, TensorEntry], *beside: FileRef, **others: Any
    ) -> TensorIndex:
        """Returns the index; files `beside` hold no tensors, `others` are its further fields."""
        files = (*self.files, *beside)
        return TensorIndex(format_name, files, RecordTable.of(self.records), tensors, **others)


def group_by_folder(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the sorted paths in each folder, in the order of the folders' names."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        folders[posixpath.dirname(path)].append(path)
    return dict(sorted(folders.items()))


def stays_inside(path: str) -> bool:
    """Returns whether a path that a header names cannot lead out of the checkpoint's folder."""
    return not ({"", ".", ".."} & set(path.split("/")) or "\0" in path)


def is_count(value: object, most: int = MAX_BYTES) -> TypeGuard[int]:
    """Returns whether a parsed value is an integer from 0 to `most`; a bool is not."""
    return type(value) is int and 0 <= value <= most


def overflows(shape: Shape, dtype: DType) -> bool:
    """Returns whether a size in bytes exceeds int64, sizes of 0 counted as 1."""
    return math.prod(size or 1 for size in shape) * dtype.itemsize > MAX_BYTES


def parse_json(data: bytes, *, where: str) -> object:
    """Parses JSON strictly: no name occurs twice in an object, and numbers are finite."""
    try:
        content: object = json.loads(
            data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
        if b"\\u" in data:  # half of a surrogate pair is not text and cannot be printed
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FormatError("JSON is nested too deeply", where=where) from error
    except FormatError as error:
        raise error.located(where) from error
    except ValueError as error:
        raise FormatError(f"not JSON: {error}", where=where) from error
    return content


def read_json_object(source: Source, path: str, max_bytes: int, what: str) -> dict[str, Any]:
    where = posixpath.join(source.location, path)
    content = parse_json(read_limited(source, path, max_bytes, what), where=where)
    if not isinstance(content, dict):
        raise FormatError("is not a JSON object", where=where)
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise FormatError(f"name {twice!r} occurs twice in one object")
    return result


def _refuse_constant(name: str) -> object:
    raise FormatError(f"{name} is not JSON")


INDEX_ENDING = ".index.json"
MAX_JSON_BYTES = 100_000_000
TWO_SAVES = "files of two saves are in one folder; take an earlier checkpoint"
MIXED_SAVES = "a save went into the folder of another one; take away the files of one"
COPY_BACK = (
    "copy the files back, name where other nodes keep theirs with --also, or take an earlier"
    " checkpoint"
)
_LISTED_NAMES = 3
_LISTED_RANKS = 7
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)")


_MODULE = re.compile(r"(?P<model>(?:.+/)?)[1-9]\d*_\w+/[^/]+")


def _is_of_module(path: str, there: Collection[str]) -> bool:
    """Returns whether a file is of a module of sentence-transformers behind the encoder.

    Source: sentence-transformers 6.2, `SentenceTransformer.save`: `2_Dense/model.safetensors`.
    """
    match = _MODULE.fullmatch(path)
    return match is not None and f"{match['model']}modules.json" in there


def group_model_files(
    paths: Iterable[str], endings: Sequence[str], format_name: str
) -> list[Candidate]:
    """Groups the files with the given endings, and their indices, into models.

    An index takes the numbered files of its stem, or all remaining files if there are none;
    numbered files without an index are one set per stem; any other file is a set of its own.
    """
    with_index = (*endings, *(ending + INDEX_ENDING for ending in endings))
    there = set(paths)
    models = (path for path in there if not _is_of_module(path, there))
    folders = group_by_folder(path for path in models if path.endswith(with_index))
    candidates = []

    def add(folder: str, files: Sequence[str], index: str | None = None) -> None:
        reason = repr(posixpath.basename(index or files[0]))
        if files[1:]:
            others = counted(len(files) - 1, "other file")
            reason += f" beside {others} of the same model"
        candidates.append(Candidate(format_name, folder, tuple(files), reason))

    for folder, inside in folders.items():
        groups: dict[tuple[str, str], list[str]] = {}
        single = []
        indices = [path for path in inside if path.endswith(INDEX_ENDING)]
        for path in (path for path in inside if path not in indices):
            stem, ending = posixpath.splitext(path)
            if match := _NUMBERED.fullmatch(stem):
                groups.setdefault((match["stem"] + ending, match["count"]), []).append(path)
            else:
                single.append(path)
        for index in indices:
            own = [key for key in groups if key[0] == index.removesuffix(INDEX_ENDING)]
            files = [path for key in own for path in groups.pop(key)]
            if not own and not groups:
                files, single = single, []
            add(folder, sorted([*files, index]), index)
        for files in (*groups.values(), *([path] for path in single)):
            add(folder, files)
    return candidates


def read_index_document(source: Source, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the metadata of an index, or {}, and its weight map with paths of the source."""
    where = posixpath.join(source.location, path)
    content = parse_json(read_limited(source, path, MAX_JSON_BYTES, "index"), where=where)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise FormatError("index has no 'weight_map' from names to files", where=where)
    for file in set(names.values()):
        if not stays_inside(file) or "\\" in file or ":" in file:
            raise UnsafePathError(f"file name {file!r} leads out of the folder", where=where)
    folder = posixpath.dirname(path)
    metadata = content.get("metadata") if isinstance(content, dict) else None
    paths = {name: posixpath.join(folder, file) for name, file in names.items()}
    return (metadata if isinstance(metadata, dict) else {}), paths


def read_weight_map(source: Source, path: str) -> dict[str, str]:
    metadata, weight_map = read_index_document(source, path)
    if "delta_encoding" in metadata:
        where = posixpath.join(source.location, posixpath.dirname(path))
        raise NotACheckpointError(
            "is a delta, which says what changed in a model, and no model",
            where=where,
            hint="apply it to the model that it was made from: ckptkit delta apply BASE DELTA OUT;"
            f" to see what is in it, run `ckptkit inspect {shlex.quote(where)}`",
        )
    return weight_map


def find_data_files(
    source: Source, candidate: Candidate
) -> tuple[list[str], dict[str, str] | None]:
    """Returns the data files of a candidate, and its weight map if it has an index."""
    indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
    if not indices:
        path = next(list_unnamed(candidate.files), None)
        if path is not None:
            name = posixpath.splitext(posixpath.basename(path))[0]
            raise MissingFileError(
                f"{len(candidate.files):,} of {int(name.rpartition('-')[2]):,} files are there;"
                f" {name!r} is missing",
                hint="copy the missing files as well",
            )
        return list(candidate.files), None
    weight_map = read_weight_map(source, indices[0])
    if not weight_map:
        raise IncompleteCheckpointError("index lists no tensor")
    paths = sorted(set(weight_map.values()))
    there = set(candidate.files)
    missing = [
        path for path in paths if path not in there and stat_or_missing(source, path).size_bytes < 0
    ]
    if missing:
        names = (repr(posixpath.basename(path)) for path in missing)
        hint = "copy the missing files as well"
        whole = indices[0].removesuffix(INDEX_ENDING)
        if len(missing) == len(paths) and stat_or_missing(source, whole).size_bytes >= 0:
            # `save_pretrained` of Transformers deletes older shards, and leaves their index.
            hint = (
                f"if {posixpath.basename(whole)!r} was saved over the shards, remove the index"
                f" {posixpath.basename(indices[0])!r}; else {hint}"
            )
        raise MissingFileError(
            f"index names {len(paths):,} files; missing are"
            f" {join_first(names, len(missing), _LISTED_NAMES)}",
            hint=hint,
        )
    unnamed = []
    for path in list_unnamed(paths):
        if path not in there and stat_or_missing(source, path).size_bytes < 0:
            raise MissingFileError(
                f"index names {counted(len(paths), 'file')}; {posixpath.basename(path)!r} of the"
                " same numbering is neither in it nor in the folder",
                hint="copy the missing files, and the index of all files",
            )
        unnamed.append(path)  # its header shows whether it has tensors that the index lacks
    return sorted([*paths, *unnamed]), weight_map


def list_unnamed(paths: Iterable[str]) -> Iterator[str]:
    """Yields the paths that are missing in the numbered sets of some files.

    A name may claim any number of files, so no list of them is made.
    """
    sets: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for path in paths:
        stem, ending = posixpath.splitext(path)
        if match := _NUMBERED.fullmatch(stem):
            numbers = sets[match["stem"], match["count"], ending]
            numbers[int(match["number"])] = len(match["number"])
    for (stem, count, ending), numbers in sorted(sets.items()):
        first = 0 if 0 in numbers else 1
        width = min(numbers.values())
        for number in range(first, first + int(count)):
            if number not in numbers:
                yield f"{stem}-{number:0{width}d}-of-{count}{ending}"


def check_weight_map(
    weight_map: Mapping[str, str], headers: Mapping[str, str], *, where: str = ""
) -> None:
    """Checks that an index and the headers of its files agree on the file of each tensor."""
    for name in [*weight_map, *headers]:
        listed, actual = weight_map.get(name), headers.get(name)
        if listed != actual:
            raise FormatError(
                f"index has tensor {name!r} in {_name_file(listed)}, it is in {_name_file(actual)}",
                where=where,
            )


def _name_file(path: str | None) -> str:
    return "no file" if path is None else repr(posixpath.basename(path))


def refuse_missing_ranks(ranks: Collection[int | None], world_size: int, what: str) -> None:
    """Refuses a checkpoint that lacks the files of a rank; `what` is in them, in the plural."""
    absent = world_size - sum(rank is not None and rank < world_size for rank in ranks)
    if absent:
        # A hostile file may claim any number of ranks, so no list of them is made.
        names = (str(rank) for rank in range(world_size) if rank not in ranks)
        missing = join_first(names, absent, _LISTED_RANKS)
        raise MissingFileError(
            f"the {what} of rank {missing} of {world_size} are not there", hint=COPY_BACK
        )


def refuse_stale_ranks(files: Iterable[tuple[int | None, str]], world_size: int) -> None:
    """Refuses a checkpoint with a file of a rank that its run did not have."""
    for rank, path in files:
        if rank is None or rank >= world_size:
            raise FormatError(
                f"{posixpath.basename(path)!r} is of a rank that a run with {world_size} ranks does"
                " not have",
                hint="an earlier save of a larger run left it; take it away",
            )


def refuse_mixed_sizes(sizes: Collection[int], hint: str = MIXED_SAVES) -> None:
    if len(sizes) > 1:
        raise FormatError(
            f"the files are of runs with {' and '.join(map(str, sorted(sizes)))} ranks", hint=hint
        )
