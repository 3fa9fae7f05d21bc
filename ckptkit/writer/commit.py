"""Turning what all ranks wrote into one step: merged, complete, durable, and visible at once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.manifest import MANIFEST_NAME, NODE_RANKS, FileRecord, parse_manifest
from ckptkit.layouts.dcp_metadata import METADATA_NAME, write_metadata
from ckptkit.storage.syscalls import Capabilities, sync_directory
from ckptkit.writer.durable import put_file, sync_tree
from ckptkit.writer.gathering import Gathering, Patience, crc_digest
from ckptkit.writer.merge import Unit, few_collections
from ckptkit.writer.messages import Commit, Committed, Proof
from ckptkit.writer.publish import clear, publish
from ckptkit.writer.record import FOLDER
from ckptkit.writer.watching import Tally


def commit(request: Commit, capabilities: Capabilities, tally: Tally) -> Committed:
    """Commits an attempt whose ranks have all given proof.

    Until the rename nothing is visible; afterwards all of it is, and durable. Only then the
    step that it replaces and the retired ones are removed.

    Args:
        request: What to commit.
        capabilities: What the platform offers.
        tally: Is told of bytes read and written.

    Returns:
        What is now there, and what is gone.

    Raises:
        CkptkitError: If something is missing, late, garbled or contradictory, or if something
            else lies where the step was to go.
        OSError: If something cannot be written.
    """
    began = time.monotonic()
    folder, final = Path(request.folder), Path(request.final)
    patience = Patience(request.visible_seconds)
    attempt = _Attempt(folder, capabilities, tally, Gathering(_Folder(folder), tally, patience))
    ranks = request.node_ranks
    with few_collections():
        if ranks:
            attempt.gathering.check(request.attempt, request.proofs, ranks)
        else:
            attempt.write_metadata(attempt.merge(request.attempt, request.proofs))
    notes = attempt.copy_from(request.beside)
    manifest = without(of_node(request.manifest, ranks), attempt.lost)
    size_bytes = attempt.finish(manifest, keeps_records=bool(ranks))
    replaced = publish(folder, final, capabilities)
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
    """Returns a manifest that says what the step lacks, by the user's name, and why."""
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
    capabilities: Capabilities
    tally: Tally
    gathering: Gathering
    lost: Mapping[str, str] = field(default_factory=dict)  # see `Merged`

    @property
    def files(self) -> dict[str, FileRecord]:
        """What the step holds, by path."""
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
        sync_tree(self.folder, self.capabilities)
        manifest = manifest_bytes(document, self.files, where)
        put_file(self.folder / MANIFEST_NAME, manifest)
        sync_directory(self.folder, self.capabilities)
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

    Raises:
        FormatError: If the document is no manifest.
    """
    manifest = parse_manifest(json.dumps(document).encode(), where=where)
    merged = {
        path: replace(file, digest=known.digest)
        if (known := manifest.files.get(path)) and known.digest
        else file
        for path, file in files.items()
    }
    return replace(manifest, files=merged).to_json()
