"""`ckptkit.verify`: checksums, coverage and completeness of a source or of an output of ckptkit.

With `--repair --from COPY`, a file that the verification names is replaced by that of a copy, if a
manifest shows that both are of one save. The new files are staged beside links to all others, and
the whole is verified, before the first damaged file is replaced.
"""

from __future__ import annotations

import posixpath
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.conversion.source.read import report_notes, scan
from ckptkit.core.checksums import digest_like
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.errors import (
    CannotPlanError,
    ChecksumError,
    CkptkitError,
    IncompleteCheckpointError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    RefusedError,
    SourceChangedError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import ChunkTable, Key, Problem, TensorEntry, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, UNVERIFIED, Manifest
from ckptkit.core.text import counted, size_text
from ckptkit.core.threads import usable_cores
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin
from ckptkit.formats.dcp.megatron import INTEGRITY, check_integrity
from ckptkit.formats.dcp.reader import BlobRef, open_blob
from ckptkit.formats.discovery import ITSELF, find_step, step_of_files
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.registry import read_index, recognise
from ckptkit.formats.torch_files import TorchOptimizerReader
from ckptkit.plan.coverage import find_problems_by_key
from ckptkit.plan.optimizer_states import OPTIMIZER
from ckptkit.plan.plan import SOURCE, StackedPart
from ckptkit.plan.selection import propose_trees
from ckptkit.runs.step_manifests import (
    check_file,
    digest_problems,
    file_problems,
    list_files,
    step_folder,
    with_data_digests,
)
from ckptkit.storage.base import Source
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import new_hidden_path, sync_file
from ckptkit.storage.local.ownership import copy_owner
from ckptkit.storage.local.target import translate_errors
from ckptkit.storage.locations import hidden_name
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path, open_source, place_of

_UNREAD = frozenset({UnsupportedError.code, UnsafePickleError.code})


def check_objects(source: Source, index: TensorIndex) -> tuple[int, int, list[Problem]]:
    """Compares every object in a DCP directory with its stored CRC-32; does not parse it.

    Returns:
        How many match their checksums, how many have none, and the problems of the others.
    """
    matching = without = 0
    problems = []
    for path, value in index.values.items():
        if not isinstance(value, BlobRef):
            continue
        where = f"{value.path}, object {'.'.join(map(str, path))!r}"
        try:
            read, size = open_blob(source, value, where=where)
            proven = open_archive(read, size, where=where).prove()
        except InputError as error:
            problems.append(Problem(error.code, where, error.message))
            continue
        matching += bool(proven)
        without += not proven
    return matching, without, problems


_MISMATCH = "digest-mismatch"
_DAMAGED = "damaged-step"  # of a run; an older one was verified
_FORMATS = {
    "model": "safetensors",
    "adapter": "safetensors",
    "torch": "torch",
    "dcp": "dcp",
    "megatron": "dcp",
    "torchtitan": "dcp",
    "universal": "universal",
}  # by kind of output


class Verification(Displayed, Struct, frozen=True):
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
        return plain_fields(self) | {"ok": self.ok}


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
    place, manifest = place_of(path), None
    if is_url(place) or local_path(place).is_dir():
        with open_source(place) as source:
            with suppress(MissingFileError):
                manifest = read_manifest(source)
            if manifest is not None and manifest.kind != TRAINING:  # an output, of any size
                is_chosen = select == ITSELF or not _has_steps(source, manifest)
                if is_chosen:
                    return _verify_output(source, manifest, str(place), listener)
    found, finals, others = _verify_source(path, select, also, manifest, listener)
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
    path: PathLike,
    select: str | None,
    also: Sequence[PathLike],
    own: Manifest | None,
    listener: Listener,
) -> tuple[Verification, Mapping[str, str], int]:
    """Returns what was found, the models beside the steps, and how many steps were not read.

    `own` is the manifest at the path itself, which counts if a step is sealed above its checkpoint.
    """
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
                    hint=f"pass {propose_trees(trees, index.run.selected)}",
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
        folder = step_folder(checkpoint.units[0].candidate.folder)
        if manifest is None and own is not None and own.is_sealed:
            manifest, folder = own, ""
            files += file_problems(checkpoint.source, folder, manifest)
        # Of what ckptkit saved or sealed.
        manifests = {} if manifest is None else {folder: with_data_digests(manifest)}
        for part in dict.fromkeys(unit.candidate.folder for unit in checkpoint.units):
            if part == folder:
                continue
            try:  # of a part that was saved by itself, as `ckptkit.training.dcp` does
                manifests[part] = with_data_digests(read_manifest(checkpoint.source, part))
            except MissingFileError:
                continue
            except InputError as error:
                files.append(_problem_of(error, part))
            else:
                files += file_problems(checkpoint.source, part, manifests[part])
        wrong = {problem.where for problem in files}
        for home, one in manifests.items():
            files += digest_problems(checkpoint.source, home, one, leaving_out=wrong)
        # That of a sealed step names the files of its parts too, each with its digest.
        records = {
            posixpath.join(home, name): record
            for home, one in reversed(manifests.items())
            for name, record in one.files.items()
        }
        if records and not files:
            summed = sum(1 for record in records.values() if record.digest)
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


def _verify_output(
    source: Source, manifest: Manifest, path: str, listener: Listener
) -> Verification:
    """Checks one output of ckptkit against its manifest: its files, its tensors, their digests."""
    problems = list(file_problems(source, "", manifest))
    wrong = [problem.where for problem in problems]
    for problem in digest_problems(source, "", manifest, leaving_out=wrong):
        is_other = problem.code == ChecksumError.code
        problems.append(replace(problem, code=_MISMATCH) if is_other else problem)
    stray = (path for path in source.walk(0) if path.endswith(".safetensors"))
    said = "is not in the manifest; loaders may read it"
    problems += [Problem("stray-file", path, said) for path in stray if path not in manifest.files]
    is_missing = any(problem.code != _MISMATCH for problem in problems)
    indexes: list[TensorIndex] = []
    if not is_missing:
        try:
            indexes = _read_written(source, manifest, path)
        except CkptkitError as error:
            problems.append(_problem_of(error, ""))
        else:
            problems += _differences(manifest, indexes)
    size_bytes = 0
    for index in indexes:
        entries = [e for e in index.tensors.values() if _name_written(e) in manifest.tensors]
        records = {entry.key: manifest.tensors[_name_written(entry)] for entry in entries}
        digests = {key: digest_like(record.digest) for key, record in records.items()}

        def visit(entry: TensorEntry, leaf: int, view: memoryview, digests: Any = digests) -> None:
            digests[entry.key].add(leaf, view)

        origin = Origin(SOURCE, source, index)
        errors = scan(origin, entries, visit, workers=usable_cores() + 1, listener=listener)
        problems += [_problem_of(error, key) for key, error in errors.items()]
        for entry in entries:
            digest, record = digests[entry.key], records[entry.key]
            if entry.key not in errors and digest.value(entry.size_bytes) != record.digest:
                where = f"tensor {_name_written(entry)!r}"
                problems.append(Problem(_MISMATCH, where, "has another digest than the manifest"))
        problems += check_objects(source, index)[2]
        size_bytes += sum(entry.size_bytes for entry in entries)
    return Verification(
        path=path,
        kind="output",
        problems=tuple(problems),
        tensors=0 if is_missing else len(manifest.tensors),
        size_bytes=size_bytes,
        unverified=tuple(name for name, t in manifest.tensors.items() if t.proof == UNVERIFIED),
    )


def _name_written(entry: TensorEntry) -> str:
    return f"{OPTIMIZER}.{entry.name}" if entry.part == "optimizer" else str(entry.name)


def _read_written(source: Source, manifest: Manifest, path: str) -> list[TensorIndex]:
    """Returns the tensors of an output; those in several parts as the manifest lists them."""
    wanted = _FORMATS.get(manifest.kind)
    # A consumer may have further files with tensors, which are compared as files alone.
    holding = {record.file for record in manifest.tensors.values()}
    depths = {}  # of stacked tensors, how many numbers the names of their parts have
    for name in manifest.tensors:
        stacked, _, numbers = name.rpartition("[")
        depths[stacked] = numbers.count(",") + 1
    indexes = []
    for candidate in recognise(sorted(manifest.files)):
        is_wanted = candidate.format in {wanted, TorchOptimizerReader.name}
        if not is_wanted or holding.isdisjoint(candidate.files):
            continue
        index, tensors = read_index(source, candidate), dict[Key, TensorEntry]()
        for key, entry in index.tensors.items():
            chunks, depth = entry.chunks, depths.get(entry.name, 0)
            if not depth or entry.name in manifest.tensors:
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
        indexes.append(replace(index, tensors=tensors))
    if holding and not any(index.format == wanted for index in indexes):
        raise NotACheckpointError(f"the manifest names no {wanted} file", where=path)
    return indexes


def _differences(manifest: Manifest, indexes: Sequence[TensorIndex]) -> Iterator[Problem]:
    expected = manifest.tensors
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
                message = f"is {actual} against {wanted} in the manifest"
                yield Problem("other-tensor", where, message)


NOT_MENDED = "not-mended"

_BLOCK_BYTES = 4 << 20
_KIND = "repair"


def run_repair(
    path: PathLike, copies: Sequence[PathLike] = (), *, listener: Listener | None = None
) -> Verification:
    """Verifies the folder of a step or an output, and replaces all damaged files, or none."""
    place = place_of(path)
    if is_url(place):
        raise RefusedError(
            "is a URL, and files are mended on a file system only",
            where=str(path),
            hint="copy the step to a disk, mend it there, and upload it again",
        )
    folder = local_path(place).resolve()
    if not folder.is_dir():
        raise RefusedError("is no folder", where=str(path), hint="name the folder of the step")
    found = report = _verify(folder, listener or ignore)
    for left in folder.parent.iterdir():
        if left.name.startswith(hidden_name(folder.name, f"{_KIND}-")):
            shutil.rmtree(left, ignore_errors=True)  # of a repair that was killed
    if report.ok:
        return report
    work = new_hidden_path(folder, _KIND)
    with ExitStack() as stack, translate_errors(folder.parent):
        damaged = stack.enter_context(open_source(folder))
        others = [stack.enter_context(open_source(place_of(copy))) for copy in copies]
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        manifest = _manifest_of(damaged)
        before = {name: _identity(damaged, name) for name in list_files(damaged)}
        if copies:
            work.mkdir(mode=0o700)
        for name in sorted(before) if copies else ():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                LOCAL_DISK.link_file((folder / name).resolve(), work / name)
            except OSError:  # a file system without hard links
                shutil.copyfile(folder / name, work / name)
        candidates: dict[str, Iterator[Source]] = {}
        staged: set[str] = set()
        while True:  # what is staged can show what else is damaged
            home = work if staged else folder
            lacking: list[str] = []
            for name in sorted(_named(report.problems, home, manifest, before)):
                mine = candidates.setdefault(name, _sound_copies(name, damaged, manifest, others))
                copy = next(mine, None)
                if copy is None:
                    lacking.append(name)
                else:
                    _stage(copy, name, folder, work)
                    staged.add(name)
            if lacking:
                refused = _refusals(lacking, damaged, manifest, others)
                return replace(found, problems=(*found.problems, *refused))
            report = _verify(work, ignore)
            if report.ok:
                break
        for name in sorted(staged):
            if _identity(damaged, name) != before.get(name):
                raise SourceChangedError(
                    f"{name!r} changed while it was mended",
                    where=str(folder),
                    hint="nothing was replaced; run again when nothing else writes there",
                )
        for name in sorted(staged):
            _replace(folder, name, work / name)
    return replace(report, path=str(folder), mended=tuple(sorted(staged)))


def _verify(folder: Path, listener: Listener) -> Verification:
    with open_source(folder) as source:  # steps beside an output are not verified with it
        manifest = _manifest_of(source)
    own = ITSELF if manifest is not None and manifest.kind != TRAINING else None
    try:
        report = run_verification(folder, select=own, listener=listener)
    except InputError as error:
        problem = Problem(error.code, error.where, error.message)
        return Verification(str(folder), "source", (problem,), 0, 0, ())
    if Path(report.path).resolve() != folder and not (folder / MANIFEST_NAME).exists():
        raise RefusedError(
            f"holds the checkpoint {report.path}",
            where=f"--repair {folder}",
            hint="name the folder of the step itself",
        )
    return report


def _manifest_of(source: Source) -> Manifest | None:
    with suppress(InputError):
        return read_manifest(source)
    return None


def _identity(source: Source, path: str) -> str | None:
    with suppress(InputError):
        return source.stat(path).identity
    return None


def _named(
    problems: Sequence[Problem], folder: Path, manifest: Manifest | None, paths: Collection[str]
) -> set[str]:
    """Returns the files that problems name; where they name none, those without a digest."""
    if manifest is None:
        return {MANIFEST_NAME}
    of_tensors = {f"tensor {name!r}": record.file for name, record in manifest.tensors.items()}
    known, named = {*paths, *manifest.files}, set[str]()
    for problem in problems:
        where = problem.where.removeprefix(f"{folder}/")
        where = of_tensors.get(where, where)
        named |= {path for path in known if f"{where},".startswith((f"{path},", f"{path}:"))}
    return named or {path for path, record in manifest.files.items() if not record.digest}


def _sound_copies(
    path: str, damaged: Source, manifest: Manifest | None, others: Sequence[Source]
) -> Iterator[Source]:
    """Yields the copies whose file is of the same save, has its digest, and is another one."""
    for copy in others:
        if manifest is None:
            theirs = _manifest_of(copy)
            if theirs is not None and not _differing(damaged, copy, theirs.files):
                yield copy
        elif path in manifest.files and _is_same_save(manifest, copy):
            with suppress(InputError):
                check_file(copy, path, manifest, path)
                is_whole = copy.stat(path).size_bytes == manifest.files[path].size_bytes
                if is_whole and _differing(damaged, copy, [path]):
                    yield copy


def _is_same_save(mine: Manifest, copy: Source) -> bool:
    """Whether manifests are of one save; an output has digests, and needs no such proof."""
    if mine.kind != TRAINING:
        return True
    theirs, attempt = _manifest_of(copy), mine.source.get("attempt")
    return bool(attempt) and theirs is not None and attempt == theirs.source.get("attempt")


def _refusals(
    lacking: Sequence[str], damaged: Source, manifest: Manifest | None, others: Sequence[Source]
) -> list[Problem]:
    """Says of each file why no copy replaces it."""
    what, reason = "is missing or damaged", "no copy of --from has it undamaged"
    files = map(posixpath.split, list_files(damaged))
    parts = [folder for folder, name in files if folder and name == MANIFEST_NAME]
    if manifest is None and parts:
        of = " or ".join(posixpath.join(damaged.location, part) for part in parts)
        reason = f"its parts have manifests of their own: pass {of}, and with --from its copy"
    elif not others:
        reason = "pass --from with another copy of the step"
    elif manifest is None:
        reason = f"without {MANIFEST_NAME} nothing shows that a copy is of the same save"
        for copy in others:
            if (theirs := _manifest_of(copy)) is not None:
                what, lacking = "differs from the copy", _differing(damaged, copy, theirs.files)
                break
    elif not any(_is_same_save(manifest, copy) for copy in others):
        reason = "no manifest shows that a copy of --from is of the same save"
    return [Problem(NOT_MENDED, path, f"{what}: {reason}") for path in lacking]


def _differing(first: Source, second: Source, paths: Collection[str]) -> list[str]:
    """Returns the files that are not there twice, equal bit by bit."""
    differing = []
    for path in paths:
        try:
            pairs = zip(_blocks(first, path), _blocks(second, path), strict=True)
            is_equal = all(one == other for one, other in pairs)
        except (InputError, ValueError):
            is_equal = False
        if not is_equal:
            differing.append(path)
    return differing


def _blocks(source: Source, path: str) -> Iterator[bytes]:
    size_bytes = source.stat(path).size_bytes
    for start in range(0, size_bytes, _BLOCK_BYTES):
        yield source.read(path, start, min(start + _BLOCK_BYTES, size_bytes))


def _stage(copy: Source, path: str, folder: Path, work: Path) -> None:
    (work / path).unlink(missing_ok=True)
    (work / path).parent.mkdir(parents=True, exist_ok=True)
    with (work / path).open("xb") as file:
        file.writelines(_blocks(copy, path))
    if (folder / path).exists():
        copy_owner(folder / path, work / path)
        shutil.copymode(folder / path, work / path)
    sync_file(work / path)


def _replace(folder: Path, path: str, staged: Path) -> None:
    """Renames a staged file over the damaged one, also in the steps that share it by hard links."""
    final, shared = folder / path, list[Path]()
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists() and final.stat().st_nlink > 1:
        others = [step / path for step in folder.parent.iterdir() if not step.name.startswith(".")]
        shared = [o for o in others if o != final and o.is_file() and o.samefile(final)]
    staged.replace(final)
    LOCAL_DISK.sync_directory(final.parent)
    for other in shared:
        draft = other.with_name(hidden_name(other.name, _KIND))
        draft.unlink(missing_ok=True)
        LOCAL_DISK.link_file(final, draft)
        draft.replace(other)
        LOCAL_DISK.sync_directory(other.parent)
