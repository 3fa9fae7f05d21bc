"""A training loop of one's own: FSDP2, saved by a Checkpointer.

    torchrun --nproc-per-node=2 examples/fsdp2.py runs/fsdp2
    torchrun --nproc-per-node=2 examples/fsdp2.py s3://bucket/runs/fsdp2 --local-disk /nvme/runs

The second line saves to the node's own disk first, and from there to a bucket.

Kill it at any time (Ctrl-C, `kill -9`, a lost node), and type the same command again: it goes on
from the newest step that is whole, with as many processes as you like. With as many as before
the final loss is that of a run that was never interrupted, to the last bit.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptkit.training import Checkpointer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> nn.Module:
    """Makes a small network, the same on all ranks, and shards it."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(64, 1)).to(DEVICE)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def loss_of(model: nn.Module, inputs: torch.Tensor) -> Any:
    """Returns how far the model is from adding up its inputs."""
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def train(model: nn.Module, run: str, local: str | None, steps: int, save_every: int) -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.manual_seed(dist.get_rank())  # each rank draws its own data

    with Checkpointer(
        run, local=local, every=save_every, keep_last=2, signals=["SIGTERM", "SIGUSR2"]
    ) as checkpointer:
        done = checkpointer.resume(state) or 0
        checkpointer.prepare(state)
        for step in range(done + 1, steps + 1):
            loss_of(model, torch.randn(8, 64, device=DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if checkpointer.should_save(step):
                checkpointer.save(step, state)
            if checkpointer.stop_requested:
                break


def main() -> None:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go: a folder, or a URL")
    parser.add_argument("--local-disk", help="a folder on this node, where steps are saved first")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    model = make_model()
    train(model, arguments.run, arguments.local_disk, arguments.steps, arguments.save_every)
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, torch.linspace(-1, 1, 64, device=DEVICE).repeat(8, 1))
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.10f}", flush=True)
    # The model refers to the process group. A thread of gloo that outlives Python aborts.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
