"""The steps that ckptkit saved in a source, and what their manifests prove.

An object store may list new files late. Manifests are written last, so the files that they name
are there, and are found by name.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ckptkit.core.checksums import digest_like, leaf_ranges
from ckptkit.core.errors import (
    ChecksumError,
    InputError,
    MissingFileError,
    TruncatedFileError,
)
from ckptkit.core.frameworks import is_unit_folder
from ckptkit.core.index import (
    UNKNOWN,
    FileRange,
    Problem,
    Record,
    RecordTable,
    RunFacts,
    TensorIndex,
)
from ckptkit.core.manifest import (
    CRC32_SCHEME,
    DIGESTS,
    MANIFEST_NAME,
    RUN_FACTS,
    SEALED,
    SIDE_FOLDER,
    TRAINING,
    UPLOADING,
    FileRecord,
    Manifest,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import UNFINISHED, is_tag_in_step, parse_step
from ckptkit.formats.registry import list_paths, read_index, recognise
from ckptkit.formats.safetensors.reader import SafetensorsReader
from ckptkit.runs.steps import step_of_source
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.locations import relative_path
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import is_url

_WRITER = "ckptkit"
_MOST_NOTES = 20  # a hostile manifest may have any number


class StepManifests:
    """The manifests of steps among candidates; a step that ckptkit saved is complete with one."""

    def __init__(
        self,
        source: Source,
        candidates: Sequence[Candidate],
        problems: Mapping[str, Problem] | None = None,
    ) -> None:
        self._source = source
        self._manifests: dict[str, Manifest | Problem] = dict(problems or {})
        self._outputs: dict[str, Manifest] = {}
        for folder in dict.fromkeys(step_folder(candidate.folder) for candidate in candidates):
            if folder in self._manifests:
                continue
            path = posixpath.join(folder, MANIFEST_NAME)
            try:
                manifest = read_manifest(source, folder)
            except MissingFileError:
                if is_there(source, posixpath.join(folder, RUN_FACTS)):
                    self._manifests[folder] = Problem(MissingFileError.code, path, _ABSENT)
                continue
            except InputError as error:
                self._manifests[folder] = Problem(error.code, path, error.message)
                continue
            if manifest.kind == TRAINING:
                self._manifests[folder] = manifest
            else:
                self._outputs[folder] = manifest

    def manifest(self, folder: str) -> Manifest | None:
        """Returns the manifest of a step; None if it is missing, damaged or of another kind."""
        manifest = self._manifests.get(folder)
        return manifest if isinstance(manifest, Manifest) else None

    def is_output(self, folder: str) -> bool:
        """Returns whether a folder holds an output of ckptkit, and not a step of a run."""
        return folder in self._outputs

    def read_index(self, candidate: Candidate) -> TensorIndex:
        """Parses a candidate, and compares it with the manifest of its folder, if it has one."""
        index = read_index(self._source, candidate)
        folder = step_folder(candidate.folder)
        manifest = self._outputs.get(folder) or self.manifest(folder)
        if manifest is None:
            return index
        return prove_index(self._source, folder, manifest, candidate, index)

    def without_side_files(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Leaves out candidates in the side folder of a step, and what is left of an optimizer.

        Neither is part of the model. A pruning that drops the optimizer of a step may be under way,
        or killed.
        """
        side_folders = [posixpath.join(folder, SIDE_FOLDER) for folder in self._manifests]
        dropped = {
            posixpath.join(folder, path)
            for folder, manifest in self._manifests.items()
            if isinstance(manifest, Manifest)
            for path in step_of_source(0, "", manifest.source).thinned
        }
        return [
            candidate
            for candidate in candidates
            if not dropped.issuperset(candidate.files)
            and not any(f"{candidate.folder}/".startswith(f"{folder}/") for folder in side_folders)
        ]

    def problem(self, folder: str) -> Problem | None:
        problem = self._manifests.get(folder)
        return problem if isinstance(problem, Problem) else None

    def lacks(self, candidate: Candidate) -> str:
        """Returns why a candidate's step is unfinished; empty if it is not.

        On a disk, ckptkit names a folder once its manifest is in it: a step without one is of
        another saver. At a URL of a run that ckptkit saves, it may also be the rest of a removal.
        """
        folder = step_folder(candidate.folder)
        manifest = self._manifests.get(folder)
        if isinstance(manifest, Problem):
            return f"{posixpath.basename(manifest.where)!r} {manifest.message}"
        if manifest is not None or parse_step(folder) is None or not is_url(self._source.location):
            return ""
        if is_there(self._source, posixpath.join(folder, UPLOADING)):
            return _UNFINISHED
        run = posixpath.dirname(folder)
        ours = any(
            isinstance(other, Manifest) and not other.is_sealed and posixpath.dirname(step) == run
            for step, other in self._manifests.items()
        )
        return OF_UNKNOWN if ours else ""

    def facts(self, folder: str, named: RunFacts) -> RunFacts:
        """Returns the facts of the run: from the manifest, else from file names (`named`)."""
        output = self._outputs.get(folder)
        if output is not None:
            step = _number(output.source.get("step"), named.step)
            version = str(output.versions.get(_WRITER, ""))
            return replace(named, writer=_WRITER, version=version, step=step)
        manifest = self.manifest(folder)
        if manifest is None or manifest.is_sealed:
            return named
        found = read_findings(manifest)
        return RunFacts(
            world_size=_number(manifest.source.get("world_size"), named.world_size),
            step=_number(manifest.source.get("step"), named.step),
            writer=_WRITER,
            version=str(manifest.versions.get(_WRITER, "")),
            mesh=named.mesh,
            notes=(
                *named.notes,
                *(f"saved without {name}: {why}" for name, why in found.lost.items()),
            ),
            warnings=(*named.warnings, *found.notes),
        )

    def problems(self, folder: str) -> Iterator[Problem]:
        """Yields the problems of a step except of its tensors: no manifest, or missing files."""
        manifest = self._manifests.get(folder)
        if isinstance(manifest, Problem):
            yield manifest
        elif manifest is not None:
            yield from file_problems(self._source, folder, manifest)


_ABSENT = f"is not there, and it is written last: {UNFINISHED}"
_UNFINISHED = f"{MANIFEST_NAME!r} {_ABSENT}"
OF_UNKNOWN = (
    f"{MANIFEST_NAME!r} is not there: another saver wrote it (see `ckptkit seal`), or {UNFINISHED}"
)
"""The problem of a step at a URL that lacks nothing else: `ckptkit seal` takes it."""


def step_folder(folder: str) -> str:
    """Returns the folder of the step that contains a folder.

    >>> step_folder("runs/checkpoint-5/pytorch_model_fsdp_0"), step_folder("optimizer_0")
    ('runs/checkpoint-5', '')
    >>> step_folder("runs/checkpoint-5/global_step5"), step_folder("runs/global_step5")
    ('runs/checkpoint-5', 'runs/global_step5')
    """
    while folder and (is_unit_folder(posixpath.basename(folder)) or is_tag_in_step(folder)):
        folder = posixpath.dirname(folder)
    return folder


class Findings(NamedTuple):
    """What the save of a step found."""

    # The entries of the state that could not be saved, each with the reason
    lost: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()  # what users of the step should know


def read_findings(manifest: Manifest) -> Findings:
    lost, notes = manifest.source.get("lost"), manifest.source.get("notes")
    return Findings(
        {str(k): str(v) for k, v in lost.items()} if isinstance(lost, Mapping) else {},
        tuple(map(str, notes[:_MOST_NOTES])) if isinstance(notes, list) else (),
    )


def file_problems(source: Source, folder: str, manifest: Manifest) -> Iterator[Problem]:
    """Yields the files of a manifest that are missing, or have another size."""
    for name, record in manifest.files.items():
        path = posixpath.join(folder, name)
        try:
            size = source.stat(path).size_bytes
        except InputError as error:
            missing = isinstance(error, MissingFileError)
            yield Problem(error.code, path, "is not there" if missing else error.message)
            continue
        if size != record.size_bytes:
            yield Problem(
                TruncatedFileError.code,
                path,
                f"has {size:,} bytes against {record.size_bytes:,} in the manifest",
            )


def _number(value: object, otherwise: int | None) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number else otherwise  # type: ignore[return-value]


_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = ".safetensors"
_NO_HEADERS = ".distcp"
_OF_STEPS = (MANIFEST_NAME, RUN_FACTS)  # the manifest first


def list_files(source: Source) -> list[str]:
    """Returns the paths of all files at the depth at which checkpoints are searched.

    An object store may list new files late. The manifest of a step is written last, so the files
    that it names exist, and are found by their names.
    """
    paths = list_paths(source)
    if not source.is_remote:
        return paths
    listed = set(paths)
    steps = dict.fromkeys(step_folder(candidate.folder) for candidate in recognise(paths)) or [""]
    expected = [posixpath.join(step, name) for step in steps for name in _OF_STEPS]
    source.prefetch([FileRange(path, 0, 0) for path in expected if path not in listed])
    manifests = [path for path in paths if posixpath.basename(path) == MANIFEST_NAME]
    manifests += [path for path in expected[:: len(_OF_STEPS)] if path not in listed]
    there = [path for path in manifests if is_there(source, path)]
    source.prefetch([FileRange(path, 0, source.stat(path).size_bytes) for path in there])
    for path in manifests:
        folder = posixpath.dirname(path)
        try:
            manifest = read_manifest(source, folder)
        except InputError:
            continue  # reported when the step is listed
        named = [path, *(posixpath.join(folder, name) for name in manifest.files)]
        listed.update(file for file in named if file not in listed and is_there(source, file))
    return sorted(listed)


def prefetch_headers(source: Source, candidate: Candidate) -> None:
    """Prefetches the headers of all files of a checkpoint together, if each is a round trip."""
    if not source.is_remote:
        return
    # What readers need first; prefetching a range includes its surroundings.
    ranges: list[FileRange] = []
    for path in candidate.files:
        if path.endswith(_NO_HEADERS) or not is_there(source, path):
            continue
        size = source.stat(path).size_bytes
        start = max(size - 1, 0) if path.endswith(_ARCHIVES) else 0
        ranges.append(FileRange(path, start, min(1, size) if path.endswith(_WEIGHTS) else size))
    source.prefetch(ranges)


# safetensors files have no checksums. Those of the manifest go into the index, so that what is read
# of such a file is compared as records of torch's archives are, whatever reads it.

_CRC32 = re.compile(rf"{CRC32_SCHEME}:([0-9a-f]{{8}})")
_HINT = (
    "the file was damaged or changed after it was written; write it again, or remove"
    f" {MANIFEST_NAME} if the change is meant"
)


def digest_problems(
    source: Source, folder: str, manifest: Manifest, *, leaving_out: Collection[str]
) -> Iterator[Problem]:
    """Yields the files that have another digest than in a manifest, or cannot be read."""
    for name, record in manifest.files.items():
        path = posixpath.join(folder, name)
        if not record.digest or path in leaving_out:
            continue
        try:
            if not _has_digest(source, path, record):
                message = f"has another {_name_of(record)} than the manifest"
                yield Problem(ChecksumError.code, path, message)
        except InputError as error:
            yield Problem(error.code, path, error.message)


def with_data_digests(manifest: Manifest) -> Manifest:
    """Returns the manifest of a step with the digests of its data files, if it has them.

    They are kept apart, since what opens a step compares the digests of its files: whole files are
    read by `verify` only.
    """
    digests = manifest.source.get(SEALED, manifest.source.get(DIGESTS))
    if not isinstance(digests, Mapping):
        return manifest
    files = {
        path: replace(record, digest=str(digests.get(path, record.digest)))
        for path, record in manifest.files.items()
    }
    return replace(manifest, files=files)


def is_data_file(path: str) -> bool:
    """Returns whether a file of a step is large as a rule, and read in parts."""
    return path.endswith((*_ARCHIVES, _WEIGHTS, _NO_HEADERS))


def check_file(source: Source, path: str, manifest: Manifest, name: str) -> None:
    """Compares a file with the digest that a manifest has for it, if it has one."""
    record = manifest.files.get(name)
    if record is None or not record.digest or _has_digest(source, path, record):
        return
    raise ChecksumError(
        f"has another {_name_of(record)} than {MANIFEST_NAME}",
        where=posixpath.join(source.location, path),
        hint=_HINT,
    )


def prove_index(
    source: Source, folder: str, manifest: Manifest, candidate: Candidate, index: TensorIndex
) -> TensorIndex:
    """Compares what was parsed with a manifest, and adds the checksums that the format lacks."""
    for path in candidate.files:
        check_file(source, path, manifest, relative_path(path, folder))
    if not manifest.tensors:
        return _with_whole_files(index, folder, with_data_digests(manifest))
    if index.format != SafetensorsReader.name:
        return index
    records = index.records
    paths = [relative_path(file.path, folder) for file in index.files]
    crc32s, digests = records.crc32.copy(), dict[int, str]()
    left = {name for name, record in manifest.tensors.items() if record.file in paths}
    for entry in index.tensors.values():
        (number,) = entry.chunks.record.tolist()
        name, path = str(entry.key_path[0]), paths[int(records.file[number])]
        if path not in manifest.files:
            continue
        record = manifest.tensors.get(name)
        found = f"is {entry.dtype.name} {list(entry.shape)} in {path!r}"
        if record is None:
            raise _differs(source, folder, name, f"{found} against no such tensor")
        if (record.dtype, record.shape, record.file) != (entry.dtype.name, entry.shape, path):
            expected = f"{record.dtype} {list(record.shape)} in {record.file!r}"
            raise _differs(source, folder, name, f"{found} against {expected}")
        left.discard(name)
        if record.crc32 is None:
            digests[number] = record.digest
        else:
            crc32s[number] = record.crc32
    if left:
        raise _differs(source, folder, min(left), "is in no file")
    return replace(index, records=records.with_sums(crc32s, digests))


def _with_whole_files(index: TensorIndex, folder: str, manifest: Manifest) -> TensorIndex:
    """Returns an index where a file whose records have no checksum is one record, with its own."""
    table, count = index.records, len(index.records)
    is_bare = (table.container == 0) & (table.crc32 == UNKNOWN)
    found: list[Record] = []
    number_of_file = np.full(len(index.files), UNKNOWN, np.int64)
    for at in np.setdiff1d(table.file[is_bare], table.file[~is_bare]).tolist():
        known = manifest.files.get(relative_path(index.files[at].path, folder))
        crc = None if known is None else _CRC32.fullmatch(known.digest)
        if known is not None and crc is not None:
            number_of_file[at] = count + len(found)
            found.append(Record(at, 0, known.size_bytes, crc32=int(crc[1], 16)))
    if not found:
        return index
    tensors = {}
    for key, entry in index.tensors.items():
        rows, chunks = entry.chunks.record, copy(entry.chunks)
        numbers = number_of_file[table.file[rows]]
        offsets = np.maximum(chunks.byte_offset, 0) + table.start[rows]
        chunks.record = np.where(numbers == UNKNOWN, rows, numbers)
        chunks.byte_offset = np.where(numbers == UNKNOWN, chunks.byte_offset, offsets)
        tensors[key] = replace(entry, chunks=chunks)
    return replace(index, tensors=tensors, records=RecordTable.of([*table, *found]))


def _differs(source: Source, folder: str, name: str, message: str) -> ChecksumError:
    where = f"{posixpath.join(source.location, folder)}, tensor {name!r}"
    return ChecksumError(f"{message} in {MANIFEST_NAME}", where=where, hint=_HINT)


def _has_digest(source: Source, path: str, record: FileRecord) -> bool:
    if source.stat(path).size_bytes != record.size_bytes:
        return False
    digest = digest_like(record.digest)
    for leaf, (start, stop) in enumerate(leaf_ranges(record.size_bytes)):
        digest.add(leaf, memoryview(source.read(path, start, stop)))
    return digest.value(record.size_bytes) == record.digest


def _name_of(record: FileRecord) -> str:
    return "CRC-32" if record.digest.startswith("crc32:") else "digest"
