"""Two tiers: a node's own disk first, the shared place after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("tiers_run.py")


@pytest.mark.distributed
def test_a_step_is_durable_on_the_nodes_first_and_survives_there(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    saving = ("normal", "united", "together", "slow", "full")
    done = run_ranks(SCRIPT, 2, tmp_path, *saving, "killed", status=None)
    for case in saving:
        assert f"{case}, rank 0: done" in done.stdout, done.stdout + done.stderr[-8_000:]
    assert sorted(path.name for path in (tmp_path / "killed").glob("truth-2-*")) == [
        "truth-2-0",
        "truth-2-1",
    ], done.stderr[-8_000:]
    for case in ("moved", "lost"):
        shutil.copytree(tmp_path / "killed", tmp_path / case)
    shutil.rmtree(tmp_path / "lost/node1")
    (tmp_path / "killed").rename(tmp_path / "restarted")
    run_ranks(SCRIPT, 2, tmp_path, "restarted", "moved", "lost")
