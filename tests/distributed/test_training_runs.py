"""Real training over several processes, consolidated and compared with the live state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit

SCRIPT = Path(__file__).with_name("training_run.py")
LIMIT_SECONDS = 600
KINDS_BY_PROCESSES = {2: ("fsdp2", "fsdp1_flat"), 4: ("hsdp", "layouts")}
CASES = [(number, kind) for number, kinds in KINDS_BY_PROCESSES.items() for kind in kinds]


def train(processes: int, folder: Path) -> None:
    """Runs all cases of one number of processes in one torchrun, over the loopback only."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", str(SCRIPT), str(folder)]
    command += KINDS_BY_PROCESSES[processes]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command,
        env=os.environ | settings,
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Trains once for each number of processes, when it is first asked for."""

    @cache
    def folder_for(processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"trained_by_{processes}")
        train(processes, folder)
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
