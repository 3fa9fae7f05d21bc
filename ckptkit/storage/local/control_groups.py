"""What this process may use where a container, Slurm or systemd limits it: memory, tasks, cores.

Source:
    cgroups(7) and proc_meminfo(5); memory.rst of the kernel's cgroup-v1, and cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

_ROOT = Path("/")


class _Files(Struct, frozen=True):
    """Files of a version of control groups; `cached` memory is reclaimed under pressure."""

    limit: str
    used: str
    cached: tuple[str, ...]


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))
_NO_LIMIT = 1 << 60  # version 1 writes the largest multiple of a page


def available_bytes(root: Path = _ROOT) -> int | None:
    """Returns how much memory is available, None if that is unknown.

    A control group with a limit, as Slurm and containers set it, kills a process that exceeds it.
    """
    limits = []
    with suppress(OSError, KeyError, ValueError):
        limits.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for folder, is_first in _groups(root, "memory"):
        files = _VERSION_1 if is_first else _VERSION_2
        with suppress(OSError, KeyError, ValueError):  # no limit says "max"
            limit = int((folder / files.limit).read_text())
            statistics = _numbers(folder / "memory.stat")
            cached = sum(statistics[name] for name in files.cached)
            limits.append(max(limit - int((folder / files.used).read_text()) + cached, 0))
    return min(limits, default=None)


def memory_bytes(root: Path = _ROOT) -> int | None:
    sizes = []
    with suppress(OSError, KeyError, ValueError):
        sizes.append(_numbers(root / "proc/meminfo")["MemTotal:"] * 1024)
    for folder, is_first in _groups(root, "memory"):
        with suppress(OSError, ValueError):
            limit = int((folder / (_VERSION_1 if is_first else _VERSION_2).limit).read_text())
            sizes += [limit] if limit < _NO_LIMIT else []
    return min(sizes, default=None)


def tasks_left(root: Path = _ROOT) -> int | None:
    """Returns how many more processes and threads the groups allow, None without a limit."""
    left = []
    for folder, _ in _groups(root, "pids"):
        with suppress(OSError, ValueError):
            most = int((folder / "pids.max").read_text())
            left.append(max(most - int((folder / "pids.current").read_text()), 0))
    return min(left, default=None)


def core_quota(root: Path = _ROOT) -> float | None:
    """Returns how many cores' time the groups allow, None without a limit."""
    quotas = []
    for folder, is_first in _groups(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if is_first:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            quotas += [quota / period] if quota > 0 else []
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields the groups of this process and their parents, whose limits apply as well.

    With each, whether it is of the first version of control groups.
    """
    top = root / "sys/fs/cgroup"
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    # Names may contain other characters at which `splitlines` cuts.
    for line in filter(None, text.split("\n")):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = top / controller if controllers else top
        own = base / path.lstrip("/")
        # In a container the path may be that of the host, and the group at the top.
        for folder in dict.fromkeys((own, *own.parents, base)):
            if folder.is_relative_to(base):
                yield folder, bool(controllers)


def _numbers(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines()
    return {name: int(rest[0]) for name, *rest in map(str.split, lines) if rest}
