"""The readers, and the one place where a format is recognised.

Other distributions can add readers by entry points of the group `ckptkit.readers`. They are asked
only if none of ckptkit's own readers is certain, since loading them takes as long as reading a
small checkpoint. One that fails is reported with the name of its distribution, and left out.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit import formats
from ckptkit.core.errors import CkptkitError, InputError, MissingFileError, NotACheckpointError
from ckptkit.core.index import TensorIndex
from ckptkit.core.text import join_first
from ckptkit.core.unread_formats import UNREAD
from ckptkit.formats.base import Candidate, CheckpointReader, FormatReader
from ckptkit.formats.discovery import find_step_above
from ckptkit.storage.base import Source
from ckptkit.storage.locations import MARKS_FOLDER

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


GROUP = "ckptkit.readers"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER_BYTES = 1024
SEARCH_DEPTH = 5  # a/step_10/policy/weights/model, of NeMo-RL, is found from the folder above `a`
_DEEPEST = 24  # folders for the parts of a parameter's name, in formats with a file for each
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_MOST_CHARACTERS = 300  # of the message of a reader's own failure


def _load_readers() -> tuple[FormatReader, ...]:
    """Returns a reader of each class in the modules of `ckptkit.formats`; no list names them."""
    for folder in formats.__path__:
        for below, _, files in os.walk(folder):  # pkgutil takes longer than all imports below
            package = Path(below).relative_to(folder).parts
            for module in (Path(file).stem for file in files if file.endswith(".py")):
                if module not in {"__init__", "registry"}:
                    import_module(".".join((formats.__name__, *package, module)))
    return tuple(sorted((cls() for cls in FormatReader.__subclasses__()), key=attrgetter("order")))


READERS = _load_readers()
_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
_NO_CHECKPOINTS = {"foreign", "torch optimizer"}  # by themselves


def is_certain(candidate: Candidate) -> bool:
    """Returns whether names alone identify a candidate as a checkpoint that ckptkit reads.

    Files that are only refused, and `.pt` files of any name, may be part of other formats.
    """
    if candidate.format == "torch":
        return is_model(candidate)
    return candidate.format not in _NO_CHECKPOINTS


def is_model(candidate: Candidate) -> bool:
    """Returns whether the main file of a candidate is named as that of a model."""
    return _MODEL_FILE.match(main_file(candidate)) is not None


def main_file(candidate: Candidate) -> str:
    """Returns the name of the file that stands for a candidate."""
    return posixpath.basename(main_path(candidate))


def main_path(candidate: Candidate) -> str:
    """Returns the path of the same: an index, if there is one."""
    files = candidate.files
    return next((path for path in files if path.endswith(".index.json")), files[0])


class PlugInReader:
    """A reader of another distribution, whose failures become errors that name the distribution.

    Attributes:
        name: Its format.
        origin: Its distribution, with the version.
        failure: The failure of the last call of `find`; empty if it did not fail.
    """

    def __init__(self, reader: CheckpointReader, origin: str) -> None:
        self._reader = reader
        self.name = reader.name
        self.origin = origin
        self.failure = ""

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Calls the reader; if it fails, the failure is kept and nothing is returned."""
        self.failure = ""
        try:
            candidates = self._reader.find(tuple(paths))
            return [self._check(candidate, set(paths)) for candidate in candidates]
        except Exception as error:  # noqa: BLE001  other formats are read all the same
            self.failure = f"looking for checkpoints, it failed: {_describe(error)}"
            return []

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Calls the reader.

        Raises:
            CkptkitError: If it refuses the checkpoint.
            InputError: If it fails.
        """
        try:
            index = self._reader.read_index(source, candidate)
        except CkptkitError:
            raise
        except Exception as error:
            raise self._error(f"failed: {_describe(error)}", source) from error
        defect = _find_defect(index)
        if defect:
            raise self._error(f"returned {defect}", source)
        return index

    def _check(self, candidate: object, paths: set[str]) -> Candidate:
        if not isinstance(candidate, Candidate):
            raise TypeError(f"{_describe(candidate)} is no Candidate")
        if not candidate.files or not paths.issuperset(candidate.files):
            raise ValueError("a candidate has files that are not among those to choose from")
        return replace(candidate, format=self.name)

    def _error(self, message: str, source: Source) -> InputError:
        return InputError(
            f"reader {self.name!r} of {self.origin} {message}",
            where=source.location,
            hint=f"report it to the maintainers of {self.origin}, or uninstall it",
        )


@cache
def load_installed() -> tuple[tuple[PlugInReader, ...], tuple[str, ...]]:
    """Loads the readers of other distributions, once per process.

    Returns:
        The readers, and the problems of those that cannot be used.
    """
    from importlib.metadata import entry_points  # costs more than reading a small checkpoint

    entries = [
        (
            f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution",
            entry,
        )
        for entry in entry_points(group=GROUP)
    ]
    readers: dict[str, PlugInReader] = {}
    unusable = []
    for origin, entry in sorted(entries, key=itemgetter(0)):
        try:
            reader = _load_reader(entry, origin, readers)
        except Exception as error:  # noqa: BLE001  loading runs any code of a module
            unusable.append(f"reader {entry.name!r} of {origin} was left out: {_describe(error)}")
        else:
            readers[reader.name] = reader
    return tuple(readers.values()), tuple(unusable)


def _load_reader(entry: EntryPoint, origin: str, others: dict[str, PlugInReader]) -> PlugInReader:
    loaded: Any = entry.load()
    reader: Any = loaded() if isinstance(loaded, type) else loaded
    for method in ("find", "read_index"):
        if not callable(getattr(reader, method, None)):
            raise TypeError(f"{entry.value!r} has no method {method!r}")
    name = reader.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"its name {name!r} is not one of lower-case letters, digits and '_.-'")
    if any(reader.name == name for reader in READERS):
        raise ValueError(f"{name!r} is the name of a format that ckptkit reads itself")
    if name in others:
        raise ValueError(f"{name!r} is the name of a reader of {others[name].origin}, too")
    return PlugInReader(reader, origin)


def _find_defect(index: object) -> str:
    """Returns why an index cannot be used; the plan checks its tensors later."""
    if not isinstance(index, TensorIndex):
        return f"{_describe(index)}, where a TensorIndex was expected"
    records = index.records
    if np.any((records.file < 0) | (records.file >= len(index.files))):
        return "a record in a file that the index does not have"
    if np.any((records.start < 0) | (records.stop < records.start)):
        return "a record that ends before it begins"
    for key, entry in index.tensors.items():
        used = entry.chunks.record
        if entry.key != key or np.any((used < 0) | (used >= len(records))):
            return f"a tensor {str(key)!r} with another key, or with a record that is not there"
    return ""


def _describe(value: object) -> str:
    """Describes a value or an exception on one line."""
    text = type(value).__name__
    if isinstance(value, BaseException):
        text = f"{text}: {value}".removesuffix(": ")
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def find_candidates(source: Source) -> list[Candidate]:
    """Recognises every checkpoint at or under the root of a source, by file names alone."""
    return recognise(list_paths(source))


def list_paths(source: Source) -> list[str]:
    """Returns the paths of the files among which checkpoints are searched, sorted.

    What processes leave for one another beside the steps of a run, such as frozen weights and
    models that are being pushed, is not among them.
    """
    paths = list(_walk(source, SEARCH_DEPTH))
    readers = _readers_to_ask(paths)
    folders = (folder for reader in readers for folder in reader.find_deep_folders(paths))
    deep = tuple(f"{folder}/" if folder else "" for folder in folders)
    if not deep:
        return paths
    return sorted({*paths, *(path for path in _walk(source, _DEEPEST) if path.startswith(deep))})


def _walk(source: Source, depth: int) -> Iterator[str]:
    return (path for path in source.walk(depth) if MARKS_FOLDER not in path.split("/")[:-1])


def recognise(paths: Sequence[str]) -> list[Candidate]:
    """Recognises every checkpoint among the paths of files; a file belongs to one of them.

    If none of ckptkit's own readers is certain, those of other distributions are asked first.
    """
    readers = _readers_to_ask(paths)
    candidates = _recognise_by(readers, paths)
    if not paths or any(is_certain(candidate) for candidate in candidates):
        return candidates
    others, _ = load_installed()
    return _recognise_by((*others, *readers), paths) if others else candidates


def _readers_to_ask(paths: Sequence[str]) -> list[FormatReader]:
    """Returns the readers whose files may be among paths."""
    lines = "\n".join(paths)
    return [one for one in READERS if re.search(f"(?:{one.endings})$", lines, re.MULTILINE)]


def list_plug_in_problems() -> tuple[str, ...]:
    """Returns why readers of other distributions were not used; empty if none was loaded."""
    if not load_installed.cache_info().currsize:
        return ()
    readers, unusable = load_installed()
    failed = (
        f"reader {reader.name!r} of {reader.origin} was left out: {reader.failure}"
        for reader in readers
        if reader.failure
    )
    return (*unusable, *failed)


_NUMBER = re.compile(r"\d+")
_MOST_GROUPS = 24


class FileGroup(Struct, frozen=True, order=True):
    """Files of one folder whose names differ in numbers, or all files below a folder.

    Attributes:
        name: The path, with `*` for numbers that differ; that of a folder ends with `/`. Empty
            for the rest, where there are too many groups.
        files: The number of files.
    """

    name: str
    files: int

    def __str__(self) -> str:
        if not self.name:
            return f"{self.files:,} more"
        return self.name if self.files == 1 else f"{self.name} ({self.files:,})"


def group_files(
    paths: Sequence[str], *, base: str = "", recognised: Collection[str] = ()
) -> tuple[FileGroup, ...]:
    """Groups files for a list of them.

    Args:
        paths: The files, all of them below `base`.
        base: A folder; names are relative to it.
        recognised: Files of checkpoints. The files in the folder of one are listed one by one; a
            folder without any is listed as one.

    Returns:
        The groups, sorted by name; the last one stands for the rest if there are too many.
    """
    opened = {base, *_above(base), *(folder for path in recognised for folder in _above(path))}
    groups: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        closed = [folder for folder in _above(path) if folder not in opened]
        name = (f"{closed[-1]}/" if closed else path)[len(base) :].lstrip("/")
        groups[_NUMBER.sub("*", name)].append(name)
    sorted_groups = sorted(
        FileGroup(names[0] if len(set(names)) == 1 else pattern, len(names))
        for pattern, names in groups.items()
    )
    rest = sum(group.files for group in sorted_groups[_MOST_GROUPS:])
    return (*sorted_groups[:_MOST_GROUPS], *([FileGroup("", rest)] if rest else []))


def _above(path: str) -> Iterator[str]:
    """Yields the folders that contain a file, the innermost first; the root is empty."""
    while path:
        path = posixpath.dirname(path)
        yield path


def _recognise_by(readers: Sequence[CheckpointReader], paths: Sequence[str]) -> list[Candidate]:
    candidates: list[Candidate] = []
    left = list(paths)
    for reader in readers:
        candidates += reader.find(left)
        taken = {path for candidate in candidates for path in candidate.files}
        left = [path for path in left if path not in taken]
    return candidates


def estimate_parsing_bytes(source: Source, candidate: Candidate) -> int:
    """Estimates the memory that parsing a candidate takes at its peak, in bytes."""
    factors = dict(reader.index_memory for reader in READERS)
    indexes = [(path, factors.get(posixpath.basename(path))) for path in candidate.files]
    return sum(factor * source.stat(path).size_bytes for path, factor in indexes if factor)


def read_index(source: Source, candidate: Candidate) -> TensorIndex:
    """Parses a candidate with the reader that recognised it.

    Returns:
        The index, its file paths relative to the root of the source.

    Raises:
        InputError: If its headers are damaged, hostile or not modelled.
        MissingFileError: If a file of it is a pointer of Git LFS.
    """
    readers: Sequence[CheckpointReader] = READERS
    if all(reader.name != candidate.format for reader in readers):
        readers, _ = load_installed()
    reader = next(reader for reader in readers if reader.name == candidate.format)
    try:
        return reader.read_index(source, candidate)
    except InputError as error:
        pointer = next((path for path in candidate.files if _is_pointer(source, path)), None)
        if pointer is None:
            # Any program may call its files like torch's; other formats have names of their own.
            is_common = candidate.format == "torch"
            unread = find_unread(source, candidate.files) if is_common else None
            if unread is None:
                raise
            raise unread from error
        raise MissingFileError(
            "is a pointer of Git LFS, which was cloned without the file itself",
            where=posixpath.join(source.location, pointer),
            hint="run `git lfs pull` in the clone, or download the files with `hf download`",
        ) from error


_MOST_START_BYTES = 64
_LISTED = 5


def find_unread(
    source: Source, paths: Iterable[str], folder: str = ""
) -> NotACheckpointError | None:
    """Returns an error that names a known format that is not read, with what to do; or None.

    `folder` is where all the paths are. Of the steps of a run, the newest is named.
    """
    listed = sorted(paths)
    for known in UNREAD:
        named = [match for path in listed if (match := re.fullmatch(known.files, path))]
        if known.starts:
            starts = re.compile(known.starts, re.DOTALL)
            named = [match for match in named if starts.match(_start(source, match[0]))]
        if not named:
            continue
        steps = {match: find_step_above(match[0]) or ("", 0) for match in named}
        if len({posixpath.dirname(step) for step, _ in steps.values()}) == 1:
            newest = max(number for _, number in steps.values())
            named = [match for match in named if steps[match][1] == newest]
        found = [match[0] for match in named]
        whole = [posixpath.join(source.location, path) for path in found]
        stem = posixpath.join(source.location, named[0].groupdict().get("stem") or found[0])
        below = posixpath.join(source.location, folder) if folder else source.location
        advice = known.advice
        for place, value in (
            ("{path}", whole[0]),
            ("{stem}", stem),
            ("{paths}", whole),
            ("{folder}", below),
        ):
            advice = advice.replace(place, repr(value))
        return NotACheckpointError(
            f"{join_first(found, len(found), _LISTED)}: {known.name}, which is not read",
            where=source.location,
            hint=f"in Python: {advice}" if advice.startswith(("from ", "import ")) else advice,
        )
    return None


def _start(source: Source, path: str) -> bytes:
    try:
        return source.read(path, 0, min(source.stat(path).size_bytes, _MOST_START_BYTES))
    except InputError:
        return b""


def _is_pointer(source: Source, path: str) -> bool:
    """Returns whether a file is what Git LFS leaves for one that was not fetched.

    Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    """
    try:
        size_bytes = source.stat(path).size_bytes
        start = (
            source.read(path, 0, len(_POINTER))
            if len(_POINTER) <= size_bytes < _MOST_POINTER_BYTES
            else b""
        )
    except InputError:
        return False
    return start == _POINTER


def describe_missing(source: Source, candidate: Candidate) -> str:
    """Says why a candidate cannot be read as a whole; empty if it can."""
    try:
        return describe_missing_files(read_index(source, candidate))
    except InputError as error:
        return str(error.message)


def describe_missing_files(index: TensorIndex) -> str:
    """Names a file that is absent, or ends before its last record; empty if there is none."""
    absent = next((file for file in index.files if file.size_bytes < 0), None)
    if absent is not None:
        return f"{absent.path!r} is missing"
    sizes = np.array([file.size_bytes for file in index.files], np.int64)
    short = np.flatnonzero(index.records.stop > sizes[index.records.file])
    if not len(short):
        return ""
    return f"{index.path_of(int(short[0]))!r} is cut short"
