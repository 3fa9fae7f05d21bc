"""Models that grew, were renamed or lost parts go on with their rows and moments, on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("changed_run.py")
Run = Callable[..., Any]


def test_a_larger_vocabulary_goes_on_under_fsdp2(run_ranks: Run, tmp_path: Path) -> None:
    done = run_ranks(SCRIPT, 2, tmp_path, "grows:fsdp2", "stages", "differs")
    assert done.returncode == 0


@pytest.mark.slow
def test_changed_models_go_on_however_they_are_wrapped(run_ranks: Run, tmp_path: Path) -> None:
    kinds = ("fsdp1_orig", "fsdp1_flat", "ddp", "tp")
    changed = [f"changes:{kind}" for kind in ("fsdp2", *kinds)]
    run_ranks(SCRIPT, 2, tmp_path, *(f"grows:{kind}" for kind in kinds), *changed, "stock:fsdp2")


@pytest.mark.slow
def test_replicas_of_shards_grow_alike(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(SCRIPT, 4, tmp_path, "grows:hsdp", "changes:hsdp")
