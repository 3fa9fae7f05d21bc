"""What ranks wrote on their node's own disk, as it is read again to be brought elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptkit.core.errors import MissingFileError, TruncatedFileError
from ckptkit.storage.names import check_relative
from ckptkit.storage.syscalls import Capabilities, OpenFile, open_for_reading
from ckptkit.writer.record import WrittenFile, parse_record

Mark = tuple[int, ...]
"""What changes with a file."""

_GONE = "nothing was found there"


def shared_mark(path: Path, *, names: int = 1) -> Mark | None:
    """Returns what changes with a file.

    Args:
        path: The file.
        names: How many it has to have: those that steps have in common have two at least.

    Returns:
        None where it is not there, or has fewer names.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_nlink < names:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_small(folder: Path, path: str) -> bytes:
    """Returns a small file as a whole.

    Args:
        folder: Where it lies.
        path: Its path from there.

    Raises:
        InputError: If the path leads out of the folder.
        MissingFileError: If it is not there.
        OSError: If it cannot be read.
    """
    check_relative(path, str(folder))
    try:
        return (folder / path).read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(_GONE, where=str(folder / path)) from error


def recorded_files(folder: Path, records: Mapping[str, bytes]) -> list[WrittenFile]:
    """Returns the files that ranks' records name.

    Args:
        folder: Where they lie.
        records: What was read of the records, by path.

    Raises:
        FormatError: If a record is garbled.
    """
    return [
        file
        for path, data in records.items()
        for file in parse_record(data, where=str(folder / path)).files
    ]


def open_written(path: Path, size_bytes: int, capabilities: Capabilities) -> OpenFile:
    """Opens a file of which the length is known, to be read in order; it has to be closed.

    Raises:
        MissingFileError: If it is not there.
        TruncatedFileError: If it is not of that length.
        OSError: If it cannot be opened.
    """
    try:
        file = open_for_reading(path, capabilities)
    except FileNotFoundError as error:
        raise MissingFileError(_GONE, where=str(path)) from error
    found = file.status().st_size
    if found != size_bytes:
        file.close()
        raise TruncatedFileError(
            f"{found:,} bytes were found where {size_bytes:,} were written", where=str(path)
        )
    file.advise_sequential()
    return file
