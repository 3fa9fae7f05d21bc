"""Small file systems of several kinds, some of which share blocks between files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.files import mounted

_IMAGE_BYTES = 320 << 20  # mkfs.xfs refuses less than 300 MB


class _Kind(NamedTuple):
    maker: Sequence[str]
    options: str = ""  # of the mount


KINDS: Mapping[str, _Kind] = {
    "xfs": _Kind(("mkfs.xfs", "-q", "-m", "reflink=1")),
    "xfs_plain": _Kind(("mkfs.xfs", "-q", "-m", "reflink=0")),
    "btrfs": _Kind(("mkfs.btrfs", "-q")),
    "btrfs_zstd": _Kind(("mkfs.btrfs", "-q"), ",compress-force=zstd"),
    "ext4": _Kind(("mkfs.ext4", "-q")),
}


@contextmanager
def reflink_mount(kind: str, tmp_path: Path) -> Iterator[Path]:
    """Mounts a new file system of a kind of `KINDS`; skips the test where that is not possible."""
    made, name = KINDS[kind], f"{kind}-disk"
    maker = shutil.which(made.maker[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if maker is None:
        pytest.skip(f"there is no {made.maker[0]}")
    image = tmp_path / f"{name}.img"
    with image.open("xb") as file:
        file.truncate(_IMAGE_BYTES)
    try:
        done = subprocess.run(
            [maker, *made.maker[1:], str(image)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"{made.maker[0]} fails here: {done.stderr.strip()}")
        with mounted(tmp_path / name, "-o", f"loop{made.options}", str(image)) as place:
            yield place
    finally:
        image.unlink()


def leave_free(place: Path, size_bytes: int) -> None:
    """Fills a file system but for about that many bytes, or as far as it lets itself be filled."""
    with (place / "ballast").open("xb") as file:
        at, step = 0, shutil.disk_usage(place).free - size_bytes
        while step > size_bytes // 4:
            try:
                os.posix_fallocate(file.fileno(), at, step)
                at += step
            except OSError:  # btrfs sets more aside than it says
                pass
            step = min(step // 2, shutil.disk_usage(place).free - size_bytes)
