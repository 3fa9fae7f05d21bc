"""The readers, and the one place where a format is recognised.

Other distributions can add readers by entry points of the group `ckptkit.readers`. They are asked
only if none of ckptkit's own readers is certain, since loading them takes as long as reading a
small checkpoint. One that fails is reported with the name of its distribution, and left out.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, InputError, MissingFileError, NotACheckpointError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate, CheckpointReader
from ckptkit.formats.dcp.reader import METADATA, DcpReader
from ckptkit.formats.discovery import is_certain
from ckptkit.formats.others.fairseq2 import Fairseq2Reader, find_deep_steps
from ckptkit.formats.others.megatron_ranks import MegatronReader
from ckptkit.formats.others.meta import MetaReader
from ckptkit.formats.others.nanotron import NanotronReader, find_deep_folders
from ckptkit.formats.others.torch_checkpointing import TorchCheckpointingReader
from ckptkit.formats.others.torchsnapshot import SNAPSHOT_METADATA, TorchsnapshotReader
from ckptkit.formats.ranks.rank_files import METADATA_PICKLE
from ckptkit.formats.ranks.reader import ForeignReader, RankFilesReader
from ckptkit.formats.safetensors.hf_shards import HfShardsReader
from ckptkit.formats.safetensors.reader import SafetensorsReader
from ckptkit.formats.torch_files import TorchFileReader, TorchOptimizerReader
from ckptkit.formats.zero.reader import UniversalReader, ZeroReader
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
# Measured: 900 MB for 350 MB of `.metadata`, the file itself included.
_PARSING_FACTORS = {METADATA: 3, SNAPSHOT_METADATA: 12, METADATA_PICKLE: 12}

READERS: tuple[CheckpointReader, ...] = (
    TorchsnapshotReader(),  # first: its files may have any name
    NanotronReader(),  # its files are safetensors and archives, which are models to others
    TorchCheckpointingReader(),
    MegatronReader(),
    MetaReader(),
    Fairseq2Reader(),
    RankFilesReader(),  # before readers that would take a rank's file for a model
    ForeignReader(),  # its files are kept from the others, which would misread them
    UniversalReader(),  # before ZeRO, whose files of weights it contains
    ZeroReader(),
    DcpReader(),
    HfShardsReader(),  # before safetensors: each shard is such a file
    SafetensorsReader(),
    TorchOptimizerReader(),
    TorchFileReader(),
)
EXPECTED: Mapping[str, str] = {
    "dcp": "'.metadata' beside '__0_0.distcp'",
    "zero": "'mp_rank_00_model_states.pt' beside '..._optim_states.pt'",
    "megatron": "'mp_rank_00/model_optim_rng.pt'",
    "universal": "'zero/<parameter>/fp32.pt'",
    "torchsnapshot": "'.snapshot_metadata'",
    "nanotron": "'checkpoint_metadata.json' beside a folder 'model' with a file per parameter",
    "torch-checkpointing": "'model_0.pt' beside 'model_1.pt', or beside 'metadata.pkl'",
    "fairseq2": "'pp_00/tp_00/sdp_00.pt'",
    "meta": "'consolidated.00.pth' beside 'params.json'",
    "dcp-hf": "'shard-00001-model-00001-of-00001.safetensors'",
    "rank-files": "'model_world_size_2_rank_0.pt', 'pytorch_model_fsdp_0_rank0.bin' or 'rank_0.pt'",
    "safetensors": "'*.safetensors'",
    "torch": "'*.pt', '*.pth', '*.bin' or '*.ckpt'",
}
"""The names of the files of each format that is a checkpoint by itself."""


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


class PlugIns(Struct, frozen=True):
    """The installed readers of other distributions.

    Attributes:
        readers: The readers that were loaded.
        unusable: The problems of all others.
    """

    readers: tuple[PlugInReader, ...]
    unusable: tuple[str, ...]


@cache
def load_installed(taken: frozenset[str]) -> PlugIns:
    """Loads the installed readers, once per process.

    Args:
        taken: The names of ckptkit's own readers.
    """
    from importlib.metadata import entry_points  # costs more than reading a small checkpoint

    return load_readers(tuple(entry_points(group=GROUP)), taken)


def load_readers(entries: Sequence[EntryPoint], taken: frozenset[str]) -> PlugIns:
    """Loads readers; problems of those that cannot be used are kept.

    Args:
        entries: The entry points of distributions.
        taken: The names of ckptkit's own readers.
    """
    readers: dict[str, PlugInReader] = {}
    unusable = []
    homes = [entry.dist for entry in entries]
    origins = [
        f"{home.name} {home.version}" if home else "an unknown distribution" for home in homes
    ]
    for entry, origin in sorted(zip(entries, origins, strict=True), key=itemgetter(1)):
        try:
            reader = _load_reader(entry, origin, taken, readers)
        except Exception as error:  # noqa: BLE001  loading runs any code of a module
            unusable.append(f"reader {entry.name!r} of {origin} was left out: {_describe(error)}")
        else:
            readers[reader.name] = reader
    return PlugIns(tuple(readers.values()), tuple(unusable))


def _load_reader(
    entry: EntryPoint, origin: str, taken: frozenset[str], others: dict[str, PlugInReader]
) -> PlugInReader:
    loaded: Any = entry.load()
    reader: Any = loaded() if isinstance(loaded, type) else loaded
    for method in ("find", "read_index"):
        if not callable(getattr(reader, method, None)):
            raise TypeError(f"{entry.value!r} has no method {method!r}")
    name = reader.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"its name {name!r} is not one of lower-case letters, digits and '_.-'")
    if name in taken:
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
    folders = (*find_deep_folders(paths), *find_deep_steps(paths))
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
    candidates = _recognise_by(READERS, paths)
    if not paths or any(is_certain(candidate) for candidate in candidates):
        return candidates
    others = _plug_ins().readers
    return _recognise_by((*others, *READERS), paths) if others else candidates


def list_plug_in_problems() -> tuple[str, ...]:
    """Returns why readers of other distributions were not used; empty if none was loaded."""
    if not load_installed.cache_info().currsize:
        return ()
    loaded = _plug_ins()
    failed = (
        f"reader {reader.name!r} of {reader.origin} was left out: {reader.failure}"
        for reader in loaded.readers
        if reader.failure
    )
    return (*loaded.unusable, *failed)


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


def make_not_found_error(paths: Sequence[str], location: str, base: str) -> NotACheckpointError:
    """Returns the error for a place where no checkpoint was recognised.

    Args:
        paths: All files that were listed.
        location: The path as the user typed it.
        base: The folder below it that was searched; empty for itself.
    """
    inside = [path for path in paths if not base or path.startswith(f"{base}/")]
    there = ", ".join(map(str, group_files(inside, base=base)))
    message = (
        f"no checkpoint of a known format is here, but {there}" if there else "no file is here"
    )
    expected = "; ".join(f"{name}: {what}" for name, what in EXPECTED.items())
    return NotACheckpointError(
        "; ".join([message, *list_plug_in_problems()]),
        where=posixpath.join(location, base) if base else location,
        hint=f"give a directory with one of these, or one up to {SEARCH_DEPTH - 1} above it:"
        f" {expected}",
    )


def _plug_ins() -> PlugIns:
    return load_installed(frozenset(reader.name for reader in READERS))


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
    indexes = [(path, _PARSING_FACTORS.get(posixpath.basename(path))) for path in candidate.files]
    return sum(factor * source.stat(path).size_bytes for path, factor in indexes if factor)


def read_index(source: Source, candidate: Candidate) -> TensorIndex:
    """Parses a candidate with the reader that recognised it.

    Returns:
        The index, its file paths relative to the root of the source.

    Raises:
        InputError: If its headers are damaged, hostile or not modelled.
        MissingFileError: If a file of it is a pointer of Git LFS.
    """
    own = (reader for reader in READERS if reader.name == candidate.format)
    reader: CheckpointReader | None = next(own, None)
    if reader is None:
        reader = next(r for r in _plug_ins().readers if r.name == candidate.format)
    try:
        return reader.read_index(source, candidate)
    except InputError as error:
        pointer = next((path for path in candidate.files if _is_pointer(source, path)), None)
        if pointer is None:
            raise
        raise MissingFileError(
            "is a pointer of Git LFS, which was cloned without the file itself",
            where=posixpath.join(source.location, pointer),
            hint="run `git lfs pull` in the clone, or download the files with `hf download`",
        ) from error


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
