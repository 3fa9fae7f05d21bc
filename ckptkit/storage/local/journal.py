"""A journal of the finished files of an output, written by a thread of its own."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.threads import WorkerThread
from ckptkit.storage.local.disk import LOCAL_DISK, Disk

logger = logging.getLogger(__name__)
_MOST_BYTES = 1 << 30
Entry = Mapping[str, Any]


def read_journal(path: Path, disk: Disk = LOCAL_DISK) -> list[Entry]:
    """Returns the entries of a journal up to the first that is not whole; none without a file."""
    try:
        file = disk.open_for_reading(path)
    except OSError:
        return []
    try:
        size = file.status().st_size
        data = file.read_bytes(0, min(size, _MOST_BYTES))
    except OSError:
        return []
    finally:
        file.close()
    return list(_entries(data))


def _entries(data: bytes) -> Iterator[Entry]:
    for line in data.splitlines():
        checksum, _, text = line.partition(b" ")
        if not text:
            continue  # what a kill cut off was ended with the next line
        if checksum != b"%08x" % crc32(text):
            continue
        try:
            entry = json.loads(text)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


class Journal:
    """A journal that is being written, by a thread of its own. Use it as a context manager."""

    def __init__(self, path: Path, first: Entry, *, is_new: bool, disk: Disk = LOCAL_DISK) -> None:
        """Opens it.

        Args:
            path: The file.
            first: The entry that a new one begins with.
            is_new: Whether what is there is no longer true.
            disk: The file operations of the platform.
        """
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_new else 0)
        self._file = disk.open(path, flags)
        self._at = self._file.status().st_size
        self._write([b"\n" if self._at else _line(first)])
        disk.sync_directory(path.parent)
        self._waiting: deque[Callable[[], Entry | None]] = deque()
        self._worker = WorkerThread("ckptkit-journal")

    def add(self, entry: Callable[[], Entry | None]) -> None:
        """Has an entry written, soon.

        Args:
            entry: Makes it, in another thread, or None for nothing.
        """
        self._waiting.append(entry)
        self._worker.submit_unwatched(self._write_waiting)

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self._worker.close()
        self._file.close()

    def _write_waiting(self) -> None:
        """Writes all that waits, so that many entries take one sync."""
        waiting = []
        while self._waiting:
            waiting.append(self._waiting.popleft())
        try:
            entries = (make_entry() for make_entry in waiting)
            self._write([_line(entry) for entry in entries if entry is not None])
        except OSError as error:  # such as a full disk, which the output itself reports
            logger.warning("the journal of the output is not written: %s", error.strerror)

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        if data:
            self._file.write_at(self._at, memoryview(data))
            self._at += len(data)
            self._file.sync()


def _line(entry: Entry) -> bytes:
    text = json.dumps(entry, sort_keys=True).encode()
    return b"%08x %s\n" % (crc32(text), text)
