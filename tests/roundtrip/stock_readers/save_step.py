"""Trains a small model under FSDP2 and saves it through the Checkpointer; run under torchrun.

save_step.py FOLDER: writes FOLDER/LAYOUT/checkpoint-3 for both layouts, and beside them the truth,
`model.safetensors` and `optimizer.safetensors`, gathered by torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from net import Net  # type: ignore[import-not-found]  # beside this script
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptkit.training import Checkpointer

STEPS = 3


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(4, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(nested: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries by dotted key, gathered."""
    found: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            found[key] = getattr(value, "full_tensor", lambda own=value: own)().clone()
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}": tensor for inner, tensor in whole(value).items()}
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, optimizer = trained()
    states, moments = get_state_dict(model, optimizer)
    truth = {"model": whole(states), "optimizer": whole(moments)}
    state = {"model": model, "optimizer": optimizer}
    for layout in ("accelerate", "dcp"):
        with Checkpointer(folder / layout, layout=layout) as checkpointer:
            checkpointer.prepare(state)
            checkpointer.save(STEPS, state, metrics={"loss": 0.5}).result(timeout=60)
    if dist.get_rank() == 0:
        for name, tensors in truth.items():
            save_file(tensors, folder / f"{name}.safetensors")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
