"""The model that is saved with one release of torch and read with others; needs torch alone."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Odd sizes; no tensor with fewer rows than ranks, which stock FSDP1 cannot load again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.gate = nn.Linear(9, 3)
        self.down = nn.Linear(9, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(rows))
        changed: torch.Tensor = self.down(hidden * self.gate(hidden).sum(-1, keepdim=True))
        return rows + changed


class Net(nn.Module):
    """Two blocks, a norm and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for block in self.blocks:
            rows = block(rows)
        loss: torch.Tensor = self.norm(rows).pow(2).mean()
        return loss
