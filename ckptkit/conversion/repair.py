"""Repairs a damaged step or output from copies of it: `ckptkit verify --repair --from COPY`.

A file that the verification names is replaced by that of a copy, if a manifest shows that both are
of one save. The new files are staged beside links to all others, and the whole is verified, before
the first damaged file is replaced.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from ckptkit.conversion.verify import Verification, run_verification
from ckptkit.core.errors import InputError, RefusedError, SourceChangedError
from ckptkit.core.index import Problem
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, Manifest
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.formats.discovery import ITSELF
from ckptkit.runs.step_manifests import list_files
from ckptkit.runs.stored_proofs import check_file
from ckptkit.storage.base import Source
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import new_hidden_path, sync_file
from ckptkit.storage.local.ownership import copy_owner
from ckptkit.storage.local.target import translate_errors
from ckptkit.storage.locations import hidden_name
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path, open_source, place_of

NOT_MENDED = "not-mended"
_READ_BYTES = 4 << 20
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
        manifest, paths = _manifest_of(damaged), set(list_files(damaged))
        before = {name: _identity(damaged, name) for name in paths}
        if copies:
            work.mkdir(mode=0o700)
            for name in sorted(paths):
                _link(folder / name, work / name)
        candidates: dict[str, Iterator[Source]] = {}
        staged: set[str] = set()
        while True:  # what is staged can show what else is damaged
            named = _named(report.problems, work if staged else folder, manifest, paths)
            lacking: list[str] = []
            for name in sorted(named):
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


def _named(
    problems: Sequence[Problem], folder: Path, manifest: Manifest | None, paths: set[str]
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
        elif path in manifest.files and _is_same_save(manifest, _manifest_of(copy)):
            with suppress(InputError):
                check_file(copy, path, manifest, path)
                is_whole = copy.stat(path).size_bytes == manifest.files[path].size_bytes
                if is_whole and _differing(damaged, copy, [path]):
                    yield copy


def _is_same_save(mine: Manifest, theirs: Manifest | None) -> bool:
    """Whether both are of one save; that of an output proves all bytes, whoever has them."""
    if mine.kind != TRAINING:
        return True
    attempt = mine.source.get("attempt")
    return bool(attempt) and theirs is not None and attempt == theirs.source.get("attempt")


def _refusals(
    lacking: Sequence[str], damaged: Source, manifest: Manifest | None, others: Sequence[Source]
) -> list[Problem]:
    """Says of each file why no copy replaces it."""
    manifests = [(copy, _manifest_of(copy)) for copy in others]
    reason = "no copy of --from has it undamaged"
    if not others:
        reason = "pass --from with another copy of the step"
    elif manifest is not None and not any(_is_same_save(manifest, own) for _, own in manifests):
        reason = "no manifest shows that a copy of --from is of the same save"
    elif manifest is None:
        reason = f"without {MANIFEST_NAME} nothing shows that a copy is of the same save"
        readable = [(copy, own) for copy, own in manifests if own is not None]
        lacking = _differing(damaged, readable[0][0], readable[0][1].files) if readable else lacking
    return [Problem(NOT_MENDED, path, f"is missing or damaged: {reason}") for path in lacking]


def _manifest_of(source: Source) -> Manifest | None:
    with suppress(InputError):
        return read_manifest(source)
    return None


def _identity(source: Source, path: str) -> str | None:
    with suppress(InputError):
        return source.stat(path).identity
    return None


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
    for start in range(0, size_bytes, _READ_BYTES):
        yield source.read(path, start, min(start + _READ_BYTES, size_bytes))


def _link(path: Path, name: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    try:
        LOCAL_DISK.link_file(path.resolve(), name)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, name)


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
