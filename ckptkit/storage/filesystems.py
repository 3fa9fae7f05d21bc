"""Whether a place lets several machines write ranges of one file at once."""

from __future__ import annotations

import os
from contextlib import suppress
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


def filesystem_of(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """Returns the type of the file system that holds a path, or will; empty where unknown.

    Source:
        https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    found, kind = -1, ""
    with suppress(OSError):
        real = path.resolve()
        for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            left, _, right = line.partition(" - ")
            place = Path(_unescaped(left.split()[4]))
            depth = len(place.parts)
            if real.is_relative_to(place) and depth >= found:  # later ones lie over earlier ones
                found, kind = depth, right.split()[0]
    return kind


def why_not_shared(kind: str) -> str:
    """Tells why files of a file system cannot be written by several machines; empty if they can.

    Args:
        kind: As `filesystem_of` returns it.
    """
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in _OTHER_FUSE)
    if kind in _SEPARATE_CACHES or is_fuse:
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
        OutputError: If nothing can be written there at all.
    """  # noqa: DOC501  `translated` makes them
    path = folder / f".probe-{os.getpid()}"
    with translated(named):
        join_file(path, 2 * PAGE_BYTES, capabilities)
        try:
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
