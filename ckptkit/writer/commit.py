"""Turning what all ranks wrote into one step: merged, complete, durable, and visible at once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, FormatError, MissingFileError, TruncatedFileError
from ckptkit.core.manifest import MANIFEST_NAME, NODE_RANKS, FileRecord, parse_manifest
from ckptkit.layouts.dcp_metadata import METADATA_NAME, write_metadata
from ckptkit.storage.names import check_relative
from ckptkit.storage.syscalls import Capabilities, sync_directory
from ckptkit.writer.durable import put_file, sync_tree
from ckptkit.writer.merge import Merger, Unit, few_collections
from ckptkit.writer.messages import Commit, Committed, Proof
from ckptkit.writer.publish import clear, publish
from ckptkit.writer.record import FOLDER, RankRecord, WrittenFile, parse_record
from ckptkit.writer.watching import Tally

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0
_LATE = "see whether all ranks write to the same file system, and whether it is slow to show files"


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
    attempt = _Attempt(folder, capabilities, tally, _Patience(request.visible_seconds))
    ranks = request.node_ranks
    with few_collections():
        if ranks:
            attempt.check(request.attempt, request.proofs, ranks)
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


class _Patience:
    """Waits for what other machines have written to become visible here, but not for ever."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def until(self, find_fault: Callable[[], Exception | None]) -> None:
        """Asks again and again until no fault is found.

        Raises:
            Exception: The fault that is left when the time is up.
        """
        pause = _FIRST_PAUSE_SECONDS
        while (fault := find_fault()) is not None:
            if time.monotonic() + pause > self._deadline:
                raise fault
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class _Attempt:
    """The working folder of one attempt, on its way to become a step."""

    folder: Path
    capabilities: Capabilities
    tally: Tally
    patience: _Patience
    files: dict[str, FileRecord] = field(default_factory=dict)  # by path
    lost: Mapping[str, str] = field(default_factory=dict)  # see `Merged`

    def merge(self, attempt: str, proofs: Sequence[Proof]) -> Mapping[str, Unit]:
        """Reads all records, sees that their files are there, and merges them."""
        merger = Merger(len(proofs))
        for record, where in self._records(attempt, proofs, range(len(proofs))):
            merger.add(record, where=where)
        merged = merger.result()
        for unit in merged.empty:
            self._remove(unit)
        self.lost = merged.lost
        return merged.units

    def _remove(self, unit: str) -> None:
        """Removes the files of a directory of which the step does without."""
        shutil.rmtree(self.folder / unit, ignore_errors=True)
        for path in [path for path in self.files if path.startswith(f"{unit}/")]:
            del self.files[path]

    def check(self, attempt: str, proofs: Sequence[Proof], ranks: Sequence[int]) -> None:
        """Reads the records of some ranks, and sees that their files are there."""
        for _ in self._records(attempt, proofs, ranks):
            pass

    def _records(
        self, attempt: str, proofs: Sequence[Proof], ranks: Sequence[int]
    ) -> Iterator[tuple[RankRecord, str]]:
        if [proof.rank for proof in proofs] != list(ranks):
            raise FormatError(
                f"proofs of the ranks {[proof.rank for proof in proofs]} were found where each of"
                f" {len(ranks)} ranks was to give one, in order",
                where=str(self.folder),
            )
        for proof in proofs:
            where = str(self.folder / proof.path)
            record = self._read(proof, where)
            if (record.rank, record.attempt) != (proof.rank, attempt):
                raise FormatError(
                    f"a record of rank {record.rank} for attempt {record.attempt!r} was found where"
                    f" that of rank {proof.rank} for {attempt!r} was expected",
                    where=where,
                )
            self._see(record.files, where)
            yield record, where

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
            self.files[name] = FileRecord(len(data), _digest(crc32(data)))
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

    def _read(self, proof: Proof, where: str) -> RankRecord:
        check_relative(proof.path, str(self.folder))
        found: list[bytes] = []

        def find_fault() -> Exception | None:
            found.clear()
            try:
                data = Path(where).read_bytes()
            except FileNotFoundError:
                return self._missing(where)
            if len(data) != proof.size_bytes:
                return _cut_short(where, len(data), proof.size_bytes)
            if crc32(data) != proof.crc32:
                return ChecksumError(
                    f"CRC-32 {crc32(data):08x} was found where rank {proof.rank} wrote"
                    f" {proof.crc32:08x}",
                    where=where,
                )
            found.append(data)
            return None

        self.patience.until(find_fault)
        self.tally.done_bytes += proof.size_bytes
        return parse_record(found[0], where=where)

    def _see(self, files: Iterable[WrittenFile], where: str) -> None:
        for file in files:
            if file.path in self.files:
                raise FormatError(f"{file.path} was written by two ranks", where=where)
            self.patience.until(partial(self._fault_of, file))
            self.files[file.path] = FileRecord(file.size_bytes, _digest(file.crc32))

    def _fault_of(self, file: WrittenFile) -> Exception | None:
        path = self.folder / file.path
        try:
            # Opening, unlike asking by name, makes NFS ask the server anew.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            return self._missing(str(path))
        try:
            size_bytes = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size_bytes != file.size_bytes:
            return _cut_short(str(path), size_bytes, file.size_bytes)
        return None

    def _missing(self, where: str) -> MissingFileError:
        return MissingFileError(
            f"it was written, and not seen within {self.patience.seconds:g} s",
            where=where,
            hint=_LATE,
        )


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


def _digest(crc: int | None) -> str:
    return "" if crc is None else f"crc32:{crc:08x}"


def _cut_short(where: str, found: int, expected: int) -> TruncatedFileError:
    return TruncatedFileError(
        f"{found:,} bytes were found where {expected:,} were written", where=where, hint=_LATE
    )
