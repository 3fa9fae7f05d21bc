"""The system calls that need a portable fallback, and a bounded pool of open files.

Callers pass a `Disk`, so that a test forces a fallback by passing another one.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import shutil
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

BLOCK_BYTES = 4096
"""Direct I/O wants addresses, offsets and lengths in multiples of this."""

PAGE_BYTES = max(BLOCK_BYTES, mmap.PAGESIZE)
"""The unit that the page cache writes back as one, so direct and buffered bytes never share it."""

_MIN_RESERVED_BYTES = 1 << 20
# Source: linux/fs.h, FICLONERANGE; where another architecture numbers it otherwise, it is refused.
_CLONE_RANGE = 0x4020940D
_CLONE = struct.Struct("qQQQ")  # source, its first byte, how many, and the first byte here
# Source: linux/fiemap.h, FS_IOC_FIEMAP; where another architecture numbers it otherwise, too.
_FIND_EXTENTS = 0xC020660B
_EXTENTS = struct.Struct("QQIIII")  # first byte, how many; flags, found, room for; nothing
_EXTENT = struct.Struct("QQQ16xI12x")  # first byte in the file and on the disk, how many; flags
_EXTENTS_AT_ONCE = 1024
_LAST, _SHARED = 0x1, 0x2000
# Unknown, not written yet, compressed, encrypted, or in a block of other things.
_WITHOUT_PLACE = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
_BINARY: int = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)


def is_out_of_space(error: OSError) -> bool:
    return error.errno in _OUT_OF_SPACE


def is_refused(error: OSError) -> bool:
    """Says whether a call failed because the file system does not offer it."""
    return error.errno in _REFUSED


class OpenFile:
    """An open file that is read and written at offsets, by several threads at once."""

    __slots__ = ("_file", "_lock", "_positional")

    def __init__(self, path: Path, flags: int, disk: Disk) -> None:
        writable = bool(flags & (os.O_WRONLY | os.O_RDWR))
        descriptor = os.open(path, flags | _BINARY, 0o666)
        try:
            self._file = io.FileIO(descriptor, "wb" if writable else "rb")
        except OSError:  # a directory
            os.close(descriptor)
            raise
        self._positional = disk.positional_io
        self._lock = threading.Lock()

    def status(self) -> os.stat_result:
        return os.fstat(self._file.fileno())

    def find_place(self) -> Path | None:
        """Returns the path of the file without links, where the platform says it (Linux)."""
        try:
            place = Path(f"/proc/self/fd/{self._file.fileno()}").readlink()
        except OSError:
            return None
        return place if place.is_absolute() else None

    def read_at(self, start: int, target: memoryview) -> int:
        """Fills `target` from byte `start` on, and returns how many bytes there were."""
        done = 0
        while done < len(target):
            count = self._read_some(start + done, target[done:])
            if not count:
                break
            done += count
        return done

    def read_bytes(self, start: int, count: int) -> bytes:
        """Returns `count` bytes from byte `start` on, fewer only where the file ends."""
        data = self._read_new(start, count)
        while data and len(data) < count:  # one call moves 2 GiB at most
            more = self._read_new(start + len(data), count - len(data))
            if not more:
                break
            data += more
        return data

    def write_at(self, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._write_some(start + done, data[done:])

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._file.fileno(), size_bytes)

    def preallocate(self, start: int, stop: int) -> None:
        """Reserves the blocks for bytes `[start, stop)`; the file system may refuse."""
        os.posix_fallocate(self._file.fileno(), start, stop - start)

    def reserve(self, size_bytes: int) -> None:
        """Reserves blocks as `preallocate` does, but where that is refused writes nothing either.

        Source:
            fallocate: https://man7.org/linux/man-pages/man2/fallocate.2.html
        """
        import ctypes  # only outputs that several processes write need it

        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if call is None:
            return
        size = ctypes.c_long(size_bytes)  # off_t has the width of long on Linux
        if call(self._file.fileno(), 0, ctypes.c_long(0), size) == 0:
            return
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if not is_refused(error):
            raise error

    def share_blocks(self, source: OpenFile, start: int, size_bytes: int, at: int) -> None:
        """Makes whole blocks of this file, from byte `at` on, those of another file.

        Raises:
            OSError: Of any number, where the file system does not do that, or not with this file.
        """
        import fcntl  # not there on Windows

        given = _CLONE.pack(source._file.fileno(), start, size_bytes, at)
        fcntl.ioctl(self._file.fileno(), _CLONE_RANGE, given)

    def shared_blocks(self) -> Iterator[tuple[int, int]]:
        """Yields where on its disk those blocks are that it shares with other files, as ranges.

        Raises:
            OSError: Of any number, where the file system does not tell.
        """
        import fcntl  # not there on Windows

        start, size_bytes, flags = 0, self.status().st_size, 0
        while start < size_bytes and not flags & _LAST:
            data = bytearray(_EXTENTS.size + _EXTENTS_AT_ONCE * _EXTENT.size)
            _EXTENTS.pack_into(data, 0, start, size_bytes - start, 0, 0, _EXTENTS_AT_ONCE, 0)
            fcntl.ioctl(self._file.fileno(), _FIND_EXTENTS, data)
            found = _EXTENTS.unpack_from(data)[3]
            if not found:  # the rest is a hole
                return
            for number in range(found):
                at = _EXTENTS.size + number * _EXTENT.size
                logical, physical, length, flags = _EXTENT.unpack_from(data, at)
                start = logical + length
                if flags & _SHARED and not flags & _WITHOUT_PLACE:
                    yield physical, physical + min(start, size_bytes) - logical

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def lock(self, *, shared: bool = False) -> bool:
        import fcntl  # not there on Windows

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._file.fileno(), kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def advise_sequential(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def forget(self) -> None:
        """Takes the content out of the page cache, so that it is next read from the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the descriptor; a second call does nothing."""
        self._file.close()

    def _read_some(self, start: int, target: memoryview) -> int:
        if self._positional:
            return os.preadv(self._file.fileno(), [target], start)
        with self._lock:
            self._file.seek(start)
            return self._file.readinto(target) or 0

    def _read_new(self, start: int, count: int) -> bytes:
        if self._positional:
            return os.pread(self._file.fileno(), count, start)
        with self._lock:
            self._file.seek(start)
            return self._file.read(count) or b""

    def _write_some(self, start: int, data: memoryview) -> int:
        if self._positional:
            return os.pwrite(self._file.fileno(), data, start)
        with self._lock:
            self._file.seek(start)
            return self._file.write(data) or 0


@dataclass(frozen=True, slots=True)
class Disk:
    """The file operations of this platform. An attribute that is False makes the fallback run.

    A file system may refuse an operation that the platform has; the fallback runs then, too.

    Attributes:
        positional_io: Reads and writes at an offset, without a shared file position.
        direct_io: Writes that bypass the page cache.
        directory_sync: Making the entries of a directory durable.
        exchange: Swapping two directories in one step.
        locks: Locks that end with their process.
        preallocation: Reserving the blocks of a file before they are written.
        hard_links: Giving a file a second name.
        sharing: Making blocks of one file those of another.
    """

    positional_io: bool = hasattr(os, "preadv") and hasattr(os, "pwrite")
    direct_io: bool = hasattr(os, "O_DIRECT")
    directory_sync: bool = os.name == "posix"
    exchange: bool = sys.platform == "linux"
    locks: bool = os.name == "posix"
    preallocation: bool = hasattr(os, "posix_fallocate")
    hard_links: bool = hasattr(os, "link")
    sharing: bool = sys.platform == "linux"

    @classmethod
    def portable(cls) -> Disk:
        return cls(*[False] * 8)

    def open(self, path: Path, flags: int) -> OpenFile:
        return OpenFile(path, flags, self)

    def open_for_reading(self, path: Path) -> OpenFile:
        """Opens a file without ever waiting for a writer at the other end of a pipe."""
        return OpenFile(path, os.O_RDONLY | _NONBLOCK | _NOFOLLOW, self)

    def open_for_writing(self, path: Path) -> OpenFile:
        return OpenFile(path, os.O_WRONLY, self)

    def open_direct(self, path: Path) -> OpenFile | None:
        """Opens an existing file for writes that bypass the page cache; None if refused."""
        if not self.direct_io:
            return None
        try:
            return OpenFile(path, os.O_WRONLY | os.O_DIRECT, self)
        except OSError as error:
            if is_refused(error):
                return None
            raise

    def try_lock(self, path: Path, *, shared: bool = False) -> tuple[bool, OpenFile | None]:
        """Opens or makes a lock file and takes its lock, which ends with the process.

        Returns whether no other process has it, and the file, whose closing releases the lock; no
        file where the platform or the file system has no locks.
        """
        if not self.locks:
            return True, None
        file = OpenFile(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW, self)
        try:
            # The previous owner may have removed it between the opening and the locking.
            if file.lock(shared=shared) and os.path.samestat(file.status(), path.stat()):
                return True, file
        except FileNotFoundError:
            pass
        except OSError as error:
            file.close()
            if is_refused(error):  # then no other process can lock it either
                return True, None
            raise
        file.close()
        return False, None

    def create_file(self, path: Path, size_bytes: int) -> None:
        """Makes a new file of that size, with its blocks reserved where that is possible."""
        with self.new_file(path) as file:
            self.reserve(file, size_bytes, [(0, size_bytes)], path)

    @contextmanager
    def new_file(self, path: Path) -> Iterator[OpenFile]:
        """Makes an empty file, and removes it again where the block fails."""
        file = OpenFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self)
        try:
            yield file
        except BaseException:
            file.close()  # before it is removed: Windows does not remove open files
            path.unlink()
            raise
        file.close()

    def reserve(
        self, file: OpenFile, size_bytes: int, lacking: Sequence[tuple[int, int]], path: Path
    ) -> None:
        """Gives a file its size, and reserves the blocks that it lacks, as starts and stops.

        Those of other ranges are there: XFS asks for as much room again where these are named.
        """
        # Checked before reserving: a reservation that fails half-way has filled the disk meanwhile.
        room = shutil.disk_usage(path.parent)
        new_bytes = sum(stop - start for start, stop in lacking)
        if room.total and new_bytes > room.free:  # some file systems do not count, and say 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        try:
            for start, stop in lacking if self.preallocation else ():
                if start < stop:
                    file.preallocate(start, stop)
        except OSError as error:
            # EBADF: where the C library does it by writing, it first reads inside of the file.
            if not is_refused(error) and error.errno != errno.EBADF:
                raise
        if file.status().st_size != size_bytes:
            file.truncate(size_bytes)

    def join_file(self, path: Path, size_bytes: int) -> None:
        """Makes a file of that size unless another process has made it already.

        Its blocks are reserved where the file system can do that without writing to them, since
        another process may have written them: writers to holes would have to wait for each other.
        """
        file = OpenFile(path, os.O_WRONLY | os.O_CREAT, self)
        try:
            if file.status().st_size < size_bytes:
                file.truncate(size_bytes)
            if size_bytes >= _MIN_RESERVED_BYTES and self.preallocation:
                file.reserve(size_bytes)
        finally:
            file.close()

    def link_file(self, path: Path, name: Path) -> None:
        """Gives a file a second name; neither is durable before its directory is synced."""
        if not self.hard_links:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(name))
        os.link(path, name)

    def sync_directory(self, path: Path) -> None:
        """Makes the entries of a directory durable, where the file system has such a thing."""
        if not self.directory_sync:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _BINARY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not is_refused(error):
                raise
        finally:
            os.close(descriptor)

    def exchange_folders(self, first: Path, second: Path) -> bool:
        """Swaps two directories in one step; returns False where that is not offered.

        Source:
            renameat2 with RENAME_EXCHANGE: https://man7.org/linux/man-pages/man2/rename.2.html
        """
        if not self.exchange:
            return False
        import ctypes  # only an overwriting commit needs it

        library = ctypes.CDLL(None, use_errno=True)
        try:
            call = library.renameat2
        except AttributeError:
            return False
        names = os.fsencode(first), os.fsencode(second)
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return True
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
        if is_refused(error):
            return False
        raise error


LOCAL_DISK = Disk()


class Closable(Protocol):
    def close(self) -> None: ...


File = TypeVar("File", bound=Closable)


class _Slot(Struct, Generic[File]):
    file: File
    users: int = 0


class DescriptorPool(Generic[File]):
    """Keeps the files used last open, and never closes one that a thread is using."""

    def __init__(
        self,
        open_file: Callable[[str], File],
        limit: int,
        retire: Callable[[File], None] = lambda file: file.close(),
    ) -> None:
        """Takes how files are opened, outside any lock, and closed to make room for others."""
        self._open_file = open_file
        self._limit = limit
        self._retire = retire
        self._slots: OrderedDict[str, _Slot[File]] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, path: str) -> Iterator[File]:
        with self._lock:
            if self._closed:
                raise ValueError("the files are closed")
            slot = self._slots.get(path)
            if slot is not None:
                slot.users += 1
                self._slots.move_to_end(path)
        if slot is None:
            file = self._open_file(path)
            with self._lock:
                slot = self._slots.setdefault(path, _Slot(file))
                slot.users += 1
                surplus = self._take_idle()
            if slot.file is not file:  # another thread was faster
                file.close()
            self._retire_all(surplus)
        try:
            yield slot.file
        finally:
            with self._lock:
                slot.users -= 1
                surplus = self._take_idle()
            self._retire_all(surplus)

    def close(self) -> None:
        """Closes every file, those in use as soon as they are given back."""
        with self._lock:
            self._closed = True
            idle = self._take_idle()
        for file in idle:
            file.close()

    def _retire_all(self, files: list[File]) -> None:
        for file in files:
            if self._closed:
                file.close()
            else:
                self._retire(file)

    def _take_idle(self) -> list[File]:
        surplus = len(self._slots) - (0 if self._closed else self._limit)
        if surplus <= 0:
            return []
        idle = [path for path, slot in self._slots.items() if not slot.users][:surplus]
        return [self._slots.pop(path).file for path in idle]
