"""Runs under torchrun: trains a few steps, saves sharded, and gathers the live state.

Usage: training_run.py FOLDER KIND... Writes FOLDER/KIND/checkpoint and
FOLDER/KIND/truth.safetensors.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.cases import FULL, WRAPPERS, end, start

LAYOUTS = 30
SEED = 20
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


class Net(nn.Module):
    """Sizes that divide by no number of ranks, and a row fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 6)
        self.up = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 1)
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.up(self.embed(tokens).mean(1))))
        loss: torch.Tensor = self.down(hidden).pow(2).mean()
        return loss


def train(kind: str) -> dict[str, torch.Tensor]:
    """Trains and saves; returns the gathered state dict."""
    torch.manual_seed(0)
    model = WRAPPERS[kind](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randint(0, 23, (4, 5), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optim": state, "step": 3}, checkpoint_id="checkpoint")
    whole = get_model_state_dict(model, options=FULL)
    return {k: tensor.clone() for k, tensor in whole.items() if isinstance(tensor, torch.Tensor)}


def scatter_at_random() -> dict[str, torch.Tensor]:
    """Saves DTensors of random shape, dtype and placement on a line and a grid of ranks."""
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    dice = random.Random(SEED)  # noqa: S311 - the same on every rank, and no secret
    generator = torch.Generator().manual_seed(SEED)
    split, truth = {}, {}
    for number in range(LAYOUTS):
        shape = [dice.randint(1, 9) for _ in range(dice.randint(1, 3))]
        mesh = dice.choice(meshes)
        dtype = dice.choice(DTYPES)
        placements = [
            dice.choice([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
            for _ in range(mesh.ndim)
        ]
        image = torch.randint(0, 120, shape, generator=generator)
        tensor = (image % 2 == 1) if dtype is torch.bool else image.to(dtype)
        truth[f"t{number}"] = tensor
        split[f"t{number}"] = distribute_tensor(tensor, mesh, placements)
    state_dict_saver.save({"model": split}, checkpoint_id="checkpoint")
    for name, tensor in split.items():
        assert torch.equal(tensor.full_tensor(), truth[name])
    return truth


def write_case(kind: str, folder: Path) -> None:
    """Works inside the case's folder, so that its checkpoint is saved under a relative path."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    truth = scatter_at_random() if kind == "layouts" else train(kind)
    if dist.get_rank() == 0:
        save_file({k: t.contiguous() for k, t in truth.items()}, "truth.safetensors")
    dist.barrier()


def main() -> None:
    folder, *kinds = sys.argv[1:]
    start()
    for kind in kinds:
        write_case(kind, Path(folder).resolve() / kind)
    end()


if __name__ == "__main__":
    main()
