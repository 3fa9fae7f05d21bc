"""How much memory there is, as the files of the kernel tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.storage.local.control_groups import available_bytes

MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:   8000 kB\nHugePages_Total: 0\n"}
VERSION_2 = {
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "100000\n",
    "sys/fs/cgroup/job/step/memory.stat": "inactive_file 0\nactive_file 0\n",
    "sys/fs/cgroup/job/memory.max": "1000000\n",
    "sys/fs/cgroup/job/memory.current": "900000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 20000\nactive_file 3000\n",
}
VERSION_1 = {
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1200000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 1\ntotal_active_file 2\n",
}
INSIDE = {
    path.replace("/job/", "/"): text for path, text in VERSION_2.items() if "step" not in path
}
ODD = "job\u2028\x85\udcff"  # no end of a line for the kernel, and a byte that is no text


@pytest.mark.parametrize(
    ("files", "groups", "expected"),
    [
        ({}, "", None),
        (MACHINE, "0::/\n", 8_192_000),
        (MACHINE | VERSION_2, "0::/job/step\n", 123_000),
        (
            MACHINE | {path.replace("job", ODD): text for path, text in VERSION_2.items()},
            *(f"0::/{ODD}/step\n", 123_000),
        ),
        (MACHINE | INSIDE, "0::/../outside\n", 123_000),
        (MACHINE | VERSION_1, "3:cpu,cpuacct:/job\n2:memory:/job\n0::/\n", 0),
        (VERSION_1, "2:memory:/job/deep\n", 0),
        (MACHINE | VERSION_1, "2:cpu:/job\n", 8_192_000),
    ],
)
def test_the_tightest_limit_counts(
    files: dict[str, str], groups: str, expected: int | None, tmp_path: Path
) -> None:
    for name, text in {**files, "proc/self/cgroup": groups}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert available_bytes(tmp_path) == expected


def test_this_machine_has_memory() -> None:
    found = available_bytes()
    assert found is None or found > 1 << 20
