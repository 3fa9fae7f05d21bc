"""Mends a damaged step or output from bytes that stand elsewhere: `ckptkit verify --repair`.

A damaged record is taken from a replica of it in the same checkpoint, or from the same place of a
copy, wherever the bytes have the checksum that the damaged file stores for them. A file whose
structure is damaged is taken from a copy as a whole, if a manifest shows that the copy is of the
same save. What was mended is verified together with all that is kept before a file is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.conversion.verify import Verification, run_verification
from ckptkit.core.crc import crc32
from ckptkit.core.errors import InputError, RefusedError, SourceChangedError
from ckptkit.core.index import ChunkTable, Problem, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, Manifest
from ckptkit.engine.locate import Located, Locator
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.formats.discovery import ITSELF
from ckptkit.formats.registry import read_index, recognise
from ckptkit.runs.step_manifests import file_problems, list_files
from ckptkit.runs.stored_proofs import digest_problems, prove_index
from ckptkit.storage.base import Source
from ckptkit.storage.local.disk import LOCAL_DISK, Disk
from ckptkit.storage.local.durable import new_hidden_path, sync_file
from ckptkit.storage.local.ownership import copy_owner
from ckptkit.storage.local.target import translate_errors
from ckptkit.storage.locations import hidden_name
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path, open_source, place_of

NOT_MENDED = "not-mended"
_READ_BYTES = 4 << 20
_KIND = "repair"


class _Range(Struct, frozen=True):
    """Bytes of a file, and the CRC-32 that they have to have."""

    path: str
    start: int
    stop: int
    crc32: int


class _Damage(Struct, frozen=True):
    """What is wrong with the files of a folder.

    Attributes:
        ranges: Damaged records, each with the places in the same folder that hold it again.
        files: Files that are missing or damaged as a whole.
    """

    ranges: Mapping[_Range, Sequence[tuple[str, int]]] = field(default_factory=dict)
    files: frozenset[str] = frozenset()


class _Folder:
    """An open folder: the damaged one, or a copy of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.paths = set(list_files(source))
        self._before = {path: source.stat(path).identity for path in self.paths}
        self.manifest: Manifest | None = None
        with suppress(InputError):
            self.manifest = read_manifest(source)

    @property
    def attempt(self) -> object:
        """What names the save that wrote a step; None for others."""
        if self.manifest is None or self.manifest.kind != TRAINING:
            return None
        return self.manifest.source.get("attempt")

    def refuse_changes(self, paths: Collection[str]) -> None:
        """Refuses to replace files that were changed since they were found damaged."""
        for path in sorted(paths):
            now = self.source.stat(path).identity if self.size_of(path) is not None else None
            if now != self._before.get(path):
                raise SourceChangedError(
                    f"{path!r} changed while it was mended",
                    where=self.source.location,
                    hint="nothing was replaced; run again when nothing else writes there",
                )

    def size_of(self, path: str) -> int | None:
        with suppress(InputError):
            return self.source.stat(path).size_bytes
        return None

    def has(self, wanted: _Range, path: str, start: int) -> bool:
        """Returns whether bytes from `start` on have the checksum of a range."""
        return _has_crc32(self.source, wanted, path, start)

    def is_same_save(self, other: _Folder) -> bool:
        """Returns whether manifests show that both are of one save, or that they need not be.

        The manifest of an output proves all its bytes, whatever they are taken from.
        """
        mine, theirs = self.manifest, other.manifest
        if mine is None or (theirs is None and mine.kind == TRAINING):
            return False
        return mine.kind != TRAINING or (
            self.attempt not in {None, ""} and self.attempt == other.attempt
        )


def run_repair(
    path: PathLike,
    copies: Sequence[PathLike] = (),
    *,
    listener: Listener | None = None,
    disk: Disk = LOCAL_DISK,
) -> Verification:
    """Verifies a folder, and mends what is damaged, all of it or nothing.

    Args:
        path: The folder of one step, or of one output.
        copies: Other copies of it.
        listener: Is called with the progress.
        disk: The file operations of the platform.

    Returns:
        What is wrong now: nothing, if all was mended; `mended` has the files that were replaced.
        What could not be mended is listed in addition to what is wrong.
    """
    listener = listener or ignore
    folder = _check_folder(path)
    before, problems = _verify(folder, listener)
    _sweep(folder)
    if before is not None and before.ok:
        return before
    with ExitStack() as stack:
        damaged = _Folder(stack.enter_context(open_source(folder)))
        others = [_Folder(stack.enter_context(open_source(place_of(copy)))) for copy in copies]
        work = new_hidden_path(folder, _KIND)
        mended: set[str] = set()
        lacking: dict[str, str] = {}
        after: Verification | None = None
        with translate_errors(folder.parent):
            try:
                # With a damaged index, it is not known which of the files that it describes are.
                for is_index_alone in (True, False):
                    shutil.rmtree(work, ignore_errors=True)
                    damage = _find_damage(damaged, is_index_alone=is_index_alone)
                    mended, after, lacking = _mend(damaged, damage, others, folder, work, disk)
                    if after is not None:
                        damaged.refuse_changes(mended)
                        _put(folder, work, mended, disk)
                        break
            finally:
                shutil.rmtree(work, ignore_errors=True)
    if after is not None:
        return replace(after, path=str(folder), mended=tuple(sorted(mended)))
    refused = tuple(Problem(NOT_MENDED, where, why) for where, why in lacking.items())
    found = before or Verification(str(folder), "source", (), 0, 0, ())
    return replace(found, problems=(*problems, *refused))


def _check_folder(path: PathLike) -> Path:
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
    return folder


def _verify(folder: Path, listener: Listener) -> tuple[Verification | None, tuple[Problem, ...]]:
    own = None  # steps beside an output are not verified with it
    with open_source(folder) as source, suppress(InputError):
        own = None if read_manifest(source).kind == TRAINING else ITSELF
    try:
        report = run_verification(folder, select=own, listener=listener)
    except InputError as error:
        return None, (Problem(error.code, error.where, error.message),)
    if Path(report.path).resolve() != folder and not (folder / MANIFEST_NAME).exists():
        raise RefusedError(
            f"holds the checkpoint {report.path}",
            where=f"--repair {folder}",
            hint="name the folder of the step itself",
        )
    return report, report.problems


def _mend(
    damaged: _Folder,
    damage: _Damage,
    others: Sequence[_Folder],
    folder: Path,
    work: Path,
    disk: Disk,
) -> tuple[set[str], Verification | None, dict[str, str]]:
    """Makes mended files in a work folder, and verifies them with the others.

    Returns:
        The mended files; what the verification says, None if not all is mended; and why.
    """
    lacking: dict[str, str] = {}
    if damaged.manifest is None:
        ours = next((other for other in others if other.manifest is not None), None)
        if ours is not None:
            lacking = dict(_find_unlike(damaged, ours))
            if lacking:
                return set(), None, lacking
            return _try_files(damaged, {MANIFEST_NAME: ours}, {}, folder, work, disk)
    patches: dict[_Range, tuple[_Folder, str, int]] = {}
    for wanted, replicas in damage.ranges.items():
        found = _find_bytes(wanted, replicas, damaged, others)
        if found is not None:
            patches[wanted] = found
            continue
        lacking[wanted.path] = (
            f"bytes [{wanted.start:,}, {wanted.stop:,}) have CRC-32 {wanted.crc32:08x} nowhere"
        )
    same = [other for other in others if damaged.is_same_save(other)]
    reason = _explain(others, same)
    files = _choose_files(damage.files, lacking, same, damaged, reason)
    if lacking:
        return set(), None, lacking
    patches = {wanted: found for wanted, found in patches.items() if wanted.path not in files}
    if not patches and not files:
        return set(), None, {folder.name: f"what is damaged was not found: {reason}"}
    return _try_files(damaged, files, patches, folder, work, disk)


def _choose_files(
    wanted: Collection[str],
    lacking: dict[str, str],
    same: Sequence[_Folder],
    damaged: _Folder,
    reason: str,
) -> dict[str, _Folder]:
    """Chooses copies of files that are damaged or lack a record, and updates what is lacking."""
    files: dict[str, _Folder] = {}
    for path in sorted({*wanted, *lacking}):
        copies = [copy for copy in same if _is_sound(copy, path, damaged)]
        other = next((copy for copy in copies if not _is_alike(damaged, copy, path)), None)
        if other is not None:
            files[path] = other
            lacking.pop(path, None)
        elif path in lacking or not copies:
            lacking[path] = f"{lacking.get(path, 'is missing or damaged')}: {reason}"
    return files


def _find_unlike(damaged: _Folder, copy: _Folder) -> Iterator[tuple[str, str]]:
    """Yields the files that keep a manifest from being taken from a copy.

    All other files have to be those of the copy: nothing else shows that both are of one save.
    """
    assert copy.manifest is not None  # noqa: S101  it is to be taken
    for path in copy.manifest.files:
        if not _is_alike(damaged, copy, path):
            why = f"differs from the copy, and without {MANIFEST_NAME} nothing shows that both are"
            yield path, f"{why} of the same save"


def _is_alike(first: _Folder, second: _Folder, path: str) -> bool:
    """Whether two folders have the same file, bit by bit."""
    size_bytes = first.size_of(path)
    if size_bytes is None or size_bytes != second.size_of(path):
        return False
    for start in range(0, size_bytes, _READ_BYTES):
        stop = min(start + _READ_BYTES, size_bytes)
        if first.source.read(path, start, stop) != second.source.read(path, start, stop):
            return False
    return True


def _explain(others: Sequence[_Folder], same: Sequence[_Folder]) -> str:
    if not others:
        return "pass --from with another copy of the step"
    if not same:
        return "no manifest shows that a copy of --from is of the same save"
    return "no copy of --from has it undamaged"


def _find_bytes(
    wanted: _Range,
    replicas: Sequence[tuple[str, int]],
    damaged: _Folder,
    others: Sequence[_Folder],
) -> tuple[_Folder, str, int] | None:
    places = [(damaged, path, start) for path, start in replicas]
    places += [(other, wanted.path, wanted.start) for other in others]
    return next((place for place in places if place[0].has(wanted, *place[1:])), None)


def _is_sound(copy: _Folder, path: str, damaged: _Folder) -> bool:
    """Whether a file of a copy has the size and the digest that the damaged folder expects."""
    assert damaged.manifest is not None  # noqa: S101  it is of the same save
    record = damaged.manifest.files.get(path)
    if record is None or copy.size_of(path) != record.size_bytes:
        return False
    alone = replace(damaged.manifest, files={path: record})
    return next(digest_problems(copy.source, "", alone, leaving_out=()), None) is None


def _try_files(
    damaged: _Folder,
    files: Mapping[str, _Folder],
    patches: Mapping[_Range, tuple[_Folder, str, int]],
    folder: Path,
    work: Path,
    disk: Disk,
) -> tuple[set[str], Verification | None, dict[str, str]]:
    """Makes the mended files beside links to all others, and verifies the whole."""
    mended = {*files, *(wanted.path for wanted in patches)}
    work.mkdir(mode=0o700)
    for path in sorted(damaged.paths - mended):
        _link(folder / path, work / path, disk)
    for path in sorted(mended):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        copy = files.get(path, damaged)
        size = copy.size_of(path) or 0
        with (work / path).open("xb") as file:
            for start in range(0, size, _READ_BYTES):
                file.write(copy.source.read(path, start, min(start + _READ_BYTES, size)))
            for wanted, (origin, place, begin) in patches.items():
                if wanted.path == path:
                    _patch(file.fileno(), wanted, origin.source, place, begin)
        if (folder / path).exists():
            copy_owner(folder / path, work / path)
            shutil.copymode(folder / path, work / path)
        sync_file(work / path)
    report, problems = _verify(work, ignore)
    if report is not None and report.ok:
        return mended, report, {}
    text = str(work)
    return (
        set(),
        None,
        {p.where.replace(text, str(folder)): f"is still damaged: {p.message}" for p in problems},
    )


def _link(path: Path, name: Path, disk: Disk) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    try:
        disk.link_file(path.resolve(), name)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, name)


def _patch(descriptor: int, wanted: _Range, source: Source, path: str, begin: int) -> None:
    for at in range(wanted.start, wanted.stop, _READ_BYTES):
        stop = min(at + _READ_BYTES, wanted.stop)
        offset = begin - wanted.start
        data = memoryview(source.read(path, at + offset, stop + offset))
        os.lseek(descriptor, at, os.SEEK_SET)
        while data:
            data = data[os.write(descriptor, data) :]


def _put(folder: Path, work: Path, mended: set[str], disk: Disk) -> None:
    """Replaces the damaged files one by one; each is the old or the mended one at any moment."""
    for path in sorted(mended):
        final = folder / path
        final.parent.mkdir(parents=True, exist_ok=True)
        shared = list(_other_names(folder, path)) if final.exists() else []
        (work / path).replace(final)
        disk.sync_directory(final.parent)
        for other in shared:  # of unchanged tensors, which steps of a run share
            draft = other.with_name(hidden_name(other.name, _KIND))
            draft.unlink(missing_ok=True)
            disk.link_file(final, draft)
            draft.replace(other)
            disk.sync_directory(other.parent)


def _other_names(folder: Path, path: str) -> Iterator[Path]:
    """Yields the same file in other steps of the run, where it is one file by a hard link."""
    status = (folder / path).stat()
    if status.st_nlink == 1:
        return
    for step in sorted(folder.parent.iterdir()):
        other = step / path
        if step == folder or step.name.startswith(".") or not other.is_file():
            continue
        if (other.stat().st_dev, other.stat().st_ino) == (status.st_dev, status.st_ino):
            yield other


def _sweep(folder: Path) -> None:
    """Removes what a repair has left that was killed."""
    begin = hidden_name(folder.name, f"{_KIND}-")
    for path in folder.parent.iterdir():
        if path.name.startswith(begin):
            shutil.rmtree(path, ignore_errors=True)


def _find_damage(folder: _Folder, *, is_index_alone: bool) -> _Damage:
    files: set[str] = set()
    source, manifest = folder.source, folder.manifest
    if manifest is not None:
        wrong = [problem.where for problem in file_problems(source, "", manifest)]
        problems = digest_problems(source, "", manifest, leaving_out=wrong)
        files = {*wrong, *(problem.where for problem in problems)}
    ranges: dict[_Range, Sequence[tuple[str, int]]] = {}
    paths = sorted({*folder.paths, *(() if manifest is None else manifest.files)})
    for candidate in recognise(paths):
        try:
            index = read_index(source, candidate)
            if manifest is not None and manifest.kind != TRAINING:
                index = prove_index(source, "", manifest, candidate, index)
        except InputError:  # without digests it is not known which of them it is
            digests = {} if manifest is None else manifest.files
            if not is_index_alone or files.isdisjoint(candidate.files):
                files |= {p for p in candidate.files if p in digests and not digests[p].digest}
            continue
        found, damaged = _find_ranges(source, index)
        ranges |= found
        files |= damaged
    return _Damage({r: at for r, at in ranges.items() if r.path not in files}, frozenset(files))


def _find_ranges(
    source: Source, index: TensorIndex
) -> tuple[dict[_Range, Sequence[tuple[str, int]]], set[str]]:
    """Compares all records with their checksums, replicas included.

    Returns:
        The damaged ones, with the places of their replicas; and files whose structure is damaged.
    """
    locator, folder = Locator(source, index), _Reading(source)
    ranges: dict[_Range, Sequence[tuple[str, int]]] = {}
    files: set[str] = set()
    for entry in index.tensors.values():
        if entry.derivation is not None:
            continue
        rows: dict[bytes, list[Located]] = defaultdict(list)
        for row in range(len(entry.chunks.record)):
            try:
                located = locator.locate(entry, entry.chunks, row)
            except InputError:
                files.add(index.files[index.records[int(entry.chunks.record[row])].file].path)
                continue
            if located.compressed is None:
                rows[_place_of(entry.chunks, row)].append(located)
        for same in rows.values():
            for located in same:
                wanted = folder.find_damage(located)
                if wanted is not None:
                    ranges[wanted] = [
                        (other.path, other.start)
                        for other in same
                        if other is not located
                        and other.stop - other.start == wanted.stop - wanted.start
                    ]
    return ranges, files


class _Reading:
    """Compares records of a source, each once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: dict[tuple[str, int], _Range | None] = {}

    def find_damage(self, located: Located) -> _Range | None:
        """Returns the range of a record that has another checksum than is stored; else None."""
        key = located.path, located.start
        if located.crc32 is None:
            return None
        if key not in self._found:
            wanted = _Range(located.path, located.start, located.stop, located.crc32)
            is_sound = _has_crc32(self._source, wanted, *key)
            self._found[key] = None if is_sound else wanted
        return self._found[key]


def _has_crc32(source: Source, wanted: _Range, path: str, start: int) -> bool:
    stop, crc = start + wanted.stop - wanted.start, 0
    try:
        for at in range(start, stop, _READ_BYTES):
            crc = crc32(source.read(path, at, min(at + _READ_BYTES, stop)), crc)
    except InputError:
        return False
    return crc == wanted.crc32


def _place_of(chunks: ChunkTable, row: int) -> bytes:
    """Returns what is equal for chunks that hold the same elements."""
    return np.asarray([chunks.offsets[row], chunks.sizes[row]]).tobytes()
