"""Processes that fill one output together: what they share, and whether their disk allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.base import Sink

SentRows = dict[str, list[Sequence[Any]]]
"""What a store has returned for the parts that it took, by file, as JSON values."""
Cut = Callable[[str], Sequence[ObjectPart]]


@dataclass(frozen=True, slots=True)
class OutputAttempt:
    """What all processes that fill one output have in common.

    Attributes:
        nonce: 16 hexadecimal digits.
        name: Of what they write; distinguishes abandoned work from work in progress.
        overwrite: Whether the commit replaces an earlier output.
        is_agreed: Whether the processes agree through notes; else one of them begins for all.
        seen: What identifies the manifest that was there when they began, empty where there was
            none; None for the one that is there when the target is opened.
    """

    nonce: str
    name: str = "all"
    overwrite: bool = False
    is_agreed: bool = True
    seen: str | None = None


def encode_plan_note(plan: bytes, seen: str | None) -> bytes:
    return (b"" if seen is None else b"=" + seen.encode()) + b"\n" + plan


def parse_plan(note: bytes) -> bytes:
    return note.rpartition(b"\n")[2]


def parse_seen(note: bytes | None) -> str | None:
    """Returns what identifies the manifest to replace, by such a note; None if it says nothing."""
    seen = (note or b"").rpartition(b"\n")[0]
    return seen[1:].decode() if seen else None


class Notes(Protocol):
    """Small texts by which the processes report what they have done."""

    def put(self, name: str, data: bytes) -> bytes:
        """Writes a note unless there is one of that name; returns the content of the note."""
        ...

    def get(self, name: str) -> bytes | None:
        """Returns the content of a note, None where there is none."""
        ...

    def alone(self, name: str, owner: str) -> AbstractContextManager[bool]:
        """Yields whether this process may do something that only one process may do.

        Args:
            name: What that is.
            owner: Who asks; the same owner may ask again after it was killed.
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
        """The shell command with which a user discards what other processes have begun."""
        ...

    @property
    def notes(self) -> Notes:
        """The notes of the processes."""
        ...

    def plan(self) -> bytes | None:
        """Returns what the processes have agreed on, None where none has begun."""
        ...

    def agree(self, plan: bytes) -> bytes:
        """Proposes a plan unless another process has; returns the plan that was agreed on."""
        ...

    def free_bytes(self) -> int | None:
        """Returns how much room there is, None where that is not known."""
        ...

    def why_no_ranges(self) -> str:
        """Returns why several processes cannot write there at once, empty if they can."""
        ...

    def sweep(self) -> None:
        """Removes what killed attempts left behind; for one of the processes."""
        ...

    def begin(self) -> None:
        """Makes the created files ready for the other processes, where one distributes the work."""
        ...

    def sync(self) -> None:
        """Makes what this process wrote durable; files have to be created again after it."""
        ...

    def sent(self) -> SentRows:
        """Returns what the commit has to know of the parts that were written."""
        ...

    def adopt(self, sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Adds what other processes have sent; returns the missing parts, by file."""
        ...

    def commit(self, last: str, data: bytes) -> None:
        """Makes the output visible, the file `last` after all others; for one process."""
        ...

    def leave(self) -> None:
        """Ends this process's part; the output stays as it is."""
        ...

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it."""
        ...


Row = tuple[str, Sequence[int], int, int]
"""A file of the output, where in it runs of one length begin, their bytes in all, their CRC-32."""


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


def read_mounts(mounts: Path = _MOUNTS) -> tuple[Mount, ...]:
    """Returns what is mounted, in its order; nothing where the system does not report it.

    Source:
        https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    entries = []
    with suppress(OSError):
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            _, _, device, root, place = left.split()[:5]
            kind = right.split()[0]
            entries.append(Mount(device, Path(_unescaped(root)), Path(_unescaped(place)), kind))
    return tuple(entries)


def find_mount(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Returns the mount that holds a path, links followed; None where that is not known."""
    best = None
    for mount in mounts:
        is_deeper = best is None or len(mount.place.parts) >= len(best.place.parts)
        if is_deeper and path.is_relative_to(mount.place):
            best = mount  # later ones cover earlier ones
    return best


def find_filesystem_type(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """Returns the type of the file system that holds a path, or will; empty where unknown."""
    with suppress(OSError):
        mount = find_mount(path.resolve(), read_mounts(mounts))
        return "" if mount is None else mount.kind
    return ""


def why_not_shared(kind: str, *, is_one_machine: bool = False) -> str:
    """Returns why several processes cannot write one file at once; empty if they can.

    Args:
        kind: As `find_filesystem_type` returns it.
        is_one_machine: Whether all of them share one kernel, and so its one page cache; what a
            program behind FUSE does with their writes is not known even then.
    """
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in _OTHER_FUSE)
    if is_fuse or (kind in _SEPARATE_CACHES and not is_one_machine):
        return f"its file system, {kind}, does not take ranges of one file from several machines"
    return ""


def _unescaped(name: str) -> str:
    for character in " \t\n\\":
        name = name.replace(f"\\{ord(character):03o}", character)
    return name
