"""Saves and loads through `ckptkit.training.dcp`, with whatever torch runs it.

Usage: through_the_door.py FOLDER PATH... PATHs have the packages that the environment lacks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as stock


def main() -> None:
    """Saves by all ranks, and loads on each."""
    folder, *paths = sys.argv[1:]
    sys.path += paths  # last, so that only what is missing comes from there
    from ckptkit.training import dcp

    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), Path(folder)
    state: dict[str, Any] = {
        "w": torch.arange(6.0),
        "n": 3,
        "own": {f"of_{rank}": torch.ones(2) * rank},
    }
    dcp.async_save(state, checkpoint_id=place / "step-1").result()
    dcp.save(state, checkpoint_id=place / "step-2", planner=dcp.DefaultSavePlanner())
    for load in (dcp.load, stock.load):
        for step in ("step-1", "step-2"):
            found: dict[str, Any] = {
                "w": torch.zeros(6),
                "n": 0,
                "own": {f"of_{rank}": torch.zeros(2)},
            }
            load(found, checkpoint_id=place / step)
            assert torch.equal(found["w"], state["w"])
            assert torch.equal(found["own"][f"of_{rank}"], torch.ones(2) * rank)
            assert found["n"] == 3
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} of torch {torch.__version__}: as saved\n")


main()
