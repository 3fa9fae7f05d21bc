"""The seam between processes that fill one output together and the place that holds it.

Small files in a hidden folder, by which processes that fill one output tell of themselves.

What one process writes for another one to put in its place, where only one may write a file.

Whether a place lets several machines write ranges of one file at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError
from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.base import Sink
from ckptkit.storage.local.disk import PAGE_BYTES, Disk, is_out_of_space, is_refused
from ckptkit.storage.local.target import free_bytes, translated, write_small

SentRows = dict[str, list[Sequence[Any]]]
"""What a store has told of the parts that it took, by file, as JSON values."""
Cut = Callable[[str], Sequence[ObjectPart]]


@dataclass(frozen=True, slots=True)
class OutputAttempt:
    """What all processes that fill an output have in common.

    Attributes:
        nonce: 16 hexadecimal digits.
        name: Of what they write, so that what was given up is told from what is under way.
        overwrite: Whether what lies there is replaced by the commit.
        is_agreed: Whether they agree among themselves; else one of them begins for all.
        seen: What identifies the manifest that was there when they began, empty where there was
            none; None for the one that is there when the target is made.
    """

    nonce: str
    name: str = "all"
    overwrite: bool = False
    is_agreed: bool = True
    seen: str | None = None


def plan_note(plan: bytes, seen: str | None) -> bytes:
    return (b"" if seen is None else b"=" + seen.encode()) + b"\n" + plan


def plan_of(note: bytes) -> bytes:
    return note.rpartition(b"\n")[2]


def seen_in(note: bytes | None) -> str | None:
    """Returns what identifies the manifest to replace, by such a note; None if it says nothing."""
    seen = (note or b"").rpartition(b"\n")[0]
    return seen[1:].decode() if seen else None


class Notes(Protocol):
    """Small texts by which the processes tell each other what they have done."""

    def put(self, name: str, data: bytes) -> bytes:
        """Leaves a note unless there is one of that name; returns what the note says."""
        ...

    def get(self, name: str) -> bytes | None:
        """Returns what a note says, None where there is none."""
        ...

    def alone(self, name: str, owner: str) -> AbstractContextManager[bool]:
        """Yields whether this process may go on with what only one may do.

        Args:
            name: What that is.
            owner: Who asks; the same one may ask again after it was killed.
        """
        ...


class SharedOutput(Sink, Protocol):
    """One process's view of an output that several fill, invisible until one of them commits it."""

    takes_parts: bool
    """Whether what is written is taken in parts of objects, as `object_parts` cuts them."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    @property
    def removal(self) -> str:
        """The command by which a user gives up what other processes have begun."""
        ...

    @property
    def notes(self) -> Notes:
        """What the processes tell each other."""
        ...

    def plan(self) -> bytes | None:
        """Returns what the processes have agreed on, None where nobody has begun."""
        ...

    def agree(self, plan: bytes) -> bytes:
        """Says what is to be done, unless another process has; returns what was agreed on."""
        ...

    def free_bytes(self) -> int | None:
        """Returns how much room there is, None where nobody knows."""
        ...

    def why_no_ranges(self) -> str:
        """Returns why several processes cannot write there at once, empty if they can."""
        ...

    def sweep(self) -> None:
        """Removes what killed attempts left behind; for one of the processes."""
        ...

    def begin(self) -> None:
        """Makes the created files ready for the other processes, where one deals out the work."""
        ...

    def sync(self) -> None:
        """Makes what this process wrote durable; what it writes next it has to create again."""
        ...

    def sent(self) -> SentRows:
        """Returns what has to be known for the commit of the parts that were written."""
        ...

    def adopt(self, sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Takes over what the processes have sent; returns which parts are missing, by file."""
        ...

    def commit(self, last: str, data: bytes) -> None:
        """Makes the whole visible, the file `last` after all others; for one process."""
        ...

    def leave(self) -> None:
        """Ends this process's part, whatever becomes of the whole."""
        ...

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it any more."""
        ...


_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES})
_CONTENT = "content"


class WorkNotes:
    """Notes, each a folder with one file in it: renaming a folder never replaces a filled one."""

    def __init__(self, folder: Path, named: Path, disk: Disk) -> None:
        """Looks into a folder that exists.

        Args:
            folder: The hidden folder.
            named: The output, as messages call it.
            disk: The file operations of the platform.
        """
        self._folder = folder
        self._named = named
        self._disk = disk

    def put(self, name: str, data: bytes) -> bytes:
        """Leaves a note unless there is one of that name, durable, whole or not at all.

        Returns:
            What the note says: `data`, or what another process was first with.

        """
        new = self._folder / f"{name}.{os.urandom(8).hex()}"
        with translated(self._named, len(data)):
            try:
                new.mkdir()
                write_small(new / _CONTENT, data, self._disk)
                new.rename(self._folder / name)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                found = self.get(name) if error.errno in _OCCUPIED else None
                if found is None:
                    raise
                return found
            self._disk.sync_directory(self._folder)
        return data

    def get(self, name: str) -> bytes | None:
        """Returns what a note says, None where there is none."""
        with translated(self._named):
            try:
                return (self._folder / name / _CONTENT).read_bytes()
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, name: str, _owner: str = "") -> Iterator[bool]:
        """Yields whether this process is the only one here; always, where there are no locks."""
        if not self._disk.locks:
            yield True
            return
        try:
            lock = self._disk.open_locked(self._folder / f"{name}.lock")
        except FileNotFoundError:  # the folder is gone: somebody was here before
            yield False
            return
        except OSError as error:
            if not is_refused(error):
                raise
            yield True
            return
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()


Row = tuple[str, Sequence[int], int, int]
"""A file of the output, where in it runs of one length begin, their bytes in all, their CRC-32."""


class PartFile:
    """A file written from its start to its end, and what is to become of its bytes.

    Attributes:
        rows: What was written, in its order.
    """

    def __init__(self, path: Path, named: Path, disk: Disk) -> None:
        """Makes the file.

        Args:
            path: Where it lies.
            named: The output, as messages call it.
            disk: The file operations of the platform.
        """
        self.rows: list[Row] = []
        self._path = path
        self._named = named
        self._at = 0
        self._lock = threading.Lock()
        with translated(named):
            disk.join_file(path, 0)
            self._file = disk.open_for_writing(path)

    def create(self, _path: str, _size_bytes: int) -> None:
        """Does nothing: whoever puts the bytes in their place makes the files."""

    def write_runs(self, path: str, starts: Sequence[int], data: memoryview) -> None:
        """Takes data that is cut into as many equal runs, each for its own byte of a file."""
        with self._lock, translated(self._named, data.nbytes):
            self._file.write_at(self._at, data)
            self._at += data.nbytes
            self.rows.append((path, starts, data.nbytes, crc32(data)))

    def free_bytes(self) -> int:
        with translated(self._named):
            return free_bytes(self._path)

    def finish(self) -> None:
        """Makes the file durable and closes it, after which other machines see all of it."""
        with translated(self._named):
            try:
                self._file.sync()
            finally:
                self._file.close()

    def close(self) -> None:
        """Closes the file, whatever it holds."""
        self._file.close()


def read_parts(
    path: Path, rows: Sequence[Row], disk: Disk
) -> Iterator[tuple[str, Sequence[int], memoryview]]:
    """Yields what a file was written for: the file of the output, the runs' starts, the bytes."""
    file, at = disk.open_for_reading(path), 0
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


_MOUNTS = Path("/proc/self/mountinfo")
# Their clients each keep whole pages of a file, and write back what they did not change.
_SEPARATE_CACHES = frozenset({"9p", "afs", "cifs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"})
_OTHER_FUSE = ("fuse.ceph-fuse", "fuse.fuse-overlayfs", "fuse.lxcfs")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system, or a folder of one, that is mounted somewhere.

    Attributes:
        device: The numbers of the file system.
        root: The folder of it that is mounted.
        place: Where.
        kind: Its type.
    """

    device: str
    root: Path
    place: Path
    kind: str


def mounts_of(mounts: Path = _MOUNTS) -> tuple[Mount, ...]:
    """Returns what is mounted, in its order; nothing where the system does not tell.

    Source:
        https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    found = []
    with suppress(OSError):
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            _, _, device, root, place = left.split()[:5]
            kind = right.split()[0]
            found.append(Mount(device, Path(_unescaped(root)), Path(_unescaped(place)), kind))
    return tuple(found)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Returns the mount that holds a path, links followed; None where that is not known."""
    best = None
    for mount in mounts:
        is_deeper = best is None or len(mount.place.parts) >= len(best.place.parts)
        if is_deeper and path.is_relative_to(mount.place):
            best = mount  # later ones cover earlier ones
    return best


def filesystem_of(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """Returns the type of the file system that holds a path, or will; empty where unknown."""
    with suppress(OSError):
        found = mount_of(path.resolve(), mounts_of(mounts))
        return "" if found is None else found.kind
    return ""


def why_not_shared(kind: str, *, is_one_machine: bool = False) -> str:
    """Tells why several processes cannot write a file of a file system at once; empty if they can.

    Args:
        kind: As `filesystem_of` returns it.
        is_one_machine: Whether all of them share one kernel, and so its one page cache; what a
            program behind FUSE makes of their writes is not known even then.
    """
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in _OTHER_FUSE)
    if is_fuse or (kind in _SEPARATE_CACHES and not is_one_machine):
        return f"its file system, {kind}, does not take ranges of one file from several machines"
    return ""


def why_no_ranges(folder: Path, named: Path, disk: Disk) -> str:
    """Tries to write at an offset; returns why that cannot be done, empty if it can.

    Args:
        folder: Where to try.
        named: What messages call it.
        disk: The file operations of the platform.

    """
    # Not by the process, whose number another machine may have given as well.
    path = folder / f".probe-{os.urandom(8).hex()}"
    with translated(named):
        try:
            disk.join_file(path, 2 * PAGE_BYTES)
            file = disk.open_for_writing(path)
            try:
                file.write_at(PAGE_BYTES, memoryview(b"1"))
                file.write_at(1, memoryview(b"1"))
            finally:
                file.close()
        except OSError as error:
            if is_out_of_space(error):
                raise
            return f"it does not take ranges of a file: {(error.strerror or str(error)).lower()}"
        finally:
            path.unlink(missing_ok=True)
    return ""


def _unescaped(name: str) -> str:
    for character in " \t\n\\":
        name = name.replace(f"\\{ord(character):03o}", character)
    return name
