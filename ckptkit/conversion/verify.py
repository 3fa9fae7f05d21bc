"""`ckptkit.verify`: checksums, coverage and completeness of a source or of an output of ckptkit."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.conversion.source.read import report_notes, scan
from ckptkit.core.checksums import digest_like
from ckptkit.core.crc import crc32
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.errors import (
    CannotPlanError,
    ChecksumError,
    CkptkitError,
    IncompleteCheckpointError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import ChunkTable, Key, Problem, TensorEntry, TensorIndex
from ckptkit.core.manifest import TRAINING, UNVERIFIED, Manifest
from ckptkit.core.text import counted, size_text
from ckptkit.core.threads import usable_cores
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin
from ckptkit.formats.dcp.megatron import INTEGRITY, check_integrity
from ckptkit.formats.dcp.reader import BlobRef, open_blob
from ckptkit.formats.discovery import ITSELF, find_step, step_of_files
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.pickle.zip_directory import data_start
from ckptkit.formats.registry import read_index, recognise
from ckptkit.formats.torch_files import TorchOptimizerReader
from ckptkit.plan.coverage import find_problems_by_key
from ckptkit.plan.optimizer_states import OPTIMIZER
from ckptkit.plan.plan import SOURCE, StackedPart
from ckptkit.plan.selection import propose_trees
from ckptkit.runs.step_manifests import file_problems, list_files, step_folder
from ckptkit.runs.stored_proofs import digest_problems
from ckptkit.storage.base import Source
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path, open_source, place_of

_READ_BYTES = 1 << 20
_UNREAD = frozenset({UnsupportedError.code, UnsafePickleError.code})


def check_objects(source: Source, index: TensorIndex) -> tuple[int, int, list[Problem]]:
    """Compares every object in a DCP directory with its stored CRC-32; does not parse it.

    Returns:
        How many match their checksums, how many have none, and the problems of the others.
    """
    summed: list[bool] = []
    problems = []
    for path, value in index.values.items():
        if not isinstance(value, BlobRef):
            continue
        where = f"{value.path}, object {'.'.join(map(str, path))!r}"
        try:
            summed.append(_is_proven(source, value, where))
        except InputError as error:
            problems.append(Problem(error.code, where, error.message))
    return sum(summed), len(summed) - sum(summed), problems


def _is_proven(source: Source, blob: BlobRef, where: str) -> bool:
    """Compares an object with its stored checksums; returns whether there are any."""
    read, size = open_blob(source, blob, where=where)
    archive = open_archive(read, size, where=where)
    sums = []
    for entry in archive.entries.values():
        if entry.crc32 is None:
            continue
        start = data_start(read, entry, where=where)
        stop, actual = start + entry.size_bytes, 0
        for at in range(start, stop, _READ_BYTES):
            actual = crc32(read(at, min(at + _READ_BYTES, stop)), actual)
        sums.append((entry, actual))
    for entry, actual in sums:
        if actual != entry.crc32:
            raise ChecksumError(
                f"{posixpath.basename(entry.name)!r} has CRC-32 {actual:#010x},"
                f" {entry.crc32:#010x} was stored",
                where=where,
            )
    return bool(sums)


_MISMATCH = "digest-mismatch"
_DAMAGED = "damaged-step"  # of a run; an older one was verified
_FORMATS = {
    "model": "safetensors",
    "adapter": "safetensors",
    "torch": "torch",
    "dcp": "dcp",
    "megatron": "dcp",
    "torchtitan": "dcp",
}  # by kind of output


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Displayed):
    """What `ckptkit verify` found.

    Attributes:
        path: The directory that was verified.
        kind: `output` for a model or adapter that ckptkit wrote, `delta` for a delta, else
            `source`.
        problems: What is wrong; empty when all is well.
        tensors: How many tensors were read.
        size_bytes: How many bytes of them.
        unverified: Names of tensors for which no checksum was stored; of an output, those for
            which its source had none: their digests are compared all the same.
        proven: What was checked beside the tensors, in words.
        mended: The files that `repair` has replaced.
    """

    path: str
    kind: str
    problems: tuple[Problem, ...]
    tensors: int
    size_bytes: int
    unverified: tuple[str, ...]
    proven: tuple[str, ...] = ()
    mended: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        return not self.problems

    def _facts(self) -> Facts:
        read = f"{counted(self.tensors, 'tensor')} read, {size_text(self.size_bytes)}"
        verdict = f"damaged, {counted(len(self.problems), 'problem')}" if self.problems else "ok"
        rows = [(problem.code, problem.where, problem.message) for problem in self.problems]
        lines = [("verdict", verdict), ("checked", read)]
        return Facts(self.path, lines, ("problem", "where", "what"), rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def run_verification(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    listener: Listener | None = None,
) -> Verification:
    """Reads everything at a path and checks it against what was stored for it.

    An output of ckptkit is checked against the digests of its manifest, anything else against the
    checksums of its own format. Of a run, the newest step is, and the models beside its steps.
    """
    listener = listener or ignore
    place = place_of(path)
    if is_url(place) or local_path(place).is_dir():
        with open_source(place) as source:
            manifest = None
            with suppress(MissingFileError):
                manifest = read_manifest(source)
            if manifest is not None and manifest.kind != TRAINING:  # an output, of any size
                is_chosen = select == ITSELF or not _has_steps(source, manifest)
                if is_chosen:
                    return _Output(source, manifest, str(place)).verify(listener)
    found, finals, others = _verify_source(path, select, also, listener)
    if select is not None or not finals:
        return found
    for label, lack in finals.items():
        if lack:
            problem = Problem(IncompleteCheckpointError.code, label, lack)
            found = replace(found, problems=(*found.problems, problem))
            continue
        folder, own = (
            posixpath.split(label) if posixpath.basename(label) == ITSELF else (label, None)
        )
        home = place.beside(posixpath.join(place, folder)) if folder else place
        if not also and (is_url(home) or local_path(home).is_dir()):
            # Where ckptkit wrote it, it has a manifest of its own.
            final = run_verification(home, select=own, listener=listener)
        else:
            final = run_verification(path, select=label, also=also, listener=listener)
        found = replace(
            found,
            problems=(
                *found.problems,
                *(replace(p, where=f"{label}: {p.where}") for p in final.problems),
            ),
            tensors=found.tensors + final.tensors,
            size_bytes=found.size_bytes + final.size_bytes,
            unverified=(*found.unverified, *final.unverified),
        )
    beside = ", ".join(label for label, lack in finals.items() if not lack)
    proven = [f"verified with the step: the model beside the steps ({beside})"] if beside else []
    if others:
        proven.append(f"not verified: {counted(others, 'other step')}")
    return replace(found, proven=(*found.proven, *proven))


def _has_steps(source: Source, manifest: Manifest) -> bool:
    """Returns whether there are steps of a run beside an output."""
    return any(
        find_step(candidate.folder) is not None or step_of_files(candidate) is not None
        for candidate in recognise(list_files(source))
        if not manifest.files.keys() & set(candidate.files)
    )


def _verify_source(
    path: PathLike, select: str | None, also: Sequence[PathLike], listener: Listener
) -> tuple[Verification, Mapping[str, str], int]:
    """Returns what was found, the models beside the steps, and how many steps were not read."""
    with open_checkpoint(path, select=select, also=also) as checkpoint:
        report_notes(checkpoint, listener)
        index, manifest = checkpoint.index, checkpoint.manifest
        entries = list(index.tensors.values())
        if checkpoint.select is not None:
            trees = list(dict.fromkeys(entry.tree for entry in entries))
            entries = [entry for entry in entries if entry.tree == checkpoint.select]
            if not entries:
                raise CannotPlanError(
                    f"holds no state dict {checkpoint.select!r}",
                    where=checkpoint.path,
                    hint=f"pass {propose_trees(trees)}",
                )
        problems = dict(find_problems_by_key(index, entries))
        whole = [entry for entry in entries if entry.key not in problems]
        origin = Origin(SOURCE, checkpoint.source, index)
        workers = usable_cores() + 1
        errors = scan(origin, whole, lambda *_: None, workers=workers, listener=listener)
        failed = [_problem_of(error, key) for key, error in errors.items()]
        files = [problem for problem in index.problems if problem.where not in index.tensors]
        match, unverified, damaged = check_objects(checkpoint.source, index)
        instead = f"{checkpoint.folder} was verified in its place"
        lacking = checkpoint.damaged.items()
        passed = (Problem(_DAMAGED, step, f"{lack}; {instead}") for step, lack in lacking)
        proven = []
        is_summed = False  # a file of the step, as a whole
        # What the optimizer keeps in a form that is not read is no damage.
        unread = {
            key
            for key, problem in problems.items()
            if problem.code in _UNREAD and index.tensors[key].part != "model"
        }
        problems = {key: problem for key, problem in problems.items() if key not in unread}
        if unread:
            proven.append(f"tensors of the optimizer that are not read: {len(unread):,}")
        if match:
            proven.append(f"objects beside the tensors that have their CRC-32: {match:,}")
        if unverified:
            proven.append(f"objects for which no checksum was stored: {unverified:,}")
        for unit in checkpoint.units:
            matching, differing = check_integrity(checkpoint.source, unit.candidate.files)
            files += differing
            is_summed = is_summed or bool(matching)
            if matching:
                proven.append(f"files that have their SHA-256 of '{INTEGRITY}': {matching:,}")
        if manifest is not None:  # of a step that ckptkit saved
            folder = step_folder(checkpoint.units[0].candidate.folder)
            wrong = {problem.where for problem in files}
            files += digest_problems(checkpoint.source, folder, manifest, leaving_out=wrong)
            if not files:
                records = manifest.files.values()
                summed = sum(1 for record in records if record.digest)
                is_summed = is_summed or bool(summed)
                proven.append(
                    f"files that have their size in the manifest: {len(records):,}; that have their"
                    f" CRC-32: {summed:,}"
                )
        all_problems = (*passed, *problems.values(), *failed, *damaged, *files)
        if not (whole or match or is_summed or all_problems):
            raise NotACheckpointError(
                "nothing was verified: there is no tensor that is read, nor anything else that has"
                " a checksum",
                where=checkpoint.path,
                hint=f"see what is there: `ckptkit inspect {shlex.quote(checkpoint.path)}`",
            )
        found = Verification(
            path=checkpoint.path,
            kind="source",
            problems=all_problems,
            tensors=len(whole),
            size_bytes=sum(entry.size_bytes for entry in whole),
            unverified=tuple(e.name for e in whole if e.key in origin.unverified),
            proven=tuple(proven),
        )
        return found, checkpoint.finals, len(checkpoint.steps) - 1


def _problem_of(error: CkptkitError, where: str) -> Problem:
    place = error.where or where
    return Problem(error.code, place, error.message)


def _name_written(entry: TensorEntry) -> str:
    return f"{OPTIMIZER}.{entry.name}" if entry.part == "optimizer" else str(entry.name)


class _Output:
    """Checks one output of ckptkit against its manifest."""

    def __init__(self, source: Source, manifest: Manifest, path: str) -> None:
        self._source = source
        self._manifest = manifest
        self._path = path

    def verify(self, listener: Listener) -> Verification:
        problems = list(self._file_problems())
        read = 0
        missing = any(problem.code != _MISMATCH for problem in problems)
        if not missing:
            try:
                indexes = self._indexes()
            except CkptkitError as error:
                indexes = []
                problems.append(_problem_of(error, ""))
            else:
                problems += self._differences(indexes)
            for index in indexes:
                of_digests, size_bytes = self._digest_problems(index, listener)
                problems += [*of_digests, *check_objects(self._source, index)[2]]
                read += size_bytes
        tensors = self._manifest.tensors
        return Verification(
            path=self._path,
            kind="output",
            problems=tuple(problems),
            tensors=0 if missing else len(tensors),
            size_bytes=read,
            unverified=tuple(name for name, t in tensors.items() if t.proof == UNVERIFIED),
        )

    def _file_problems(self) -> Iterator[Problem]:
        wrong = []
        for problem in file_problems(self._source, "", self._manifest):
            wrong.append(problem.where)
            yield problem
        for problem in digest_problems(self._source, "", self._manifest, leaving_out=wrong):
            is_other = problem.code == ChecksumError.code
            yield replace(problem, code=_MISMATCH) if is_other else problem
        for path in self._source.walk(0):
            if path.endswith(".safetensors") and path not in self._manifest.files:
                yield Problem("stray-file", path, "is not in the manifest; loaders may read it")

    def _digest_problems(self, index: TensorIndex, listener: Listener) -> tuple[list[Problem], int]:
        expected = self._manifest.tensors
        names = {entry.key: _name_written(entry) for entry in index.tensors.values()}
        entries = [entry for entry in index.tensors.values() if names[entry.key] in expected]
        digests = {entry.key: digest_like(expected[names[entry.key]].digest) for entry in entries}

        def visit(entry: TensorEntry, leaf: int, view: memoryview) -> None:
            digests[entry.key].add(leaf, view)

        origin = Origin(SOURCE, self._source, index)
        errors = scan(origin, entries, visit, workers=usable_cores() + 1, listener=listener)
        problems = [_problem_of(error, key) for key, error in errors.items()]
        problems += [
            Problem(_MISMATCH, f"tensor {name!r}", "has another digest than the manifest")
            for entry in entries
            if entry.key not in errors
            and digests[entry.key].value(entry.size_bytes)
            != expected[name := names[entry.key]].digest
        ]
        return problems, sum(entry.size_bytes for entry in entries)

    def _indexes(self) -> list[TensorIndex]:
        wanted = _FORMATS.get(self._manifest.kind)
        # A consumer may have further files with tensors, which are compared as files alone.
        holding = {record.file for record in self._manifest.tensors.values()}
        indexes = [
            self._split_stacked(read_index(self._source, candidate))
            for candidate in recognise(sorted(self._manifest.files))
            if candidate.format in {wanted, TorchOptimizerReader.name}
            and not holding.isdisjoint(candidate.files)
        ]
        if holding and not any(index.format == wanted for index in indexes):
            raise NotACheckpointError(f"the manifest names no {wanted} file", where=self._path)
        return indexes

    def _split_stacked(self, index: TensorIndex) -> TensorIndex:
        """Splits tensors that were written in parts, which the manifest lists one by one."""
        depths = {}
        for name in self._manifest.tensors:
            stacked, _, numbers = name.rpartition("[")
            depths[stacked] = numbers.count(",") + 1
        tensors = {}
        for key, entry in index.tensors.items():
            chunks, depth = entry.chunks, depths.get(entry.name, 0)
            if not depth or entry.name in self._manifest.tensors:
                tensors[key] = entry
                continue
            for row, offsets in enumerate(chunks.offsets.tolist()):
                sizes = chunks.sizes[row : row + 1]
                own = ChunkTable(np.zeros_like(sizes), sizes, chunks.record[row : row + 1])
                part = StackedPart(entry.name, tuple(offsets[:depth]), ()).part_name
                shape = tuple(map(int, sizes[0]))
                tensors[Key(part)] = replace(
                    entry, key=Key(part), name=part, shape=shape, chunks=own
                )
        return replace(index, tensors=tensors)

    def _differences(self, indexes: Sequence[TensorIndex]) -> Iterator[Problem]:
        expected = self._manifest.tensors
        entries = [entry for index in indexes for entry in index.tensors.values()]
        by_name = {_name_written(entry): entry for entry in entries}
        for name in sorted(expected.keys() | by_name.keys()):
            where = f"tensor {name!r}"
            if name not in by_name:
                yield Problem("missing-tensor", where, "is in the manifest and in no file")
            elif name not in expected:
                yield Problem("stray-tensor", where, "is in a file and not in the manifest")
            else:
                entry, record = by_name[name], expected[name]
                actual = f"{entry.dtype.name} {list(entry.shape)}"
                wanted = f"{record.dtype} {list(record.shape)}"
                if actual != wanted:
                    yield Problem(
                        "other-tensor", where, f"is {actual} against {wanted} in the manifest"
                    )
