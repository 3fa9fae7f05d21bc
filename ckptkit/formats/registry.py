"""The readers, and the one place where a format is recognised.

Readers that other distributions bring along, as entry points of the group `ckptkit.readers`.

They are asked only where none of our readers is sure, since finding them takes as long as a small
checkpoint does. One that does not work is told of by the name of its distribution, and left out.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.core.errors import CkptkitError, InputError, NotACheckpointError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate, CheckpointReader
from ckptkit.formats.dcp.reader import METADATA, DcpReader
from ckptkit.formats.discovery import grouped, is_certain
from ckptkit.formats.others.torch_checkpointing import TorchCheckpointingReader
from ckptkit.formats.others.torchsnapshot import SNAPSHOT_METADATA, TorchsnapshotReader
from ckptkit.formats.ranks.contents import METADATA_PICKLE
from ckptkit.formats.ranks.reader import ForeignReader, RankFilesReader
from ckptkit.formats.safetensors.hf_shards import HfShardsReader
from ckptkit.formats.safetensors.reader import SafetensorsReader
from ckptkit.formats.torch_files.optimizer import TorchOptimizerReader
from ckptkit.formats.torch_files.reader import TorchFileReader
from ckptkit.formats.zero.reader import ZeroReader
from ckptkit.formats.zero.universal import UniversalReader
from ckptkit.storage.base import Source

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


GROUP = "ckptkit.readers"
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_MOST_CHARACTERS = 300  # of what a reader says about its own failure


class PlugInReader:
    """A reader of somebody else's, whose failures become errors that say whose they are.

    Attributes:
        name: Its format.
        origin: The distribution that brought it, with its version.
        failure: What `find` failed with when it was last asked, in words; empty where it did not.
    """

    def __init__(self, reader: CheckpointReader, origin: str) -> None:
        self._reader = reader
        self.name = reader.name
        self.origin = origin
        self.failure = ""

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Asks the reader; one that fails has found nothing, and the failure is kept."""
        self.failure = ""
        try:
            found = self._reader.find(tuple(paths))
            return [self._checked(candidate, set(paths)) for candidate in found]
        except Exception as error:  # noqa: BLE001  other formats are read all the same
            self.failure = f"looking for checkpoints, it failed: {_told(error)}"
            return []

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Asks the reader.

        Raises:
            CkptkitError: If it refuses the checkpoint.
            InputError: If it fails.
        """
        try:
            index = self._reader.read_index(source, candidate)
        except CkptkitError:
            raise
        except Exception as error:
            raise self._error(f"failed: {_told(error)}", source) from error
        problem = _what_is_wrong_with(index)
        if problem:
            raise self._error(f"returned {problem}", source)
        return index

    def _checked(self, candidate: object, paths: set[str]) -> Candidate:
        if not isinstance(candidate, Candidate):
            raise TypeError(f"{_told(candidate)} is no Candidate")
        if not candidate.files or not paths.issuperset(candidate.files):
            raise ValueError("a candidate has files that are not among those to choose from")
        return replace(candidate, format=self.name)

    def _error(self, message: str, source: Source) -> InputError:
        return InputError(
            f"reader {self.name!r} of {self.origin} {message}",
            where=source.location,
            hint=f"tell those who maintain {self.origin}, or uninstall it",
        )


@dataclass(frozen=True, slots=True)
class PlugIns:
    """What is installed.

    Attributes:
        readers: Those that can be asked.
        unusable: What is wrong with the others, in words.
    """

    readers: tuple[PlugInReader, ...]
    unusable: tuple[str, ...]

    def complaints(self) -> tuple[str, ...]:
        """Says what is wrong with any of them, so far."""
        failed = (
            f"reader {reader.name!r} of {reader.origin} was left out: {reader.failure}"
            for reader in self.readers
            if reader.failure
        )
        return (*self.unusable, *failed)


@cache
def installed(taken: frozenset[str]) -> PlugIns:
    """Loads the readers that are installed, once in a process.

    Args:
        taken: Names that are ours, and cannot be theirs.
    """
    from importlib.metadata import entry_points  # costs more than reading a small checkpoint

    return load(tuple(entry_points(group=GROUP)), taken)


def load(entries: Sequence[EntryPoint], taken: frozenset[str]) -> PlugIns:
    """Loads readers; those that cannot be used are told of.

    Args:
        entries: What distributions declare.
        taken: Names that are ours, and cannot be theirs.
    """
    readers: dict[str, PlugInReader] = {}
    unusable = []
    for entry, origin in sorted(_with_origins(entries), key=lambda pair: pair[1]):
        try:
            reader = PlugInReader(_loaded(entry), origin)
            _check_name(reader.name, taken, readers)
        except Exception as error:  # noqa: BLE001  loading runs whatever stands in a module
            unusable.append(f"reader {entry.name!r} of {origin} was left out: {_told(error)}")
        else:
            readers[reader.name] = reader
    return PlugIns(tuple(readers.values()), tuple(unusable))


def _with_origins(entries: Sequence[EntryPoint]) -> Iterator[tuple[EntryPoint, str]]:
    for entry in entries:
        home = entry.dist
        yield entry, f"{home.name} {home.version}" if home else "an unknown distribution"


def _loaded(entry: EntryPoint) -> CheckpointReader:
    found: Any = entry.load()
    reader: Any = found() if isinstance(found, type) else found
    for method in ("find", "read_index"):
        if not callable(getattr(reader, method, None)):
            raise TypeError(f"{entry.value!r} has no method {method!r}")
    return reader  # type: ignore[no-any-return]


def _check_name(name: object, taken: frozenset[str], others: dict[str, PlugInReader]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"its name {name!r} is not one of lower-case letters, digits and '_.-'")
    if name in taken:
        raise ValueError(f"{name!r} is the name of a format that ckptkit reads itself")
    if name in others:
        raise ValueError(f"{name!r} is the name of a reader of {others[name].origin}, too")


def _what_is_wrong_with(index: object) -> str:
    """Says why nothing can be read by an index; what it says of tensors is proven later."""
    if not isinstance(index, TensorIndex):
        return f"{_told(index)}, where a TensorIndex was expected"
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


def _told(value: object) -> str:
    """Says what something is, on one line, whatever its own text may be."""
    text = type(value).__name__
    if isinstance(value, BaseException):
        text = f"{text}: {value}".removesuffix(": ")
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


READERS: tuple[CheckpointReader, ...] = (
    TorchsnapshotReader(),  # first: its files may have any name
    TorchCheckpointingReader(),
    RankFilesReader(),  # before those that would take a rank's file for a model
    ForeignReader(),  # what it takes is kept from the others, who would misread it
    UniversalReader(),  # before ZeRO, whose files of weights lie in it
    ZeroReader(),
    DcpReader(),
    HfShardsReader(),  # before safetensors, of which each is one
    SafetensorsReader(),
    TorchOptimizerReader(),
    TorchFileReader(),
)
EXPECTED: Mapping[str, str] = {
    "dcp": "'.metadata' beside '__0_0.distcp'",
    "zero": "'mp_rank_00_model_states.pt' beside '..._optim_states.pt'",
    "universal": "'zero/<parameter>/fp32.pt'",
    "torchsnapshot": "'.snapshot_metadata'",
    "torch-checkpointing": "'model_0.pt' beside 'model_1.pt', or beside 'metadata.pkl'",
    "dcp-hf": "'shard-00001-model-00001-of-00001.safetensors'",
    "rank-files": "'model_world_size_2_rank_0.pt', 'pytorch_model_fsdp_0_rank0.bin' or 'rank_0.pt'",
    "safetensors": "'*.safetensors'",
    "torch": "'*.pt', '*.pth', '*.bin' or '*.ckpt'",
}
"""What the files of each format are called, where a checkpoint can be made of them alone."""
# Measured: 900 MB for 350 MB of `.metadata`, the file itself included.
_PARSING_FACTORS = {METADATA: 3, SNAPSHOT_METADATA: 12, METADATA_PICKLE: 12}
SEARCH_DEPTH = 4  # runs/a/checkpoint-500/pytorch_model_fsdp_0 is found from `runs`


def find_candidates(source: Source) -> list[Candidate]:
    """Recognises every checkpoint at or under the root of a source, by file names alone."""
    return recognise(list(source.walk(SEARCH_DEPTH)))


def recognise(paths: Sequence[str]) -> list[Candidate]:
    """Recognises every checkpoint among the paths of files; a file belongs to one of them.

    Where none of our readers is certain of what it found, those of others are asked first.
    """
    found = _recognised(READERS, paths)
    if not paths or any(is_certain(candidate) for candidate in found):
        return found
    others = _plug_ins().readers
    return _recognised((*others, *READERS), paths) if others else found


def complaints() -> tuple[str, ...]:
    """Says which readers of others could not be used, and why; nothing where none was asked."""
    return _plug_ins().complaints() if installed.cache_info().currsize else ()


def nothing_found(paths: Sequence[str], location: str, base: str) -> NotACheckpointError:
    """Makes the error for a place where no checkpoint was recognised.

    Args:
        paths: All files that were looked at.
        location: The path as the user typed it.
        base: The folder below it that was looked into; empty for itself.
    """
    inside = [path for path in paths if not base or path.startswith(f"{base}/")]
    there = ", ".join(map(str, grouped(inside, base=base)))
    found = (
        f"no checkpoint of a known format lies here, but {there}" if there else "no file is here"
    )
    expected = "; ".join(f"{name}: {what}" for name, what in EXPECTED.items())
    return NotACheckpointError(
        "; ".join([found, *complaints()]),
        where=posixpath.join(location, base) if base else location,
        hint=f"give a directory with one of these, or one up to {SEARCH_DEPTH - 1} above it:"
        f" {expected}",
    )


def _plug_ins() -> PlugIns:
    return installed(frozenset(reader.name for reader in READERS))


def _recognised(readers: Sequence[CheckpointReader], paths: Sequence[str]) -> list[Candidate]:
    found: list[Candidate] = []
    left = list(paths)
    for reader in readers:
        found += reader.find(left)
        taken = {path for candidate in found for path in candidate.files}
        left = [path for path in left if path not in taken]
    return found


def parsing_bytes(source: Source, candidate: Candidate) -> int:
    """Estimates the memory that parsing a candidate takes at its peak, in bytes."""
    indexes = [(path, _PARSING_FACTORS.get(posixpath.basename(path))) for path in candidate.files]
    return sum(factor * source.stat(path).size_bytes for path, factor in indexes if factor)


def read_index(source: Source, candidate: Candidate) -> TensorIndex:
    """Parses a candidate with the reader that recognised it.

    Returns:
        The index, its file paths relative to the root of the source.

    Raises:
        InputError: If its headers are damaged, hostile or not modelled.
    """
    known = (reader for reader in READERS if reader.name == candidate.format)
    reader = next(known, None) or _plug_in(candidate.format)
    return reader.read_index(source, candidate)


def _plug_in(name: str) -> CheckpointReader:
    return next(reader for reader in _plug_ins().readers if reader.name == name)
