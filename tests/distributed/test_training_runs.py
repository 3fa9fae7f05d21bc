"""Real training over several processes, consolidated and compared with the live state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from tests.ranks import RunRanks

SCRIPT = Path(__file__).with_name("training_run.py")
KINDS_BY_PROCESSES = {2: ("fsdp2", "fsdp1_flat"), 4: ("hsdp", "layouts")}
CASES = [
    pytest.param(number, kind, marks=[pytest.mark.slow] if number > 2 else [])
    for number, kinds in KINDS_BY_PROCESSES.items()
    for kind in kinds
]


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Trains once for each number of processes, when it is first asked for."""

    @cache
    def folder_for(processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"trained_by_{processes}")
        run_ranks(SCRIPT, processes, folder, *KINDS_BY_PROCESSES[processes])
        return folder

    return folder_for


@pytest.mark.distributed
@pytest.mark.parametrize(("processes", "kind"), CASES)
def test_what_training_saved_consolidates_to_the_live_state(
    processes: int, kind: str, trained: Callable[[int], Path], tmp_path: Path
) -> None:
    source = trained(processes) / kind
    ckptkit.consolidate(source / "checkpoint", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(source / "truth.safetensors")
    assert written.keys() == truth.keys()
    for name, tensor in truth.items():
        assert written[name].dtype == tensor.dtype, name
        assert written[name].shape == tensor.shape, name
        ours, theirs = written[name].flatten(), tensor.flatten()
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
