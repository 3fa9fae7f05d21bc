"""One chunk above 4 GiB, where zip archives need their 64-bit fields."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptkit

SIZE_BYTES = (4 << 30) + 4096
MARKS = (0, 1 << 31, (4 << 30) - 1, 4 << 30, SIZE_BYTES - 1)
NEEDED_BYTES = 24 << 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_chunk_above_4_gib_and_the_one_behind_it_are_copied_whole(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < NEEDED_BYTES:
        pytest.skip("needs 24 GiB of free disk")
    large = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    for number, at in enumerate(MARKS):
        large[at] = number + 1
    behind = torch.arange(1000, dtype=torch.float32)
    dcp.save(
        {"model": {"large.weight": large, "behind.weight": behind}},
        checkpoint_id=tmp_path / "checkpoint",
        no_dist=True,
    )
    del large
    manifest = ckptkit.consolidate(tmp_path / "checkpoint", tmp_path / "out")
    assert {record.proof for record in manifest.tensors.values()} == {"crc32"}
    assert manifest.tensors["large.weight"].shape == (SIZE_BYTES,)
    shutil.rmtree(tmp_path / "checkpoint")

    file = tmp_path / "out" / "model.safetensors"
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        # float32 comes first: larger item sizes do.
        stream.seek(start)
        assert stream.read(4000) == behind.numpy().tobytes()
        for number, at in enumerate(MARKS):
            stream.seek(start + 4000 + at)
            assert stream.read(1) == bytes([number + 1])
    assert file.stat().st_size == start + 4000 + SIZE_BYTES
    shutil.rmtree(tmp_path / "out")
