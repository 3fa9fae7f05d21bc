"""How much memory can still be had, by the machine and by the groups that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Files:
    """Where a version of control groups says what; `cached` is given back under pressure."""

    limit: str
    used: str
    cached: tuple[str, ...]


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns how much memory can still be had, or None where that is not known.

    A group with a limit, as Slurm and containers set it, kills a process that asks for more.

    Args:
        root: Where `proc` and `sys` lie.

    Source:
        proc_meminfo(5) and cgroups(7); memory.rst of the kernel's cgroup-v1, and cgroup-v2.rst.
    """
    known = []
    with suppress(OSError, KeyError, ValueError):
        known.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for folder, files in _groups(root):
        with suppress(OSError, KeyError, ValueError):  # no limit says "max"
            limit = int((folder / files.limit).read_text())
            statistics = _numbers(folder / "memory.stat")
            cached = sum(statistics[name] for name in files.cached)
            known.append(max(limit - int((folder / files.used).read_text()) + cached, 0))
    return min(known, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yields the groups of this process; the limits of those above it count as well."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (top / "memory", _VERSION_1) if controllers else (top, _VERSION_2)
        own = base / path.lstrip("/")
        # In a container the path may be that of its host, and the group lie at the top.
        for folder in dict.fromkeys((own, *own.parents, base)):
            if folder.is_relative_to(base):
                yield folder, files


def _numbers(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines()
    return {name: int(rest[0]) for name, *rest in map(str.split, lines) if rest}
