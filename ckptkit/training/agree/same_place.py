"""Whether all ranks name the same directory, which they may spell in different ways."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.storage.places import is_url, local_path

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # unlike host names, no two machines have the same
Facts = Mapping[str, Any]


def place_facts(named: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what tells one directory from others, as values that JSON can hold.

    Args:
        named: As the user named it; it need not be there yet.
    """
    if is_url(named):
        url = os.fspath(named).rstrip("/")
        return {"named": url, "machine": "", "path": url, "inode": []}
    text = os.fspath(local_path(named))
    real = Path(os.path.realpath(text))
    above = next((path for path in (real, *real.parents) if path.exists()), real)
    try:
        found = above.stat()
        inode = [found.st_dev, found.st_ino, *real.relative_to(above).parts]
    except OSError:
        inode = []
    return {"named": text, "machine": _machine(), "path": str(real), "inode": inode}


def check_same_place(of_ranks: Sequence[Facts], where: str) -> None:
    """Refuses directories that differ between ranks.

    Args:
        of_ranks: What `place_facts` returned on each rank.
        where: What the ranks were given them for.
    """
    first = of_ranks[0]
    for rank, facts in enumerate(of_ranks):
        if not _are_same(first, facts):
            raise UsageError(
                f"is {_shown(facts)} on rank {rank} and {_shown(first)} on rank 0, where the same"
                " directory was expected on all ranks",
                where=where,
                hint="name the same directory on every rank; a relative path begins at each"
                " process's own working directory",
            )


def _are_same(one: Facts, other: Facts) -> bool:
    if one["path"] == other["path"]:
        return True
    if one["machine"] == other["machine"]:
        return bool(one["inode"]) and one["inode"] == other["inode"]
    # Links may lead to different mounts of one file system on different machines.
    named = {os.path.normpath(facts["named"]) for facts in (one, other)}
    return len(named) == 1 and all(Path(name).is_absolute() for name in named)


def _shown(facts: Facts) -> str:
    same = facts["path"] == facts["named"]
    return repr(facts["named"]) if same else f"{facts['named']!r} (which is {facts['path']!r})"


@lru_cache(1)
def _machine() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
