"""Whether a place lets several machines write ranges of one file at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.storage.staged_files import translated
from ckptkit.storage.syscalls import (
    PAGE_BYTES,
    Capabilities,
    is_out_of_space,
    join_file,
    open_for_writing,
)

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


def why_no_ranges(folder: Path, named: Path, capabilities: Capabilities) -> str:
    """Tries to write at an offset; returns why that cannot be done, empty if it can.

    Args:
        folder: Where to try.
        named: What messages call it.
        capabilities: What the platform offers.

    Raises:
        NoSpaceError: If the disk is full.
        OutputError: If what was tried cannot be removed again.
    """  # noqa: DOC501  `translated` makes them
    # Not by the process, whose number another machine may have given as well.
    path = folder / f".probe-{os.urandom(8).hex()}"
    with translated(named):
        try:
            join_file(path, 2 * PAGE_BYTES, capabilities)
            file = open_for_writing(path, capabilities)
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
