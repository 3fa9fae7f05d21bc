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
