"""Runs under torchrun: a run goes on in another framework, with the next losses of the first.

Usage: universal_run.py FOLDER STAGE, on 1 or 2 ranks. The engine of DeepSpeed loads
FOLDER/universal and prints its losses; with STAGE 0 it trains, and saves with ZeRO 1.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FIRST, NEXT = 4, 10
BATCH, VOCABULARY = 8, 31


class Net(nn.Module):
    """Small, with parameters that decay and others that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.up = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(torch.relu(self.up(self.embed(tokens[:, :-1])))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(first: int, count: int, rank: int = 0, world_size: int = 1) -> Iterator[torch.Tensor]:
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (BATCH, 6), generator=generator)
        yield tokens[rank * BATCH // world_size : (rank + 1) * BATCH // world_size]


def make_groups(model: nn.Module, *, is_one: bool = False) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.ndim > 1]
    flat = [p for p in model.parameters() if p.ndim == 1]
    if is_one:
        return [{"params": wide + flat, "weight_decay": 0.1}]
    return [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int
) -> list[float]:
    losses = []
    for tokens in batches(first, count):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    known = deepspeed.ops.__compatible_ops__  # no compiler is needed: gloo does what they do
    known.update(dict.fromkeys(known, False))
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0 if stage == 0 else 9)  # what is loaded must not be there before
    model = Net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(make_groups(model, is_one=stage == 3), lr=0.01),
        config={
            "train_batch_size": BATCH,
            "zero_optimization": {"stage": stage or 1, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "checkpoint": {"load_universal": stage > 0},
        },
    )
    if stage:
        engine.load_checkpoint(str(folder / "universal"), load_lr_scheduler_states=False)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def go_on(first: int, count: int) -> list[float]:
        losses = []
        for tokens in batches(first, count, rank, world_size):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / world_size)
        return losses

    if not stage:
        go_on(0, FIRST)
        engine.save_checkpoint(str(folder / "zero"), tag=f"global_step{FIRST}")
    losses = go_on(FIRST, NEXT)
    if rank == 0:
        (folder / f"losses_{stage}_{world_size}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
