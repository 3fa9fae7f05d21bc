"""Memory that a trainer and its writer share."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from ckptkit.core.errors import NoSpaceError
from ckptkit.storage.local.control_groups import available_bytes
from ckptkit.storage.local.disk import is_out_of_space, is_refused

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name
_HINT = "set staging_limit, so that the state is staged in waves through a smaller buffer"
_PLACE_HINT = f"{_HINT}, or set TMPDIR to a folder with room"
_NO_MEMORY = frozenset({errno.ENOMEM, errno.EFBIG})


class MemoryPlaces(Struct, frozen=True):
    """Sources of shared memory, in this order."""

    # Whether to request memory without a name, which no size of a mount limits
    anonymous: bool = hasattr(os, "memfd_create")
    # A folder in memory, or None
    memory_folder: Path | None = Path("/dev/shm")  # noqa: S108  where Linux has it
    disk_folder: Path | None = None  # a folder on a disk; None for the system's temporary folder


class SharedBuffer:
    """Writable memory with a descriptor that can be passed to another process.

    All pages are allocated at once: later writes neither wait for the kernel nor fail for lack of
    memory. A forked child does not get the memory.

    Attributes:
        memory: The bytes.
        descriptor: -1 without memory; new memory has a number that was never used before.
        kind: "memfd", "shm" or "file"; empty before the first `reserve`.
        note: What the user should know of it; may be empty.
    """

    def __init__(self, places: MemoryPlaces | None = None) -> None:
        """Allocates no memory yet."""
        self._places = places or MemoryPlaces()
        self._map: mmap.mmap | None = None
        self._highest = -1
        self.memory = memoryview(b"")
        self.descriptor = -1
        self.kind = ""
        self.note = ""

    @property
    def size_bytes(self) -> int:
        return len(self.memory)

    def reserve(self, size_bytes: int) -> bool:
        """Makes the buffer at least this large; the content is lost if it grows.

        Old memory must not be in use any more: it is released even if views of it exist.

        Returns:
            Whether the memory is new.
        """
        import fcntl  # not there on Windows

        if size_bytes <= self.size_bytes:
            return False
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.close()  # first, so that old and new memory never exist at once
        descriptor, kind, note = self._obtain(size_bytes)
        # To a number that this buffer never had, so that it looks changed.
        self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, self._highest + 1)
        os.close(descriptor)
        self._highest = self.descriptor
        try:
            memory = mmap.mmap(self.descriptor, size_bytes)
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                with suppress(OSError):  # only ever a matter of speed
                    memory.madvise(getattr(mmap, advice, mmap.MADV_NORMAL))
            try:
                memory.madvise(_POPULATE_WRITE)
            except OSError:  # an older kernel
                np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
        except OSError as error:
            self.close()
            raise _no_space(size_bytes, "memory", str(error)) from error
        self._map, self.memory = memory, memoryview(memory)
        self.kind, self.note = kind, note
        return True

    def close(self) -> None:
        """Releases the memory; a second call does nothing.

        It is truncated as well, so that another process that has it mapped does not keep it.
        """
        with suppress(BufferError):  # a view exists; the memory is released with the last one
            self.memory.release()
            if self._map is not None:
                self._map.close()
        self.memory, self._map = memoryview(b""), None
        if self.descriptor != -1:
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
        self.descriptor = -1

    def close_descriptor(self) -> None:
        """Closes the descriptor and leaves the content alone, as in a forked child."""
        if self.descriptor != -1:
            os.close(self.descriptor)
        self.descriptor = -1

    def _obtain(self, size_bytes: int) -> tuple[int, str, str]:
        """Returns the descriptor of new memory, its kind, and a note for the user."""
        places = self._places
        short = ""
        available = available_bytes()
        if available is not None and available < size_bytes:
            # A control group with a limit would be killed without an error.
            raise NoSpaceError(
                f"{_megabytes(size_bytes)} of memory are needed for staging,"
                f" and {_megabytes(available)} are available",
                hint=_HINT,
            )
        if places.anonymous:
            with suppress(OSError):  # refused by the kernel, or by a container's filter
                descriptor = os.memfd_create("ckptkit", os.MFD_CLOEXEC)
                return _filled(descriptor, size_bytes, "memory"), "memfd", ""
        if places.memory_folder is not None:
            try:
                return _file_in(places.memory_folder, size_bytes), "shm", ""
            except NoSpaceError as error:
                short = error.message
        folder = places.disk_folder or Path(tempfile.gettempdir())
        descriptor = _file_in(folder, size_bytes)
        reason = short or "shared memory is disabled"
        return descriptor, "file", f"{reason}: staging in a file under {str(folder)!r}, slower"


def _file_in(folder: Path, size_bytes: int) -> int:
    """Returns the descriptor of a new file without a name."""
    place = repr(str(folder))
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        if free >= size_bytes or not status.f_blocks:  # some file systems report no sizes
            descriptor, name = tempfile.mkstemp(prefix=".ckptkit-staging-", dir=folder)
            Path(name).unlink()
            return _filled(descriptor, size_bytes, place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NoSpaceError(f"{place} cannot be used ({reason})", hint=_PLACE_HINT) from error
    raise NoSpaceError(
        f"{place} has {_megabytes(free)} free, where {_megabytes(size_bytes)} are needed",
        hint=_PLACE_HINT,
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def _filled(descriptor: int, size_bytes: int, place: str) -> int:
    """Allocates all memory now, so that a lack of it is an error here, and no signal later."""
    try:
        try:
            allocate = getattr(os, "posix_fallocate", None)  # not there on macOS
            if allocate is not None:
                allocate(descriptor, 0, size_bytes)
        except OSError as error:
            if not is_refused(error):
                raise
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        os.close(descriptor)
        if is_out_of_space(error) or error.errno in _NO_MEMORY:
            raise _no_space(size_bytes, place, str(error)) from error
        raise
    return descriptor


def _no_space(size_bytes: int, place: str, reason: str) -> NoSpaceError:
    return NoSpaceError(
        f"{place} refused {_megabytes(size_bytes)} for staging: {reason}",
        hint=_HINT,
    )
