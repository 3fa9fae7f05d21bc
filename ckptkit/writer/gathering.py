"""What all ranks wrote of an attempt: their records read, their files seen, all of it merged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, FormatError, MissingFileError, TruncatedFileError
from ckptkit.core.manifest import FileRecord
from ckptkit.storage.local.names import check_relative
from ckptkit.writer.failures import Tally
from ckptkit.writer.merge import Merged, Merger
from ckptkit.writer.messages import Proof
from ckptkit.writer.record import RankRecord, WrittenFile, parse_record

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0
_LATE = "see whether all ranks write to the same file system, and whether it is slow to show files"


class Shelf(Protocol):
    """Where the files of an attempt lie; paths are relative to it."""

    @property
    def location(self) -> str:
        """The place, for messages."""
        ...

    def read(self, path: str) -> bytes | None:
        """Returns a file, None where it is not there."""
        ...

    def size_bytes(self, path: str) -> int | None:
        """Returns the length of a file, None where it is not there."""
        ...


class Patience:
    """Waits for what other machines have written to become visible here, but not for ever."""

    def __init__(self, seconds: float) -> None:
        """Begins to count.

        Args:
            seconds: How long it waits at most, all in all.
        """
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def until(self, find_fault: Callable[[], Exception | None]) -> None:
        """Asks again and again until no fault is found."""
        pause = _FIRST_PAUSE_SECONDS
        while (fault := find_fault()) is not None:
            if time.monotonic() + pause > self._deadline:
                raise fault
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class Gathering:
    """Reads the records of an attempt, and sees that the files that they name are there.

    Attributes:
        files: What was seen, by path.
    """

    def __init__(self, shelf: Shelf, tally: Tally, patience: Patience) -> None:
        """Reads nothing yet.

        Args:
            shelf: Where the files lie.
            tally: Is told of bytes read.
            patience: How long they are waited for.
        """
        self.files: dict[str, FileRecord] = {}
        self._shelf = shelf
        self._tally = tally
        self._patience = patience

    def merge(self, attempt: str, proofs: Sequence[Proof]) -> Merged:
        """Reads the records of all ranks, sees that their files are there, and merges them."""
        merger = Merger(len(proofs))
        for record, where in self._records(attempt, proofs, range(len(proofs))):
            merger.add(record, where=where)
        merged = merger.result()
        for unit in merged.empty:
            self._forget(unit)
        return merged

    def check(self, attempt: str, proofs: Sequence[Proof], ranks: Sequence[int]) -> None:
        for _ in self._records(attempt, proofs, ranks):
            pass

    def see(self, files: Mapping[str, FileRecord], where: str) -> None:
        """Sees that further files are there.

        Args:
            files: By path.
            where: What names them.
        """
        for path, record in files.items():
            self._see([WrittenFile(path, record.size_bytes, None)], where)
            self.files[path] = record

    def _forget(self, unit: str) -> None:
        """Leaves out the files of a directory of which the step does without."""
        for path in [path for path in self.files if path.startswith(f"{unit}/")]:
            del self.files[path]

    def _records(
        self, attempt: str, proofs: Sequence[Proof], ranks: Sequence[int]
    ) -> Iterator[tuple[RankRecord, str]]:
        if [proof.rank for proof in proofs] != list(ranks):
            raise FormatError(
                f"proofs of the ranks {[proof.rank for proof in proofs]} were found where each of"
                f" {len(ranks)} ranks was to give one, in order",
                where=self._shelf.location,
            )
        for proof in proofs:
            where = self._where(proof.path)
            record = self._read(proof, where)
            if (record.rank, record.attempt) != (proof.rank, attempt):
                raise FormatError(
                    f"a record of rank {record.rank} for attempt {record.attempt!r} was found where"
                    f" that of rank {proof.rank} for {attempt!r} was expected",
                    where=where,
                )
            self._see(record.files, where)
            yield record, where

    def _read(self, proof: Proof, where: str) -> RankRecord:
        check_relative(proof.path, self._shelf.location)
        found: list[bytes] = []

        def find_fault() -> Exception | None:
            found.clear()
            data = self._shelf.read(proof.path)
            if data is None:
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

        self._patience.until(find_fault)
        self._tally.done_bytes += proof.size_bytes
        return parse_record(found[0], where=where)

    def _see(self, files: Iterable[WrittenFile], where: str) -> None:
        for file in files:
            if file.path in self.files:
                raise FormatError(f"{file.path} was written by two ranks", where=where)
            self._patience.until(partial(self._fault_of, file))
            self.files[file.path] = FileRecord(file.size_bytes, crc_digest(file.crc32))

    def _fault_of(self, file: WrittenFile) -> Exception | None:
        size_bytes = self._shelf.size_bytes(file.path)
        if size_bytes is None:
            return self._missing(self._where(file.path))
        if size_bytes != file.size_bytes:
            return _cut_short(self._where(file.path), size_bytes, file.size_bytes)
        return None

    def _missing(self, where: str) -> MissingFileError:
        return MissingFileError(
            f"it was written, and not seen within {self._patience.seconds:g} s",
            where=where,
            hint=_LATE,
        )

    def _where(self, path: str) -> str:
        return f"{self._shelf.location}/{path}"


def crc_digest(crc: int | None) -> str:
    """Returns a file's CRC-32 as the manifest has it, empty where it is not known."""
    return "" if crc is None else f"crc32:{crc:08x}"


def _cut_short(where: str, found: int, expected: int) -> TruncatedFileError:
    return TruncatedFileError(
        f"{found:,} bytes were found where {expected:,} were written", where=where, hint=_LATE
    )
