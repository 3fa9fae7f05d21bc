"""What several commands are tried with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.files import flip_bit

LLAMA = Path(__file__).parents[2] / "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    """A checkpoint with one wrong bit in the data of a model tensor."""
    folder = Path(shutil.copytree(LLAMA, tmp_path / "flipped"))
    shard = folder / "pytorch_model_fsdp_0" / "__0_0.distcp"
    flip_bit(shard, shard.read_bytes().index(b"PK\x05\x06") // 2)
    return folder
