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
pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("tiers_run.py")


@pytest.fixture(scope="module")
def killed(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two nodes and the shared place hold after a kill between a step and its drain."""
    folder = tmp_path_factory.mktemp("tiers")
    done = run_ranks(SCRIPT, 2, folder, "killed", status=None)
    truths = sorted(path.name for path in (folder / "killed").glob("truth-2-*"))
    assert truths == ["truth-2-0", "truth-2-1"], done.stderr[-8_000:]
    return folder / "killed"


@pytest.mark.slow
def test_a_step_that_is_durable_on_the_nodes_only_survives_there_and_is_lost_with_one_of_them(
    run_ranks: Callable[..., Any], killed: Path, tmp_path: Path
) -> None:
    for case in ("restarted", "lost"):
        shutil.copytree(killed, tmp_path / case)
    shutil.rmtree(tmp_path / "lost/node1")
    run_ranks(SCRIPT, 2, tmp_path, "restarted", "lost")


@pytest.mark.slow
def test_steps_are_durable_on_the_nodes_first_and_wherever_ranks_and_nodes_go(
    run_ranks: Callable[..., Any], killed: Path, tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, "normal", "united", "together", "slow", "full")
    shutil.copytree(killed, tmp_path / "moved")
    shutil.copytree(tmp_path / "spread", tmp_path / "single")
    shutil.copytree(tmp_path / "spread/node0", tmp_path / "spread/node1")
    run_ranks(SCRIPT, 2, tmp_path, "moved", "spread")
    goes_on_alone(tmp_path / "single")


def goes_on_alone(folder: Path) -> None:
    """One process resumes what two ranks left on their node."""
    state = troubles.state_of(troubles.network(3), 3)
    with Checkpointer(folder / "run", local=folder / "node0") as checkpointer:
        assert checkpointer.resume(state) == 2
    for name, tensor in load_file(folder / "weights.safetensors").items():
        assert torch.equal(state["model"].state_dict()[name], tensor)
