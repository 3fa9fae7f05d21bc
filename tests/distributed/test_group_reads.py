"""What several ranks hold alike is read by one of them, which sends it to the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("group_run.py")
CASES = ("loads", "resumes", "differs", "apart")


@pytest.mark.parametrize("kind", ["ddp", "hsdp", "world"])
def test_a_group_reads_once_or_fails_together(
    kind: str, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(
        SCRIPT, 4, tmp_path, *(f"{case}:{kind}" for case in CASES), "damaged:ddp", "outside:ddp"
    )
