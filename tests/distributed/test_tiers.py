"""Two tiers: a node's own disk first, the shared place after it."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptkit.training import Checkpointer

sys.path.append(str(Path(__file__).parents[1] / "crash"))
troubles: Any = importlib.import_module("troubles")
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
    shutil.copytree(tmp_path / "spread", tmp_path / "single")
    shutil.copytree(tmp_path / "spread/node0", tmp_path / "spread/node1")
    shutil.rmtree(tmp_path / "lost/node1")
    (tmp_path / "killed").rename(tmp_path / "restarted")
    run_ranks(SCRIPT, 2, tmp_path, "restarted", "moved", "lost", "spread")
    goes_on_alone(tmp_path / "single")


def goes_on_alone(folder: Path) -> None:
    """One process resumes what two ranks left on their node."""
    state = troubles.state_of(troubles.network(3), 3)
    with Checkpointer(folder / "run", local=folder / "node0") as checkpointer:
        assert checkpointer.resume(state) == 2
    for name, tensor in load_file(folder / "weights.safetensors").items():
        assert torch.equal(state["model"].state_dict()[name], tensor)
