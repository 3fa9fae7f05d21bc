"""What the ranks hold, found without a word, is what torch gathers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("state_run.py")
RunRanks = Callable[..., subprocess.CompletedProcess[str]]
ON_TWO, ON_FOUR = 27, 9


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "scenarios"), [(2, ON_TWO), (4, ON_FOUR)])
def test_the_parts_that_ranks_own_make_up_what_torch_gathers(
    ranks: int, scenarios: int, run_ranks: RunRanks
) -> None:
    done = run_ranks(SCRIPT, ranks)
    assert done.stdout.count("agrees: ") == scenarios, done.stdout
