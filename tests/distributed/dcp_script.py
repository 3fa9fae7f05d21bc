"""A loop that calls torch's functions however one can, and knows nothing of ckptkit.

Usage: dcp_script.py FOLDER [--hurry], which ends without waiting for the last save.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as module
from torch.distributed import checkpoint
from torch.distributed.checkpoint import async_save, save, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import async_save as inner


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    state: dict[str, Any] = {"w": torch.arange(1e5), "step": 3}
    save(state, checkpoint_id=folder / "step-1")
    module.save(state, storage_writer=module.FileSystemWriter(folder / "step-2"))
    for step, function in enumerate(
        (async_save, inner, checkpoint.async_save, state_dict_saver.async_save), 3
    ):
        saved: Any = function(state, checkpoint_id=folder / f"step-{step}")
        if step < 6 or sys.argv[2:] != ["--hurry"]:
            assert set(saved.result().state_dict_metadata) == {"w", "step"}
    loaded: dict[str, Any] = {"w": torch.zeros(int(1e5)), "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder / "step-5")
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
