"""The steps that ckptkit saved in a source, and what their manifests prove.

An object store may list new files late. Manifests are written last, so the files that they name
are there, and are found by name.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, InputError, MissingFileError, TruncatedFileError
from ckptkit.core.index import FileRange, Problem, RunFacts
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    RUN_FACTS,
    SIDE_FOLDER,
    TRAINING,
    Manifest,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import is_unit_folder
from ckptkit.formats.registry import SEARCH_DEPTH, recognise
from ckptkit.storage.base import Source, distant, is_there, prefetch
from ckptkit.storage.manifests import read_manifest

_WRITER = "ckptkit"
_READ_BYTES = 1 << 20


class StepManifests:
    """The steps among candidates that ckptkit saved; a step is whole if it has its manifest."""

    def __init__(
        self,
        source: Source,
        candidates: Sequence[Candidate],
        problems: Mapping[str, Problem] | None = None,
    ) -> None:
        """Looks at the manifests.

        Args:
            source: The place that holds the steps.
            candidates: What was recognised there.
            problems: What is known already to be wrong, by folder of a step.
        """
        self._source = source
        self._manifests: dict[str, Manifest | Problem] = dict(problems or {})
        self._outputs: dict[str, Manifest] = {}
        for candidate in candidates:
            self._look(step_folder(candidate.folder))

    def manifest(self, folder: str) -> Manifest | None:
        """Returns the manifest of a step, or None where it is absent, damaged or not ours."""
        found = self._manifests.get(folder)
        return found if isinstance(found, Manifest) else None

    def is_output(self, folder: str) -> bool:
        """Returns whether a folder holds what ckptkit converted, and not what a run saved."""
        return folder in self._outputs

    def apart(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Leaves out what lies in the folder that describes a step: it is no model of its own."""
        beside = [posixpath.join(folder, SIDE_FOLDER) for folder in self._manifests]
        return [
            candidate
            for candidate in candidates
            if not any(f"{candidate.folder}/".startswith(f"{folder}/") for folder in beside)
        ]

    def problem(self, folder: str) -> Problem | None:
        found = self._manifests.get(folder)
        return found if isinstance(found, Problem) else None

    def lacks(self, candidate: Candidate) -> str:
        """Returns whether a candidate's step was never finished; empty for what others saved.

        In a run that ckptkit saves, every step without a manifest counts as unfinished.
        """
        folder = step_folder(candidate.folder)
        found = self._manifests.get(folder)
        if isinstance(found, Problem):
            return f"{posixpath.basename(found.where)!r} {found.message}"
        run = posixpath.dirname(folder)
        ours = any(
            isinstance(other, Manifest) and posixpath.dirname(step) == run
            for step, other in self._manifests.items()
        )
        return _UNFINISHED if found is None and ours else ""

    def facts(self, folder: str, known: RunFacts) -> RunFacts:
        """Returns what is known of the run, the manifest's word before that of file names."""
        output = self._outputs.get(folder)
        if output is not None:
            step = _number(output.source.get("step"), known.step)
            return replace(known, writer=_WRITER, version=_version(output), step=step)
        manifest = self.manifest(folder)
        if manifest is None:
            return known
        return RunFacts(
            world_size=_number(manifest.source.get("world_size"), known.world_size),
            step=_number(manifest.source.get("step"), known.step),
            writer=_WRITER,
            version=_version(manifest),
            mesh=known.mesh,
            notes=(
                *known.notes,
                *(f"saved without {name}: {why}" for name, why in lost_entries(manifest).items()),
            ),
        )

    def problems(self, folder: str) -> Iterator[Problem]:
        """Yields what is wrong with a step beside its tensors: no manifest, or missing files."""
        found = self._manifests.get(folder)
        if isinstance(found, Problem):
            yield found
        elif found is not None:
            yield from file_problems(self._source, folder, found)

    def _look(self, folder: str) -> None:
        if folder in self._manifests or folder in self._outputs:
            return
        path = posixpath.join(folder, MANIFEST_NAME)
        try:
            found = read_manifest(self._source, folder)
        except MissingFileError:
            if is_there(self._source, posixpath.join(folder, RUN_FACTS)):
                self._manifests[folder] = Problem(MissingFileError.code, path, _ABSENT)
            return
        except InputError as error:
            self._manifests[folder] = Problem(error.code, path, error.message)
            return
        if found.kind == TRAINING:
            self._manifests[folder] = found
        else:
            self._outputs[folder] = found


_ABSENT = "is not there, and it is written last: the save was not finished"
_UNFINISHED = f"{MANIFEST_NAME!r} {_ABSENT}"


def step_folder(folder: str) -> str:
    """Returns the folder of the step that a part of it lies in.

    >>> step_folder("runs/checkpoint-5/pytorch_model_fsdp_0"), step_folder("optimizer_0")
    ('runs/checkpoint-5', '')
    """
    while folder and is_unit_folder(posixpath.basename(folder)):
        folder = posixpath.dirname(folder)
    return folder


def lost_entries(manifest: Manifest) -> dict[str, str]:
    """Returns what could not be saved with a step, by its name in the state, and why."""
    found = manifest.source.get("lost")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, Mapping) else {}


def file_problems(source: Source, folder: str, manifest: Manifest) -> Iterator[Problem]:
    """Yields the files of a manifest that are not there, or not as long as they were."""
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


def digest_problems(
    source: Source, folder: str, manifest: Manifest, *, leaving_out: Collection[str]
) -> Iterator[Problem]:
    """Reads the files of which a step's manifest has the CRC-32.

    Args:
        source: The place that holds the step.
        folder: The step's.
        manifest: Its manifest.
        leaving_out: Paths of which something else is known to be wrong already.

    Yields:
        Those that have another one, or cannot be read.
    """
    for name, record in manifest.files.items():
        path = posixpath.join(folder, name)
        if not record.digest or path in leaving_out:
            continue
        try:
            found = _crc32(source, path, record.size_bytes)
        except InputError as error:
            yield Problem(error.code, path, error.message)
            continue
        if record.digest != f"crc32:{found:08x}":
            yield Problem(ChecksumError.code, path, "has another CRC-32 than the manifest")


def _crc32(source: Source, path: str, size_bytes: int) -> int:
    crc = 0
    for start in range(0, size_bytes, _READ_BYTES):
        crc = crc32(source.read(path, start, min(start + _READ_BYTES, size_bytes)), crc)
    return crc


def _version(manifest: Manifest) -> str:
    return str(manifest.versions.get(_WRITER, ""))


def _number(value: object, otherwise: int | None) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number else otherwise  # type: ignore[return-value]


_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = ".safetensors"
_NO_HEADERS = ".distcp"
_OF_STEPS = (MANIFEST_NAME, RUN_FACTS)  # the manifest first


def listed_files(source: Source) -> list[str]:
    """Returns the paths of all files at the depth at which checkpoints are looked for.

    An object store may list what was written a moment ago only later. The manifest of a step is
    written last, so what it names is there, and is found by its name.
    """
    paths = list(source.walk(SEARCH_DEPTH))
    if distant(source) is None:
        return paths
    known = set(paths)
    steps = dict.fromkeys(step_folder(one.folder) for one in recognise(paths)) or [""]
    expected = [posixpath.join(step, name) for step in steps for name in _OF_STEPS]
    prefetch(source, [FileRange(path, 0, 0) for path in expected if path not in known])
    manifests = [path for path in paths if posixpath.basename(path) == MANIFEST_NAME]
    manifests += [path for path in expected[:: len(_OF_STEPS)] if path not in known]
    prefetch(source, list(_extents(source, manifests)))
    for path in manifests:
        named = (one for one in _named(source, path) if one not in known)
        known.update(one for one in named if is_there(source, one))
    return sorted(known)


def foresee_headers(source: Source, candidate: Candidate) -> None:
    """Has the headers of all files of a checkpoint read at once, where each costs a round trip."""
    if distant(source) is not None:
        prefetch(source, list(_headers(source, candidate)))


def _headers(source: Source, candidate: Candidate) -> Iterator[FileRange]:
    """Yields where readers look first: any such range brings what lies around it."""
    for path in candidate.files:
        if path.endswith(_NO_HEADERS) or not is_there(source, path):
            continue
        size = source.stat(path).size_bytes
        if path.endswith(_ARCHIVES):
            yield FileRange(path, max(size - 1, 0), size)
        elif path.endswith(_WEIGHTS):
            yield FileRange(path, 0, min(1, size))
        else:
            yield FileRange(path, 0, size)


def _extents(source: Source, manifests: Sequence[str]) -> Iterator[FileRange]:
    for path in manifests:
        if is_there(source, path):
            yield FileRange(path, 0, source.stat(path).size_bytes)


def _named(source: Source, path: str) -> Iterator[str]:
    folder = posixpath.dirname(path)
    try:
        manifest = read_manifest(source, folder)
    except InputError:
        return  # reported when the step is listed
    yield path
    yield from (posixpath.join(folder, name) for name in manifest.files)
