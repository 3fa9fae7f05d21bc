"""What one process writes for another one to put in its place, where only one may write a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError
from ckptkit.storage.staged_files import free_bytes, translated
from ckptkit.storage.syscalls import (
    Capabilities,
    join_file,
    open_for_reading,
    open_for_writing,
)

Row = tuple[str, Sequence[int], int, int]
"""A file of the output, where in it runs of one length begin, their bytes in all, their CRC-32."""


class PartFile:
    """A file written from its start to its end, and what is to become of its bytes.

    Attributes:
        rows: What was written, in its order.
    """

    def __init__(self, path: Path, named: Path, capabilities: Capabilities) -> None:
        """Makes the file.

        Args:
            path: Where it lies.
            named: The output, as messages call it.
            capabilities: What the platform offers.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be made.
        """
        self.rows: list[Row] = []
        self._path = path
        self._named = named
        self._at = 0
        self._lock = threading.Lock()
        with translated(named):
            join_file(path, 0, capabilities)
            self._file = open_for_writing(path, capabilities)

    def create(self, _path: str, _size_bytes: int) -> None:
        """Does nothing: whoever puts the bytes in their place makes the files."""

    def write_runs(self, path: str, starts: Sequence[int], data: memoryview) -> None:
        """Takes data that is cut into as many equal runs, each for its own byte of a file.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be written.
        """
        with self._lock, translated(self._named, data.nbytes):
            self._file.write_at(self._at, data)
            self._at += data.nbytes
            self.rows.append((path, starts, data.nbytes, crc32(data)))

    def free_bytes(self) -> int:
        """Returns how much room there is."""
        with translated(self._named):
            return free_bytes(self._path)

    def finish(self) -> None:
        """Makes the file durable and closes it, after which other machines see all of it.

        Raises:
            NoSpaceError: If the disk is full.
            OutputError: If it cannot be made durable.
        """
        with translated(self._named):
            try:
                self._file.sync()
            finally:
                self._file.close()

    def close(self) -> None:
        """Closes the file, whatever it holds."""
        self._file.close()


def read_parts(
    path: Path, rows: Sequence[Row], capabilities: Capabilities
) -> Iterator[tuple[str, Sequence[int], memoryview]]:
    """Yields what a file was written for: the file of the output, the runs' starts, the bytes.

    Raises:
        ChecksumError: If other bytes are found than were written.
        OSError: If the file cannot be read.
    """
    file, at = open_for_reading(path, capabilities), 0
    try:
        for name, starts, size, expected in rows:
            data = file.read_bytes(at, size)
            if len(data) != size or crc32(data) != expected:
                raise ChecksumError(
                    f"other bytes than were written were found from byte {at:,} on",
                    where=str(path),
                    hint="the storage does not show what another machine wrote; export to another",
                )
            yield name, starts, memoryview(data)
            at += size
    finally:
        file.close()
