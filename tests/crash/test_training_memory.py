"""A group of processes with a limit of memory, beyond which the kernel kills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RunRanks

LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
PROGRAM = """
import os, pathlib
pathlib.Path({group!r}, "cgroup.procs").write_text(str(os.getpid()))
from ckptkit.core.errors import NoSpaceError
from ckptkit.training.save.staging import SharedBuffer
buffer = SharedBuffer()
try:
    buffer.reserve(3 << 30)
except NoSpaceError as error:
    print(error, error.hint)
assert buffer.reserve(16 << 20)
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A group of processes that may use 2 GiB."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
        paths = {kind: path for _, kind, path in (line.split(":", 2) for line in own)}
        top = "/sys/fs/cgroup/memory" if "memory" in paths else "/sys/fs/cgroup"
        group = Path(top, paths.get("memory", paths.get("", "")).lstrip("/"), f"test-{os.getpid()}")
        group.mkdir()
    except OSError:
        pytest.skip("groups cannot be made here")
    try:
        limits = [group / name for name in LIMIT_FILES if (group / name).exists()]
        if not limits:
            pytest.skip("groups have no limits here")
        limits[0].write_text(str(2 << 30))
        yield group
    finally:
        group.rmdir()


def test_more_memory_than_the_group_may_use_is_an_error_and_no_kill(
    limited_group: Path, tmp_path: Path, run_ranks: RunRanks
) -> None:
    script = tmp_path / "reserve.py"
    script.write_text(PROGRAM.format(group=str(limited_group)))
    done = run_ranks(script, 1)
    assert "3,221 MB of memory are needed for staging" in done.stdout
    assert "staging_limit" in done.stdout
