"""What several commands are tried with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.files import copy_flipped

LLAMA = Path(__file__).parents[2] / "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    return copy_flipped(LLAMA, tmp_path / "flipped")
