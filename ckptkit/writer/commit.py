"""Commits an attempt: gathers the ranks' records, merges them, and gives the folder its name.

Nothing is visible before the last rename. Everything in the folder is durable before it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    MissingFileError,
    OutputExistsError,
    TruncatedFileError,
)
from ckptkit.core.manifest import MANIFEST_NAME, NODE_RANKS, FileRecord, parse_manifest
from ckptkit.core.threads import few_collections
from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, write_metadata
from ckptkit.runs.marks import claim
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.durable import (
    OCCUPIED,
    OLD,
    TRASH,
    new_hidden_path,
    put_file,
    remove_folder,
    replace_folder,
    sync_folders,
)
from ckptkit.storage.locations import STAGED_FILES, check_relative, unstaged_path
from ckptkit.writer.merge import Merged, MergedUnit, Merger, with_findings
from ckptkit.writer.messages import ByteCounter, Commit, RecordProof, StepCommitted
from ckptkit.writer.record import RECORDS_FOLDER, RankRecord, parse_record
from ckptkit.writer.sweep import sweep


def commit(request: Commit, disk: Disk, counter: ByteCounter) -> StepCommitted:
    """Commits a save. Every rank has proved its record of it.

    Before the rename nothing is visible, after it everything is visible and durable. Only then
    are the replaced step and the retired steps removed.
    """
    began = time.monotonic()
    folder, final, ranks = Path(request.folder), Path(request.final), request.node_ranks
    attempt = _WorkingFolder(folder, counter, request.visible_seconds)
    merged = Merged({}, {}, ())
    with few_collections():
        if ranks:
            for _ in attempt.records(request.attempt, request.proofs, ranks):
                pass  # a node's copy of a step is not merged
        else:
            merged = attempt.merge(request.attempt, request.proofs)
            for unit in merged.empty:
                shutil.rmtree(folder / unit, ignore_errors=True)
            for name, content in merged.units.items():
                path = f"{name}/{METADATA_NAME}" if name else METADATA_NAME
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with (folder / path).open("xb", buffering=1 << 20) as file:
                    attempt.files[path] = write_index(file, content, counter)
                    os.fsync(file.fileno())
    notes = [*merged.notes]
    if request.beside:
        sidecar = Path(request.beside)
        if sidecar.is_dir():
            attempt.files |= _copy_sidecar(sidecar, folder, counter)
        else:
            notes.append(f"{sidecar} is missing, so the step has none of its files")
    source = with_findings(request.manifest["source"], merged.lost, merged.notes, merged.digests)
    if ranks:  # it names the ranks whose files the folder has
        source[NODE_RANKS] = list(ranks)
    else:
        shutil.rmtree(folder / RECORDS_FOLDER)
    sync_folders(folder, disk)
    place = folder / MANIFEST_NAME
    manifest = manifest_bytes({**request.manifest, "source": source}, attempt.files, str(place))
    put_file(place, manifest)
    disk.sync_directory(folder)
    replaced = _rename(folder, final, disk, shared=request.shared)
    if replaced is not None:
        try:
            shutil.rmtree(replaced)
        except OSError as error:
            notes.append(f"the replaced step could not be removed: {error}")
    if folder.name == STAGED_FILES:
        with suppress(OSError):  # else it is removed as what a kill leaves
            folder.parent.rmdir()
    if request.shared:
        notes += sweep(final.parent, final.name)
    # A step with lost values must not retire a complete one.
    remove = () if merged.lost else request.remove
    removed, unremoved = remove_steps([Path(step) for step in remove if Path(step) != final])
    return StepCommitted(
        attempt=request.attempt,
        size_bytes=sum(file.size_bytes for file in attempt.files.values()) + len(manifest),
        seconds=time.monotonic() - began,
        removed=tuple(map(str, removed)),
        notes=(*notes, *unremoved),
        lost=merged.lost,
    )


def write_index(file: IO[bytes], unit: MergedUnit, counter: ByteCounter) -> FileRecord:
    """Writes the `.metadata` of one DCP directory, which may be large."""
    size_bytes = crc = 0

    def write(data: bytes) -> None:
        nonlocal size_bytes, crc
        file.write(data)
        size_bytes += len(data)
        crc = crc32(data, crc)
        counter.done_bytes += len(data)

    write_metadata(write, unit.tensors, unit.objects)
    file.flush()
    return FileRecord(size_bytes, crc_digest(crc))


def _copy_sidecar(source: Path, folder: Path, counter: ByteCounter) -> dict[str, FileRecord]:
    """Copies the files of a folder into the step; one that vanishes meanwhile is an error."""
    files: dict[str, FileRecord] = {}
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(source).as_posix()
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes()
        put_file(target, data)
        files[name] = FileRecord(len(data), crc_digest(crc32(data)))
        counter.done_bytes += len(data)
    return files


def _rename(folder: Path, final: Path, disk: Disk, *, shared: bool) -> Path | None:
    """Renames a durable working folder to its step, durably; a complete step is replaced.

    Where files of others may be in the step's directory, and are, the files are moved into it.

    Returns:
        The hidden folder that has the replaced step now, None if nothing was replaced.
    """
    replaced = None
    try:
        folder.rename(final)  # an empty directory is replaced too
    except OSError as error:
        if error.errno not in OCCUPIED:
            raise
        if shared and final.is_dir() and _holds_more(final):
            _move_into(folder, final, disk)
            return None
        if not final.is_dir() or final.is_symlink() or not (final / MANIFEST_NAME).is_file():
            raise OutputExistsError(
                f"expected a step or nothing, found something without a {MANIFEST_NAME}",
                where=str(final),
                hint="it may be a checkpoint of another tool; move it away, or save into another"
                " directory",
            ) from error
        old = new_hidden_path(final, OLD)
        replaced = replace_folder(folder, final, old, disk)
        # Only an old step is put back by a sweep; `folder` has a hidden name as well.
        trash = new_hidden_path(final, TRASH)
        if replaced == old:
            old.rename(trash)
            replaced = trash
        else:
            with suppress(OSError):
                replaced = folder.rename(trash)
    disk.sync_directory(final.parent)
    return replaced


def _holds_more(final: Path) -> bool:
    """Returns whether a folder has other files than those of one complete step."""
    try:
        data = (final / MANIFEST_NAME).read_bytes()
        own = {*parse_manifest(data, where=str(final)).files, MANIFEST_NAME}
    except (OSError, CkptkitError):
        return True
    files = (path for path in final.rglob("*") if not path.is_dir())
    return any(path.relative_to(final).as_posix() not in own for path in files)


def _move_into(folder: Path, final: Path, disk: Disk) -> None:
    """Moves durable files into a folder that is there; what makes it a checkpoint comes last."""
    last = (METADATA_NAME, MANIFEST_NAME)
    for name in reversed(last):  # of an earlier save, some files of which are replaced
        (final / name).unlink(missing_ok=True)
        disk.sync_directory(final)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: last.index(path.name) if path.name in last else -1):
        target = final / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name in last:
            sync_folders(final, disk)
        path.replace(target)
    disk.sync_directory(final)
    shutil.rmtree(folder)


def remove_steps(steps: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Removes retired steps as far as possible.

    One that is being read stays; the next save retires it again.

    Returns:
        Those that were removed, and notes on what could not be removed.
    """
    removed: list[Path] = []
    notes: list[str] = []
    for step in steps:
        try:
            indexes = sorted(step.glob(f"*/{METADATA_NAME}")) + sorted(step.glob(METADATA_NAME))
            mark = claim(indexes)
            if mark is None:
                notes.append(f"{step.name} is being read and stays until a later save")
                continue
            with mark:
                remove_folder(step)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{step.name} could not be removed: {error}")
        else:
            removed.append(step)
    return removed, notes


def manifest_bytes(
    document: Mapping[str, Any], files: Mapping[str, FileRecord], where: str
) -> bytes:
    """Returns the manifest with all files; digests that it has already are kept."""
    manifest = parse_manifest(json.dumps(document).encode(), where=where)
    merged = {
        path: replace(file, digest=known.digest)
        if (known := manifest.files.get(path)) and known.digest
        else file
        for path, file in files.items()
    }
    return replace(manifest, files=merged).to_json()


_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0
_LATE = "check that all ranks write to the same file system, and whether it shows files late"


class AttemptFiles:
    """The files of an attempt, of which records of ranks say what there has to be.

    Files of other machines may become visible here late, so they are waited for, for
    `visible_seconds` in all.

    Attributes:
        files: The files that were checked, by path.
    """

    def __init__(self, location: str, counter: ByteCounter, visible_seconds: float) -> None:
        """Takes where they are, for messages."""
        self.files: dict[str, FileRecord] = {}
        self._digests: dict[str, str] = {}
        self._location = location
        self._counter = counter
        self._seconds = visible_seconds
        self._deadline = time.monotonic() + visible_seconds

    def read(self, path: str) -> bytes | None:
        """Returns the content of a file, None if it does not exist."""
        raise NotImplementedError

    def size_bytes(self, path: str) -> int | None:
        """Returns the size of a file, None if it does not exist."""
        raise NotImplementedError

    def merge(self, attempt: str, proofs: Sequence[RecordProof]) -> Merged:
        """Reads the records of all ranks, checks that their files exist, and merges them."""
        merger = Merger(len(proofs))
        for record, where in self.records(attempt, proofs, range(len(proofs))):
            merger.add(record, where=where)
        merged = merger.result()._replace(digests=self._digests)
        for unit in merged.empty:  # the step does without their files
            for path in [path for path in self.files if path.startswith(f"{unit}/")]:
                del self.files[path]
        return merged

    def records(
        self, attempt: str, proofs: Sequence[RecordProof], ranks: Sequence[int]
    ) -> Iterator[tuple[RankRecord, str]]:
        """Yields each rank's record, and where it is, once all its files were seen."""
        if [proof.rank for proof in proofs] != list(ranks):
            raise FormatError(
                f"expected one proof of each of {len(ranks)} ranks in order, found proofs of the"
                f" ranks {[proof.rank for proof in proofs]}",
                where=self._location,
            )
        for proof in proofs:
            where = f"{self._location}/{proof.path}"
            check_relative(proof.path, self._location)
            record = parse_record(self._wait_for(proof.path, proof.size_bytes, proof), where=where)
            self._counter.done_bytes += proof.size_bytes
            if (record.rank, record.attempt) != (proof.rank, attempt):
                raise FormatError(
                    f"expected the record of rank {proof.rank} for attempt {attempt!r}, found that"
                    f" of rank {record.rank} for {record.attempt!r}",
                    where=where,
                )
            for file in record.files:
                digest = crc_digest(file.crc32)
                if file.in_parts:
                    self._digests[file.path], digest = digest, ""
                self.check(file.path, FileRecord(file.size_bytes, digest), where)
            yield record, where

    def check(self, path: str, record: FileRecord, where: str) -> None:
        """Checks that a file exists which nothing else has named; `where` is what names it."""
        if path in self.files:
            raise FormatError(f"{path} was written by two ranks", where=where)
        self._wait_for(path, record.size_bytes)
        self.files[path] = record

    def _wait_for(self, path: str, size_bytes: int, proof: RecordProof | None = None) -> bytes:
        """Waits until a file has its size; with a proof also its content, which is returned."""
        where, pause = f"{self._location}/{path}", _FIRST_PAUSE_SECONDS
        while True:
            data, found_bytes = b"", self.size_bytes(path) if proof is None else None
            if proof is not None and (content := self.read(path)) is not None:
                data, found_bytes = content, len(content)
            if found_bytes is None:
                fault: Exception = MissingFileError(
                    f"it was written, but not seen within {self._seconds:g} s",
                    where=where,
                    hint=_LATE,
                )
            elif found_bytes != size_bytes:
                fault = TruncatedFileError(
                    f"expected {size_bytes:,} bytes, found {found_bytes:,}", where=where, hint=_LATE
                )
            elif proof is not None and crc32(data) != proof.crc32:
                fault = ChecksumError(
                    f"expected CRC-32 {proof.crc32:08x}, which rank {proof.rank} wrote, found"
                    f" {crc32(data):08x}",
                    where=where,
                )
            else:
                return data
            if time.monotonic() + pause > self._deadline:
                raise fault
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class _WorkingFolder(AttemptFiles):
    """The working folder, which all ranks wrote into."""

    def __init__(self, path: Path, counter: ByteCounter, visible_seconds: float) -> None:
        super().__init__(unstaged_path(str(path)), counter, visible_seconds)
        self._path = path

    def read(self, path: str) -> bytes | None:
        try:
            return (self._path / path).read_bytes()
        except FileNotFoundError:
            return None

    def size_bytes(self, path: str) -> int | None:
        try:
            # Unlike stat, open makes NFS revalidate its cached attributes.
            descriptor = os.open(self._path / path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            return None
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


def crc_digest(crc: int | None) -> str:
    """Returns a CRC-32 as the manifest writes it, empty if it is unknown."""
    return "" if crc is None else f"crc32:{crc:08x}"
