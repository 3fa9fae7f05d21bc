"""Turning what all ranks wrote into one step: merged, complete, durable, and visible at once.

Giving a finished working folder the name of its step, and clearing away what it replaces.

Files and folders that are there, or said not to be, after the power failed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME, NODE_RANKS, FileRecord, parse_manifest
from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, write_metadata
from ckptkit.runs.marks import claim
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.names import WORK_INFIX
from ckptkit.writer.failures import Tally, naming
from ckptkit.writer.gathering import Gathering, Patience, crc_digest
from ckptkit.writer.merge import Unit, few_collections
from ckptkit.writer.messages import Commit, Committed, Proof
from ckptkit.writer.record import FOLDER

TRASH, OLD = "trash", "old"
"""Kinds of hidden directories: one to be removed, and one that makes room for its successor."""

_NONCE_BYTES = 8
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


def put_file(path: Path, data: bytes) -> None:
    """Makes a durable file; its entry in the folder is not, yet."""
    with naming(path):
        descriptor = os.open(path, _NEW_FILE, 0o666)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(folder: Path, inside: Iterable[str], disk: Disk) -> list[Path]:
    """Makes a folder, those above it, and some inside it, where they are not there.

    Args:
        folder: The outermost one that the caller fills.
        inside: Paths relative to it; may hold the empty one.
        disk: The file operations of the platform.

    Returns:
        The folders inside, those between included, whose entries are to be made durable after
        they were filled; the innermost first.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        disk.sync_directory(path.parent)
    needed = {folder}
    for name in inside:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        while path != folder:
            needed.add(path)
            path = path.parent
    return sorted(needed, reverse=True)


def hidden_beside(path: Path, kind: str) -> Path:
    """Returns a new hidden name beside a directory, which no tool takes for a checkpoint."""
    nonce = os.urandom(_NONCE_BYTES).hex()
    return path.parent / f".{path.name}{WORK_INFIX}{kind}-{nonce}"


def remove_whole(path: Path) -> None:
    """Removes a directory, which first loses its name: no half of it looks like a checkpoint.

    Of a link only the link goes: what it leads to lies elsewhere, and may serve something else.
    """
    if path.is_symlink():
        path.unlink()
        return
    trash = hidden_beside(path, TRASH)
    path.rename(trash)
    shutil.rmtree(trash)


def sync_tree(folder: Path, disk: Disk) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        disk.sync_directory(Path(path))


_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def publish(folder: Path, final: Path, disk: Disk) -> Path | None:
    """Renames a working folder to its step, durably; a complete step of that name is replaced.

    Args:
        folder: The working folder, all of it durable.
        final: The step's directory, beside it.
        disk: The file operations of the platform.

    Returns:
        Where the replaced step lies now, hidden, or None where nothing was replaced.
    """
    replaced = None
    try:
        folder.rename(final)  # an empty directory is replaced too
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        _refuse_strangers(final)
        replaced = _replace(folder, final, disk)
    disk.sync_directory(final.parent)
    return replaced


def clear(replaced: Path | None, steps: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Removes the replaced step and retired ones, as far as that is possible.

    A retired step that somebody reads stays: it is retired once more by the next save.

    Returns:
        The retired steps that are gone, and notes on what could not be removed.
    """
    removed: list[Path] = []
    notes: list[str] = []
    if replaced is not None:
        try:
            shutil.rmtree(replaced)
        except OSError as error:
            notes.append(f"what was replaced could not be removed: {error}")
    for step in steps:
        try:
            is_gone = _remove_unread(step)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{step.name} could not be removed: {error}")
            continue
        if is_gone:
            removed.append(step)
        else:
            notes.append(f"{step.name} is being read, and stays until a later save")
    return removed, notes


def _remove_unread(step: Path) -> bool:
    mark = claim(sorted(step.glob(f"*/{METADATA_NAME}")) + sorted(step.glob(METADATA_NAME)))
    if mark is None:
        return False
    with mark:
        remove_whole(step)
    return True


def _refuse_strangers(final: Path) -> None:
    if final.is_dir() and not final.is_symlink() and (final / MANIFEST_NAME).is_file():
        return
    raise OutputExistsError(
        f"something without a {MANIFEST_NAME} was found where the step was to go",
        where=str(final),
        hint="it may be another tool's checkpoint; move it away, or save into another directory",
    )


def _replace(folder: Path, final: Path, disk: Disk) -> Path:
    trash = hidden_beside(final, TRASH)
    if disk.exchange_folders(folder, final):
        with suppress(OSError):  # it is hidden under its present name as well
            folder.rename(trash)
            return trash
        return folder
    old = hidden_beside(final, OLD)
    final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        old.rename(final)
        raise
    old.rename(trash)
    return trash


def commit(request: Commit, disk: Disk, tally: Tally) -> Committed:
    """Commits an attempt whose ranks have all given proof.

    Until the rename nothing is visible; afterwards all of it is, and durable. Only then the
    step that it replaces and the retired ones are removed.

    Args:
        request: What to commit.
        disk: The file operations of the platform.
        tally: Is told of bytes read and written.

    Returns:
        What is now there, and what is gone.
    """
    began = time.monotonic()
    folder, final = Path(request.folder), Path(request.final)
    patience = Patience(request.visible_seconds)
    attempt = _Attempt(folder, disk, tally, Gathering(_Folder(folder), tally, patience))
    ranks = request.node_ranks
    with few_collections():
        if ranks:
            attempt.gathering.check(request.attempt, request.proofs, ranks)
        else:
            attempt.write_metadata(attempt.merge(request.attempt, request.proofs))
    notes = attempt.copy_from(request.beside)
    manifest = without(of_node(request.manifest, ranks), attempt.lost)
    size_bytes = attempt.finish(manifest, keeps_records=bool(ranks))
    replaced = publish(folder, final, disk)
    # A step that lacks something takes the place of none that has all.
    remove = () if attempt.lost else request.remove
    retired = [Path(step) for step in remove if Path(step) != final]
    removed, unremoved = clear(replaced, retired)
    return Committed(
        attempt=request.attempt,
        size_bytes=size_bytes,
        seconds=time.monotonic() - began,
        removed=tuple(map(str, removed)),
        notes=(*notes, *unremoved),
        lost=attempt.lost,
    )


def without(document: Mapping[str, Any], lost: Mapping[str, str]) -> Mapping[str, Any]:
    return {**document, "source": {**document["source"], "lost": lost}} if lost else document


class _Folder:
    """A directory that all ranks wrote into."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path

    def read(self, path: str) -> bytes | None:
        try:
            return (self._path / path).read_bytes()
        except FileNotFoundError:
            return None

    def size_bytes(self, path: str) -> int | None:
        try:
            # Opening, unlike asking by name, makes NFS ask the server anew.
            descriptor = os.open(self._path / path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            return None
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class _Attempt:
    """The working folder of one attempt, on its way to become a step."""

    folder: Path
    disk: Disk
    tally: Tally
    gathering: Gathering
    lost: Mapping[str, str] = field(default_factory=dict)  # see `Merged`

    @property
    def files(self) -> dict[str, FileRecord]:
        return self.gathering.files

    def merge(self, attempt: str, proofs: Sequence[Proof]) -> Mapping[str, Unit]:
        """Reads all records, sees that their files are there, and merges them."""
        merged = self.gathering.merge(attempt, proofs)
        for unit in merged.empty:
            shutil.rmtree(self.folder / unit, ignore_errors=True)
        self.lost = merged.lost
        return merged.units

    def write_metadata(self, units: Mapping[str, Unit]) -> None:
        """Writes the index of every unit."""
        for name, unit in units.items():
            path = f"{name}/{METADATA_NAME}" if name else METADATA_NAME
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb", buffering=1 << 20) as file:

                def write(data: bytes) -> None:
                    self.tally.done_bytes += file.write(data)

                write_metadata(write, unit.tensors, unit.objects)
                file.flush()
                os.fsync(file.fileno())
                self.files[path] = FileRecord(file.tell())

    def copy_from(self, beside: str) -> list[str]:
        """Copies the files of a folder into the step; returns notes.

        Nobody changes the folder meanwhile: one of its files that vanishes is an error.
        """
        if not beside:
            return []
        source = Path(beside)
        if not source.is_dir():
            return [f"{beside} is gone, so the step lies there without the files of that folder"]
        for path in sorted(source.rglob("*")):
            if path.is_dir():
                continue
            name = path.relative_to(source).as_posix()
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            put_file(target, data)
            self.files[name] = FileRecord(len(data), crc_digest(crc32(data)))
            self.tally.done_bytes += len(data)
        return []

    def finish(self, document: Mapping[str, Any], *, keeps_records: bool) -> int:
        """Makes the folder durable, the manifest last; returns the bytes of all files."""
        where = str(self.folder / MANIFEST_NAME)
        if not keeps_records:
            shutil.rmtree(self.folder / FOLDER)
        sync_tree(self.folder, self.disk)
        manifest = manifest_bytes(document, self.files, where)
        put_file(self.folder / MANIFEST_NAME, manifest)
        self.disk.sync_directory(self.folder)
        return sum(file.size_bytes for file in self.files.values()) + len(manifest)


def of_node(document: Mapping[str, Any], ranks: Sequence[int]) -> Mapping[str, Any]:
    """Returns a manifest that names the ranks whose files alone lie beside it, if any are given."""
    if not ranks:
        return document
    return {**document, "source": {**document["source"], NODE_RANKS: list(ranks)}}


def manifest_bytes(
    document: Mapping[str, Any], files: Mapping[str, FileRecord], where: str
) -> bytes:
    """Returns the manifest with all files in it; digests that it has already are kept.

    Args:
        document: The manifest as plain values.
        files: By path.
        where: The manifest's own path, for messages.
    """
    manifest = parse_manifest(json.dumps(document).encode(), where=where)
    merged = {
        path: replace(file, digest=known.digest)
        if (known := manifest.files.get(path)) and known.digest
        else file
        for path, file in files.items()
    }
    return replace(manifest, files=merged).to_json()
