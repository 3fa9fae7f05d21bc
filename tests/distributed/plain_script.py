"""An accelerate script as users write them: it knows nothing of ckptkit.

Usage: plain_script.py PROJECT [--resume] [--die-at STEP]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

STEPS, EVERY = 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("project")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-at", type=int)
    return parser.parse_args()


def main() -> None:
    args = parse()
    config = ProjectConfiguration(args.project, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=config)
    set_seed(5, device_specific=True)
    model: Any = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state()
        config.iteration = progress.step // EVERY
        accelerator.print(f"resumed from {progress.step}")
    loss = torch.zeros(())
    while progress.step < STEPS:
        loss = model(torch.randn(4, 16)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % EVERY == 0:
            accelerator.save_state()
        if progress.step == args.die_at and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    accelerator.print(f"final loss {accelerator.reduce(loss.detach()).item():.9f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
