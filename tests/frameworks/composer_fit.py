"""A script for Composer: its Trainer with FSDP2 and `autoresume`, on two CPU processes.

Usage: composer_fit.py FOLDER, from the newest checkpoint of the folder on.
"""

from __future__ import annotations

import sys

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 1024


def main(folder: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 4))
    for layer in (net[0], net[2]):
        layer._fsdp_wrap = True  # type: ignore[assignment]
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    sampler = dist.get_sampler(data, shuffle=True)
    model = ComposerClassifier(net, num_classes=4)
    Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=sampler),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="8ba",
        parallelism_config={"fsdp": FSDP2Config()},
        save_folder=folder,
        save_interval="2ba",
        run_name="run",
        autoresume=True,
        seed=0,
        device="cpu",
        progress_bar=False,
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
